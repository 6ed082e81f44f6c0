import itertools
import random

import pytest
import torch

from trueline.data.batching import FILLER, FILLER_TOKENS, Budget, MicroBatch, Plan, collate, plan_micro_batches
from trueline.data.types import Batch, Sample, pack_samples

CPU = torch.device("cpu")


def random_lengths(seed: int, count: int, longest: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


def placed(plan: Plan) -> list[int]:
    return [at for passes in plan for micro_batch in passes for at in micro_batch if at != FILLER]


def work(plan: Plan, lengths: list[int]) -> list[int]:
    """Tokens of each rank."""
    return [sum(lengths[at] for micro_batch in passes for at in micro_batch if at != FILLER) for passes in plan]


def load(micro_batch: MicroBatch, lengths: list[int], budget: Budget) -> int:
    """Tokens that one pass computes; a pass of fillers is not bound by the budget."""
    widths = [lengths[at] for at in micro_batch if at != FILLER]
    if not widths:
        return 0
    return sum(widths) if budget.packed else len(widths) * max(widths)


def check_promises(plan: Plan, lengths: list[int], ranks: int, budget: Budget) -> None:
    assert len(plan) == ranks
    assert len({len(passes) for passes in plan}) == 1  # every rank does the same number of passes
    assert sorted(placed(plan)) == list(range(len(lengths)))
    for micro_batch in [micro_batch for passes in plan for micro_batch in passes]:
        assert micro_batch
        assert load(micro_batch, lengths, budget) <= budget.tokens
        assert budget.samples is None or len(micro_batch) <= budget.samples
        assert FILLER not in micro_batch or set(micro_batch) == {FILLER}


CASES = [
    (random_lengths(seed, count, 64), ranks, Budget(tokens, samples, packed))
    for seed, count in enumerate([1, 2, 3, 7, 16, 33, 100])
    for ranks in (1, 2, 3, 8)
    for tokens, samples in [(64, None), (128, None), (128, 1), (1000, 5)]
    for packed in (True, False)
]


def test_a_plan_keeps_its_promises() -> None:
    for lengths, ranks, budget in CASES:
        check_promises(plan_micro_batches(lengths, ranks, budget), lengths, ranks, budget)


def test_pairs_stay_together_and_in_order() -> None:
    for pairs, ranks, samples, packed in itertools.product([1, 4, 31], [1, 2, 5], [None, 2, 7], [True, False]):
        lengths, budget = random_lengths(pairs, 2 * pairs, 50), Budget(150, samples, packed)
        plan = plan_micro_batches(lengths, ranks, budget, samples_per_row=2)
        check_promises(plan, lengths, ranks, budget)
        for micro_batch in [micro_batch for passes in plan for micro_batch in passes]:
            chosen, rejected = micro_batch[::2], micro_batch[1::2]
            assert all(at == FILLER or at % 2 == 0 for at in chosen)
            assert rejected == [at if at == FILLER else at + 1 for at in chosen]


def test_a_filler_for_pairs_is_a_pair() -> None:
    assert sorted(plan_micro_batches([5, 6], 2, Budget(20), samples_per_row=2)) == [[[FILLER, FILLER]], [[0, 1]]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ten_thousand_samples_are_planned_evenly(ranks: int, packed: bool) -> None:
    lengths, budget = random_lengths(ranks, 10_000, 2048), Budget(16_384, packed=packed)
    plan = plan_micro_batches(lengths, ranks, budget)
    check_promises(plan, lengths, ranks, budget)
    tokens = work(plan, lengths)
    assert max(tokens) / min(tokens) < 1.05


@pytest.mark.parametrize("seed", range(10))
def test_ranks_get_like_amounts_of_work(seed: int) -> None:
    lengths = random_lengths(seed, 64, 100)
    tokens = work(plan_micro_batches(lengths, 4, Budget(400)), lengths)
    assert max(tokens) - min(tokens) <= max(lengths)
    assert max(tokens) / min(tokens) < 1.15


@pytest.mark.parametrize("seed", range(10))
def test_packed_passes_are_few(seed: int) -> None:
    """The budget's share that is used tells how many passes are wasted."""
    lengths, budget = random_lengths(seed, 400, 100), Budget(1000)
    (passes,) = plan_micro_batches(lengths, 1, budget)
    assert len(passes) <= -(-sum(lengths) // budget.tokens) + 1


def test_one_long_sample_among_short_ones_finds_its_place() -> None:
    lengths = [1] * 50 + [100] + [1] * 50
    plan = plan_micro_batches(lengths, 2, Budget(100))
    check_promises(plan, lengths, 2, Budget(100))
    assert [50] in [micro_batch for passes in plan for micro_batch in passes]


def test_ranks_without_a_sample_get_fillers() -> None:
    for packed in (True, False):
        plan = plan_micro_batches([5], 3, Budget(10, packed=packed))
        assert sorted(plan) == [[[FILLER]], [[FILLER]], [[0]]]


def test_padded_passes_hold_like_lengths() -> None:
    """Long ones with long ones: 9 and 8 fill 18 of 20 places, 3, 2 and 1 nine."""
    plan = plan_micro_batches([1, 9, 3, 8, 2], 1, Budget(20, packed=False))
    assert [sorted(micro_batch) for micro_batch in plan[0]] == [[1, 3], [0, 2, 4]]


def test_padded_passes_are_split_before_fillers_are_added() -> None:
    plan = plan_micro_batches([4, 4, 4], 2, Budget(100, packed=False))
    assert sorted(len(micro_batch) for passes in plan for micro_batch in passes) == [1, 2]


def test_no_samples_are_no_passes() -> None:
    assert plan_micro_batches([], 2, Budget(10)) == [[], []]


def test_a_sample_above_the_budget_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match=r"row 2 has 11 tokens, more than micro_batch_tokens=10: raise micro_batch"):
        plan_micro_batches([10, 11, 3], 2, Budget(10))


@pytest.mark.parametrize(("packed", "load"), [(True, 11), (False, 14)])
def test_a_pair_above_the_budget_is_refused_by_its_row(packed: bool, load: int) -> None:
    """End to end it has 4 + 7 tokens; padded twice seven."""
    with pytest.raises(ValueError, match=f"row 2 has {load} tokens, more than micro_batch_tokens=10"):
        plan_micro_batches([5, 5, 4, 7], 1, Budget(10, packed=packed), samples_per_row=2)


def test_a_limit_of_one_sample_separates_a_pair() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_samples=1 would split a pair: raise it to 2 or more"):
        plan_micro_batches([5, 5], 1, Budget(10, 1), samples_per_row=2)


def sample(tokens: list[int], mask: list[bool], weight: float, label: float) -> Sample:
    made = Sample(torch.tensor(tokens), torch.tensor(mask), weight=weight, label=label)
    made.rollout_logprobs = torch.tensor([-0.1 * token for token in tokens])
    return made


SAMPLES = [
    sample([5, 6, 7], [False, True, True], 0.5, 1.0),
    sample([8, 9], [False, True], 0.25, 0.0),
    sample([1, 2, 3, 4], [False, False, True, False], 2.0, -3.0),
]


def collated(micro_batch: list[int]) -> Batch:
    return collate(pack_samples(SAMPLES), micro_batch, CPU)


def test_collate_lays_samples_end_to_end() -> None:
    batch = collated([2, 1])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 8, 9]
    assert batch.mask.tolist() == [False, False, True, False, False, True]
    assert batch.lengths == [4, 2]
    assert (batch.tokens.dtype, batch.mask.dtype) == (torch.int64, torch.bool)


def test_shares_and_labels_belong_to_sequences() -> None:
    batch = collated([2, 0])
    assert batch.shares.tolist() == [2.0, 0.5]
    assert batch.labels.tolist() == [-3.0, 1.0]
    assert batch.shares.dtype == batch.labels.dtype == torch.float32


def test_a_filler_weighs_nothing() -> None:
    batch = collated([FILLER])
    assert batch.tokens.tolist() == [0] * FILLER_TOKENS
    assert batch.lengths == [FILLER_TOKENS]
    assert not batch.mask.any()
    assert batch.shares.tolist() == batch.labels.tolist() == [0.0]
    assert batch.rollout_logprobs.tolist() == [0.0] * FILLER_TOKENS


def test_fillers_stand_where_the_plan_puts_them() -> None:
    batch = collated([1, FILLER, 0])
    assert batch.tokens.tolist() == [8, 9, *[0] * FILLER_TOKENS, 5, 6, 7]
    assert batch.lengths == [2, FILLER_TOKENS, 3]
    assert batch.shares.tolist() == [0.25, 0.0, 0.5]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_packed_comes_out_again(at: int) -> None:
    batch = collated([at])
    assert torch.equal(batch.tokens, SAMPLES[at].tokens)
    assert torch.equal(batch.mask, SAMPLES[at].mask)
    assert torch.equal(batch.rollout_logprobs, SAMPLES[at].rollout_logprobs)


def test_a_collated_batch_shares_no_memory_with_the_samples() -> None:
    packed = pack_samples(SAMPLES)
    collate(packed, [0], CPU).tokens.zero_()
    assert packed.arrays["tokens"].tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]


def test_fields_that_were_not_filled_stay_unfilled() -> None:
    with pytest.raises(AttributeError, match="old_logprobs"):
        _ = collated([0]).old_logprobs
