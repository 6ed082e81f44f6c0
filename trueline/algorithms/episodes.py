"""A step's samples by group, episode, role and turn, and their sampled tokens as rows."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample

Episode = list[Sample]  # its sequences


def groups_of(samples: list[Sample]) -> list[list[Episode]]:
    """Return the episodes of each group; where they have several roles, those of each role."""
    members = divide(samples, lambda sample: (sample.group, sample.role))
    return [episodes_of(some) for some in members]


def episodes_of(samples: list[Sample]) -> list[Episode]:
    """Return the sequences of each episode and role: to estimators, a role of an episode is an episode."""
    return divide(samples, Sample.whose)


def by_role(samples: list[Sample]) -> list[list[Sample]]:
    return divide(samples, lambda sample: sample.role)


def divide(samples: list[Sample], key: Callable[[Sample], Hashable]) -> list[list[Sample]]:
    found: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        found.setdefault(key(sample), []).append(sample)
    return list(found.values())


def on_sampled(samples: list[Sample], fields: list[Tensor]) -> Tensor:
    """Gather a field [T] of each sample into [B, L]: its sampled tokens, then zeros."""
    rows = [field.masked_select(sample.mask) for sample, field in zip(samples, fields, strict=True)]
    return pad_sequence(rows, batch_first=True)


def on_all(sample: Sample, row: Tensor, config: AlgorithmConfig) -> Tensor:
    """Spread a row of `on_sampled` or `on_turns` over [T], with zeros on tokens that were not sampled."""
    own = row[turn_numbers(sample)] if config.credit == "turn" else row
    return torch.zeros(sample.length()).masked_scatter_(sample.mask, own)


def step_rewards(samples: list[Sample], config: AlgorithmConfig) -> Tensor:
    """Return the rewards [B, L] of sampled tokens, or of turns."""
    rewards = on_sampled(samples, [sample.token_rewards for sample in samples])
    return rewards if config.credit == "token" else on_turns(samples, rewards, sum_of_turns)


def turn_numbers(sample: Sample) -> Tensor:
    """Return the turn of each sampled token, from 0: consecutive tokens are one turn."""
    places = sample.mask.nonzero()[:, 0]
    return (places.diff(prepend=places[:1]) > 1).cumsum(0)


def turn_count(sample: Sample) -> int:
    return int(turn_numbers(sample)[-1]) + 1


def sum_of_turns(row: Tensor, turns: Tensor) -> Tensor:
    return torch.zeros(int(turns[-1]) + 1, dtype=row.dtype).index_add_(0, turns, row[: len(turns)])


def on_turns(samples: list[Sample], rows: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce rows [B, L] of sampled tokens to [B, K] of turns."""
    reduced = [reduce(row, turn_numbers(sample)) for row, sample in zip(rows, samples, strict=True)]
    return pad_sequence(reduced, batch_first=True)


def over_episodes(episodes: list[Episode], read: Callable[[Sample], Tensor]) -> Tensor:
    """Gather a field [T] of samples into [n, L]: all sampled tokens of each episode, then zeros."""
    rows = [torch.cat([read(sample).masked_select(sample.mask) for sample in episode]) for episode in episodes]
    return pad_sequence(rows, batch_first=True).double()
