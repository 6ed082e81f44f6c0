from statistics import fmean

import pytest
import torch

from trueline.algorithms.loss_aggregation import AGGREGATIONS, set_weights
from trueline.data.types import Sample

BUDGET = 11
VALUES = [[1.0, 2.0, 3.0], [10.0], [-4.0, 0.5]]  # loss of each sampled token


def paper(name: str, values: list[list[float]]) -> float:
    """The average as each paper writes it."""
    flat = [value for answer in values for value in answer]
    return {
        "token_mean": fmean(flat),
        "sequence_mean": fmean([fmean(answer) for answer in values]),
        "constant": sum(sum(answer) / BUDGET for answer in values) / len(values),
        "sequence_sum": fmean([sum(answer) for answer in values]),
    }[name]


def weighted_samples(name: str, filtered: tuple[int, ...] = ()) -> list[Sample]:
    """Each answer follows a prompt of another length, which must not count."""
    samples = [
        Sample(torch.zeros(prompt + len(answer)), torch.tensor([False] * prompt + [True] * len(answer)), weight=7.0)
        for prompt, answer in enumerate(VALUES, 2)
    ]
    for at in filtered:
        samples[at].filtered = True
    set_weights(samples, name, BUDGET)
    return samples


def weighted_sum(samples: list[Sample]) -> float:
    return sum(sample.weight * sum(answer) for sample, answer in zip(samples, VALUES, strict=True))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_weighted_sum_is_the_papers_average(name: str) -> None:
    assert weighted_sum(weighted_samples(name)) == pytest.approx(paper(name, VALUES))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_a_mean_has_weights_that_sum_to_one(name: str) -> None:
    assert sum(sample.weight * sample.sampled_tokens() for sample in weighted_samples(name)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_filtered_answers_are_neither_in_the_sum_nor_in_the_denominator(name: str) -> None:
    samples = weighted_samples(name, filtered=(1,))
    assert samples[1].weight == 0.0
    assert weighted_sum(samples) == pytest.approx(paper(name, [VALUES[0], VALUES[2]]))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_where_all_are_filtered_nothing_weighs(name: str) -> None:
    assert [sample.weight for sample in weighted_samples(name, filtered=(0, 1, 2))] == [0.0, 0.0, 0.0]
