import itertools
import random

import numpy as np
import pytest
import torch

from trueline.data.batching import (
    FILLER,
    FILLER_TOKENS,
    SHORTEST_PREFIX,
    Budget,
    MicroBatch,
    Plan,
    collate,
    find_families,
    find_repeats,
    pack_samples,
    plan_micro_batches,
)
from trueline.data.types import Batch, Kin, Repeat, Sample

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


Sequence = np.ndarray


def family(prompt: int, answers: list[int], seed: int = 0) -> list[Sequence]:
    """Sequences that have a prompt of so many tokens in common, and differ right behind it."""
    generator = np.random.default_rng(seed)
    shared = generator.integers(3, 1000, prompt)
    firsts = range(1000, 1000 + len(answers))
    return [
        np.concatenate([shared, [first], generator.integers(3, 1000, answer - 1)])
        for first, answer in zip(firsts, answers, strict=True)
    ]


def computed(sequences: list[Sequence]) -> int:
    """Tokens of a pass that repeat no other sequence."""
    return sum(map(len, sequences)) - sum(repeat.tokens for repeat in find_repeats(sequences))


def test_sequences_repeat_the_one_that_they_are_most_alike() -> None:
    one, two, other = *family(40, [5, 9]), *family(50, [3], seed=1)
    longer, short = np.concatenate([one, [7, 8]]), one[: SHORTEST_PREFIX - 1]
    assert find_repeats([two, other, one]) == [Repeat(0, 2, 40)]
    assert set(find_repeats([two, one, longer])) == {Repeat(2, 1, 45), Repeat(0, 2, 40)}
    assert find_repeats([one, short]) == find_repeats([one[:36], other]) == find_repeats([one]) == []


def test_a_sequence_keeps_a_token_of_its_own() -> None:
    (one,) = family(40, [5])
    assert find_repeats([one, one.copy()]) == [Repeat(1, 0, 44)]
    assert find_repeats([one, one[:40]]) == [Repeat(0, 1, 40)]


def test_families_begin_alike() -> None:
    """A sequence with half of the prompt joins its family; one with less is none of it."""
    siblings, stranger = family(100, [5, 6, 7]), family(60, [4], seed=2)
    half, less = (np.concatenate([siblings[0][:count], [2000] * 9]) for count in (60, 40))
    kin = find_families([*siblings, *stranger])
    assert kin == [Kin(1, 100), Kin(1, 106), Kin(1, 100), Kin(3, 64)]
    assert len({one.family for one in find_families([*siblings, half])}) == 1
    assert [one.family for one in find_families([*siblings, less])] == [1, 1, 1, 3]


def test_the_sample_that_shares_the_most_comes_first() -> None:
    """Otherwise a pass would count tokens of all that follow which it does not compute."""
    siblings = family(100, [5, 6, 7])
    sequences = [np.concatenate([siblings[0][:60], [2, 2, 2]]), *siblings]
    (passes,) = plan = plan_micro_batches([len(one) for one in sequences], 1, Budget(400), kin=find_families(sequences))
    assert plan.saved == pytest.approx(1 - computed(sequences) / sum(map(len, sequences)))
    assert passes[0][-1] == 0


