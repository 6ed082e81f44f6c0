import random

import pytest
import torch

from trueline.data.batching import FILLER, Budget, collate, plan_micro_batches
from trueline.data.types import Batch, Sample, pack_samples

CPU = torch.device("cpu")


def random_lengths(seed: int, count: int, longest: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


CASES = [
    (random_lengths(seed, count, 64), ranks, Budget(tokens, samples))
    for seed, count in enumerate([1, 2, 3, 7, 16, 33, 100])
    for ranks in (1, 2, 3, 8)
    for tokens, samples in [(64, None), (128, None), (128, 1), (1000, 5)]
]


@pytest.mark.parametrize(("lengths", "ranks", "budget"), CASES)
def test_a_plan_keeps_its_promises(lengths: list[int], ranks: int, budget: Budget) -> None:
    plan = plan_micro_batches(lengths, ranks, budget)
    assert len(plan) == ranks
    assert len({len(passes) for passes in plan}) == 1  # every rank does the same number of passes
    placed = [at for passes in plan for micro_batch in passes for at in micro_batch if at != FILLER]
    assert sorted(placed) == list(range(len(lengths)))
    for micro_batch in [micro_batch for passes in plan for micro_batch in passes]:
        assert micro_batch
        widths = [1 if at == FILLER else lengths[at] for at in micro_batch]
        assert len(widths) * max(widths) <= budget.tokens
        assert budget.samples is None or len(widths) <= budget.samples


def test_ranks_get_like_amounts_of_work() -> None:
    lengths = random_lengths(5, 64, 100)
    plan = plan_micro_batches(lengths, 4, Budget(400))
    work = [sum(lengths[at] for micro_batch in passes for at in micro_batch if at != FILLER) for passes in plan]
    assert max(work) - min(work) <= max(lengths)


def test_ranks_without_a_sample_get_fillers() -> None:
    plan = plan_micro_batches([5], 3, Budget(10))
    assert sorted(plan) == [[[FILLER]], [[FILLER]], [[0]]]


def test_passes_are_split_before_fillers_are_added() -> None:
    """The first rank gets 4 and 1, which share no pass of 4 tokens; the other's two rows of 2 would."""
    assert plan_micro_batches([4, 2, 2, 1], 2, Budget(4)) == [[[0], [3]], [[1], [2]]]


def test_a_sample_above_the_budget_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens, more than micro_batch_tokens=10"):
        plan_micro_batches([10, 11, 3], 2, Budget(10))


def sample(tokens: list[int], mask: list[bool], weight: float) -> Sample:
    made = Sample(torch.tensor(tokens), torch.tensor(mask), weight=weight)
    made.rollout_logprobs = torch.tensor([-0.1 * token for token in tokens])
    return made


SAMPLES = [
    sample([5, 6, 7], [False, True, True], 0.5),
    sample([8, 9], [False, True], 0.25),
    sample([1, 2, 3, 4], [False, False, True, False], 2.0),
]


def collated(micro_batch: list[int]) -> Batch:
    return collate(pack_samples(SAMPLES), micro_batch, CPU)


def test_collate_pads_on_the_right() -> None:
    batch = collated([2, 1])
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [8, 9, 0, 0]]
    assert batch.mask.tolist() == [[False, False, True, False], [False, True, False, False]]
    assert batch.mask.dtype == torch.bool
    assert batch.tokens.dtype == torch.int64


def test_weights_stand_on_masked_tokens_only() -> None:
    batch = collated([0, 2])
    assert batch.weights.tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 2.0, 0.0]]
    assert batch.weights.dtype == torch.float32


def test_a_filler_weighs_nothing() -> None:
    batch = collated([FILLER])
    assert batch.tokens.shape == (1, 1)
    assert batch.weights.sum() == 0
    assert collated([1, FILLER]).weights.tolist() == [[0.0, 0.25], [0.0, 0.0]]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_packed_comes_out_again(at: int) -> None:
    batch = collated([at])
    assert torch.equal(batch.tokens[0], SAMPLES[at].tokens)
    assert torch.equal(batch.mask[0], SAMPLES[at].mask)
    assert torch.equal(batch.rollout_logprobs[0], SAMPLES[at].rollout_logprobs)


def test_fields_that_were_not_filled_stay_unfilled() -> None:
    with pytest.raises(AttributeError, match="old_logprobs"):
        _ = collated([0]).old_logprobs
