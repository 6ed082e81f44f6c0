"""What controller and ranks tell each other of a step: what the loss needs, and what came of it."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueline.data.types import Batch, LossOutput

Metrics = dict[str, float]
AGREED, TOLD = "agreed", "told"  # experts that trainer and engine both chose, and all that the engine has told


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What a loss needs besides the samples."""

    temperature: float = 1.0
    section: Any = None  # of the configuration, that the loss reads
    statistics: dict[str, float] = field(default_factory=dict)  # of the whole minibatch
    fresh: bool = False  # the old log-probs are those of the pass itself, because it is the only one
    entropies: bool = False  # of each token come back, where the loss has them
    draws: bool = False  # the samples were drawn with these very weights, and are tested for it
    expert_counts: list[float] = field(default_factory=list)  # [E] of the whole minibatch, where routers are balanced


class Tally:
    """Weighted sums and maxima over the passes of an update; they stay on the device until all are done."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.maxima: dict[str, list[Tensor]] = {}

    def add(self, loss: LossOutput, batch: Batch, **more: Tensor) -> None:
        weights = weights_of(loss, batch)
        sums = {name: (weights * values).sum() for name, values in loss.means.items()} | more
        sums["loss"] = (weights * loss.values).sum()
        sums["weight"] = weights.sum()
        for name, value in sums.items():
            self.sums.setdefault(name, []).append(value.detach())
        for name, values in loss.maxima.items():
            self.maxima.setdefault(name, []).append(torch.where(weights > 0, values, -torch.inf).max())

    def report(self) -> "Report":
        sums = {name: sum(numbers) for name, numbers in fetched(self.sums).items()}
        return Report(sums, {name: max(numbers) for name, numbers in fetched(self.maxima).items()}, {})


def fetched(found: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """Bring all numbers from their device at once."""
    flat = torch.stack([one.float() for values in found.values() for one in values]).tolist() if found else []
    numbers = iter(flat)
    return {name: [next(numbers) for _ in values] for name, values in found.items()}


@dataclass(slots=True)
class Report:
    """What one rank reports of an update: weighted sums and maxima, to be joined over ranks."""

    sums: dict[str, float]
    maxima: dict[str, float]
    step: dict[str, float]
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # of a fresh pass, in plan order
    entropies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # in plan order
    out_of_memory: str = ""  # why there is nothing else in it: no step was made, and no gradient is left


def agreement(totals: Metrics) -> Metrics:
    """Put the share of experts on which trainer and engine agree in place of its two sums, where there are any."""
    agreed, told = totals.pop(AGREED, 0.0), totals.pop(TOLD, 0.0)
    return {"mismatch/routing_agreement": agreed / told} if told else {}


def weights_of(loss: LossOutput, batch: Batch) -> Tensor:
    return batch.shares if loss.per_sequence else batch.token_weights()


def attempted(work: Callable[[], Report], discard: Callable[[], bool]) -> Report:
    """Do the only rank's work; where memory runs out, forget its gradients and say so, and it can be tried again.

    Of several ranks the others would wait for this one in a collective.
    """
    try:
        return work()
    except torch.OutOfMemoryError as error:
        found = str(error)
    if not discard():
        raise torch.OutOfMemoryError(found)
    if torch.cuda.is_available():
        released()
    return Report({}, {}, {}, out_of_memory=found)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the peak of this process's tensors, and what all have in use of a GPU; on a CPU, this process's peak."""
    if device.type == "cuda":
        return {"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30, "memory/device_gib": in_use_gib()}
    return {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def in_use_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def released() -> tuple[float, float]:
    """Empty the allocator's cache; return what all processes had in use before, and what this one gave back."""
    before, held = in_use_gib(), torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before, (held - torch.cuda.memory_reserved()) / 2**30
