"""What is handed to processes and samplers."""

from typing import Any

from trueline.config.model import CriticConfig, ModelConfig
from trueline.config.rl import SamplingControls
from trueline.plan.resolve import RoleModel
from trueline.rollout.engine import SamplingParams
from trueline.rollout.groups import SamplerSpec
from trueline.runs.processes import Sampling, role_group
from trueline.runs.rollout_workers import WorkerSampler
from trueline.runtime.placement import RoleRanks

NOTHING: Any = None


class Recorder:
    """Starts nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[RoleRanks, list[Any]]] = []

    def role(self, one: RoleRanks, target: object, specs: list[Any]) -> list[Any]:
        self.asked.append((one, specs))
        return []


def test_every_rank_of_a_role_knows_what_it_is() -> None:
    model, ranks = ModelConfig(path="somewhere", context_parallel=2), CriticConfig(placement="separate")
    processes: Any = Recorder()
    group = role_group(RoleModel("critic", "critic", model, ranks, "value", NOTHING, 4), processes, 5, 60.0, 9)
    ((place, specs),) = processes.asked
    assert place == RoleRanks("critic", 4, shared=False, width=2)
    assert [(one.rank, one.world) for one in specs] == [(rank, 4) for rank in range(4)]
    known = {(one.model.path, one.head, one.total_steps, one.seed, one.timeout_seconds) for one in specs}
    assert known == {("somewhere", "value", 9, 5, 60.0)}
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
