"""The state of a run, and how a resumed run restores it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from trueline.config.base import ConfigError, Tree
from trueline.data.loader import changes
from trueline.monitoring.ledger import Ledger, Pools, Row
from trueline.monitoring.progress import Progress
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints
from trueline.training.samples import SampleNumbers


@dataclass(slots=True)
class RLState:
    """The state of an RL run."""

    step: int = 0
    version: int = 0  # of the policy's weights
    ledger: Ledger = field(default_factory=Ledger)  # of the prompts
    skipped_steps: int = 0
    critic_skipped_steps: int = 0
    kl_coefficient: float | None = None  # where it adapts
    critic_ready: bool = False  # it has reached algorithm.critic_warmup_variance
    tracker: dict[str, str] = field(default_factory=dict)  # ids of the run at trackers, by their keys
    data: Tree = field(default_factory=dict)  # fingerprint of what the order was drawn from
    rolled_back: int = 0  # times that the run went back to a healthy checkpoint
    drawn_excess: float = 0.0  # sums of all steps, by which their draws are tested
    drawn_variance: float = 0.0
    averages: dict[str, float] = field(default_factory=dict)  # moving averages of rewards, by role

    def snapshot(self) -> Tree:
        """Return a copy as JSON; pools of a million rows are copied as they are, for `asdict` takes seconds."""
        tree = asdict(replace(self, ledger=replace(self.ledger, pools=Pools())))
        pools = self.ledger.pools
        tree["ledger"]["pools"] = {"easy": dict(pools.easy), "hard": dict(pools.hard), "left": dict(pools.left)}
        return tree

    def behind(self, saved: Tree, fates: list[Row]) -> Tree:
        """Return counters that were saved, behind the prompts of the steps since, which are not trained on again.

        The fates are those that the ledger's rows tell of these steps.
        """
        ledger = asdict(self.ledger.roll_back(Ledger.of(saved["ledger"]), fates))
        return saved | {"ledger": ledger, "rolled_back": self.rolled_back + 1}

    def advance(self, trained: Iterable[int], learnt: bool) -> None:
        """Count a step that has trained on the prompts of these numbers."""
        self.step += 1
        self.version += learnt
        self.ledger.close(trained, "trained")

    def follow(self, samples: Iterable[SampleNumbers], decay: float) -> None:
        """Move each average by the mean reward of the role's n completions, n times, so that order cannot matter."""
        earned: dict[str, dict[int, float]] = {}
        for one in samples:
            earned.setdefault(one.role, {})[one.episode] = one.reward
        for role, rewards in earned.items():
            kept = decay ** len(rewards)
            self.averages[role] = kept * self.averages.get(role, 0.0) + (1 - kept) * fmean(rewards.values())


@dataclass(slots=True)
class SupervisedState:
    """The state of an offline run. The rows trained on so far are the first `rows` of the data's order."""

    step: int = 0
    rows: int = 0
    skipped_steps: int = 0
    tracker: dict[str, str] = field(default_factory=dict)  # ids of the run at trackers, by their keys
    data: Tree = field(default_factory=dict)  # fingerprint of what the order was drawn from
    rolled_back: int = 0  # times that the run went back to a healthy checkpoint

    def behind(self, saved: Tree, fates: list[Row]) -> Tree:
        """Return counters that were saved, behind the rows of the steps since, which are not trained on again."""
        return saved | {"rows": self.rows, "rolled_back": self.rolled_back + 1}


State = TypeVar("State", RLState, SupervisedState)


def restore(kind: type[State], checkpoints: Checkpoints, load: Callable[[Path], object], progress: Progress) -> State:
    """Give the newest checkpoint to `load` and return its state, or a fresh one if there is none."""
    if (newest := checkpoints.newest()) is None:
        return kind()
    saved = checkpoints.read_state(newest, tensors=False)  # ranks compare these before they load them
    if isinstance(saved["tracker"], str):  # the id at Weights & Biases, where no other tracker is known
        saved["tracker"] = {"wandb": saved["tracker"]}
    if "ledger" in saved:
        saved["ledger"] = Ledger.of(saved["ledger"])
    state = kind(**saved)
    try:
        load(newest)
    except ActorFailure as failure:
        checkpoints.refuse_named(newest, str(failure))
        raise
    progress.note(f"resumed from {newest} at step {state.step}")
    return state


def data_before(checkpoints: Checkpoints) -> Tree | None:
    """Return the fingerprint of the data that the newest checkpoint has learnt from."""
    return checkpoints.peek(newest)[0]["data"] if (newest := checkpoints.newest()) is not None else None


def check_data(checkpoints: Checkpoints, now: Tree) -> None:
    """Refuse a damaged checkpoint, and changed data: a place in the order means the same rows only while both stay."""
    if (newest := checkpoints.newest()) is not None:
        checkpoints.check_whole(newest)
    changed = changes(checkpoints.peek(newest)[0]["data"], now) if newest is not None else []
    if changed:
        raise ConfigError(
            f"{newest}: the data is not what this run has learnt from: {'; '.join(changed)}. Going on would repeat "
            f"some rows and skip others: bring it back as it was, or start a new run with --model {newest}/model"
        )
