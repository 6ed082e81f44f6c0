"""Ranks of the trained model, opened for checks."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trueline.config.base import ConfigError, Tree
from trueline.config.verify import VerifyConfig
from trueline.data.types import Sample
from trueline.plan.resolve import check_model_keys, check_trained
from trueline.runs.processes import model_group, open_processes
from trueline.runtime.actors import Actor, LocalActor, Target, wait_all
from trueline.runtime.placement import Layout
from trueline.training.group import ModelGroup, start_groups, write_models
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec, rank_environment
from trueline.verify.comparison import Measurement
from trueline.verify.subject import LOGS, NUMBERS, Subject, free_memory, masked_rows

STILL = 1e-12  # a learning rate that moves no float32 weight
RATE = 1e-3  # moves weights in bfloat16, too
STEPS = 100


class CheckedWorker(Worker):
    """A rank whose process opens one model after the other."""

    def reopen(self, spec: WorkerSpec) -> None:
        rendezvous = self.rendezvous
        self.__dict__.clear()
        gc.collect()
        super().__init__(spec)
        self.rendezvous = rendezvous


def one_process(config: VerifyConfig) -> VerifyConfig:
    """Return the keys of a single rank in this process."""
    engine = "torch" if config.model.dtype == "float32" else "fsdp2"  # which has float32 master weights
    keys = {"engine": engine, "ranks": 1, "replicas": None, "offload": "none", "compile": False}
    return config.with_keys({"model": {"tensor_parallel": 1, "context_parallel": 1}, "training": keys})


def with_rates(config: VerifyConfig, rate: float, more: Tree) -> VerifyConfig:
    fixed = {"learning_rate": rate, "schedule": "constant", "warmup_steps": 0, "ema_decay": 0.0, "weight_decay": 0.0}
    return config.with_keys({"training": {**fixed, "share_prefixes": False}}).with_keys(more)


def check(subject: Subject, config: VerifyConfig) -> None:
    """Refuse what a run would refuse before it starts."""
    check_trained("training", config.training, config.model)
    check_model_keys(config.training, config.model, subject.facts)


def specs_of(config: VerifyConfig, ranks: int) -> list[WorkerSpec]:
    first = WorkerSpec(config.model, config.training, 0, ranks, STEPS, config.seed, config.timeout_seconds)
    return [replace(first, rank=rank) for rank in range(ranks)]


@contextmanager
def open_here(subject: Subject, more: Tree, rate: float = STILL) -> Iterator[ModelGroup]:
    """Open the trained model in this process, with more keys."""
    config = with_rates(one_process(subject.config), rate, more)
    check(subject, config)
    specs = specs_of(config, 1)
    group = model_group("policy", [LocalActor("policy", Worker(specs[0]))], specs)
    try:
        group.start()
        yield group
    finally:
        del group
        free_memory()


@dataclass(frozen=True, slots=True)
class SharedRanks:
    """Processes that open the model divided in one way after the other."""

    subject: Subject
    actors: Sequence[Actor[CheckedWorker]]

    def open(self, more: Tree) -> ModelGroup:
        config = with_rates(self.subject.config, STILL, more)
        config = config.with_keys({"training": {"ranks": len(self.actors)}})
        check(self.subject, config)
        specs = specs_of(config, len(self.actors))
        pairs = zip(self.actors, specs, strict=True)
        wait_all([actor.submit(CheckedWorker.reopen, spec) for actor, spec in pairs], config.timeout_seconds)
        group = model_group("policy", [*self.actors], specs)
        start_groups([group])
        return group


@contextmanager
def open_ranks(subject: Subject, ranks: int) -> Iterator[SharedRanks]:
    config, logs = subject.config, subject.folder / LOGS
    logs.mkdir(exist_ok=True)
    environment = partial(rank_environment, config.training)
    target: Target[CheckedWorker] = Target(
        f"{CheckedWorker.__module__}:{CheckedWorker.__name__}", environment=environment
    )
    with ExitStack() as stack:
        processes = stack.enter_context(open_processes(subject.machine, Layout(ranks), logs, config.runtime))
        actors = processes.policy(target, specs_of(config, ranks))
        for actor in actors:
            stack.callback(actor.stop)
        yield SharedRanks(subject, actors)


def measure(group: ModelGroup, samples: list[Sample]) -> Measurement:
    """Return what a model says of the samples, and their gradient; its weights stay as they are."""
    logprobs = masked_rows(group.score(samples), samples)
    group.update(samples, "sft", LossSettings(gradients=NUMBERS))
    return Measurement(logprobs, group.gradient.astype("float64"))


def step(group: ModelGroup, samples: list[Sample]) -> None:
    group.update(samples, "sft", LossSettings())


def save(group: ModelGroup, folder: Path) -> Path:
    """Save a checkpoint as a run does, and return its folder."""
    folder.mkdir()
    found = write_models({"": group}, folder)(True)
    if found is None or found.problem:
        raise ConfigError(f"{folder}: the checkpoint could not be written ({found and found.problem})")
    return folder
