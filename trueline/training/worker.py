"""One rank of one model: it scores, updates, hands out weights, saves and loads. It knows no algorithm."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueline.algorithms.supervised_losses import LOSSES
from trueline.config.model import ModelConfig, RanksConfig
from trueline.data.batching import FILLER, MicroBatch, collate
from trueline.data.types import Batch, LossOutput, PackedSamples
from trueline.models.loading import DTYPES, load_model
from trueline.models.scorer import Scorer
from trueline.runtime.transport import (
    Address,
    BroadcastGroup,
    Bucket,
    Meeting,
    TensorSpec,
    bucket_buffer,
    bucket_views,
    checksum,
)
from trueline.training.checkpoints import load_tensors, save_model_folder, save_tensors
from trueline.training.engine import TrainEngine
from trueline.training.torch_engine import TorchEngine


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a rank must know to start."""

    model: ModelConfig
    ranks: RanksConfig  # a TrainingConfig for a model that is trained
    rank: int
    world: int
    total_steps: int
    seed: int
    timeout_seconds: float = 1800.0


class Worker:
    """Made, then told to `listen` (rank 0), then started on every rank with the address that came back."""

    engine: TrainEngine

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.meeting = Meeting()
        self.channel: BroadcastGroup | None = None

    def listen(self) -> Address:
        """On rank 0: where the other ranks, or later the engines, find it."""
        return self.meeting.open()

    def start(self, address: Address) -> None:
        """Join the other ranks and load the model."""
        torch.manual_seed(self.spec.seed)
        if self.spec.ranks.engine == "deepspeed":
            self._join(address)
        self.model = load_model(self.spec.model, DTYPES[self.spec.model.dtype])
        scorer = Scorer(self.model, self.spec.model.head_chunk_tokens)
        self.engine = make_engine(scorer, self.spec, self.device)

    def _join(self, address: Address) -> None:
        from trueline.training.deepspeed_engine import join_ranks  # noqa: PLC0415

        spec = self.spec
        join_ranks(
            lambda: self.meeting.store(address, spec.world, spec.timeout_seconds),
            spec.rank,
            spec.world,
            spec.timeout_seconds,
            self.device,
        )

    def score(self, packed: PackedSamples, passes: list[MicroBatch], temperature: float) -> np.ndarray:
        """Log-probs of every token of this rank's samples, one after another in the plan's order."""
        rows: list[Tensor] = []
        with torch.no_grad():
            for micro_batch in passes:
                batch = collate(packed, micro_batch, self.device)
                logprobs = self.engine.forward(batch, temperature).logprobs.cpu()
                rows += [logprobs[row, : packed.lengths[at]] for row, at in enumerate(micro_batch) if at != FILLER]
        return torch.cat(rows).numpy() if rows else np.zeros(0, dtype=np.float32)

    def update(self, packed: PackedSamples, passes: list[MicroBatch], loss: str, settings: Any) -> "Report":
        """One optimizer step on this rank's share of a minibatch."""
        report = self.accumulate(packed, passes, loss, settings)
        info = self.engine.step()
        report.step = {"grad_norm": info.grad_norm, "learning_rate": info.learning_rate}
        return report

    def accumulate(self, packed: PackedSamples, passes: list[MicroBatch], loss: str, settings: Any) -> "Report":
        report = Report({}, {}, {})
        for number, micro_batch in enumerate(passes, 1):
            batch = collate(packed, micro_batch, self.device)
            output = self.engine.forward(batch, settings.temperature)
            values = LOSSES[loss](output, batch, settings.algorithm)
            total = (batch.weights * values.values).sum()
            self.engine.backward(total, last=number == len(passes))
            report.add(values, batch)
        return report

    def weight_specs(self, dtype: str) -> list[TensorSpec]:
        """Names and shapes of the weights, as engines will receive them."""
        return [TensorSpec(name, tuple(tensor.shape), dtype) for name, tensor in self.engine.weights()]

    def connect(self, address: Address, world: int, timeout_seconds: float) -> None:
        """Join the engines' broadcast group; only rank 0 sends."""
        if self.spec.rank == 0:
            store = self.meeting.store(address, world, timeout_seconds)
            self.channel = BroadcastGroup(store, 0, world, timeout_seconds)

    def send_weights(self, buckets: list[Bucket]) -> list[int]:
        """Every rank takes part in gathering; rank 0 sends, and returns a checksum per bucket."""
        weights = self.engine.weights()
        sums: list[int] = []
        for bucket in buckets:
            buffer = bucket_buffer(bucket)
            for name, view in bucket_views(bucket, buffer):
                sent, tensor = next(weights)
                assert sent == name, f"weights come in another order: {sent} instead of {name}"
                if self.spec.rank == 0:
                    view.copy_(tensor)
            if self.channel is not None:
                self.channel.broadcast(buffer)
                sums.append(checksum(buffer))
        next(weights, None)  # lets the last gather end
        return sums

    def copy_weights(self) -> list[tuple[str, Tensor]]:
        """For an engine in the same process."""
        return [(name, tensor.clone()) for name, tensor in self.engine.weights()]

    def save(self, folder: str) -> None:
        """Every rank gathers; rank 0 writes a Hugging Face folder and the training state."""
        write = self.spec.rank == 0
        weights = {name: tensor.cpu() for name, tensor in kept(self.engine.weights(), write)}
        if write:
            save_model_folder(Path(folder), self.model, weights, self.spec.model)
        states = {
            f"{name}/{part}": tensor.cpu()
            for name, state in kept(self.engine.state(), True)
            for part, tensor in state.items()
            if write
        }
        if write:
            save_tensors(Path(folder) / "training.safetensors", states, {"steps": str(self.engine.steps)})

    def load(self, folder: str) -> None:
        """Take up weights and moments that `save` wrote, on any number of ranks."""
        with load_tensors(Path(folder) / "training.safetensors") as saved:
            self.engine.start_loading(int(saved.metadata["steps"]))
            for name, parts in saved.by_name().items():
                self.engine.load_state(name, {part: saved.read(key) for part, key in parts.items()})

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().cpu().float().numpy().copy() for name, tensor in self.engine.gradients()}


def kept(pairs: Any, keep: bool) -> Any:
    """Copies of what a generator yields, or nothing at all while it still runs to its end."""
    for name, value in pairs:
        if keep:
            yield name, value.clone() if isinstance(value, Tensor) else value


def make_engine(scorer: Scorer, spec: WorkerSpec, device: torch.device) -> TrainEngine:
    if spec.ranks.engine == "torch":
        return TorchEngine(scorer, spec.ranks, spec.total_steps, device)
    from trueline.training.deepspeed_engine import DeepSpeedEngine  # noqa: PLC0415

    return DeepSpeedEngine(scorer, spec.ranks, spec.total_steps, device)


@dataclass(slots=True)
class Report:
    """What one rank has to say of an update: weighted sums and maxima, to be joined over ranks."""

    sums: dict[str, float]
    maxima: dict[str, float]
    step: dict[str, float]

    def add(self, loss: LossOutput, batch: Batch) -> None:
        sums = {name: (batch.weights * values).sum() for name, values in loss.means.items()}
        sums["loss"] = (batch.weights * loss.values).sum().detach()
        sums["weight"] = batch.weights.sum()
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.item()
        for name, values in loss.maxima.items():
            largest = float(torch.where(batch.mask, values, -torch.inf).max())
            self.maxima[name] = max(self.maxima.get(name, -float("inf")), largest)
