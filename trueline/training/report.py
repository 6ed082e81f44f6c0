"""What the controller sends to ranks for a step, and what they report."""

import math
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueline.data.batching import FILLER, MicroBatch
from trueline.data.types import TARGETS, Batch, LossOutput, ModelOutput, is_filled
from trueline.models.truncation import Truncation

Metrics = dict[str, float]
Then = Literal["step", "more", "discard"]  # what follows the passes: a step, more passes before it, or neither
AGREED, REPORTED = "agreed", "reported"  # experts that trainer and engine both chose, and all that the engine returned


@dataclass(frozen=True, slots=True)
class LossSettings:
    temperature: float = 1.0
    section: Any = None  # of the configuration
    statistics: dict[str, float] = field(default_factory=dict)  # of the whole minibatch
    logprobs_from_update: bool = False  # the only pass of the step computes the old log-probs
    entropies: bool = False  # return the entropy of each token
    draws: bool = False  # test whether the samples come from these weights
    expert_counts: list[float] = field(default_factory=list)  # [E] of the whole minibatch, to balance routers
    then: Then = "step"
    scale: float = 1.0  # of all gradients since the last step
    gradients: int = 0  # report so many numbers of each tensor's gradient
    kept: Truncation | None = None  # the likeliest tokens, from which completions were sampled

    def kept_fields(self) -> tuple[str, ...]:
        """Return the fields of samples that an update computes."""
        return ("old_logprobs",) * self.logprobs_from_update + ("entropy",) * self.entropies


class Asked(NamedTuple):
    """What a teacher is asked."""

    names: tuple[str, ...]  # of the fields: log-probs of tokens, and TARGETS
    top_k: int  # likeliest tokens; 0: none
    temperature: float
    weights: Literal["live", "average", "reference"]  # of the model; reference: without adapters


class FieldRows:
    """Outputs of several passes as fields of samples, on the host."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.rows: dict[str, list[Tensor]] = {name: [] for name in names}

    def add(self, output: ModelOutput, batch: Batch, micro_batch: MicroBatch) -> None:
        for name, rows in zip(("logprobs", *TARGETS), self.rows.values(), strict=False):
            rows += rows_of(getattr(output, name).cpu(), batch, micro_batch)

    def join(self) -> dict[str, np.ndarray]:
        return {name: torch.cat(rows).numpy() if rows else np.zeros(0) for name, rows in self.rows.items()}


class LossAccumulator:
    """Weighted sums and maxima over the passes of an update; they stay on the device until the last pass."""

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.maxima: dict[str, list[Tensor]] = {}

    def add(self, loss: LossOutput, batch: Batch, **more: Tensor) -> Tensor:
        """Add a pass and its other sums, and return the weighted sum of its loss."""
        weights = batch.shares if loss.per_sequence else batch.token_weights()
        sums = {name: (weights * values).sum() for name, values in loss.means.items()} | more
        sums |= loss.totals
        sums["loss"] = (weights * loss.values).sum() + (0.0 if loss.added is None else loss.added)
        sums["weight"] = weights.sum()
        for name, value in sums.items():
            self.sums.setdefault(name, []).append(value.detach())
        for name, values in loss.maxima.items():
            self.maxima.setdefault(name, []).append(torch.where(weights > 0, values, -torch.inf).max())
        return sums["loss"]

    def report(self) -> "Report":
        sums = {name: sum(numbers) for name, numbers in fetch_numbers(self.sums).items()}
        return Report(sums, {name: max(numbers) for name, numbers in fetch_numbers(self.maxima).items()}, {})


def spread_sample(tensors: Iterable[tuple[str, Tensor]], most: int) -> np.ndarray:
    """Return up to `most` evenly spread numbers of each tensor."""
    flats = (tensor.detach().flatten() for _, tensor in tensors)
    return torch.cat([flat[:: math.ceil(len(flat) / most)].clone().float().cpu() for flat in flats]).numpy()


def fetch_numbers(found: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """Copy all numbers from the device at once."""
    flat = torch.stack([one.float() for values in found.values() for one in values]).tolist() if found else []
    numbers = iter(flat)
    return {name: [next(numbers) for _ in values] for name, values in found.items()}


@dataclass(slots=True)
class Report:
    """One rank's weighted sums and maxima of an update."""

    sums: dict[str, float]
    maxima: dict[str, float]
    step: dict[str, float]
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # in plan order
    entropies: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # in plan order
    gradient: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # some numbers of it
    out_of_memory: str = ""  # the error; the report is empty, no step was made, and gradients are discarded
    remark: str = ""  # why its layers are not compiled


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return this process's peak, and on a GPU the memory in use by all processes."""
    if device.type == "cuda":
        return {"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30, "memory/device_gib": in_use_gib()}
    return {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def in_use_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def release_cache() -> tuple[float, float]:
    """Empty the allocator's cache; return the GiB that all processes used before, and the GiB released."""
    before, held = in_use_gib(), torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before, (held - torch.cuda.memory_reserved()) / 2**30


def rows_of(values: Tensor, batch: Batch, micro_batch: MicroBatch) -> list[Tensor]:
    """Split the values of all tokens into the samples of a pass, without fillers."""
    return [part for at, part in zip(micro_batch, values.split(batch.lengths), strict=True) if at != FILLER]


def only_output(output: ModelOutput, more: tuple[str, ...] = ()) -> Tensor:
    """Return the only output of a forward pass, or log-probs and what stands beside them as [N, K]."""
    if more:
        return torch.stack([output.logprobs, *(getattr(output, name) for name in more)], -1)
    return next(getattr(output, one.name) for one in fields(output) if is_filled(output, one.name))
