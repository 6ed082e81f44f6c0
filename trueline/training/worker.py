"""One rank of one model: it scores, updates, hands out weights, saves and loads. It knows no algorithm."""

import copy
import datetime
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from trueline.algorithms.importance_sampling import drawn
from trueline.algorithms.losses import LOSSES
from trueline.algorithms.router_loss import over_learnt, router_loss
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, PolicyTrainingConfig, RanksConfig, TrainingConfig
from trueline.data.batching import FILLER, MicroBatch, collate
from trueline.data.types import Batch, LossOutput, ModelOutput, PackedSamples, is_filled
from trueline.models.head import HEAD_CHUNK
from trueline.models.loading import DTYPES, ShareOut, load_model, load_tokenizer, shape_of
from trueline.models.lora import adapters_off, add_lora, dequantized, frozen, merged, scaled
from trueline.models.probe import Probe
from trueline.models.routing import KEY, Replay
from trueline.models.scorer import Scorer
from trueline.models.weight_names import WeightNames
from trueline.monitoring.beats import WORK
from trueline.runtime.actors import Target
from trueline.runtime.fingerprints import bit_sum
from trueline.runtime.host import build
from trueline.runtime.transport import Address, Meeting
from trueline.sync.sender import WeightSender
from trueline.training.checkpoints import Saved, save_tensors
from trueline.training.deepspeed_config import GATHERING_ON_CPU
from trueline.training.engines import TRAIN_ENGINES, TrainEngine
from trueline.training.mesh import Mesh
from trueline.training.optimizer import MOMENTS, stepped_by
from trueline.training.report import (
    AGREED,
    TOLD,
    LossSettings,
    Report,
    Tally,
    attempted,
    memory_metrics,
    released,
    weights_of,
)
from trueline.training.saving import FIXED, SavedState, Saver, contents, describe_model, load_state, snapshot_bytes


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
    head: str = "language"  # or "reward", "steps", "value"
    goal: Callable[[Any, torch.dtype, bool], Any] | None = None  # loads what its head learns in place of tokens
    chat_template: str | None = None  # that is saved with the model; None: the tokenizer's own

    def mesh(self) -> Mesh:
        return Mesh(self.world, self.model.context_parallel, self.model.tensor_parallel)


