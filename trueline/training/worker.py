"""One rank of one model: it scores, updates, sends weights, saves and loads, and knows no algorithm."""

import copy
import datetime
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from trueline.algorithms.importance_sampling import draw_sums
from trueline.algorithms.losses import LOSSES, over_learnt, router_loss
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, PolicyTrainingConfig, RanksConfig, TrainingConfig
from trueline.data.batching import MicroBatch, SampleReader, collate
from trueline.data.types import Batch, LossOutput, ModelOutput, is_filled
from trueline.models.compiling import CompiledLayers
from trueline.models.head import HEAD_CHUNK
from trueline.models.loading import DTYPES, ShareOut, fits_whole, load_model, load_tokenizer, shape_of
from trueline.models.lora import adapters_off, add_lora
from trueline.models.ring_attention import Mesh
from trueline.models.routing import KEY, Replay
from trueline.models.scorer import Probe, Scorer, sharing_gap
from trueline.models.vision import load_vision
from trueline.models.weight_names import WeightNames
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.timing import START
from trueline.runtime import transport
from trueline.runtime.actors import Target
from trueline.runtime.fingerprints import LiveSums, bit_sum
from trueline.runtime.host import build
from trueline.training import report as reports
from trueline.training import saving
from trueline.training.checkpoints import SaveResult, check_tensors, save_tensors
from trueline.training.engines.engine import AVERAGE, TrainEngine
from trueline.training.engines.optimizer import MOMENTS, stepped_by
from trueline.training.engines.table import TRAIN_ENGINES
from trueline.training.outgoing import Outgoing
from trueline.training.report import Asked, LossSettings, Report
from trueline.training.samples import Arrays

Names = tuple[str, ...]
COMPARED = 3  # sequences that begin like another one


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    model: ModelConfig
    ranks: RanksConfig  # a TrainingConfig for a trained model
    rank: int
    world: int
    total_steps: int
    seed: int
    timeout_seconds: float = 1800.0
    head: str = "language"  # or "reward", "steps", "value"
    distillation_target: Callable[[Any, torch.dtype, bool], Any] | None = None  # loads what its head learns
    chat_template: str | None = None  # saved with the model; None: the tokenizer's own
    deterministic: bool = False  # its operations add in one order
    memory_share: float = 1.0  # of its GPU, cached memory included, where engines work at the same time

    def mesh(self) -> Mesh:
        return Mesh(self.world, self.model.context_parallel, self.model.tensor_parallel)


