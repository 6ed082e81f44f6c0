"""AdamW and Muon, their moments and learning rate, and the moving average of weights."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trueline.config.model import TrainingConfig
from trueline.models.loading import shape_of

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
IN_LAYER = re.compile(r"(^|\.)\d+\.")  # a numbered layer, in contrast to embeddings, last norm and heads
PIECE = 64 * 2**20  # elements of each moment that are on the device at a time; two pieces overlap
PINNED_APART = 2**24  # elements from which memory is pinned in place: PyTorch's pool rounds up to powers of two

Parameters = list[nn.Parameter]


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: TrainingConfig) -> torch.optim.Optimizer:
    """Make an optimizer that applies weight decay to matrices, not to biases and norms."""
    parts: dict[str, Parameters] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            parts.setdefault(stepped_by(name, len(shape_of(parameter)), config), []).append(parameter)
    optimizers = [MAKERS[kind](parameters, config) for kind, parameters in parts.items()]
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def stepped_by(name: str, dimensions: int, config: TrainingConfig) -> str:
    """Return the key in MAKERS for a parameter: Muon is for matrices of hidden layers."""
    return "muon" if config.optimizer == "muon" and dimensions == 2 and IN_LAYER.search(name) else "adamw"


def make_adamw(parameters: Parameters, config: TrainingConfig) -> torch.optim.Optimizer:
    matrices = [one for one in parameters if len(shape_of(one)) > 1]
    others = [one for one in parameters if len(shape_of(one)) <= 1]
    groups = (matrices, config.weight_decay), (others, 0.0)
    kept: list[dict[str, Any]] = [{"params": held, "weight_decay": decay} for held, decay in groups if held]
    rate, betas = config.peak_rate(), (config.betas[0], config.betas[1])
    if config.offload == "moments":
        return HostMomentsAdamW(kept, rate, betas, config.epsilon)
    return torch.optim.AdamW(kept, lr=rate, betas=betas, eps=config.epsilon, fused=True)


def make_muon(parameters: Parameters, config: TrainingConfig) -> torch.optim.Optimizer:
    """Make a Muon whose updates are as large as AdamW's, so that both use one learning rate."""
    rate, decay = config.peak_rate(), config.weight_decay
    return torch.optim.Muon(parameters, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")


MAKERS = {"adamw": make_adamw, "muon": make_muon}


class HostMomentsAdamW(torch.optim.Optimizer):
    """AdamW with moments in host memory; it steps pieces of a tensor with PyTorch's fused arithmetic."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # One piece leaves the device while the next arrives. Always the same two: each stream keeps its own memory.
        self.streams = [torch.cuda.Stream() for _ in range(2)] if torch.cuda.is_available() else []

    def reserve(self, parameters: Iterable[Tensor]) -> None:
        """Allocate the moments before the first step, so that a lack of memory ends the run at its start."""
        for parameter in parameters:
            moments = {key: host_zeros(parameter) for key in MOMENTS["adamw"]}
            self.state[parameter] = {"step": torch.tensor(0.0), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.reserve([parameter])
        state = self.state[parameter]
        tensors = parameter.data, parameter.grad, *(state[key] for key in MOMENTS["adamw"])
        flats = [tensor.reshape(-1) for tensor in tensors]
        streams = self.streams if parameter.device.type == "cuda" else []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(parameter.device))
        for number, start in enumerate(range(0, len(flats[0]), PIECE)):
            with torch.cuda.stream(streams[number % 2]) if streams else nullcontext():
                self._step_piece([flat[start : start + PIECE] for flat in flats], state["step"], group)
        for stream in streams:
            stream.synchronize()  # the host may read the moments as soon as this returns
        state["step"] += 1

    def _step_piece(self, piece: list[Tensor], step: Tensor, group: dict[str, Any]) -> None:
        weight, gradient, *kept = piece
        first, second = (moment.to(weight.device, non_blocking=True, copy=True) for moment in kept)
        count = torch.full((), float(step), device=weight.device)  # counted up in place
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        settings["beta1"], settings["beta2"] = group["betas"]
        adamw(
            [weight], [gradient], [first], [second], [], [count], fused=True, amsgrad=False, maximize=False, **settings
        )
        for moment, stepped in zip(kept, (first, second), strict=True):
            moment.copy_(stepped, non_blocking=True)


def host_zeros(like: Tensor) -> Tensor:
    """Return zeros in host memory that a GPU can copy while it computes."""
    on_gpu, apart = like.device.type == "cuda", like.numel() >= PINNED_APART
    zeros = torch.zeros(like.shape, dtype=torch.float32, pin_memory=on_gpu and not apart)
    if on_gpu and apart:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0))
    return zeros


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with one list of parameter groups and one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the moments of a parameter; there are none before the first step."""
    return {key: value for key, value in optimizer.state.get(parameter, {}).items() if key != "step"}


def set_moments(optimizer: torch.optim.Optimizer, parameter: Tensor, moments: dict[str, Tensor], steps: int) -> None:
    """Copy moments of step `steps` into the optimizer, into existing memory if there is some."""
    state = optimizer.state[parameter]
    state["step"] = torch.full_like(state.get("step", torch.tensor(0.0, device=parameter.device)), steps)
    for key, value in moments.items():
        if key in state:
            state[key].copy_(value)
        else:
            state[key] = value.to(parameter.device).clone()


class MovingAverage:
    """An exponential moving average of a rank's tensors: whole parameters, or its shards."""

    def __init__(self, pieces: list[Tensor], decay: float) -> None:
        self.pieces, self.decay = pieces, decay
        self.average = [piece.detach().clone() for piece in pieces]

    @torch.no_grad()
    def update(self) -> None:
        for average, piece in zip(self.average, self.pieces, strict=True):
            average.lerp_(piece, 1 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        for average, piece in zip(self.average, self.pieces, strict=True):
            average.copy_(piece)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the tensors while inside, to read or write it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, piece in zip(self.average, self.pieces, strict=True):
            kept = piece.clone()
            piece.copy_(average)
            average.copy_(kept)


def learning_rate_at(step: int, config: TrainingConfig, total_steps: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0; it depends on the step alone, for exact resuming."""
    if step < config.warmup_steps:
        return config.peak_rate() * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    factors = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "wsd": min((1.0 - progress) / config.decay_share, 1.0),
    }
    return config.peak_rate() * factors[config.schedule]
