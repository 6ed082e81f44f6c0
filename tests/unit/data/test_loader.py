import json
from itertools import islice
from typing import Any

import numpy as np
import pytest

from trueline.config.base import ConfigError, Tree
from trueline.config.data import DataConfig
from trueline.data.loader import Mixture, Order, changes, digest_rows, fingerprint, split_rows
from trueline.data.rows import Located


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20])
def test_an_order_goes_on_from_its_position_alone(shuffle: bool, position: int) -> None:
    whole = list(islice(Order(7, seed=3, shuffle=shuffle), 30))
    assert list(islice(Order(7, seed=3, shuffle=shuffle, position=position), 30 - position)) == whole[position:]


def test_every_epoch_has_every_row_once_in_a_new_order() -> None:
    order = Order(50, seed=1, shuffle=True)
    epochs = [list(islice(order, 50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_without_shuffling_rows_come_as_they_stand() -> None:
    assert list(islice(Order(3, seed=1, shuffle=False), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_the_seed_decides_the_order() -> None:
    first, same, other = (list(islice(Order(50, seed, True), 50)) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_position_counts_what_was_drawn() -> None:
    order = Order(4, seed=0, shuffle=True, position=5)
    list(islice(order, 3))
    assert order.position == 8


# Mixtures


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 4097, 9000])
def test_a_mixture_goes_on_from_its_position_alone(shuffle: bool, position: int) -> None:
    def mixture(start: int) -> Mixture:
        return Mixture([7, 100, 3], [1, 2, 1], seed=3, shuffle=shuffle, position=start)

    whole = list(islice(mixture(0), 10_000))
    resumed = mixture(position)
    assert list(islice(resumed, 10_000 - position)) == whole[position:]
    assert resumed.position == 10_000


def test_sources_are_drawn_by_their_probability() -> None:
    """Three sigma of a binomial draw of 40,000 are below 300."""
    drawn = np.array(list(islice(Mixture([10, 20, 30], [3, 1, 6], seed=1, shuffle=True), 40_000)))
    counts = [int(((low <= drawn) & (drawn < high)).sum()) for low, high in [(0, 10), (10, 30), (30, 60)]]
    assert sum(counts) == 40_000
    assert all(abs(count - wanted) < 300 for count, wanted in zip(counts, [12_000, 4_000, 24_000], strict=True))


def test_every_source_goes_through_its_own_rows() -> None:
    drawn = list(islice(Mixture([4, 5], [1, 1], seed=2, shuffle=False), 50))
    first, second = [row for row in drawn if row < 4], [row for row in drawn if row >= 4]
    assert first == [number % 4 for number in range(len(first))]
    assert second == [4 + number % 5 for number in range(len(second))]
    shuffled = list(islice(Mixture([50, 50], [1, 1], seed=2, shuffle=True), 400))
    epochs = [row for row in shuffled if row < 50][:50], [row - 50 for row in shuffled if row >= 50][:50]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]


def test_the_seed_decides_the_mixture() -> None:
    first, same, other = (list(islice(Mixture([9, 9], [1, 3], seed, True), 50)) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_a_mixture_of_one_is_its_only_source() -> None:
    assert list(islice(Mixture([3], [0.2], seed=1, shuffle=False), 5)) == [0, 1, 2, 0, 1]


def test_a_mixture_replaces_the_path() -> None:
    assert DataConfig.parse({"mixture": {"a.jsonl": 1, "b.jsonl": 0.5}}).mixture == {"a.jsonl": 1.0, "b.jsonl": 0.5}
    with pytest.raises(ConfigError, match=r"path=c\.jsonl and mixture=.*exclude each other"):
        DataConfig.parse({"path": "c.jsonl", "mixture": {"a.jsonl": 1}})


@pytest.mark.parametrize("probability", [0, -1, float("nan"), float("inf")])
def test_a_probability_must_be_positive(probability: float) -> None:
    with pytest.raises(ConfigError, match=r"b\.jsonl=.*: set a weight above 0"):
        DataConfig.parse({"mixture": {"a.jsonl": 1, "b.jsonl": probability}})


# Held-out rows


def numbered(count: int, groups: int = 1) -> list[Located]:
    return [Located({"number": at, "topic": at % groups}, f"f, line {at + 1}") for at in range(count)]


@pytest.mark.parametrize(("count", "share", "held"), [(10, 0.2, 2), (10, 0.01, 1), (10, 0.99, 9), (2, 0.5, 1)])
def test_a_share_of_rows_is_held_out(count: int, share: float, held: int) -> None:
    rows = numbered(count)
    train, held_out = split_rows(rows, share, None, seed=1)
    assert (len(train), len(held_out)) == (count - held, held)
    assert sorted([*train, *held_out], key=rows.index) == rows
    for part in (train, held_out):
        assert part == sorted(part, key=rows.index)


def test_the_seed_decides_which_rows_are_held_out() -> None:
    first, same, other = (split_rows(numbered(100), 0.2, None, seed)[1] for seed in (1, 1, 2))
    assert first == same
    assert first != other


@pytest.mark.parametrize("seed", range(5))
def test_rows_with_one_value_stay_together(seed: int) -> None:
    train, held_out = split_rows(numbered(100, groups=10), 0.25, "topic", seed)
    topics = [{located.row["topic"] for located in part} for part in (train, held_out)]
    assert topics[0].isdisjoint(topics[1])
    assert len(held_out) == 20  # two topics of ten rows; a third does not fit


def test_where_no_group_fits_a_smallest_one_is_held_out() -> None:
    rows = [Located({"topic": topic}, "f") for topic in "aaaab"]
    assert [located.row["topic"] for located in split_rows(rows, 0.01, "topic", seed=3)[1]] == ["b"]


def test_nothing_is_held_out_on_request() -> None:
    rows = numbered(3)
    assert split_rows(rows, 0.0, None, seed=1) == (rows, [])


@pytest.mark.parametrize(
    ("rows", "share", "by", "said"),
    [
        (numbered(1), 0.5, None, "f, line 1: the data has only one row"),
        (numbered(3), 0.5, "topic", "f, line 1: the data has only one value in column 'topic'"),
        (numbered(3), 0.5, "subject", "f, line 1: column 'subject' is missing"),
    ],
)
def test_a_split_that_cannot_be_is_refused(rows: list[Located], share: float, by: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_rows(rows, share, by, seed=1)
    assert said in str(caught.value)


# Fingerprints


def marked(rows: dict[str, list[dict[str, Any]]], weights: list[float], seed: int = 0, shuffle: bool = True) -> Tree:
    """As a checkpoint keeps it."""
    shares = dict(zip(rows, weights, strict=True))
    digests, sizes = [digest_rows(part) for part in rows.values()], [len(part) for part in rows.values()]
    return dict(json.loads(json.dumps(fingerprint(shares, sizes, digests, seed, shuffle))))


ONE = {"a.jsonl": [{"prompt": "1", "label": 1}, {"prompt": "2", "label": 2}]}
TWO = ONE | {"b.jsonl": [{"prompt": "3", "label": None}]}
LONGER = {"a.jsonl": [*ONE["a.jsonl"], {"prompt": "9"}]}
SWAPPED = {"a.jsonl": ONE["a.jsonl"][::-1]}
RELABELLED = {"a.jsonl": [{"prompt": "1", "label": 1}, {"prompt": "2", "label": 3}]}
CHANGES = {
    "a row more": (marked(LONGER, [1.0]), ["a.jsonl had 2 rows and now has 3"]),
    "another order": (marked(SWAPPED, [1.0]), ["a.jsonl still has 2 rows, but other ones or in another order"]),
    "another label": (marked(RELABELLED, [1.0]), ["a.jsonl still has 2 rows, but other ones or in another order"]),
    "another seed": (marked(ONE, [1.0], seed=1), ["seed changed from 0 to 1"]),
    "no shuffling": (
        marked(ONE, [1.0], shuffle=False),
        ["seed changed from 0 to None", "data.shuffle changed from True to False"],
    ),
    "another source": (marked(TWO, [1.0, 1.0]), ["the number of datasets changed from 1 to 2"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_shift_the_order_is_named(change: str) -> None:
    now, said = CHANGES[change]
    assert changes(marked(ONE, [1.0]), now) == said


def test_a_mixtures_probabilities_count_as_shares() -> None:
    before = marked(TWO, [1.0, 1.0])
    assert changes(before, marked(TWO, [0.5, 0.5])) == []
    assert changes(before, marked(TWO, [3.0, 1.0])) == [
        "the probability of a.jsonl changed from 0.5 to 0.75",
        "the probability of b.jsonl changed from 0.5 to 0.25",
    ]


def test_what_leaves_the_order_as_it_is_is_no_change() -> None:
    """A file that was moved, columns in another order, the seed of a dataset that nothing draws from."""
    reordered = [{"label": row["label"], "prompt": row["prompt"]} for row in ONE["a.jsonl"]]
    assert changes(marked(ONE, [1.0]), marked({"elsewhere.jsonl": reordered}, [2.0])) == []
    assert changes(marked(ONE, [1.0], 0, shuffle=False), marked(ONE, [1.0], 1, shuffle=False)) == []
