import pytest
import torch

from trueline.data.types import (
    Completion,
    Outcome,
    Prompt,
    Sample,
    Trajectory,
    filled_fields,
    pack_samples,
    to_sample,
)

PROMPT = Prompt(0, [{"role": "user", "content": "hi"}])
LATER = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")


def trajectory(reward: float | None = 1.0) -> Trajectory:
    made = Trajectory.start(PROMPT, 4, [10, 11])
    made.add_action(Completion([12, 13], [-0.5, -0.25], version=3, finish_reason="stop"))
    made.add_observation([14])
    made.add_action(Completion([15], [-2.0], version=2, finish_reason="stop"))
    made.reward = reward
    return made


def test_the_four_failures_are_failures_and_nothing_else_is() -> None:
    failed = {outcome for outcome in Outcome if outcome.failed}
    assert failed == {
        Outcome.ENVIRONMENT_ERROR,
        Outcome.REWARD_ERROR,
        Outcome.REWARD_TIMEOUT,
        Outcome.INFRA_ERROR,
    }


def test_a_trajectory_has_one_entry_per_token() -> None:
    made = trajectory()
    assert made.tokens == [10, 11, 12, 13, 14, 15]
    assert made.mask == [False, False, True, True, False, True]
    assert made.logprobs == [0.0, 0.0, -0.5, -0.25, 0.0, -2.0]
    assert made.versions == [-1, -1, 3, 3, -1, 2]
    assert made.oldest_version() == 2


def test_starting_a_trajectory_copies_the_prompts_tokens() -> None:
    tokens = [1, 2]
    Trajectory.start(PROMPT, 0, tokens).add_observation([3])
    assert tokens == [1, 2]


def test_a_trajectory_becomes_a_sample() -> None:
    sample = to_sample(trajectory(reward=0.5))
    assert sample.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert sample.mask.tolist() == [False, False, True, True, False, True]
    assert (sample.group, sample.version, sample.reward, sample.truncated) == (4, 2, 0.5, False)
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, -2.0]
    assert (sample.length(), sample.sampled_tokens()) == (6, 3)


def test_a_cut_answer_is_marked() -> None:
    cut = trajectory()
    cut.outcome = Outcome.TRUNCATED
    assert to_sample(cut).truncated


def test_an_answer_without_a_reward_cannot_be_trained_on() -> None:
    failed = trajectory(reward=None)
    failed.outcome = Outcome.REWARD_TIMEOUT
    with pytest.raises(ValueError, match="reward_timeout"):
        to_sample(failed)


@pytest.mark.parametrize("name", LATER)
def test_a_field_read_too_early_is_named(name: str) -> None:
    sample = Sample(torch.tensor([1]), torch.tensor([True]))
    with pytest.raises(AttributeError, match=name):
        getattr(sample, name)
    setattr(sample, name, torch.zeros(1))
    assert getattr(sample, name).shape == (1,)


def test_filled_fields_grow_as_stages_fill_them() -> None:
    sample = Sample(torch.tensor([1]), torch.tensor([True]))
    assert filled_fields(sample) == ["tokens", "mask"]
    sample.advantages = torch.zeros(1)
    assert filled_fields(sample) == ["tokens", "mask", "advantages"]


def test_packing_is_one_flat_array_per_field_and_the_lengths() -> None:
    samples = [
        Sample(torch.tensor([1, 2]), torch.tensor([False, True]), weight=0.5),
        Sample(torch.tensor([3]), torch.tensor([True]), weight=0.25),
    ]
    packed = pack_samples(samples)
    assert packed.lengths.tolist() == [2, 1]
    assert packed.weights.tolist() == [0.5, 0.25]
    assert packed.arrays["tokens"].tolist() == [1, 2, 3]
    assert packed.arrays["mask"].tolist() == [False, True, True]
    assert set(packed.arrays) == {"tokens", "mask"}


def test_packing_does_not_carry_the_storage_of_a_view() -> None:
    wide = torch.zeros(100, 1000)
    sample = Sample(torch.arange(3), torch.ones(3, dtype=torch.bool))
    sample.old_logprobs = wide[0, :3]
    array = pack_samples([sample]).arrays["old_logprobs"]
    assert array.nbytes == 3 * 4
    assert array.base is None or array.base.nbytes == 3 * 4
