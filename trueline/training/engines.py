"""What training asks of a framework, one model on one rank of a group, and a row for each framework."""

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trueline.config.model import RanksConfig
from trueline.data.types import Batch, ModelOutput
from trueline.training.deepspeed_config import deepspeed_environment, effective_stage

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

    def __init__(
        self, module: nn.Module, config: RanksConfig, total_steps: int, device: torch.device, tensor_ranks: int
    ) -> None: ...

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


class Shards(NamedTuple):
    """Among how many ranks each part of a model is shared out."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


@dataclass(frozen=True, slots=True)
class TrainRow:
    """What is known of an engine before one of its processes imports it."""

    path: str  # of a class that follows TrainEngine
    package: str = ""  # that must be installed
    brought_by: str = ""  # what installs it
    local: bool = False  # it can live in the process of the run
    several_ranks: bool = True  # that have met in torch.distributed before it is made
    masters: bool = True  # float32 weights beside those that compute in bfloat16
    offloads: bool = True
    shards: Callable[[RanksConfig, str, int], Shards] = lambda ranks, dtype, world: Shards()  # for its memory
    environment: Callable[[int], dict[str, str]] = lambda gpus: {}  # of its processes

    def load(self) -> type[TrainEngine]:
        engine: type[TrainEngine] = pkgutil.resolve_name(self.path)
        return engine


def zero_shards(ranks: RanksConfig, dtype: str, world: int) -> Shards:
    stage = effective_stage(ranks, dtype)
    return Shards(*(world if stage >= least else 1 for least in (3, 2, 1)))


TRAIN_ENGINES = {
    "deepspeed": TrainRow(
        "trueline.training.deepspeed_engine:DeepSpeedEngine",
        package="deepspeed",
        brought_by="trueline itself on Linux",
        shards=zero_shards,
        environment=deepspeed_environment,
    ),
    "torch": TrainRow(
        "trueline.training.torch_engine:TorchEngine", local=True, several_ranks=False, masters=False, offloads=False
    ),
}
