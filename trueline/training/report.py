"""What controller and ranks tell each other of a step: what the loss needs, and what came of it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueline.data.types import Batch, LossOutput


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What a loss needs besides the samples."""

    temperature: float = 1.0
    section: Any = None  # of the configuration, that the loss reads
    statistics: dict[str, float] = field(default_factory=dict)  # of the whole minibatch
    expert_counts: list[float] = field(default_factory=list)  # [E] of the whole minibatch, where routers are balanced


@dataclass(slots=True)
class Report:
    """What one rank reports of an update: weighted sums and maxima, to be joined over ranks."""

    sums: dict[str, float]
    maxima: dict[str, float]
    step: dict[str, float]

    def add(self, loss: LossOutput, batch: Batch) -> None:
        weights = weights_of(loss, batch)
        sums = {name: (weights * values).sum() for name, values in loss.means.items()}
        sums["loss"] = (weights * loss.values).sum().detach()
        sums["weight"] = weights.sum()
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item()
        for name, values in loss.maxima.items():
            largest = float(torch.where(weights > 0, values, -torch.inf).max())
            self.maxima[name] = max(self.maxima.get(name, -float("inf")), largest)


def weights_of(loss: LossOutput, batch: Batch) -> Tensor:
    return batch.shares if loss.per_sequence else batch.token_weights()
