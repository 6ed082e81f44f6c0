"""Offline training: the same worker, the same update, no sampling."""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev

from torch import Tensor

from trueline.config.base import ConfigError, Tree
from trueline.config.model import ModelConfig, RanksConfig
from trueline.config.supervised import DistillRunConfig, SupervisedConfig
from trueline.data.batching import Budget
from trueline.data.chat import ChatFormat
from trueline.data.loader import fingerprint
from trueline.data.types import Sample
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.speed import flops_per_token, speed_metrics
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.runtime.cluster import Machine, ray_cluster, this_machine
from trueline.runtime.placement import Layout, Processes, check_devices, crowding
from trueline.trainers.dataset import Dataset, Material, check_longest, load_material
from trueline.trainers.guard import Guard
from trueline.trainers.idle_keys import idle_keys
from trueline.trainers.interrupts import Interrupts
from trueline.trainers.learning_rate import rate_warnings, suited_rate
from trueline.trainers.memory import Room, Tenant, describe_passes, settled
from trueline.trainers.reference import ReferenceCache, fill_reference
from trueline.trainers.rescue import Rescue
from trueline.trainers.resolve import check_installed, check_parallel, resolve_dtype, resolve_path
from trueline.trainers.state import SupervisedState, check_data, restore
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import ModelGroup, write_model
from trueline.training.report import LossSettings
from trueline.training.worker import WORKER, Worker, WorkerSpec


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    config: SupervisedConfig  # resolved
    machine: Machine
    facts: ModelFacts
    layout: Layout
    material: Material
    steps: int
    longest: int
    chat: ChatFormat

    def fingerprint(self) -> Tree:
        data, train = self.config.data, self.material.train
        return fingerprint(data.sources(), train.sizes, train.digests, self.config.seed, data.shuffle)


def plan_supervised(config: SupervisedConfig, *, here: bool = True) -> SupervisedPlan:
    """Read, check and tokenize before any model is loaded; `here`: this machine must have the memory to train it."""
    check_installed("training.engine", config.training.engine, "torch")
    facts, machine = check_model(config.model), this_machine()
    config = resolve(config, facts, machine)
    chat = load_chat(config.model, config.data.chat_template)
    material = load_material(config, chat)
    parts = [part for part in (material.train, material.held_out) if part is not None]
    longest = max(check_longest(part, budget_of(config)) for part in parts)
    config = settle_memory(config, facts, machine, longest) if here else config
    steps = config.steps or math.ceil(material.train.rows() * config.epochs / config.samples_per_step)
    assert config.training.ranks
    layout = Layout(config.training.ranks)
    check_devices(layout, machine)
    return SupervisedPlan(config.replaced({"steps": steps}), machine, facts, layout, material, steps, longest, chat)


