"""Whatever ends a run early, what it has trained is saved first, as long as its models still answer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from trueline.config.run import HealthConfig
from trueline.monitoring.beats import WORK
from trueline.monitoring.health import Health
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import fates_after
from trueline.runs.guard import Guard, TrainingFailure
from trueline.runs.interrupts import Interrupts
from trueline.runs.memory import GIB, Forecast
from trueline.runs.state import RLState, SupervisedState
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints

PATIENCE_SECONDS = 60.0
PROVEN = 10  # steps without BAD behind a checkpoint that is healthy
MOST_ROLL_BACKS = 2
GO_ON = "go_on"  # file that ends a pause


# The phase of a forecast in which something of a step happens, and keys that leave it more memory.
PHASES = {"rollout": "rollout", "sync": "rollout"}
REMEDIES = {
    "rollout": ("rollout.gpu_memory_utilization", "rollout.max_sequences"),
    "training": ("training.micro_batch_tokens", "model.head_chunk_tokens"),
}


@dataclass(slots=True)
class MemoryWatch:
    """Keep the most that is in use of a device beside what was forecast of it."""

    forecast: Forecast
    timer: Timer
    most: float = 0.0  # GiB

    def see(self, metrics: Mapping[str, float]) -> None:
        self.most = max(self.most, metrics.get("memory/device_gib", 0.0))

    def summary(self) -> str:
        return f"memory: forecast {self.forecast.largest()}, most in use {self.most:.1f} GiB"

    def answer(self, step: int) -> str:
        """Answer a failure for want of memory: where, what was expected, what was seen, and the key to change."""
        phase = PHASES.get(self.timer.latest, "training")
        keys = " or ".join(REMEDIES[phase])
        spare = "" if phase == "rollout" else ", or set model.gradient_checkpointing=true or training.offload=moments"
        return (
            f"out of memory in step {step} ({self.timer.latest}): forecast {self.forecast.largest()} of "
            f"{self.forecast.room.size / GIB:.1f} GiB, most in use before {self.most:.1f} GiB: lower {keys}{spare}"
        )


class RolledBack(Exception):
    """The run is to go on from an earlier checkpoint, at a lower learning rate."""


@dataclass(slots=True)
class Care:
    """Do what is asked for about steps that are judged BAD."""

    config: HealthConfig
    health: Health
    checkpoints: Checkpoints
    folder: Path  # of the run
    known: set[str] = field(default_factory=set)  # rules that a person has let pass

    def begin(self, save: Callable[[], None]) -> None:
        """Make sure that there is something to go back to."""
        if self.config.action != "roll_back":
            return
        if self.checkpoints.newest() is None:
            save()
            self.checkpoints.settle(wait=True)
        self.checkpoints.held = self.checkpoints.newest()

    def act(self, state: RLState | SupervisedState, save: Callable[[], None], interrupts: Interrupts) -> None:
        """Act upon the verdict on the last step."""
        bad = self.health.bad()
        self.known &= set(bad)
        rules = f"health: {', '.join(bad)} BAD, as said above"
        if not bad or self.config.action == "log":
            if self.config.action == "roll_back":
                self.checkpoints.hold(state.step - PROVEN)
        elif self.config.action == "pause":
            self._pause(set(bad), save, interrupts)
        elif self.config.action == "stop":
            raise TrainingFailure(f"{rules}; health.action=log goes on with --resume")
        elif state.rolled_back >= MOST_ROLL_BACKS or self.checkpoints.held is None:
            raise TrainingFailure(f"{rules}, and the run has gone back {state.rolled_back} times before")
        else:
            ledger = RunFolder(self.folder).ledger
            step = self.checkpoints.go_back(lambda saved: state.behind(saved, fates_after(ledger, saved["step"])))
            self.checkpoints.note(
                f"health     back from step {state.step} to {step}, behind the prompts in between; learning rates x "
                f"{self.config.rate_factor:g} (roll back {state.rolled_back + 1} of {MOST_ROLL_BACKS})"
            )
            raise RolledBack

    def _pause(self, bad: set[str], save: Callable[[], None], interrupts: Interrupts) -> None:
        """Wait until a person has looked; a rule that was let pass is not asked about again while it stays BAD."""
        if bad <= self.known:
            return
        save()
        file = self.folder / GO_ON
        self.checkpoints.note(f"health     paused: `touch {file}` goes on, Ctrl-C ends the run")
        while not file.exists() and not interrupts.requested:
            WORK.move()
            time.sleep(0.5)
        file.unlink(missing_ok=True)
        self.known |= bad


def care_of(config: HealthConfig, folder: RunFolder, checkpoints: Checkpoints, max_staleness: int = 0) -> Care:
    """Judge a run from what it has reported before it was taken up."""
    health = Health(checkpoints.note, max_staleness)
    health.recall(row for row in folder.rows() if row["step"] > 0)
    return Care(config, health, checkpoints, folder.path)


class Rescue:
    """Call `save`, where that makes sense, before an error that leaves the loop inside is passed on."""

    def __init__(
        self,
        state: RLState | SupervisedState,
        guards: list[Guard],
        save: Callable[[], None],
        checkpoints: Checkpoints,
        watch: MemoryWatch,
    ) -> None:
        self.state, self.guards, self.save, self.checkpoints, self.watch = state, guards, save, checkpoints, watch

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note = self.checkpoints.note
        if kind is None and self.watch.most:
            note(self.watch.summary())
        if "CUDA" in str(error) and "out of memory" in str(error):  # rewards can run out of their own
            note(f"error: {self.watch.answer(self.state.step + 1)}")
        if kind is None or not issubclass(kind, Exception) or kind is RolledBack or self.state.step == 0:
            return
        whole = all(guard.whole for guard in self.guards)
        if not whole:
            note(f"warning: stopped inside step {self.state.step + 1}, so there are no weights of a whole step to save")
        try:
            for guard in self.guards:
                guard.model.wait_until_idle(PATIENCE_SECONDS)
            if whole:
                self.save()
            self.checkpoints.settle(wait=True)
        except ActorFailure as failure:
            note(f"warning: the steps since the last checkpoint could not be saved: {failure}")
