"""How token losses are averaged: each sequence gets its share, set over the whole minibatch.

A worker sums `weight * mask * value`, so micro-batches, ranks and padding cannot change the result.
"""

from trueline.algorithms.entries import Entry, entry, named
from trueline.data.types import Sample

Aggregation = Entry[[list[int], int], list[float]]  # sampled tokens of each episode, token budget -> weights


@entry("every sampled token of a minibatch counts the same")
def token_mean(counts: list[int], budget: int) -> list[float]:
    """Weight tokens for the mean over all sampled tokens: DAPO (arXiv:2503.14476)."""
    return [1 / sum(counts)] * len(counts)


@entry("every answer counts the same, its tokens share that")
def sequence_mean(counts: list[int], budget: int) -> list[float]:
    """Weight tokens for the mean over completions of each one's mean: GRPO (arXiv:2402.03300)."""
    return [1 / (len(counts) * count) for count in counts]


@entry("sums of tokens over answers x rollout.max_new_tokens")
def constant(counts: list[int], budget: int) -> list[float]:
    """Weight tokens for sums, divided by the run's constant token budget: Dr. GRPO (arXiv:2503.20783)."""
    return [1 / (len(counts) * budget)] * len(counts)


@entry("sums of tokens over answers")
def sequence_sum(counts: list[int], budget: int) -> list[float]:
    """Weight tokens for the mean over completions of each one's sum: REINFORCE."""
    return [1 / len(counts)] * len(counts)


AGGREGATIONS: dict[str, Aggregation] = named(token_mean, sequence_mean, constant, sequence_sum)


def set_weights(samples: list[Sample], loss_aggregation: str, budget: int) -> None:
    """Set every sample's weight by the loss aggregation; filtered samples weigh nothing and count nowhere.

    The sequences of an episode are weighted as one of their length together.
    """
    counts: dict[int, int] = {}  # by episode
    for sample in samples:
        if not sample.filtered:
            counts[sample.whose()] = counts.get(sample.whose(), 0) + sample.sampled_tokens()
    found = AGGREGATIONS[loss_aggregation](list(counts.values()), budget) if counts else []
    weights = dict(zip(counts, found, strict=True))
    for sample in samples:
        sample.weight = 0.0 if sample.filtered else weights[sample.whose()]
