"""Loss aggregation: each sequence gets a weight in the whole minibatch.

A worker sums `weight * mask * value`, so micro-batches, ranks and padding cannot change the result.
"""

from collections.abc import Sequence
from typing import Protocol

from trueline.algorithms.entries import Entry, entry, table_of
from trueline.data.types import Whose

Aggregation = Entry[[list[int], int], list[float]]  # sampled tokens of each episode, token budget -> weights


@entry("mean over all tokens of a minibatch")
def token_mean(counts: list[int], budget: int) -> list[float]:
    """DAPO (arXiv:2503.14476)."""
    return [1 / sum(counts)] * len(counts)


@entry("mean over tokens, then over completions")
def sequence_mean(counts: list[int], budget: int) -> list[float]:
    """GRPO (arXiv:2402.03300)."""
    return [1 / (len(counts) * count) for count in counts]


@entry("sum over tokens, divided by completions x rollout.max_new_tokens")
def constant(counts: list[int], budget: int) -> list[float]:
    """Dr. GRPO (arXiv:2503.20783)."""
    return [1 / (len(counts) * budget)] * len(counts)


@entry("sum over tokens, mean over completions")
def sequence_sum(counts: list[int], budget: int) -> list[float]:
    """REINFORCE."""
    return [1 / len(counts)] * len(counts)


AGGREGATIONS: dict[str, Aggregation] = table_of(token_mean, sequence_mean, constant, sequence_sum)


def weight_total(samples: "Sequence[Weighted]", loss_aggregation: str) -> int:
    """Return what the weights of a minibatch are divided by, besides its budget: its tokens, or its completions."""
    learnt = [sample for sample in samples if not sample.filtered]
    if loss_aggregation == token_mean.function.__name__:
        return sum(sample.sampled_tokens() for sample in learnt)
    return len({sample.whose() for sample in learnt})


class Weighted(Protocol):
    """A sample, or what the controller knows of one."""

    filtered: bool
    weight: float

    def whose(self) -> Whose: ...

    def sampled_tokens(self) -> int: ...


def set_weights(samples: Sequence[Weighted], loss_aggregation: str, budget: int) -> None:
    """Set the weight of every sample; filtered samples have none. Sequences of one episode and role count as one."""
    counts: dict[Whose, int] = {}
    for sample in samples:
        if not sample.filtered:
            counts[sample.whose()] = counts.get(sample.whose(), 0) + sample.sampled_tokens()
    found = AGGREGATIONS[loss_aggregation](list(counts.values()), budget) if counts else []
    weights = dict(zip(counts, found, strict=True))
    for sample in samples:
        sample.weight = 0.0 if sample.filtered else weights[sample.whose()]
