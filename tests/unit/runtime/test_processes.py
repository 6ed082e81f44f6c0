"""Which bundle, node, devices and cores each process of a run is started with; nothing is started here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runtime.test_placement import cluster, critic, layout, machine
from trueline.config.base import ConfigError
from trueline.runtime import placement
from trueline.runtime.actors import Placement, Target
from trueline.runtime.cluster import Machine
from trueline.runtime.host import Location
from trueline.runtime.placement import Layout, Processes, RoleRanks, place_processes, process_environment

TARGET: Target[Any] = Target("tests:Nothing", environment=lambda gpus: {"OWN": str(gpus)})
Made = Callable[..., tuple[Processes, list[dict[str, float]]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    """Processes that claim nothing, and the bundles that they would."""

    def make(wanted: Layout, there: Machine) -> tuple[Processes, list[dict[str, float]]]:
        asked: list[dict[str, float]] = []
        monkeypatch.setattr(placement, "reserve", lambda bundles: asked.extend(bundles) or "group")
        monkeypatch.setattr(placement, "RayActor", lambda name, target, given, spot, log: (name, given, spot, log))
        return Processes(there, wanted, tmp_path, local=False), asked

    return make


def spots(started: list[Any]) -> list[Placement]:
    return [spot for _, _, spot, _ in started]


def test_bundles_lie_in_the_order_of_kinds_each_on_its_node(made: Made) -> None:
    processes, asked = made(layout(3, 2, 2, False, critic(2, shared=False)), cluster(4, 6))
    nodes = [next(name for name in one if name.startswith("node:")) for one in asked]
    assert [one["GPU"] for one in asked] == [1, 1, 1, 1, 1, 2, 2] and {one["CPU"] for one in asked} == {1}
    assert [int(name[-1]) for name in nodes] == [0, 0, 0, 0, 1, 1, 1]
    assert processes.bundles == {"policy": 0, "critic": 3, "engine": 5}
    engines = processes.engines(TARGET, ["a", "b"])
    assert [(spot.bundle, spot.gpus, spot.cpus, spot.address) for spot in spots(engines)] == [
        (5, 2, 1, "10.0.0.1"),
        (6, 2, 1, "10.0.0.1"),
    ]
    assert [(name, given) for name, given, _, _ in engines] == [("engine-0", ["a"]), ("engine-1", ["b"])]
    beside = spots(processes.role(critic(2, shared=False), TARGET, [1, 2]))
    assert [(spot.bundle, spot.gpus, spot.address) for spot in beside] == [(3, 1, "10.0.0.0"), (4, 1, "10.0.0.1")]


def test_on_a_cluster_s_cpus_an_engine_claims_a_slot_for_each_of_its_parts(made: Made) -> None:
    processes, asked = made(layout(2, 1, 2), cluster(2, 3, cpus=1))
    assert [one["CPU"] for one in asked] == [1, 1, 2] and not any("GPU" in one for one in asked)
    (engine,) = spots(processes.engines(TARGET, ["a"]))
    assert (engine.bundle, engine.cpus, engine.gpus) == (2, 2, 0)


def test_who_shares_gpus_sees_those_of_the_ranks_that_it_sits_with(made: Made) -> None:
    beside = RoleRanks("reference", 4, True)
    processes, asked = made(Layout(4, 2, 2, True, (beside,)), cluster(2, 2))
    assert len(asked) == 4 and processes.bundles == {"policy": 0}
    processes.locations = [Location(f"node-{rank // 2}", [str(rank % 2)], rank) for rank in range(4)]
    seen = [
        (spot.node, spot.environment["CUDA_VISIBLE_DEVICES"], spot.address)
        for spot in spots(processes.engines(TARGET, [0, 1]))
    ]
    assert seen == [("node-0", "0,1", "10.0.0.0"), ("node-1", "0,1", "10.0.0.1")]
    seen = [
        (spot.node, spot.environment["CUDA_VISIBLE_DEVICES"], spot.address)
        for spot in spots(processes.role(beside, TARGET, [0] * 4))
    ]
    assert seen == [
        ("node-0", "0", "10.0.0.0"),
        ("node-0", "1", "10.0.0.0"),
        ("node-1", "0", "10.0.0.1"),
        ("node-1", "1", "10.0.0.1"),
    ]


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("3", "3")])
def test_who_shares_the_only_gpu_does_not_wait_for_its_rank(
    made: Made, monkeypatch: pytest.MonkeyPatch, given: str | None, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    processes, _ = made(Layout(1, 1, 1, True), machine(1))
    processes.policy(TARGET, ["a"])
    (engine,) = spots(processes.engines(TARGET, ["b"]))
    assert (engine.node, engine.environment["CUDA_VISIBLE_DEVICES"]) == (None, seen)


def test_cores_are_shared_by_those_of_a_node_that_work_at_once(made: Made) -> None:
    def threads(started: list[Any]) -> list[str]:
        return [spot.environment["OMP_NUM_THREADS"] for spot in spots(started)]

    there = cluster(6, 12, cpus=1)  # slots are cores
    wanted = Layout(8, 2, 2)
    places = place_processes(wanted, there)
    assert (places.policy, places.engines) == ([0] * 6 + [1] * 2, [1, 1])
    processes, _ = made(wanted, there)
    assert threads(processes.policy(TARGET, [0] * 8)) == ["1"] * 6 + ["6"] * 2
    assert threads(processes.engines(TARGET, [0] * 2)) == ["3"] * 2  # two engines of two parts
    processes, _ = made(Layout(8, 2, 2, in_turns=False), there)
    assert threads(processes.engines(TARGET, [0] * 2)) == ["2"] * 2  # beside two ranks, all at once
    alone, _ = made(layout(2, 1), machine(0))
    assert alone.group is None and threads(alone.policy(TARGET, [0] * 2)) == ["4"] * 2


def test_the_environment_is_the_target_s_and_has_threads_on_cpus_alone() -> None:
    assert process_environment(TARGET, machine(0), 3)["OMP_NUM_THREADS"] == "2"
    assert process_environment(TARGET, machine(0), 30)["OMP_NUM_THREADS"] == "1"
    assert process_environment(TARGET, machine(0), 0, cpus=5)["OMP_NUM_THREADS"] == "5"
    environment = process_environment(TARGET, machine(2))
    assert "OMP_NUM_THREADS" not in environment and environment["OWN"] == "2"


def test_an_engine_takes_all_its_parts_from_one_node() -> None:
    assert place_processes(layout(0, 3, 2), cluster(4, 3)).engines == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"tensor_parallel=2 needs 2 GPUs on one node: 10\.0\.0\.0 has 1 of 3 left"):
        place_processes(layout(0, 2, 2), cluster(3, 1))


def test_shared_ranks_wrap_around_and_without_a_policy_lie_on_the_first_node() -> None:
    shared = RoleRanks("judge", 3, True)
    assert place_processes(Layout(2, roles=(shared,)), cluster(1, 1)).roles == {"judge": [0, 1, 0]}
    found = place_processes(Layout(0, 3, 1, roles=(shared,)), cluster(2, 3))
    assert (found.roles, found.engines, found.nodes()) == ({"judge": [0, 0, 0]}, [1, 0, 1], [0, 1])
