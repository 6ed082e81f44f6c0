"""Whatever ends a run early, what it has trained is saved first, as long as its models still answer."""

from collections.abc import Callable
from types import TracebackType

from trueline.runs.guard import Guard
from trueline.runs.state import RLState, SupervisedState
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints

PATIENCE_SECONDS = 60.0


class Rescue:
    """Call `save`, where that makes sense, before an error that leaves the loop inside is passed on."""

    def __init__(
        self,
        state: RLState | SupervisedState,
        guards: list[Guard],
        save: Callable[[], None],
        checkpoints: Checkpoints,
    ) -> None:
        self.state, self.guards, self.save, self.checkpoints = state, guards, save, checkpoints

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, Exception) or self.state.step == 0:
            return
        note = self.checkpoints.note
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