def resolve(config: SupervisedConfig, facts: ModelFacts, machine: Machine) -> SupervisedConfig:
    """Fill in every key that was left to the machine or the model."""
    width = config.model.tensor_parallel * config.model.ring
    ranks = config.training.ranks or (max(machine.gpus // width, 1) * width)
    limit = config.training.micro_batch_tokens
    resolved = config.replaced(
        {
            "model": {
                "dtype": resolve_dtype(config.model.dtype, config.training, machine),
                "path": resolve_path(config.model.path),
            },
            "training": {"ranks": ranks if config.training.engine == "deepspeed" else 1},
            "max_tokens": config.max_tokens or min(facts.context, (limit or facts.context) * config.model.ring),
        }
    )
    check_parallel(resolved.model, facts)
    if isinstance(resolved, DistillRunConfig):
        resolved = resolved.replaced({"distill": {"teacher": resolve_path(resolved.distill.teacher)}})
        check_teacher(resolved)
    return resolved


def budget_of(config: SupervisedConfig) -> Budget:
    """What was asked for; passes that follow memory hold whatever the data has."""
    training = config.training
    limit = sys.maxsize if training.micro_batch_tokens is None else training.micro_batch_tokens * config.model.ring
    return Budget(limit, training.micro_batch_samples, training.packing)


def settle_memory(config: SupervisedConfig, facts: ModelFacts, machine: Machine, longest: int) -> SupervisedConfig:
    """Fill in what memory decides; a teacher lives beside its student."""
    world = config.training.ranks
    assert world
    tokens = config.samples_per_step * longest / world
    tenants = [Tenant("model", "training", facts, config.model, config.training, world, tokens)]
    if isinstance(config, DistillRunConfig):
        teacher, ranks = teacher_model(config), RanksConfig(micro_batch_tokens=config.training.micro_batch_tokens)
        tenants.append(Tenant("teacher", "training", check_model(teacher), teacher, ranks, world, tokens))
    if machine.gpus:
        room = Room(machine.gpu_bytes, "cuda", [(one, 1) for one in tenants])
    else:
        room = Room(machine.memory_bytes, "cpu", [(one, world) for one in tenants])
    return config.replaced(settled([room], longest, "max_tokens").keys())


def teacher_model(config: DistillRunConfig) -> ModelConfig:
    path, trusted = config.distill.teacher, config.model.trust_remote_code
    return ModelConfig(path=path, dtype=config.model.dtype, trust_remote_code=trusted)


def check_teacher(config: DistillRunConfig) -> None:
    if not config.distill.teacher:
        raise ConfigError("distill.teacher is empty: name the model to learn from, e.g. distill.teacher=path/to/folder")
    check_model(teacher_model(config))


def describe_plan(plan: SupervisedPlan) -> str:
    config, train, held_out = plan.config, plan.material.train, plan.material.held_out
    devices = f"{plan.machine.gpus} GPUs" if plan.machine.gpus else f"{plan.machine.cpus} CPU cores"
    mesh = config.model
    shape = f", tensor {mesh.tensor_parallel} x ring {mesh.ring}" if mesh.tensor_parallel * mesh.ring > 1 else ""
    counts = ", ".join(f"{count} {what}" for what, count in train.counts.items() if count and what != "rows")
    data = [
        f"data       {train.rows()} rows, longest {plan.longest} tokens" + (f" ({counts})" if counts else ""),
        *(f"format     {described}" for described in train.formats),
        *([f"held out   {held_out.rows()} rows"] if held_out else []),
        *plan.chat.remarks(),
    ]
    return "\n".join(
        [
            f"machine    {devices}",
            f"model      {mesh.path}: {plan.facts.parameters / 1e6:.1f} M parameters, {mesh.dtype}"
            + (f", LoRA of rank {mesh.lora.rank}" if mesh.lora.rank else ""),
            f"training   {plan.layout.policy_ranks} x {config.training.engine} rank, "
            f"ZeRO {config.training.zero_stage}{shape}, {describe_passes(config.training, mesh)}",
            *data,
            f"length     {plan.steps} steps of {config.samples_per_step} rows",
            *(f"warning: {text}" for text in plan_warnings(plan)),
        ]
    )


def plan_warnings(plan: SupervisedPlan) -> list[str]:
    """What will run, but hardly as it was meant."""
    config = plan.config
    rates = rate_warnings(plan.facts.parameters, config.task, config.model, config.training)
    return [*crowding(plan.layout, plan.machine), *rates, *idle_keys(config)]


@dataclass(slots=True)
class SupervisedTrainer:
    plan: SupervisedPlan
    model: ModelGroup
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    state: SupervisedState
    guard: Guard
    timer: Timer

    def fit(self) -> SupervisedState:
        plan, state, train = self.plan, self.state, self.plan.material.train
        config = plan.config
        order = train.order(config.seed, config.data.shuffle, state.rows)
        self.guard.watch()
        rescue = Rescue(state, [self.guard], lambda: self.save({}), self.progress.note)
        with self.progress, Interrupts(self.progress.note) as interrupts, rescue:
            metrics = self.evaluate() if state.step == 0 else {}
            if metrics:
                self.tracker.log(0, metrics)
                self.progress.note(shown(metrics))
            while state.step < plan.steps and not interrupts.requested:
                rows = [next(order) for _ in range(config.samples_per_step)]
                metrics = self.learn(rows)
                state.step, state.rows, state.skipped_steps = state.step + 1, order.position, self.guard.skipped
                self.guard.whole = True
                if self.evaluation_due():
                    metrics |= self.evaluate()
                times = self.timer.flush()
                metrics |= times | self.speed(train.take(rows), times["time/train"])
                self.tracker.log(state.step, metrics)
                self.progress.step(state.step, metrics)
                self.guard.follow("loss", metrics["loss"])
                # After its numbers are written: a kill in between costs the step again, not its row.
                if self.checkpoints.due(state.step) or state.step == plan.steps:
                    self.save(metrics)
            self.save({})
        return state

    def learn(self, rows: list[int]) -> dict[str, float]:
        """One optimizer step on these rows."""
        train = self.plan.material.train
        with self.timer.phase("train"):
            samples = train.take(rows)
            settings = self.settings(train, [train.mismatched[row] for row in rows] if train.mismatched else [])
            metrics = self.guard.update(samples, train.task.loss, settings, together=train.task.together)
            return metrics | settings.statistics

    def settings(self, dataset: Dataset, mismatched: list[Sample]) -> LossSettings:
        statistics = {}
        if mismatched:
            statistics["kto/kl"] = kl_estimate(mismatched, self.model.score(mismatched))
        return LossSettings(1.0, dataset.task.settings(self.plan.config), statistics)

    def evaluation_due(self) -> bool:
        every, step = self.plan.config.evaluation.every, self.state.step
        return step == self.plan.steps or (every > 0 and step % every == 0)

    def evaluate(self) -> dict[str, float]:
        """The loss of all held-out rows; nothing where none are held out."""
        held_out = self.plan.material.held_out
        if held_out is None:
            return {}
        with self.timer.phase("evaluate"):
            samples = held_out.take(list(range(held_out.rows())))
            settings = self.settings(held_out, held_out.mismatched)
            found = self.model.evaluate(samples, held_out.task.loss, settings, together=held_out.task.together)
            if held_out.task.head == "reward":
                self.store_scale(samples)
        return {f"evaluation/{name}": value for name, value in found.items()}

    def store_scale(self, samples: list[Sample]) -> None:
        """Mean and deviation of a reward model's scores are saved with it, for whoever normalises rewards."""
        scores = [float(scores[-1, 0]) for scores in self.model.score(samples)]
        self.model.call(Worker.annotate, {"reward_mean": fmean(scores), "reward_std": pstdev(scores)})

    def speed(self, samples: list[Sample], seconds: float) -> dict[str, float]:
        plan, tokens = self.plan, sum(sample.length() for sample in samples)
        flops = flops_per_token(plan.facts.parameters, adapters=plan.config.model.lora.rank > 0)
        return speed_metrics(tokens, seconds, plan.layout.policy_ranks, flops, plan.machine.gpu_name)

    def save(self, metrics: dict[str, float]) -> None:
        with self.timer.phase("save"):
            self.checkpoints.save(self.state.step, asdict(self.state), self._write, metrics)

    def _write(self, folder: Path) -> None:
        write_model(self.model, folder)


def kl_estimate(mismatched: list[Sample], logprobs: list[Tensor]) -> float:
    """KTO's z: how far the model is from the reference on answers to other prompts; never below zero."""
    ratios = [
        float(((scores - sample.ref_logprobs) * sample.mask).sum())
        for sample, scores in zip(mismatched, logprobs, strict=True)
    ]
    return max(fmean(ratios), 0.0)


def shown(metrics: dict[str, float]) -> str:
    return "start      " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


@contextmanager
def supervised_trainer(plan: SupervisedPlan, folder: RunFolder, progress: Progress) -> Iterator[SupervisedTrainer]:
    config, task = plan.config, plan.material.train.task
    local = config.runtime == "local"
    checkpoints = Checkpoints(folder.path, config.checkpoint, progress.note)
    data = plan.fingerprint()
    check_data(checkpoints, data)
    with ExitStack() as stack:
        if not local:
            stack.enter_context(ray_cluster(plan.machine))
        specs = worker_specs(plan)
        processes = Processes(plan.machine, plan.layout, folder.logs, local)
        actors = processes.policy(WORKER, specs)
        model = ModelGroup("model", actors, config.training, config.timeout_seconds, specs[0].mesh())
        model.start()
        if task.reference(config):
            cache = ReferenceCache(folder.path / "reference.safetensors", config.model.path)
            fill_reference(model, used_samples(plan), cache, progress)
        state = restore(SupervisedState, checkpoints, lambda newest: model.call(Worker.load, str(newest)), progress)
        tracker = Tracker(folder, config.monitoring, state.step, state.tracker, progress.note)
        stack.callback(tracker.close)
        state.tracker, state.data = tracker.run_id, data
        guard = Guard(model, config.training, progress.note)
        guard.skipped = state.skipped_steps
        guard.suited = suited_rate(plan.facts.parameters, config.task, adapters=config.model.lora.rank > 0)
        yield SupervisedTrainer(plan, model, checkpoints, tracker, progress, state, guard, Timer())


def used_samples(plan: SupervisedPlan) -> list[Sample]:
    """What the whole run will train and evaluate on; a short run over much data uses little of it."""
    config, train, held_out = plan.config, plan.material.train, plan.material.held_out
    order = train.order(config.seed, config.data.shuffle, 0)
    samples = train.samples_of(next(order) for _ in range(plan.steps * config.samples_per_step))
    return samples + (held_out.samples_of(range(held_out.rows())) if held_out else [])


def worker_specs(plan: SupervisedPlan) -> list[WorkerSpec]:
    config, world = plan.config, plan.layout.policy_ranks
    return [
        WorkerSpec(
            config.model,
            config.training,
            rank,
            world,
            plan.steps,
            config.seed,
            config.timeout_seconds,
            head=plan.material.train.task.head,
            distill=config.distill if isinstance(config, DistillRunConfig) else None,
            chat_template=plan.chat.tokenizer.chat_template,
        )
        for rank in range(world)
    ]
