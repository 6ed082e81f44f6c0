"""What training asks of a framework: one model on one rank of a group."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trueline.data.types import Batch, ModelOutput

MOMENTS = ("exp_avg", "exp_avg_sq")

TensorState = dict[str, Tensor]  # "weight" in float32 and, once a step was made, the two moments


@dataclass(frozen=True, slots=True)
class StepInfo:
    grad_norm: float
    learning_rate: float
    skipped: bool = False  # a gradient was not finite, on any rank: nothing was changed


class TrainEngine(Protocol):
    """Every rank of a group makes the same calls in the same order."""

    device: torch.device
    steps: int  # optimizer steps made so far

    def forward(self, batch: Batch, temperature: float, entropy: bool) -> ModelOutput: ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the sum over all ranks; `last` marks a step's last micro-batch."""

    def step(self) -> StepInfo: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, valid until the next one is asked for."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full gradients, between the last `backward` and `step`."""

    def state(self) -> Iterator[tuple[str, TensorState]]:
        """What a checkpoint needs of each trained tensor."""

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """The trained tensors in the precision that the optimizer steps."""

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        """The moving average of each trained tensor; nothing where none is kept."""

    def load_state(self, name: str, state: TensorState) -> None: ...

    def load_averages(self, averages: Iterator[tuple[str, Tensor]]) -> None: ...

    def start_loading(self, steps: int) -> None:
        """Make room for the moments before `load_state` fills them."""


def model_output(fields: dict[str, Tensor]) -> ModelOutput:
    output = ModelOutput()
    for name, tensor in fields.items():
        setattr(output, name, tensor)
    return output
