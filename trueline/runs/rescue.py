"""Act on bad health, and save what is trained before an error ends a run, as long as its models respond."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from trueline.config.run import HealthConfig, RunConfig
from trueline.monitoring.findings import REFUSED, WATCH, Finding
from trueline.monitoring.health import RunMonitor
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import fates_after
from trueline.plan.memory import GIB, Forecast
from trueline.runs.guard import TrainingFailure, UpdateMonitor
from trueline.runs.interrupts import Interrupts
from trueline.runs.state import RLState, SupervisedState
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints

PATIENCE_SECONDS = 60.0
PROVEN = 10  # steps without a bad one after a checkpoint that counts as healthy
MOST_ROLL_BACKS = 2
GO_ON = "go_on"  # file that ends a pause
# The phase of the forecast for each phase of a step, and the keys that leave it more memory.
PHASES = {"rollout": "rollout", "sync": "rollout"}
REMEDIES = {
    "rollout": ("rollout.gpu_memory_utilization", "rollout.max_sequences"),
    "training": ("training.micro_batch_tokens", "model.head_chunk_tokens"),
}


@dataclass(slots=True)
class MemoryWatch:
    """Compare the peak memory of a device with its forecast."""

    forecast: Forecast
    timer: Timer
    most: float = 0.0  # GiB

    def see(self, metrics: Mapping[str, float]) -> None:
        self.most = max(self.most, metrics.get("memory/device_gib", 0.0))

    def summary(self) -> str:
        return f"Peak memory {self.most:.1f} GiB (forecast {self.forecast.largest()})"

    def out_of_memory(self, step: int) -> Finding:
        """Report where memory ran out, the forecast, the peak so far, and the keys to change."""
        phase = PHASES.get(self.timer.latest, "training")
        keys = REMEDIES[phase]
        spare = "" if phase == "rollout" else ", or set model.gradient_checkpointing=true or training.offload=moments"
        what = (
            f"out of memory in step {step} ({self.timer.latest}): forecast {self.forecast.largest()} of "
            f"{self.forecast.room.size / GIB:.1f} GiB, peak before {self.most:.1f} GiB"
        )
        return Finding(REFUSED, "out_of_memory", what, f"lower {' or '.join(keys)}{spare}", keys[0])


class RolledBack(Exception):
    """The run continues from an earlier checkpoint, at a lower learning rate."""


@dataclass(slots=True)
class HealthAction:
    """Do what `health.action` says after a bad step."""

    config: HealthConfig
    monitor: RunMonitor
    checkpoints: Checkpoints
    folder: Path  # of the run
    accepted: set[str] = field(default_factory=set)  # rules that a person has let pass

    def begin(self, save: Callable[[], None]) -> None:
        """Make sure that there is a checkpoint to roll back to."""
        if self.config.action != "roll_back":
            return
        if self.checkpoints.newest() is None:
            save()
            self.checkpoints.settle(wait=True)
        self.checkpoints.held = self.checkpoints.newest()

    def act(self, state: RLState | SupervisedState, save: Callable[[], None], interrupts: Interrupts) -> None:
        """Act on the findings of the last step."""
        bad = self.monitor.bad()
        self.accepted &= set(bad)
        rules = f"health is bad ({', '.join(bad)})"
        if not bad or self.config.action == "log":
            if self.config.action == "roll_back":
                self.checkpoints.hold(state.step - PROVEN)
        elif self.config.action == "pause":
            self._pause(set(bad), save, interrupts)
        elif self.config.action == "stop":
            raise TrainingFailure(f"{rules}; --resume with health.action=log continues")
        elif state.rolled_back >= MOST_ROLL_BACKS or self.checkpoints.held is None:
            raise TrainingFailure(f"{rules}, and the run was rolled back {state.rolled_back} times before")
        else:
            ledger = RunFolder(self.folder).ledger
            step = self.checkpoints.roll_back(lambda saved: state.behind(saved, fates_after(ledger, saved["step"])))
            self.checkpoints.note(
                f"Rolled back from step {state.step} to {step} ({state.rolled_back + 1} of {MOST_ROLL_BACKS} times); "
                f"learning rates x {self.config.rate_factor:g}, and the prompts in between are not used again"
            )
            raise RolledBack

    def _pause(self, bad: set[str], save: Callable[[], None], interrupts: Interrupts) -> None:
        """Wait until a person has looked; a rule that was let pass does not pause again while it stays bad."""
        if bad <= self.accepted:
            return
        save()
        file = self.folder / GO_ON
        self.checkpoints.note(f"Paused: `touch {file}` continues the run, Ctrl-C ends it")
        while not file.exists() and not interrupts.has_request():
            WORK.move()
            time.sleep(0.5)
        file.unlink(missing_ok=True)
        self.accepted |= bad


def care_of(config: RunConfig, folder: RunFolder, checkpoints: Checkpoints, progress: Progress) -> HealthAction:
    """Make the monitor of a run, which knows what the run reported before it was resumed."""
    monitor = RunMonitor(progress.report, config)
    monitor.recall(row for row in folder.rows() if row["step"] > 0)
    return HealthAction(config.health, monitor, checkpoints, folder.path)


@dataclass(slots=True)
class SaveOnFailure:
    """Save before an error leaves the training loop, if the weights are those of a whole step."""

    state: RLState | SupervisedState
    guards: list[UpdateMonitor]
    save: Callable[[], None]
    checkpoints: Checkpoints
    watch: MemoryWatch
    progress: Progress

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.watch.most:
            self.progress.note(self.watch.summary())
        step = self.state.step
        if "CUDA" in str(error) and "out of memory" in str(error):  # rewards can run out of their own
            self.progress.report(self.watch.out_of_memory(step + 1))
        if kind is None or not issubclass(kind, Exception) or kind is RolledBack or step == 0:
            return
        if not (whole := all(guard.whole for guard in self.guards)):
            what = f"the run ended inside step {step + 1}, so there are no weights of a whole step to save"
            self.progress.report(Finding(WATCH, "unfinished_step", what))
        try:
            for guard in self.guards:
                guard.model.wait_until_idle(PATIENCE_SECONDS)
            if whole:
                self.save()
            self.checkpoints.settle(wait=True)
        except ActorFailure as failure:
            what = f"the steps since the last checkpoint could not be saved: {failure}"
            self.progress.report(Finding(WATCH, "unsaved_steps", what))
