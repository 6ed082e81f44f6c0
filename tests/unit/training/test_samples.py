"""How much of the object store samples take."""

from typing import Any

import numpy as np

from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.data.types import Completion, Prompt, Trajectory
from trueline.models.loading import ModelFacts
from trueline.rollout.summary import pack_group
from trueline.runtime.actors import Stored
from trueline.training.samples import TEXT, Fields, SampleBlock, sample_bytes

LENGTHS = (2, 3)  # of two samples

FACTS = ModelFacts(1000, 1000, 2, 2, 8, 100, 16, layers=3, intermediate_size=32, experts=4)
PLAIN = {"preset": "grpo", "kl": {"coefficient": 0}}


def estimate(algorithm: dict[str, Any], tokens: bool = False, **more: Any) -> int:
    """Of a token of each of 4 x 2 completions with 10 tokens."""
    algorithm |= {"group_size": 2}
    tree = {"algorithm": algorithm, "prompts_per_step": 4, "monitoring": {"tokens": tokens}} | more
    config = RLConfig.parse(tree)
    given = config.rollout.model_dump(exclude_none=True) | {"engines": 1, "max_prompt_tokens": 3, "max_new_tokens": 7}
    bytes_of_all = sample_bytes(config, ResolvedRollout.parse(given), FACTS)
    assert bytes_of_all % 80 == 0
    return bytes_of_all // 80


def test_every_field_that_an_algorithm_stores_is_counted() -> None:
    sampled, trained = 4 + 1 + 4 + 4 + 4, 4 + 4  # id, mask, log-prob, reward, text; advantage, old log-prob
    assert estimate(PLAIN) == sampled + trained
    assert estimate(PLAIN, tokens=True) == sampled + trained + 4
    assert estimate({"preset": "grpo", "kl": {"coefficient": 0.1}}) == sampled + trained + 4
    assert estimate({"preset": "ppo", "kl": {"coefficient": 0}}) == sampled + trained + 8
    assert estimate({"preset": "on_policy_distill", "kl": {"coefficient": 0}}, teacher={"path": "x"}) == (
        sampled + trained + 4
    )
    assert estimate(PLAIN, rollout={"max_staleness": 2}) == 3 * sampled + trained
    assert estimate(PLAIN, training={"replay_routing": True}) == sampled + trained + 8 * 3


def test_the_bytes_of_a_sampled_token_are_those_that_a_worker_packs() -> None:
    trajectory = Trajectory(Prompt(0, [{"role": "user", "content": "?"}]), 0)
    trajectory.add_observation([1, 2, 3])
    trajectory.add_action(Completion.of([4] * 7, [-1.0] * 7, 0, "stop"))
    trajectory.add_reward(1.0)
    packed = [array for arrays in pack_group([trajectory]) for array in arrays.values()]
    assert sum(array.nbytes for array in packed) == 10 * (estimate(PLAIN) - TEXT - 8)  # without text, and trained


def test_a_field_is_that_of_the_latest_block_whichever_is_opened_first() -> None:
    """A score before the update and the update itself may both have a field, of all samples or of some."""

    def block(names: tuple[str, ...], samples: tuple[int, ...], value: float) -> SampleBlock:
        size = sum(LENGTHS[number] for number in samples)
        return SampleBlock(names, samples, Stored({name: np.full(size, value) for name in names}))

    scored = block(("old_logprobs", "entropy"), (0, 1), 1.0)
    fields = Fields([*LENGTHS], [scored])
    fields.add(block(("entropy",), (1,), 2.0))
    assert fields.part("entropy", 1).tolist() == [2.0] * 3  # opens the later block
    assert fields.part("old_logprobs", 0).tolist() == [1.0] * 2  # opens the earlier one
    assert fields.part("entropy", 1).tolist() == [2.0] * 3
    assert fields.part("entropy", 0).tolist() == [1.0] * 2