class Worker(WeightSender):
    """A rank: it is made, told to `listen` (rank 0 alone), then started with the address that came back."""

    engine: TrainEngine

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rank, self.meeting = spec.rank, Meeting()
        self.apart = spec.model.lora.apart()

    def listen(self) -> Address:
        """Return the address at which the other ranks, or later the engines, find rank 0."""
        return self.meeting.open()

    def start(self, address: Address) -> None:
        """Join the other ranks and load the model."""
        spec, config = self.spec, self.spec.model
        torch.manual_seed(spec.seed)
        row = TRAIN_ENGINES[spec.ranks.engine]
        if row.several_ranks and not dist.is_initialized():  # a process that has joined stays joined
            store = self.meeting.store(address, spec.world, spec.timeout_seconds)
            timeout = datetime.timedelta(seconds=spec.timeout_seconds)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world, timeout=timeout)
        dtype = DTYPES[config.dtype]
        share_out = self._share_out()
        self.model = load_model(config, dtype, spec.head, packed=spec.ranks.packing, share_out=share_out)
        self.names = WeightNames(self.model)
        self.adapter = add_lora(self.model, config.lora, spec.head, config.path) if config.lora.rank else None
        if share_out is not None:
            for parameter in self.model.parameters():  # those that were not read from a file, or had to wait
                share_out(parameter)
        self.shapes = {name: shape_of(tensor) for name, tensor in self.model.named_parameters()}
        speaks = spec.head == "language" and spec.goal is None
        whole = share_out is None and self._fits()
        if whole or share_out is not None:
            self.model.to(self.device)
        probe = Probe(self.model, self.device, spec.ranks.packing, speaks and whole)
        self.scorer = Scorer(
            self.model,
            config.head_chunk_tokens or HEAD_CHUNK[self.device.type],
            packed=spec.ranks.packing,
            ring=spec.mesh().join_ring(spec.rank),
            goal=spec.goal(self.model, dtype, spec.ranks.packing) if spec.goal else None,
            values=spec.head == "value",
        )
        if self._router_coefficient():
            self.scorer.top_k = int(self.model.config.get_text_config().num_experts_per_tok)
        if isinstance(spec.ranks, PolicyTrainingConfig) and spec.ranks.replay_routing:
            self.scorer.replay = Replay(self.model, follows=spec.ranks.replay_routing is True)
        self.engine = build(row.path, [self.scorer, spec, self.device])
        self.names.restore_buffers()
        self.release()  # before something small and lasting settles in memory that was only needed to start
        held = partial(contents, self.engine, self.names, self.adapter is not None)
        self.saver = Saver(spec.rank, spec.world, held, partial(held, model=False))
        if speaks and not whole:
            with self.scorer.plainly():  # layers are gathered one after the other, or stay cut
                probe.expect(lambda tokens: self._forward(tokens, [len(tokens)]))
        probe.compare(self._forward, self.model.get_input_embeddings())

    def _share_out(self) -> ShareOut | None:
        """Return what shares a model out while it is read, where its ranks share out its weights.

        AutoTP cuts whole layers: with it, a model is shared out when all of it is there.
        """
        spec, row = self.spec, TRAIN_ENGINES[self.spec.ranks.engine]
        shared = row.stage(spec.ranks, spec.model.dtype) == 3 and spec.model.tensor_parallel == 1
        return build(row.share_out, [spec]) if shared else None

    def _fits(self) -> bool:
        """Tell whether the whole model fits on the device, before tensor parallelism cuts it layer by layer."""
        if self.device.type == "cpu" or self.spec.model.tensor_parallel == 1:
            return True
        return sum(tensor.nbytes for tensor in self.model.parameters()) < torch.cuda.mem_get_info(self.device)[0] / 2

    def _router_coefficient(self) -> float:
        ranks = self.spec.ranks
        return ranks.router_aux_loss_coef if isinstance(ranks, TrainingConfig) else 0.0

    def ready(self) -> None:
        """Do nothing; calls are worked on one after the other, so those before are done once it returns."""

    def _forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return every token's log-prob or score, for the probe."""
        none = torch.zeros(len(lengths), device=self.device)
        batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), lengths, none, none)
        return only(self.engine.forward(batch, 1.0, entropy=False))

    def score(
        self, packed: PackedSamples, passes: list[MicroBatch], temperature: float, reference: bool = False
    ) -> np.ndarray:
        """Return log-probs, or scores, of all tokens of this rank's samples, one after another in the plan's order.

        As `reference`, a model with adapters computes them without its adapters.
        """
        rows: list[Tensor] = []
        with self._judging(), self._as_reference(reference):
            for micro_batch in passes:
                batch = collate(packed, micro_batch, self.device, experts=not reference)
                rows += rows_of(only(self.engine.forward(batch, temperature, entropy=False)), batch, micro_batch)
                WORK.move()
        return torch.cat(rows).cpu().numpy() if rows else np.zeros(0, dtype=np.float32)

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Turn off gradients, and the dropout of adapters."""
        self.scorer.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.scorer.train()

    def _as_reference(self, reference: bool) -> AbstractContextManager[None]:
        return adapters_off(self.model) if reference and self.adapter is not None else nullcontext()

    def update(self, packed: PackedSamples, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        """Make one optimizer step on this rank's share of a minibatch, or none where its passes are too large."""
        work = partial(self.accumulate, packed, passes, loss, settings)
        report = work() if self.spec.world > 1 else attempted(work, self.engine.discard)
        if report.out_of_memory:
            return report
        with WORK.doing("part", "optimizer step"):
            report.step = self.engine.step() | memory_metrics(self.device)
        return report

    def release(self) -> tuple[float, float]:
        """Give memory that no tensor needs back to the device; return GiB in use of it before, and given back."""
        return released() if self.device.type == "cuda" else (0.0, 0.0)

    def accumulate(self, packed: PackedSamples, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        tally = Tally()
        fresh: list[Tensor] = []
        entropies: list[Tensor] = []
        for number, micro_batch in enumerate(passes, 1):
            batch, output, values = self._loss(packed, micro_batch, loss, settings)
            fresh += rows_of(batch.old_logprobs, batch, micro_batch) if settings.fresh else []
            entropies += rows_of(output.entropy.detach(), batch, micro_batch) if settings.entropies else []
            total = (weights_of(values, batch) * values.values).sum()
            more: dict[str, Tensor] = drawn(output, batch) if settings.draws else {}
            more |= {AGREED: output.agreed.sum(), TOLD: output.told.sum()} if self.scorer.replay else {}
            if settings.expert_counts:
                more["router_loss"] = router_loss(output, batch, settings.expert_counts, self.scorer.top_k)
                total = total + self._router_coefficient() * more["router_loss"]
            # The gradient of a loss that is not finite may be finite; no rank may step on it.
            total = total * torch.where(total.detach().isfinite(), 1.0, math.nan)
            self.engine.backward(total, last=number == len(passes))
            WORK.move()
            tally.add(values, batch, **more)
        report = tally.report()
        report.logprobs = torch.cat(fresh).cpu().numpy() if fresh else report.logprobs
        report.entropies = torch.cat(entropies).float().cpu().numpy() if entropies else report.entropies
        return report

    def evaluate(self, packed: PackedSamples, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        tally = Tally()
        with self._judging():
            for micro_batch in passes:
                batch, _, values = self._loss(packed, micro_batch, loss, settings)
                tally.add(values, batch)
                WORK.move()
        return tally.report()

    def count_experts(self, packed: PackedSamples, passes: list[MicroBatch]) -> list[float]:
        """Count how often the layers send tokens of this rank's samples to each expert, [E]."""
        found: list[Tensor] = []
        with self._judging():
            for micro_batch in passes:
                batch = collate(packed, micro_batch, self.device)
                batch.host_mask = torch.zeros(len(batch.tokens), dtype=torch.bool)  # spares the head
                found.append(over_learnt(self.engine.forward(batch, 1.0, entropy=False).expert_counts, batch))
        return torch.stack(found).sum(0).tolist()

    def _loss(
        self, packed: PackedSamples, micro_batch: MicroBatch, loss: str, settings: Any
    ) -> tuple[Batch, ModelOutput, LossOutput]:
        batch = collate(packed, micro_batch, self.device)
        batch.statistics = settings.statistics
        output = self.engine.forward(batch, settings.temperature, entropy=LOSSES[loss].entropy)
        if self.scorer.replay is not None and not is_filled(output, AGREED):
            raise ValueError(f"{KEY}: these samples do not tell which experts the engine chose; set it to false")
        if settings.fresh:
            batch.old_logprobs = output.logprobs.detach()
        return batch, output, LOSSES[loss].compute(output, batch, settings.section)

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = self.engine.weights()
        if self.adapter is None:
            return self.names.saved(weights)
        if self.spec.model.lora.quantize:
            weights = dequantized(weights, self.model)
        return self.names.saved(frozen(weights) if self.apart else merged(weights, self.spec.model.lora.scale()))

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.apart:
            return scaled(self.engine.weights(), self.spec.model.lora.scale())
        return self.engine.masters() if self.adapter is not None else iter(())

    def annotate(self, facts: dict[str, float]) -> None:
        """Keep numbers that belong to the model and are saved in its configuration."""
        for name, value in facts.items():
            setattr(self.model.config, name, value)

    def prepare_saving(self, sharers: int) -> None:
        """Begin to allocate host memory for what will be saved, on a machine that as many ranks share.

        Rank 0 reads the tokenizer, which is saved along.
        """
        _ = self.tokenizer if self.rank == 0 else None
        trained, ranks = self._trained_shapes(), self.spec.ranks
        weights = (
            0 if self.adapter else sum(map(math.prod, self.shapes.values())) * DTYPES[self.spec.model.dtype].itemsize
        )
        averaged = isinstance(ranks, TrainingConfig) and ranks.ema_decay > 0
        elements = sum(map(math.prod, trained.values()))
        stage = TRAIN_ENGINES[ranks.engine].stage(ranks, self.spec.model.dtype)
        moments = 8 * elements / (self.spec.world if stage else 1)  # that the first step makes
        coming = moments if self.device.type == "cpu" else 0.0
        self.saver.allocate(snapshot_bytes(weights, elements, self.spec.world, averaged), sharers, coming)

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer that is saved with the model; it is read once, as its folder may be gone later."""
        tokenizer = load_tokenizer(self.spec.model)
        tokenizer.chat_template = self.spec.chat_template or tokenizer.chat_template
        return tokenizer

    def save(self, folder: str, model: bool = True) -> None:
        """Copy this rank's share of a Hugging Face folder and of the training state; a thread writes them.

        Without `model`, the folder has all but a model's weights.
        """
        spec, target, random, config = self.spec, Path(folder), random_states(), copy.deepcopy(self.model.config)
        config.architectures = [type(self.model).__name__]  # those of a new head, not of the model it began from

        def describe() -> None:
            save_tensors(target / f"random-{spec.rank}.safetensors", random, {})
            if spec.rank == 0 and self.names.buffers:
                save_tensors(target / FIXED, dict(self.names.on_disk(iter(self.names.buffers.items()))), {})
            if spec.rank == 0:
                describe_model(target / "model", self.model, config, self.adapter, self.tokenizer)

        self.saver.save(target, self.engine.steps, describe, model)

    def saved(self, wait: bool) -> Saved | None:
        """Return what became of the last `save`, or None while it is being written."""
        return self.saver.saved(wait=wait)

    def load(self, folder: str) -> None:
        """Take up what `save` wrote, on any number of ranks."""
        saved = SavedState(Path(folder))
        self._check_names(folder, saved.weight_shapes())
        parts = saved.by_name().items()
        self._check_moments(folder, {name: found.keys() - {"weight", "average"} for name, found in parts})
        load_state(self.engine, saved)
        mine = Path(folder) / f"random-{self.spec.rank}.safetensors"
        if mine.exists():
            restore_random(load_file(mine))

    def _trained_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shapes[name] for name, tensor in self.model.named_parameters() if tensor.requires_grad}

    def _check_names(self, folder: str, saved: dict[str, tuple[int, ...]]) -> None:
        wrong = sorted(set(saved.items()) ^ set(self._trained_shapes().items()))
        if wrong:
            raise ConfigError(
                f"{folder}: a checkpoint of another model or task ({wrong[0][0]} of shape {list(wrong[0][1])} is only "
                "in one of the two); resume with the configuration that wrote it"
            )

    def _check_moments(self, folder: str, saved: dict[str, set[str]]) -> None:
        config = self.spec.ranks
        assert isinstance(config, TrainingConfig)
        for name, found in saved.items():
            if found and found != set(MOMENTS[stepped_by(name, len(self.shapes[name]), config)]):
                raise ConfigError(
                    f"{folder}: a checkpoint of another optimizer than optimizer={config.optimizer} ({name} has "
                    f"{', '.join(sorted(found))}); resume with the one that wrote it, or start a new run from its model"
                )

    def fingerprints(self) -> dict[str, int]:
        """Return a checksum of each trained tensor, to tell whether training changes it."""
        return {name: int(bit_sum(tensor.float())) for name, tensor in self.engine.masters()}

    def weight_sample(self, most: int) -> np.ndarray:
        """Return up to `most` numbers of each trained tensor, evenly spread, to tell how far training moves them."""
        flats = (tensor.detach().flatten() for _, tensor in self.engine.masters())
        return torch.cat([flat[:: math.ceil(len(flat) / most)].clone().float().cpu() for flat in flats]).numpy()

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().cpu().float().numpy().copy() for name, tensor in self.engine.gradients()}


def worker_target(ranks: RanksConfig) -> Target[Worker]:
    return Target("trueline.training.worker:Worker", environment=partial(rank_environment, ranks))


def rank_environment(ranks: RanksConfig, gpus: int) -> dict[str, str]:
    row = TRAIN_ENGINES[ranks.engine]
    gathers = not gpus and row.stage(ranks, "float32") == 3
    return row.environment(gpus) | (GATHERING_ON_CPU if gathers else {})


def rows_of(values: Tensor, batch: Batch, micro_batch: MicroBatch) -> list[Tensor]:
    """Cut what was computed of all tokens into the samples of a pass, without fillers."""
    return [part for at, part in zip(micro_batch, values.split(batch.lengths), strict=True) if at != FILLER]


def random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def only(output: ModelOutput) -> Tensor:
    """Return the one output that the model's head fills where no entropy is asked for."""
    return next(getattr(output, one.name) for one in fields(output) if is_filled(output, one.name))
