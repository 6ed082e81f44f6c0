"""What is handed to processes and samplers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trueline.config.model import CriticConfig, ModelConfig
from trueline.config.rl import SamplingControls
from trueline.plan.resolve import RoleModel
from trueline.rollout.engine import SamplingParams
from trueline.rollout.groups import SamplerSpec
from trueline.runs import processes as runs
from trueline.runs.processes import Sampling, open_processes, role_group
from trueline.runs.rollout_workers import WorkerSampler
from trueline.runtime import mps, placement
from trueline.runtime.actors import Placement, Target
from trueline.runtime.cluster import Machine
from trueline.runtime.host import Location
from trueline.runtime.placement import Layout, RoleRanks

NOTHING: Any = None


class Started:
    """A process that is not started."""

    def __init__(self, name: str, target: object, given: list[Any], spot: Placement, log: Path) -> None:
        self.environment = spot.environment

    def location(self) -> Location:
        return Location("", ["0"], 0)


class Recorder:
    """Starts nothing."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.asked: list[tuple[RoleRanks, list[Any]]] = []

    def role(self, one: RoleRanks, target: object, specs: list[Any]) -> list[Any]:
        self.asked.append((one, specs))
        return []


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_rank_of_a_role_knows_what_it_is(deterministic: bool) -> None:
    model, ranks = ModelConfig(path="somewhere", context_parallel=2), CriticConfig(placement="separate")
    processes: Any = Recorder(Layout(2, 1, deterministic=deterministic))
    group = role_group(RoleModel("critic", "critic", model, ranks, "value", NOTHING, 4), processes, 5, 60.0, 9)
    ((place, specs),) = processes.asked
    assert place == RoleRanks("critic", 4, shared=False, width=2)
    assert [(one.rank, one.world) for one in specs] == [(rank, 4) for rank in range(4)]
    known = {
        (one.model.path, one.head, one.total_steps, one.seed, one.timeout_seconds, one.deterministic) for one in specs
    }
    assert known == {("somewhere", "value", 9, 5, 60.0, deterministic)}
    assert all(one.ranks is ranks for one in specs)
    assert (group.name, group.timeout_seconds) == ("critic", 60.0)


def test_a_sampler_has_the_controls_the_length_and_the_ends_of_its_answers() -> None:
    talk = Sampling(NOTHING, (2, 7), NOTHING)
    controls = SamplingControls(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2, stop=["a", "b"])
    sampler = talk.sampler(controls, 9, 3, 11, "train", greedy=True)
    params = SamplingParams(0.5, 9, (2, 7), None, 0.9, 4, 0.1, 1.2, ("a", "b"))
    assert sampler == WorkerSampler(NOTHING, SamplerSpec(params, 3, 11, "train", True))
    plain = talk.sampler(SamplingControls(), 9, 3, 11, "train").spec.params
    assert plain == SamplingParams(1.0, 9, (2, 7))  # what an engine does unasked is what the keys do unset


@pytest.mark.parametrize(
    ("layout", "installed", "served"),
    [
        (Layout(1, 1, colocated=True, in_turns=False), True, True),
        (Layout(1, 1, colocated=True, in_turns=True), True, False),
        (Layout(1, 1, colocated=False, in_turns=False), True, False),
        (Layout(1, 1, colocated=True, in_turns=False), False, False),
    ],
)
def test_models_and_engines_that_share_a_gpu_at_once_are_clients_of_one_service(
    layout: Layout, installed: bool, served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[str] = []

    @contextmanager
    def running(name: str, *given: object) -> Iterator[dict[str, str]]:
        under_way.append(name)
        yield {mps.PIPES: "here"}
        under_way.remove(name)

    monkeypatch.setattr(runs, "ray_cluster", lambda *given: running("ray"))
    monkeypatch.setattr(mps, "service", lambda logs: running("mps"))
    monkeypatch.setattr(placement, "reserve", lambda bundles: "group")
    monkeypatch.setattr(placement, "RayActor", Started)
    monkeypatch.setattr(placement, "wait_all", lambda locations, seconds: locations)
    machine = Machine(cpus=8, memory_bytes=2**34, gpus=2, gpu_bytes=2**34, mps=installed)
    target: Target[Any] = Target("tests:Nothing")
    with open_processes(machine, layout, tmp_path, "ray") as opened:
        started: list[Any] = [*opened.policy(target, ["a"]), *opened.engines(target, ["b"])]
        assert [mps.PIPES in one.environment for one in started] == [served] * 2
        assert under_way == (["ray", "mps"] if served else ["ray"])
    assert under_way == []
