"""The protocol of training engines."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trueline.config.model import RanksConfig, TrainingConfig
from trueline.data.types import Batch, ModelOutput, is_filled
from trueline.models.truncation import Truncation
from trueline.training.engines.optimizer import MovingAverage, learning_rate_at
from trueline.training.engines.shards import Shard

AVERAGE = "average"  # the part of a tensor's state that engines keep separately
TensorState = dict[str, Tensor]  # "weight" in float32 and, after the first step, the optimizer's moments
Chosen = Callable[[str], bool]  # tells by its name whether a tensor is wanted


class TrainEngine(Protocol):
    """Trains one model on one rank of a group; every rank makes the same calls in the same order."""

    module: Any  # a Scorer, or what wraps one
    config: RanksConfig
    total_steps: int
    device: torch.device
    optimizer: Any
    average: MovingAverage | None
    steps: int  # optimizer steps made so far

    def forward(
        self, batch: Batch, temperature: float, entropy: bool, squares: bool = False, kept: Truncation | None = None
    ) -> ModelOutput:
        experts = batch.experts if is_filled(batch, "experts") else None
        given = batch.tokens, batch.mask_bytes(), batch.lengths, temperature, entropy, experts, batch.repeats
        targets = batch.target_ids if is_filled(batch, "target_ids") else None
        fields = self.module(*given, batch.pictures, targets, squares, kept)
        output = ModelOutput()
        for name, tensor in fields.items():
            setattr(output, name, tensor)
        return output

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the sum over all ranks; `last` marks a step's last micro-batch."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply what was accumulated since the last step."""

    def step(self) -> dict[str, float]:
        """Return grad_norm, learning_rate, and skipped=1 if the gradient was not finite and nothing changed."""
        assert isinstance(self.config, TrainingConfig)
        rate = learning_rate_at(self.steps, self.config, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self.step_if_finite()
        if not (skipped := not math.isfinite(norm)):
            self.steps += 1
            if self.average is not None:
                self.average.update()
        return {"grad_norm": norm, "learning_rate": rate, "skipped": float(skipped)}

    def step_if_finite(self) -> float:
        """Return the norm of the gradient, and step if it is finite; discard the gradient."""

    def discard(self) -> bool:
        """Discard gradients after a failed pass, and return whether this engine can do that."""

    def weights(self, chosen: Chosen | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors with their Hugging Face names, each valid until the next one; all, or the chosen ones."""

    def weight_shards(self) -> Iterator[Shard]:
        """Yield what this rank holds of each weight, without a word to other ranks; every rank yields all names.

        As with all shards, values may change when the next one is taken.
        """

    def master_shards(self) -> Iterator[Shard]:
        """Yield what this rank holds of each trained tensor, in the precision that the optimizer steps."""

    def moment_shards(self) -> Iterator[Shard]:
        """Yield what this rank holds of the moments of each trained tensor, named `tensor/moment`."""

    def state_shards(self) -> Iterator[Shard]:
        """Yield this rank's part of what a checkpoint needs of trained tensors, named `tensor/part`."""
        yield from (replace(shard, name=f"{shard.name}/weight") for shard in self.master_shards())
        yield from self.moment_shards()
        if self.average is not None:
            with self.average.in_place():
                yield from (replace(shard, name=f"{shard.name}/{AVERAGE}") for shard in self.master_shards())

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole gradients, between the last `backward` and `step`."""

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors whole, in the precision that the optimizer steps."""

    def needed_slice(self, name: str, part: str) -> slice:
        """Return the elements of a flat tensor that this rank needs to load this part of it."""
        return slice(None)

    def load_state(self, name: str, state: TensorState) -> None: ...

    def load_averages(self, averages: Iterator[tuple[str, Tensor]]) -> None:
        if self.average is not None:
            self.average.restart()
            with self.average.in_place():
                for name, tensor in averages:
                    self.set_master(name, tensor)

    def set_master(self, name: str, value: Tensor) -> None: ...

    @contextmanager
    def with_average(self) -> Iterator[None]:
        """Compute with the moving average of the weights while inside."""
        assert self.average is not None
        try:
            with self.average.in_place():
                self.use_masters()
                yield
        finally:
            self.use_masters()

    def use_masters(self) -> None:
        """Copy what the optimizer steps to the weights that compute, where these are others."""

    def start_loading(self, steps: int) -> None:
        """Set the count of steps, and allocate moments before `load_state` fills them."""
        self.steps = steps