class Worker:
    """A rank. Rank 0 first returns its address from `listen`; then all ranks `start` with that address."""

    engine: TrainEngine
    channel: transport.Channel | None = None  # to the rollout engines

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rank, self.rendezvous, ranks = spec.rank, transport.Rendezvous(), spec.ranks
        self.router_coefficient = ranks.router_aux_loss_coef if isinstance(ranks, TrainingConfig) else 0.0

    def listen(self) -> transport.Address:
        """Return the address of rank 0, for the other ranks and later for the engines."""
        return self.rendezvous.open()

    def start(self, address: transport.Address) -> None:
        """Join the other ranks, load the model, and check that it computes as expected."""
        spec, row = self.spec, TRAIN_ENGINES[self.spec.ranks.engine]
        torch.manual_seed(spec.seed)
        torch.use_deterministic_algorithms(spec.deterministic)
        if spec.memory_share < 1 and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(spec.memory_share)  # its cache would grow into the engine's room
        if row.several_ranks and not dist.is_initialized():  # a process joins once
            store = self.rendezvous.store(address, spec.world, spec.timeout_seconds)
            timeout = datetime.timedelta(seconds=spec.timeout_seconds)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world, timeout=timeout)
        START.end("meeting")
        share_out: ShareOut | None = build(row.share_out, [spec, self.device]) if row.share_out else None
        config, packing = spec.model, spec.ranks.packing
        self.model = load_model(config, DTYPES[config.dtype], spec.head, packed=packing, share_out=share_out)
        self.names = WeightNames(self.model)
        self.adapter = add_lora(self.model, config.lora, spec.head, config.path) if config.lora.rank else None
        if share_out is not None:
            for parameter in self.model.parameters():  # those that were not read from a file, or had to wait
                share_out.shard(parameter)
        self.shapes = {name: shape_of(tensor) for name, tensor in self.model.named_parameters()}
        parts = max(config.tensor_parallel, row.division(spec.ranks, config.dtype, spec.world).experts)
        is_whole = share_out is None and fits_whole(self.model, self.device, parts)
        if is_whole or share_out is not None:
            self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))
        speaks = spec.head == "language" and spec.distillation_target is None
        probe = Probe(self.model, self.device, packing, speaks and is_whole)
        self.scorer = self._make_scorer()
        START.end("weights")
        self.engine = build(row.path, [self.scorer, spec, self.device])
        START.end("engine")
        self.names.restore_buffers()
        self.release()  # before lasting small tensors settle in memory that was needed only to start
        self.outgoing = Outgoing(self.engine, self.names, config.lora, spec.rank)
        held = partial(saving.contents, self.engine, self.names, self.adapter is not None)
        self.saver = saving.Saver(spec.rank, spec.world, held)
        if speaks and not is_whole:
            with self.scorer.plainly():  # layers are gathered one by one, or stay split
                probe.expect(lambda tokens: self._forward(tokens, [len(tokens)]))
        probe.compare(self._forward, self.model.get_input_embeddings())
        compiles = isinstance(spec.ranks, TrainingConfig) and bool(spec.ranks.compile)
        self.compiled = CompiledLayers(self.scorer) if compiles else None
        START.end("check")

    def _make_scorer(self) -> Scorer:
        spec, packing, make_target = self.spec, self.spec.ranks.packing, self.spec.distillation_target
        scorer = Scorer(
            self.model,
            spec.model.head_chunk_tokens or HEAD_CHUNK[self.device.type],
            packed=packing,
            ring=spec.mesh().join_ring(spec.rank),
            distillation_target=make_target(self.model, DTYPES[spec.model.dtype], packing) if make_target else None,
            values=spec.head == "value",
            vision=load_vision(spec.model),
        )
        if self.router_coefficient:
            scorer.top_k = int(self.model.config.get_text_config().num_experts_per_tok)
        if isinstance(spec.ranks, PolicyTrainingConfig) and spec.ranks.replay_routing:
            scorer.replay = Replay(self.model, follows=spec.ranks.replay_routing is True)
        return scorer

    def ready(self) -> None:
        """Do nothing: calls run in order, so this returns after all earlier calls."""

    def _forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        none = torch.zeros(len(lengths), device=self.device)
        return self._outputs(Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), lengths, none, none))

    def score(
        self,
        packed: SampleReader,
        passes: list[MicroBatch],
        temperature: float,
        reference: bool = False,
        more: Names = (),
    ) -> np.ndarray:
        """Return log-probs or scores of this rank's tokens in the plan's order; as `reference`, without adapters.

        With `more` (entropy, squares), these stand beside the log-probs.
        """
        rows: list[Tensor] = []
        without = adapters_off(self.model) if reference and self.adapter is not None else nullcontext()
        with self.eval_mode(), without:
            for micro_batch in passes:
                batch = collate(packed, micro_batch, self.device, experts=not reference)
                output = self.engine.forward(batch, temperature, "entropy" in more, "squares" in more)
                rows += reports.rows_of(reports.only_output(output, more), batch, micro_batch)
                WORK.move()
        return torch.cat(rows).cpu().numpy() if rows else np.zeros(0, dtype=np.float32)

    def compare_sharing(self, packed: SampleReader, passes: list[MicroBatch]) -> tuple[float, float]:
        """Return how far computing a common prefix once moves the outputs of some sequences, and how far it may."""
        with self.eval_mode():
            repeats = collate(packed, passes[0], self.device, experts=False).repeats[:COMPARED]
            some = sorted({at for repeat in repeats for at in (repeat.at, repeat.of)}) or [0]
            batch = collate(packed, [passes[0][at] for at in some], self.device, experts=False)
            return sharing_gap(batch, self._outputs, self.model.get_input_embeddings())

    def _outputs(self, batch: Batch) -> Tensor:
        return reports.only_output(self.engine.forward(batch, 1.0, entropy=False))

    def score_kept(
        self, packed: SampleReader, passes: list[MicroBatch], names: Names, temperature: float, reference: bool = False
    ) -> tuple[None, Arrays]:
        """Score, and return the result as a field of the samples; others may stand beside log-probs."""
        found = self.score(packed, passes, temperature, reference, names[1:])
        return None, dict(zip(names, found.reshape(-1, len(names)).T.copy(), strict=True))

    def score_targets(self, packed: SampleReader, passes: list[MicroBatch], asked: Asked) -> tuple[None, Arrays]:
        """Score, and return the log-probs of tokens and of the likeliest ones as fields."""
        held: dict[str, Callable[[], Any]] = {"live": nullcontext, "average": self.engine.with_average}
        held["reference"] = partial(adapters_off, self.model)
        rows = reports.FieldRows(asked.names)
        with self.eval_mode(), self.scorer.telling(asked.top_k), held[asked.weights]():
            for micro_batch in passes:
                batch = collate(packed, micro_batch, self.device, experts=False)
                rows.add(self.engine.forward(batch, asked.temperature, entropy=False), batch, micro_batch)
                WORK.move()
        return None, rows.join()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Turn off gradients, and the dropout of adapters."""
        self.scorer.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.scorer.train()

    def update(self, packed: SampleReader, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        """Train on this rank's share of a minibatch, and make an optimizer step unless memory runs out."""
        problem = None
        try:
            report = self.accumulate(packed, passes, loss, settings)
        except torch.OutOfMemoryError as error:
            if self.spec.world > 1:  # the others wait for this rank in a collective
                raise
            problem = str(error)  # without the traceback, which keeps tensors in memory
        if problem is not None:
            if not self.engine.discard():
                raise torch.OutOfMemoryError(problem)
            self.release()
            return Report({}, {}, {}, out_of_memory=problem)
        if settings.gradients:
            report.gradient = settings.scale * reports.spread_sample(self.engine.gradients(), settings.gradients)
        if settings.then == "discard" and not self.engine.discard():
            raise RuntimeError("this engine cannot discard gradients")
        if settings.then != "step":
            return report
        self.engine.scale_gradients(settings.scale)
        with WORK.doing("part", "optimizer step"):
            report.step = self.engine.step() | reports.memory_metrics(self.device)
        return report

    def update_kept(
        self, packed: SampleReader, passes: list[MicroBatch], loss: str, settings: LossSettings
    ) -> tuple[Report, Arrays]:
        """Update, and return what it computes of each token apart from the report."""
        report = self.update(packed, passes, loss, settings)
        found = {"old_logprobs": report.logprobs, "entropy": report.entropies}
        report.logprobs = report.entropies = np.zeros(0, np.float32)
        return report, {name: found[name] for name in settings.kept_fields()}

    def release(self) -> tuple[float, float]:
        """Release cached memory; return the device's GiB in use before, and the GiB released."""
        return reports.release_cache() if self.device.type == "cuda" else (0.0, 0.0)

    def accumulate(self, packed: SampleReader, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        sums = reports.LossAccumulator()
        if self.compiled is not None:
            self.compiled.prove(collate(packed, passes[0][:1], self.device))
        logprobs, entropies = list[Tensor](), list[Tensor]()
        for number, micro_batch in enumerate(passes, 1):
            batch, output, values = self._loss(packed, micro_batch, loss, settings)
            logprobs += reports.rows_of(batch.old_logprobs, batch, micro_batch) if settings.logprobs_from_update else []
            entropies += (
                reports.rows_of(output.entropy.detach() * batch.mask, batch, micro_batch) if settings.entropies else []
            )
            more: dict[str, Tensor] = draw_sums(output, batch) if settings.draws else {}
            if self.scorer.replay:
                more |= {reports.AGREED: output.agreed.sum(), reports.REPORTED: output.reported.sum()}
            if settings.expert_counts:
                more["router_loss"] = router_loss(output, batch, settings.expert_counts, self.scorer.top_k)
            total = sums.add(values, batch, **more)
            if settings.expert_counts:
                total = total + self.router_coefficient * more["router_loss"]
            # A loss that is not finite may have a finite gradient; no rank may step on it.
            total = total * torch.where(total.detach().isfinite(), 1.0, math.nan)
            self.engine.backward(total, last=number == len(passes) and settings.then != "more")
            WORK.move()
        report = sums.report()
        report.remark = "" if self.compiled is None else self.compiled.doubt
        report.logprobs = torch.cat(logprobs).cpu().numpy() if logprobs else report.logprobs
        report.entropies = torch.cat(entropies).float().cpu().numpy() if entropies else report.entropies
        return report

    def evaluate(self, packed: SampleReader, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        sums = reports.LossAccumulator()
        with self.eval_mode():
            for micro_batch in passes:
                batch, _, values = self._loss(packed, micro_batch, loss, settings)
                sums.add(values, batch)
                WORK.move()
        return sums.report()

    def count_experts(self, packed: SampleReader, passes: list[MicroBatch]) -> list[float]:
        """Count how many tokens of this rank's samples go to each expert, over all layers, [E]."""
        found: list[Tensor] = []
        with self.eval_mode():
            for micro_batch in passes:
                batch = collate(packed, micro_batch, self.device)
                batch.host_mask = torch.zeros(len(batch.tokens), dtype=torch.bool)  # skips the head
                found.append(over_learnt(self.engine.forward(batch, 1.0, entropy=False).expert_counts, batch))
        return torch.stack(found).sum(0).tolist()

    def _loss(
        self, packed: SampleReader, micro_batch: MicroBatch, loss: str, settings: Any
    ) -> tuple[Batch, ModelOutput, LossOutput]:
        batch = collate(packed, micro_batch, self.device)
        batch.statistics = settings.statistics
        row = LOSSES[loss]
        if row.observes(settings.section):
            batch.observe()
        output = self.engine.forward(batch, settings.temperature, row.entropy, kept=settings.kept)
        if self.scorer.replay is not None and not is_filled(output, reports.AGREED):
            raise ValueError(f"{KEY}: these samples have no experts of the engine; set it to false")
        if settings.logprobs_from_update:
            batch.old_logprobs = output.logprobs.detach() * batch.mask
        return batch, output, row.compute(output, batch, settings.section)

    def weight_specs(self, dtype: str) -> list[transport.TensorSpec]:
        return self.outgoing.specs(dtype)

    def share_memory(self, nbytes: int) -> dict[str, list[transport.SharedMemory]]:
        """Make two buffers for engines on this GPU, and return their handles."""
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return {transport.gpu_name(self.device): [transport.shared_memory(buffer) for buffer in self.buffers]}

    def connect(self, link: transport.Link) -> str:
        """Join the engines' group, and return why NCCL cannot form it, or nothing."""
        # Every rank joins with shared GPU memory; otherwise rank 0 alone, which sends to all.
        shares_gpu = link.transport == "ipc"

        def join() -> None:
            group = link.join(self.rank, self.device, self.rendezvous)
            self.channel = transport.GpuPair(group, self.buffers) if shares_gpu else group

        return transport.try_join(join) if self.rank == 0 or shares_gpu else ""

    def send_weights(self, buckets: list[transport.Bucket]) -> list[int]:
        """Gather the weights on every rank; those with a channel send them, and return a fingerprint per bucket."""
        prints, failure = self.outgoing.send(buckets, self.channel)
        if failure is not None:
            self.channel = None
            raise failure
        return prints

    def weight_bits(self, dtype: str, base: bool = True) -> LiveSums:
        return self.outgoing.bit_sums(dtype, base)

    def copy_weights(self) -> list[tuple[str, Tensor]]:
        """Return copies of the weights, for an engine in the same process."""
        return [(name, tensor.clone()) for name, tensor in self.outgoing.plain_weights()]

    def annotate(self, facts: dict[str, float]) -> None:
        for name, value in facts.items():
            setattr(self.model.config, name, value)

    def prepare_saving(self, sharers: int) -> None:
        """Begin to allocate host memory for checkpoints, on a machine with this many ranks."""
        _ = self.tokenizer if self.rank == 0 else None  # read now, and saved by rank 0
        ranks, dtype, world = self.spec.ranks, self.spec.model.dtype, self.spec.world
        weights = 0 if self.adapter else sum(map(math.prod, self.shapes.values())) * DTYPES[dtype].itemsize
        averaged = isinstance(ranks, TrainingConfig) and ranks.ema_decay > 0
        elements = sum(map(math.prod, self._trained_shapes().values()))
        moments = 8 * elements / TRAIN_ENGINES[ranks.engine].division(ranks, dtype, world).optimizer  # not yet there
        coming = moments if self.device.type == "cpu" else 0.0
        self.saver.allocate(saving.snapshot_bytes(weights, elements, world, averaged), sharers, coming)

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer or processor that is saved with the model; read once, as its folder may disappear."""
        tokenizer = self.scorer.vision.processor if self.scorer.vision else load_tokenizer(self.spec.model)
        tokenizer.chat_template = self.spec.chat_template or tokenizer.chat_template
        return tokenizer

    def save(self, folder: str, model: bool = True) -> None:
        """Copy this rank's share of the training state and, with `model`, of the weights; a thread writes them."""
        target, states, config = Path(folder), {"cpu": torch.get_rng_state()}, copy.deepcopy(self.model.config)
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        config.architectures = [type(self.model).__name__]  # of a new head, not of the model it began from

        def describe() -> None:
            save_tensors(target / f"random-{self.rank}.safetensors", states, {})
            if self.rank == 0 and self.names.buffers:
                save_tensors(target / saving.FIXED, dict(self.names.on_disk(iter(self.names.buffers.items()))), {})
            if self.rank == 0:
                saving.describe_model(target / "model", self.model, config, self.adapter, self.tokenizer)

        self.saver.save(target, self.engine.steps, describe, model)

    def save_result(self, wait: bool) -> SaveResult | None:
        return self.saver.result(wait=wait)

    def load(self, folder: str) -> None:
        """Load a training state, after this rank has compared the hashes of its share of the files."""
        check_tensors(Path(folder), self.rank, self.spec.world)
        saved, config = saving.SavedState(Path(folder)), self.spec.ranks
        parts = saved.by_name()
        shapes = {name: tuple(saved.shapes[keys["weight"]]) for name, keys in parts.items()}
        if wrong := sorted(shapes.items() ^ self._trained_shapes().items()):
            raise ConfigError(
                f"{folder}: a checkpoint of another model or task ({wrong[0][0]} of shape {list(wrong[0][1])} is only "
                "in one of the two); resume with the configuration that wrote it"
            )
        assert isinstance(config, TrainingConfig)
        for name, keys in parts.items():
            found = keys.keys() - {"weight", AVERAGE}
            if found and found != set(MOMENTS[stepped_by(name, len(shapes[name]), config)]):
                raise ConfigError(
                    f"{folder}: a checkpoint of another optimizer than optimizer={config.optimizer} ({name} has "
                    f"{', '.join(sorted(found))}); resume with that optimizer, or start a new run from its model"
                )
        saving.load_state(self.engine, saved)
        mine = Path(folder) / f"random-{self.rank}.safetensors"
        if mine.exists():
            states = load_file(mine)
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.set_rng_state(states["cuda"])

    def _trained_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shapes[name] for name, tensor in self.model.named_parameters() if tensor.requires_grad}

    def fingerprints(self) -> dict[str, int]:
        """Return this rank's part of a checksum of each trained tensor, to see whether training changes it."""
        shards = self.engine.master_shards()
        return {one.name: int(bit_sum(one.values.float())) if one.counts() else 0 for one in shards}

    def weight_sample(self, most: int) -> np.ndarray:
        """Return up to `most` evenly spread numbers of each trained tensor, to measure how far training moves them."""
        return reports.spread_sample(self.engine.masters(), most)

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().cpu().float().numpy().copy() for name, tensor in self.engine.gradients()}


def worker_target(ranks: RanksConfig) -> Target[Worker]:
    return Target("trueline.training.worker:Worker", environment=partial(rank_environment, ranks))


def rank_environment(ranks: RanksConfig, gpus: int) -> dict[str, str]:
    return TRAIN_ENGINES[ranks.engine].environment(ranks, gpus)
