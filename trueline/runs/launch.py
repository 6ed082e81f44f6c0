"""The one way from a configuration to a finished run: plan it, print the plan, do the work, report the end."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from trueline.algorithms.entries import AlgorithmFailure
from trueline.config.model import TrainingConfig
from trueline.config.run import RunConfig
from trueline.monitoring.findings import FINE, REFUSED, Finding
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.progress import Follower, Progress
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.monitoring.timing import START
from trueline.monitoring.trackers import check_trackers
from trueline.monitoring.user_files import changed_files, with_absolute_places
from trueline.monitoring.watch import Watch
from trueline.plan.describe import describe
from trueline.plan.inputs import Reading, resolve_run_as_model
from trueline.plan.offline import SupervisedPlan
from trueline.plan.rl import RLPlan
from trueline.rewards.combined import REWARD_KINDS
from trueline.rewards.functions import REWARDS
from trueline.rollout.failures import RolloutFailure
from trueline.runs.guard import TrainingFailure
from trueline.runs.rescue import RolledBack
from trueline.runs.state import RLState, SupervisedState
from trueline.runtime.actors import ActorFailure
from trueline.sync.proof import SyncFailure
from trueline.training.checkpoints import Checkpoints

Kind = TypeVar("Kind", bound=RunConfig)
FAILURES = (ActorFailure, AlgorithmFailure, RolloutFailure, SyncFailure, TrainingFailure, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class Start:
    """A request for a run, before it is planned."""

    verb: str
    folder: RunFolder
    resume: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A planned run."""

    config: RunConfig  # resolved
    about: str
    total: int  # steps, prompts or rounds
    work: Callable[[RunFolder, Progress], int]  # gives the exit status
    trains: bool = False  # resumes from checkpoints only
    reading: Reading | None = None  # until it was looked at
    findings: Sequence[Finding] = ()


class Trainer(Protocol):
    def fit(self) -> RLState | SupervisedState: ...


def launch(
    config: Kind,
    verb: str,
    prepare: Callable[[Kind, Start], Job],
    *,
    dry_run: bool = False,
    resume: bool = False,
    look: Callable[[Job], list[Finding]] = lambda job: [],
    follower: Follower | None = None,
) -> int:
    """Name the run, plan it with `prepare`, and do it, or only print the plan; then report what `look` finds in it."""
    name = config.name or default_name(verb)
    folder = RunFolder(Path(config.folder).resolve() / name)
    config, taken = resolve_run_as_model(config)
    say = lambda line: sys.stderr.write(f"{line}\n")  # noqa: E731
    with ExitStack() as held, Watch(config.timeout_seconds, say) as watch:
        found = held.enter_context(folder.hold_lock()) if resume and not dry_run else []
        with WORK.doing("phase", "plan"):
            job = prepare(config.with_keys({"name": name}), Start(verb, folder, resume))
        START.end("plan")
        about = "\n".join([job.about, *taken])
        if job.trains:
            check_trackers(job.config.monitoring)
        if dry_run:
            sys.stdout.write(f"{job.config.dump()}\n{about}\n")
            return 0
        folder.open(job.config, verb, resume=resume)
        if not resume:
            folder.rewrite(movable(job.config), verb)
        found = found if resume else held.enter_context(folder.hold_lock())
        progress = Progress(name, job.total, folder=folder, follower=follower)
        watch.move(folder.logs, progress.note)
        folder.write_plan(about, job.findings)
        progress.note(f"{about}\nrun        {folder.path}")
        progress.record([Finding(FINE, "started", f"{verb} of {job.total}"), *job.findings])
        for finding in (*found, *changed_files(folder.code, movable(job.config).model_dump())):
            progress.report(finding)
        if resume and job.trains and not folder.has_checkpoint():
            progress.note("resume     no checkpoint yet: starts over at step 0")
        continues = resume and (folder.has_checkpoint() or not job.trains)
        if job.config.monitoring.doctor and not continues:
            for finding in look(job):
                progress.report(finding)
        while True:
            try:
                return carry_out(replace(job, reading=None), folder, progress)  # texts are not needed any more
            except RolledBack:
                START.begin()
                config = with_lower_rates(config, job.config)
                with WORK.doing("phase", "plan"):
                    job = prepare(config.with_keys({"name": name}), Start(verb, folder, resume=True))
                folder.rewrite(movable(job.config), verb)
                progress = Progress(name, job.total, folder=folder, follower=follower)


def movable(config: RunConfig) -> RunConfig:
    """Return what a run folder keeps: `--resume` may be given in another folder."""
    return config.parse(with_absolute_places(config.model_dump(), {*REWARDS, *REWARD_KINDS}))


def with_lower_rates(config: Kind, planned: RunConfig) -> Kind:
    """Return the keys of a run after a rollback, with learning rates below those that were planned."""
    sections = {key: dict(planned).get(key) for key in ("training", "critic")}
    rates = {key: part.learning_rate for key, part in sections.items() if isinstance(part, TrainingConfig)}
    factor = config.health.rate_factor
    return config.with_keys({key: {"learning_rate": factor * rate} for key, rate in rates.items() if rate is not None})


def carry_out(job: Job, folder: RunFolder, progress: Progress) -> int:
    """Do the work; where it fails, say why and how to resume."""
    try:
        return job.work(folder, progress)
    except FAILURES as error:
        code, key = (error.code, error.key) if isinstance(error, TrainingFailure) else ("failed", "")
        progress.report(Finding(REFUSED, code, str(error), key=key))
        if folder.has_checkpoint() or not job.trains:
            source = " from the last checkpoint" if job.trains else ""
            progress.note(f"Continue{source} with: {folder.resume_command()}")
        return 1


def training(
    plan: RLPlan | SupervisedPlan, steps: int, trainer: Callable[[RunFolder, Progress], AbstractContextManager[Trainer]]
) -> Job:
    """Make the job of a trainer that is open as long as it trains."""
    config = plan.config

    def work(folder: RunFolder, progress: Progress) -> int:
        with trainer(folder, progress) as running:
            state = running.fit()
        finished = state.step == steps
        ended = f"{'done' if finished else 'stopped'}: step {state.step} of {steps}"
        if not config.checkpoint.save:
            progress.note(f"{ended}; nothing was saved (checkpoint.save=false)")
            return 0 if finished else 130
        newest = Checkpoints(folder.path, config.checkpoint).newest()
        if newest is None or int(newest.name.removeprefix("step_")) < state.step:
            what = f"step {state.step} is trained but not saved; the last checkpoint is {newest}"
            progress.report(Finding(REFUSED, "unsaved_steps", what))
            return 1
        whole = config.checkpoint.holds_model(state.step, steps) or any((newest / "model").glob("*.safetensors"))
        made = "" if whole else f": `trueline export {newest} FOLDER` writes its weights (checkpoint.model=last)"
        progress.note(f"{ended}; model in {newest}/model{made}")
        if not finished:
            progress.note(f"continue with: {folder.resume_command()}")
        return 0 if finished else 130

    return Job(config, describe(plan), steps, work, trains=True, reading=plan.reading(), findings=plan.findings)