def groups(seed: int, count: int, size: int) -> list[Sequence]:
    generator = random.Random(seed)
    made = [
        family(generator.randint(10, 200), [generator.randint(1, 60) for _ in range(size)], seed=100 * seed + number)
        for number in range(count)
    ]
    mixed = [sequence for one in made for sequence in one]
    branches = [np.concatenate([one[: len(one) * 2 // 3], [5000] * 7]) for one in mixed[::5]]
    mixed += [*branches, mixed[0].copy(), mixed[0][:-1].copy()]
    generator.shuffle(mixed)
    return mixed


SHARED_CASES = [
    (groups(number, count, size), ranks, Budget(tokens, samples))
    for number, (count, size) in enumerate([(1, 1), (1, 9), (3, 8), (10, 4), (2, 40), (25, 2)])
    for ranks in (1, 2, 3, 8)
    for tokens, samples in [(270, None), (1000, None), (1000, 5), (20_000, None)]
]


def test_a_plan_with_common_prefixes_keeps_its_promises() -> None:
    """The budget is one of tokens that are computed, and there are no more passes than without sharing."""
    for sequences, ranks, budget in SHARED_CASES:
        lengths = [len(one) for one in sequences]
        plan = plan_micro_batches(lengths, ranks, budget, kin=find_families(sequences))
        whole = plan_micro_batches(lengths, ranks, budget)
        assert sorted(placed(plan)) == list(range(len(sequences)))
        assert len({len(passes) for passes in plan}) == 1
        assert len(plan[0]) <= len(whole[0]) or budget.samples  # families are cut less, and fill passes less
        passes = [[at for at in one if at != FILLER] for rank in plan for one in rank]
        tokens = [computed([sequences[at] for at in one]) for one in passes]
        assert max(tokens) <= budget.tokens
        assert all(len(one) <= (budget.samples or len(one)) for one in passes)
        assert 0 <= plan.saved <= 1 - sum(tokens) / sum(lengths) + 1e-9
        assert plan == plan_micro_batches(lengths, ranks, budget, kin=find_families(sequences))


def test_a_family_stays_in_one_pass_where_it_fits() -> None:
    sequences = groups(5, 6, 8)
    kin = find_families(sequences)
    (passes,) = plan_micro_batches([len(one) for one in sequences], 1, Budget(700), kin=kin)
    assert len(passes) > 2
    for number in {one.family for one in kin}:
        assert sum(any(kin[at].family == number for at in one) for one in passes) == 1


@pytest.mark.parametrize(("count", "size"), [(1, 64), (3, 32), (9, 8), (64, 8)])
def test_ranks_share_families_evenly(count: int, size: int) -> None:
    """A family is cut where ranks would wait for each other otherwise, and that costs less than it brings."""
    sequences, ranks = [one for seed in range(count) for one in family(100, [50] * size, seed)], 4
    lengths, budget = [len(one) for one in sequences], Budget(2000)
    plan = plan_micro_batches(lengths, ranks, budget, kin=find_families(sequences))
    waits = sum(
        max(computed([sequences[at] for at in one if at != FILLER]) for one in one_round)
        for one_round in zip(*plan, strict=True)
    )
    assert waits < 1.35 * computed(sequences) / ranks
    assert plan.saved > 0.4


def test_pairs_share_their_prompt_within_a_row() -> None:
    pairs = [one for seed in range(4) for one in family(60, [10, 20], seed)]
    kin = find_families(pairs)
    plan = plan_micro_batches([len(one) for one in pairs], 2, Budget(200), samples_per_row=2, kin=kin)
    assert sorted(placed(plan)) == list(range(8)) and [len(passes) for passes in plan] == [1, 1]
    assert plan.saved == pytest.approx(4 * 60 / sum(map(len, pairs)))


def test_only_samples_that_share_prefixes_are_compared() -> None:
    samples = [Sample(torch.from_numpy(one), torch.ones(len(one), dtype=torch.bool)) for one in family(40, [5, 6])]
    assert collate(pack_samples(samples), [0, 1], CPU).repeats == []
    assert collate(pack_samples(samples, shares=True), [1, 0], CPU).repeats == [Repeat(0, 1, 40)]
    assert collate(pack_samples(samples, shares=True), [FILLER], CPU).repeats == []


@pytest.mark.parametrize(("common", "shared"), [(31, 0), (32, 1)])
def test_prefixes_are_shared_from_32_tokens_on(common: int, shared: int) -> None:
    one, other = np.arange(40), np.concatenate([np.arange(common), np.arange(100, 110)])
    assert len(find_repeats([one, other])) == shared
