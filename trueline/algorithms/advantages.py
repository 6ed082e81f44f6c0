"""Rewards -> advantages: (samples of one step) -> `advantages` filled on each."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trueline.algorithms.lookup import lookup
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample

Estimator = Callable[[list[Sample], AlgorithmConfig], None]


def group_norm(samples: list[Sample], config: AlgorithmConfig) -> None:
    """GRPO (arXiv:2402.03300, eq. 3): reward minus the group's mean, over its sample standard deviation."""
    for members, rewards in by_group(samples):
        spread(members, (rewards - rewards.mean()) / (rewards.std() + 1e-6))


def group_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Dr. GRPO (arXiv:2503.20783, section 3.2): reward minus the group's mean."""
    for members, rewards in by_group(samples):
        spread(members, rewards - rewards.mean())


def leave_one_out(samples: list[Sample], config: AlgorithmConfig) -> None:
    """RLOO (arXiv:2402.14740, eq. 8): reward minus the mean of the others in the group."""
    for members, rewards in by_group(samples):
        others = (rewards.sum() - rewards) / (len(members) - 1)
        spread(members, rewards - others)


def by_group(samples: list[Sample]) -> Iterator[tuple[list[Sample], Tensor]]:
    """The members of each group and their rewards; float64, so that order cannot matter."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    for members in groups.values():
        yield members, torch.tensor([member.reward for member in members], dtype=torch.float64)


def spread(members: list[Sample], advantages: Tensor) -> None:
    """One number per answer, on each of its sampled tokens; exactly zero where all rewards are equal."""
    equal = len({member.reward for member in members}) == 1
    for sample, advantage in zip(members, advantages, strict=True):
        sample.advantages = (0.0 if equal else advantage.float()) * sample.mask


def assign_advantages(samples: list[Sample], config: AlgorithmConfig) -> None:
    lookup(ADVANTAGES, config.advantage, "algorithm.advantage")(samples, config)


ADVANTAGES: dict[str, Estimator] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
