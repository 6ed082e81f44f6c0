from statistics import fmean

import pytest
import torch

from trueline.algorithms.weighting import WEIGHTINGS, set_weights
from trueline.data.types import Sample

BUDGET = 11
VALUES = [[1.0, 2.0, 3.0], [10.0], [-4.0, 0.5]]  # loss of each sampled token


def paper(name: str) -> float:
    """The average as each paper writes it."""
    flat = [value for answer in VALUES for value in answer]
    return {
        "token_mean": fmean(flat),
        "sequence_mean": fmean([fmean(answer) for answer in VALUES]),
        "constant": sum(sum(answer) / BUDGET for answer in VALUES) / len(VALUES),
        "sequence_sum": fmean([sum(answer) for answer in VALUES]),
    }[name]


def weighted_samples(name: str) -> list[Sample]:
    """Each answer follows a prompt of another length, which must not count."""
    samples = [
        Sample(torch.zeros(prompt + len(answer)), torch.tensor([False] * prompt + [True] * len(answer)))
        for prompt, answer in enumerate(VALUES, 2)
    ]
    set_weights(samples, name, BUDGET)
    return samples


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_weighted_sum_is_the_papers_average(name: str) -> None:
    total = sum(sample.weight * sum(answer) for sample, answer in zip(weighted_samples(name), VALUES, strict=True))
    assert total == pytest.approx(paper(name))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_a_mean_has_weights_that_sum_to_one(name: str) -> None:
    assert sum(sample.weight * sample.sampled_tokens() for sample in weighted_samples(name)) == pytest.approx(1.0)
