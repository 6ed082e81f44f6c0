"""From a configuration to a finished run: plan, say, start, train, tell where things are."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trueline.config.run import RunConfig
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder, default_name
from trueline.rollout.failures import RolloutFailure
from trueline.runs.guard import TrainingFailure
from trueline.runtime.actors import ActorFailure
from trueline.sync.weights import SyncFailure
from trueline.training.checkpoints import Checkpoints

Kind = TypeVar("Kind", bound=RunConfig)


@dataclass(frozen=True, slots=True)
class Start:
    """How a run was asked for."""

    verb: str
    dry_run: bool
    resume: bool


def named(config: Kind, verb: str) -> Kind:
    return config if config.name is not None else config.replaced({"name": default_name(verb)})


def begin(config: RunConfig, start: Start, about: str, total: int) -> tuple[RunFolder, Progress]:
    """The run's folder, new or to go on with, and its plan on the screen."""
    assert config.name is not None
    folder = RunFolder.open(config, start.verb, resume=start.resume)
    progress = Progress(config.name, total)
    progress.note(about)
    progress.note(f"run        {folder.path}")
    return folder, progress


def launch(config: RunConfig, start: Start, about: str, steps: int, trainer: Callable[..., Any]) -> int:
    if start.dry_run:
        sys.stdout.write(f"{config.dump()}\n{about}\n")
        return 0
    folder, progress = begin(config, start, about, steps)
    if start.resume and not folder.has_checkpoint():
        progress.note("resume     no checkpoint yet: starts over at step 0")
    try:
        with trainer(folder, progress) as running:
            state = running.fit()
    except (ActorFailure, RolloutFailure, SyncFailure, TrainingFailure) as error:
        progress.note(f"error: {error}")
        if Checkpoints(folder.path, config.checkpoint).newest() is not None:
            progress.note(f"The run can go on from its last checkpoint with --resume --name {config.name}")
        return 1
    newest = Checkpoints(folder.path, config.checkpoint).newest()
    if newest is None or int(newest.name.removeprefix("step_")) < state.step:
        progress.note(f"error: step {state.step} is trained but not saved; the last checkpoint is {newest}")
        return 1
    progress.note(f"done: step {state.step} of {steps}; model in {newest}/model")
    return 0 if state.step == steps else 130
