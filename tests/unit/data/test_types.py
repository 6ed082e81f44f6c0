import pytest
import torch

from trueline.data.batching import pack_samples
from trueline.data.types import Batch, Completion, Outcome, Prompt, Sample, Trajectory, is_filled, to_samples

PROMPT = Prompt(0, [{"role": "user", "content": "hi"}])
LATER = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "step_labels")


def trajectory(reward: float | None = 1.0) -> Trajectory:
    made = Trajectory(PROMPT, 4)
    made.add_observation([10, 11])
    made.add_action(Completion.of([12, 13], [-0.5, -0.25], version=3, finish_reason="stop"))
    made.add_observation([14])
    made.add_action(Completion.of([15], [-2.0], version=2, finish_reason="stop"))
    made.reward = reward
    return made


def test_the_four_failures_are_failures_and_nothing_else_is() -> None:
    failed = {outcome for outcome in Outcome if outcome.is_failure}
    assert failed == {Outcome.ENVIRONMENT_ERROR, Outcome.REWARD_ERROR, Outcome.REWARD_TIMEOUT, Outcome.INFRA_ERROR}


def test_a_trajectory_has_one_entry_per_token() -> None:
    made = trajectory()
    assert made.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert made.mask.tolist() == [False, False, True, True, False, True]
    assert made.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, -2.0]
    assert made.versions.tolist() == [-1, -1, 3, 3, -1, 2]
    assert (made.oldest_version(), made.sampled_tokens()) == (2, 3)
    made.add_reward(0.5)
    assert made.rewards.tolist() == [0.0] * 5 + [0.5]


def test_a_trajectory_becomes_a_sample() -> None:
    (sample,) = to_samples(trajectory(reward=0.5))
    assert sample.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert sample.mask.tolist() == [False, False, True, True, False, True]
    assert (sample.group, sample.version, sample.reward, sample.truncated) == (4, 2, 0.5, False)
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, -2.0]
    assert (sample.length(), sample.sampled_tokens()) == (6, 3)


def test_a_cut_answer_is_marked() -> None:
    cut = trajectory()
    cut.truncated = True
    assert to_samples(cut)[0].truncated


def test_an_answer_without_a_reward_cannot_be_trained_on() -> None:
    failed = trajectory(reward=None)
    failed.outcome = Outcome.REWARD_TIMEOUT
    with pytest.raises(ValueError, match="reward_timeout"):
        to_samples(failed)


@pytest.mark.parametrize("name", LATER)
def test_a_field_read_too_early_is_named(name: str) -> None:
    sample = Sample(torch.tensor([1]), torch.tensor([True]))
    with pytest.raises(AttributeError, match=name):
        getattr(sample, name)
    setattr(sample, name, torch.zeros(1))
    assert getattr(sample, name).shape == (1,)


def test_filled_fields_grow_as_stages_fill_them() -> None:
    sample = Sample(torch.tensor([1]), torch.tensor([True]))
    assert [*pack_samples([sample]).arrays] == ["tokens", "mask"]
    sample.advantages = torch.zeros(1)
    assert [*pack_samples([sample]).arrays] == ["tokens", "mask", "advantages"]


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


def test_packing_keeps_the_labels_of_sequences() -> None:
    samples = [Sample(torch.tensor([1]), torch.tensor([True]), label=label) for label in (0.0, 1.0, -2.5)]
    assert pack_samples(samples).labels.tolist() == [0.0, 1.0, -2.5]


def batch() -> Batch:
    """Three sequences of 3, 1 and 2 tokens; the second has nothing to learn."""
    mask = torch.tensor([False, True, True, False, True, False])
    shares = torch.tensor([0.5, 4.0, 0.25])
    return Batch(torch.arange(6), mask, [3, 1, 2], shares, torch.zeros(3))


def test_a_token_weighs_its_sequences_share_where_the_mask_is_true() -> None:
    weights = batch().token_weights()
    assert weights.tolist() == [0.0, 0.5, 0.5, 0.0, 0.25, 0.0]
    assert weights.dtype == torch.float32


def test_sums_are_over_the_masked_tokens_of_each_sequence() -> None:
    values = torch.tensor([100.0, 1.0, 2.0, 100.0, 3.0, 100.0], requires_grad=True)
    sums = batch().sums(values)
    assert sums.tolist() == [3.0, 0.0, 3.0]
    (sums * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 1.0, 1.0, 0.0, 3.0, 0.0]


def test_counts_are_of_masked_tokens() -> None:
    counts = batch().counts()
    assert counts.tolist() == [2.0, 0.0, 1.0]
    assert counts.dtype == torch.float32


def test_the_last_of_each_sequence_is_taken_masked_or_not() -> None:
    assert batch().last_of(torch.arange(6.0)).tolist() == [2.0, 3.0, 5.0]
    assert batch().last_of(torch.arange(12.0).view(6, 2)).tolist() == [[4.0, 5.0], [6.0, 7.0], [10.0, 11.0]]


def test_a_batch_knows_which_of_its_fields_are_filled() -> None:
    made = batch()
    assert not is_filled(made, "advantages")
    made.advantages = torch.zeros(6)
    assert is_filled(made, "advantages")
