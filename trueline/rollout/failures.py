"""Completions without a reward are counted and grouped by cause, and too many of them stop the run."""

import re
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from trueline.data.types import Trajectory
from trueline.runtime.actors import ActorFailure

SMALLEST_WINDOW = 100  # completions; a share of fewer would let a single failure stop a small run
SHOWN = 3

Report = Callable[[list[Trajectory]], list[Path]]  # writes a file for each of some failures


class RolloutFailure(RuntimeError):
    """Sampling cannot go on; the message says why."""


class NothingToLearn(RolloutFailure):
    """Every group that was sampled for a step has one reward only."""


class EnginesDie(ActorFailure):
    """They cannot be brought back: each time they die of the same cause."""


class EngineLost(ActorFailure):
    """An engine is gone; what was sampled so far is kept, and sampling goes on once it is there again."""


def no_report(failed: list[Trajectory]) -> list[Path]:
    return []


class FailureBudget:
    """Watch the completions of a run, one group after the other."""

    def __init__(self, share: float, completions_per_step: int, report: Report = no_report) -> None:
        self.share, self.report = share, report
        self.recent: deque[bool] = deque(maxlen=max(completions_per_step, SMALLEST_WINDOW))
        self.causes: Counter[str] = Counter()
        self.examples: dict[str, Trajectory] = {}

    def add(self, group: list[Trajectory]) -> int:
        """Return how many of these completions failed, or raise RolloutFailure once the budget is spent."""
        failed = [trajectory for trajectory in group if trajectory.outcome.failed]
        self.recent.extend(trajectory.outcome.failed for trajectory in group)
        for trajectory in failed:
            cause = cause_of(trajectory)
            self.causes[cause] += 1
            self.examples.setdefault(cause, trajectory)
        if sum(self.recent) > self.share * (self.recent.maxlen or 0):
            raise RolloutFailure(self.explain())
        return len(failed)

    def explain(self) -> str:
        """Name the most frequent causes, one example of each, and files that reproduce them."""
        frequent = self.causes.most_common(SHOWN)
        files = self.report([self.examples[cause] for cause, _ in frequent])
        shown = [
            f"{count} x {self.examples[cause].outcome}: {self.examples[cause].error.strip()}"
            for cause, count in frequent
        ]
        again = "".join(f"\npython -m trueline.rewards.replay {file}" for file in files)
        return (
            f"{sum(self.recent)} of the last {len(self.recent)} answers have no reward, more than "
            f"reward.max_failure_share={self.share:g} of {self.recent.maxlen}. Most frequent:\n"
            + "\n".join(shown)
            + (f"\nTo see them again:{again}" if again else "")
        )


def cause_of(trajectory: Trajectory) -> str:
    """Return the cause, which is one for failures that differ in numbers only, such as addresses and counts."""
    return f"{trajectory.outcome}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', trajectory.error)}"
