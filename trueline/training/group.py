"""The controller's view of all ranks of one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueline.config.model import RanksConfig
from trueline.data.batching import FILLER, Budget, Plan, plan_micro_batches
from trueline.data.types import Sample, pack_samples
from trueline.runtime.actors import Actor, share, wait_all
from trueline.training.worker import Report


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What a loss needs besides the samples."""

    temperature: float = 1.0
    algorithm: Any = None


class ModelGroup:
    def __init__(self, name: str, actors: Sequence[Actor], config: RanksConfig, timeout_seconds: float) -> None:
        self.name, self.actors, self.timeout_seconds = name, actors, timeout_seconds
        self.budget = Budget(config.micro_batch_tokens, config.micro_batch_samples)

    def start(self) -> None:
        start_groups([self])

    def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank; their results in rank order."""
        return wait_all([actor.submit(method, *args) for actor in self.actors], self.timeout_seconds)

    def score(self, samples: list[Sample], temperature: float) -> list[Tensor]:
        """[T] log-probs of each sample's tokens under this model."""
        plan = self.plan(samples)
        packed = share(pack_samples(samples))
        calls = [
            actor.submit("score", packed, passes, temperature) for actor, passes in zip(self.actors, plan, strict=True)
        ]
        scores: dict[int, Tensor] = {}
        for passes, flat in zip(plan, wait_all(calls, self.timeout_seconds), strict=True):
            positions = [at for micro_batch in passes for at in micro_batch if at != FILLER]
            pieces = torch.tensor(flat).split([samples[at].length() for at in positions])
            scores.update(zip(positions, pieces, strict=True))
        return [scores[at] for at in range(len(samples))]

    def update(self, samples: list[Sample], loss: str, settings: LossSettings) -> dict[str, float]:
        """Exactly one optimizer step on the whole minibatch."""
        return joined(self._spread("update", samples, loss, settings))

    def accumulate(self, samples: list[Sample], loss: str, settings: LossSettings) -> dict[str, float]:
        """The gradients of `update` without its step."""
        return joined(self._spread("accumulate", samples, loss, settings))

    def _spread(self, method: str, samples: list[Sample], loss: str, settings: LossSettings) -> list[Report]:
        packed = share(pack_samples(samples))
        calls = [
            actor.submit(method, packed, passes, loss, settings)
            for actor, passes in zip(self.actors, self.plan(samples), strict=True)
        ]
        return wait_all(calls, self.timeout_seconds)

    def plan(self, samples: list[Sample]) -> Plan:
        return plan_micro_batches([sample.length() for sample in samples], len(self.actors), self.budget)

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()


def start_groups(groups: Sequence[ModelGroup]) -> None:
    """Start the ranks of several models at once; each model's ranks meet at its rank 0."""
    seconds = groups[0].timeout_seconds
    addresses = wait_all([group.actors[0].submit("listen") for group in groups], seconds)
    starts = [
        actor.submit("start", address)
        for group, address in zip(groups, addresses, strict=True)
        for actor in group.actors
    ]
    wait_all(starts, seconds)


def joined(reports: list[Report]) -> dict[str, float]:
    """Means are reduced the way the loss is; the loss itself keeps its own scale."""
    names = reports[0].sums
    sums = {name: sum(report.sums.get(name, 0.0) for report in reports) for name in names}
    weight, loss = sums.pop("weight"), sums.pop("loss")
    means = {name: value / weight for name, value in sums.items()}
    maxima = {name: max(report.maxima[name] for report in reports) for name in reports[0].maxima}
    return {"loss": loss, **means, **maxima, **reports[0].step}
