"""How token losses are averaged: each sequence gets its share, set over the whole minibatch.

A worker sums `weight * mask * value`, so micro-batches, ranks and padding cannot change the result.
"""

from collections.abc import Callable

from trueline.data.types import Sample

Weighting = Callable[[list[int], int], list[float]]  # sampled tokens of each answer, token budget -> weights


def token_mean(counts: list[int], budget: int) -> list[float]:
    """DAPO (arXiv:2503.14476): the mean over all sampled tokens."""
    return [1 / sum(counts)] * len(counts)


def sequence_mean(counts: list[int], budget: int) -> list[float]:
    """GRPO (arXiv:2402.03300): the mean over answers of each answer's mean."""
    return [1 / (len(counts) * count) for count in counts]


def constant(counts: list[int], budget: int) -> list[float]:
    """Dr. GRPO (arXiv:2503.20783): sums, divided by the run's constant token budget."""
    return [1 / (len(counts) * budget)] * len(counts)


def sequence_sum(counts: list[int], budget: int) -> list[float]:
    """REINFORCE: the mean over answers of each answer's sum."""
    return [1 / len(counts)] * len(counts)


WEIGHTINGS: dict[str, Weighting] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sequence_sum": sequence_sum,
}


def set_weights(samples: list[Sample], weighting: str, budget: int) -> None:
    """Filtered samples weigh nothing and count nowhere."""
    in_loss = [sample for sample in samples if not sample.filtered]
    counts = [sample.sampled_tokens() for sample in in_loss]
    weights = WEIGHTINGS[weighting](counts, budget) if counts else []
    for sample in samples:
        sample.weight = 0.0
    for sample, weight in zip(in_loss, weights, strict=True):
        sample.weight = weight
