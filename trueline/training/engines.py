"""What training asks of a framework, one model on one rank of a group, and a row for each framework."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trueline.config.model import RanksConfig
from trueline.data.types import Batch, ModelOutput, is_filled
from trueline.training.deepspeed_config import ON_CPU, effective_stage

TensorState = dict[str, Tensor]  # "weight" in float32 and, once a step was made, its optimizer's moments


class TrainEngine(Protocol):
    """A framework that trains one model; every rank of a group makes the same calls in the same order."""

    device: torch.device
    steps: int  # optimizer steps made so far

    def forward(self, batch: Batch, temperature: float, entropy: bool) -> ModelOutput: ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the sum over all ranks; `last` marks a step's last micro-batch."""

    def step(self) -> dict[str, float]:
        """Return grad_norm, learning_rate, and skipped=1 where a gradient was not finite and nothing was changed."""

    def discard(self) -> bool:
        """Forget gradients after a pass that failed half way, or return that this engine cannot."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under their Hugging Face names, each valid until the next one is asked for."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full gradients, between the last `backward` and `step`."""

    def state(self) -> Iterator[tuple[str, TensorState]]:
        """Yield what a checkpoint needs of each trained tensor."""

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors in the precision that the optimizer steps."""

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moving average of each trained tensor, or nothing where none is kept."""

    def wanted(self, name: str, part: str) -> slice:
        """Return the elements of a whole tensor, laid out flat, that this rank needs to load it as this part."""

    def load_state(self, name: str, state: TensorState) -> None: ...

    def load_averages(self, averages: Iterator[tuple[str, Tensor]]) -> None: ...

    def start_loading(self, steps: int) -> None:
        """Make room for the moments before `load_state` fills them."""


def pass_arguments(batch: Batch, temperature: float, entropy: bool) -> tuple[Any, ...]:
    """Return what a Scorer is called with."""
    experts = batch.experts if is_filled(batch, "experts") else None
    return batch.tokens, batch.learnt(), batch.lengths, temperature, entropy, experts


def model_output(fields: dict[str, Tensor]) -> ModelOutput:
    output = ModelOutput()
    for name, tensor in fields.items():
        setattr(output, name, tensor)
    return output


@dataclass(frozen=True, slots=True)
class TrainRow:
    """What is known of an engine before one of its processes imports it."""

    path: str  # of a class that follows TrainEngine and is made from a Scorer, a WorkerSpec and a device
    package: str = ""  # that must be installed
    brought_by: str = ""  # what installs it
    local: bool = False  # it can live in the process of the run
    several_ranks: bool = True  # that have met in torch.distributed before it is made
    masters: bool = True  # float32 weights beside those that compute in bfloat16
    offloads: tuple[str, ...] = ("moments", "optimizer", "all")
    # What its ranks share out of a model in this type: 1 the optimizer, 2 gradients too, 3 weights too.
    stage: Callable[[RanksConfig, str], int] = lambda ranks, dtype: 0
    share_out: str = ""  # a function that makes a ShareOut of a WorkerSpec, for models whose weights are shared out
    environment: Callable[[int], dict[str, str]] = lambda gpus: {}  # of its processes


TRAIN_ENGINES = {
    "deepspeed": TrainRow(
        "trueline.training.deepspeed_engine:DeepSpeedEngine",
        package="deepspeed",
        brought_by="trueline itself on Linux",
        stage=effective_stage,
        share_out="trueline.training.deepspeed_engine:share_out",
        environment=lambda gpus: {} if gpus else ON_CPU,
    ),
    "torch": TrainRow(
        "trueline.training.torch_engine:TorchEngine",
        local=True,
        several_ranks=False,
        masters=False,
        offloads=("moments",),
    ),
}
