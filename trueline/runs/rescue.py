"""Whatever ends a run early, what it has trained is saved first, as long as its models still answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from trueline.monitoring.timing import Timer
from trueline.runs.guard import Guard
from trueline.runs.memory import GIB, Forecast
from trueline.runs.state import RLState, SupervisedState
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints

PATIENCE_SECONDS = 60.0


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
        if kind is None or not issubclass(kind, Exception) or self.state.step == 0:
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
