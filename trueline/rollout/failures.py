"""Completions without a reward are counted and grouped by cause, and too many of them stop the run."""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trueline.data.types import Trajectory
from trueline.rewards.base import last_words
from trueline.runtime.actors import ActorFailure

SMALLEST_WINDOW = 100  # completions; a share of fewer would let a single failure stop a small run
SHOWN, MOST_FILES = 3, 20  # causes that are named at the end, and that a file is written of

Report = Callable[[int, Trajectory], str]  # writes a numbered file about a failure, and returns how to look at it


class RolloutFailure(RuntimeError):
    """Sampling cannot go on; the message says why."""


class NothingToLearn(RolloutFailure):
    """Every group that was sampled for a step has one reward only."""


class EnginesDie(ActorFailure):
    """They cannot be brought back: each time they die of the same cause."""


class EngineLost(ActorFailure):
    """An engine is gone; what was sampled so far is kept, and sampling goes on once it is there again."""


def no_report(number: int, trajectory: Trajectory) -> str:
    return ""


@dataclass(slots=True)
class Cause:
    """Failures that have the same reason, the first of them, and how to look at it."""

    first: Trajectory
    look: str
    count: int = 0

    def words(self) -> str:
        return f"{self.first.outcome}: {last_words(self.first.error)}"


class FailureBudget:
    """Watch the completions of a run, one group after the other."""

    def __init__(self, share: float, completions_per_step: int, report: Report = no_report) -> None:
        self.share, self.report = share, report
        self.recent: deque[bool] = deque(maxlen=max(completions_per_step, SMALLEST_WINDOW))
        self.causes: dict[str, Cause] = {}
        self.seen = self.failed = 0  # completions
        self.reported_seen = self.reported_failed = 0  # of them, by the last report
        self.unreported: list[Cause] = []

    def add(self, group: list[Trajectory]) -> int:
        """Return how many of these completions failed, or raise RolloutFailure once the budget is spent."""
        failed = self.count(group)
        self.recent.extend(trajectory.outcome.failed for trajectory in group)
        if sum(self.recent) > self.share * (self.recent.maxlen or 0):
            shares = f"more than reward.max_failure_share={self.share:g} of {self.recent.maxlen}"
            raise RolloutFailure(
                f"{sum(self.recent)} of the last {len(self.recent)} answers have no reward, {shares}. {self.explain()}"
            )
        return failed

    def count(self, group: list[Trajectory]) -> int:
        """Count failures by cause, without drawing on the budget."""
        failed = [trajectory for trajectory in group if trajectory.outcome.failed]
        self.seen, self.failed = self.seen + len(group), self.failed + len(failed)
        for trajectory in failed:
            if (kind := cause_of(trajectory)) not in self.causes:
                look = self.report(len(self.causes) + 1, trajectory) if len(self.causes) < MOST_FILES else ""
                self.causes[kind] = Cause(trajectory, look)
                self.unreported.append(self.causes[kind])
            self.causes[kind].count += 1
        return len(failed)

    def news(self) -> list[str]:
        """Return a line where a cause is new, or failures have doubled since the last line."""
        if not self.unreported and self.failed < 2 * max(self.reported_failed, 1):
            return []
        seen, failed = self.seen - self.reported_seen, self.failed - self.reported_failed
        first = self.unreported[0] if self.unreported else max(self.causes.values(), key=lambda cause: cause.count)
        self.reported_seen, self.reported_failed, self.unreported = self.seen, self.failed, []
        look = f"; its call: {first.look}" if first.look else ""
        return [f"warning: {failed} of the last {seen} answers got no reward ({first.words()}){look}"]

    def total(self) -> list[str]:
        """Return a line for the end of a run in which some failed."""
        if not self.failed:
            return []
        frequent = "; ".join(f"{cause.count} x {cause.words()}" for cause in self.frequent())
        return [f"failed     {self.failed} of {self.seen} answers got no reward: {frequent}"]

    def frequent(self) -> list[Cause]:
        return sorted(self.causes.values(), key=lambda cause: -cause.count)[:SHOWN]

    def explain(self) -> str:
        """Name the most frequent causes, one example of each, and files that reproduce them."""
        shown = [f"{cause.count} x {cause.first.outcome}: {cause.first.error.strip()}" for cause in self.frequent()]
        again = "".join(f"\n{cause.look}" for cause in self.frequent() if cause.look)
        return "Most frequent:\n" + "\n".join(shown) + (f"\nTo see them again:{again}" if again else "")


def cause_of(trajectory: Trajectory) -> str:
    """Return what failures of the same cause share: the kind of exception and its place, or else all but numbers."""
    error = trajectory.error
    if places := re.findall(r'File ".+", line \d+', error):
        return f"{trajectory.outcome}: {places[-1]}: {last_words(error).partition(':')[0]}"
    return f"{trajectory.outcome}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', error)}"
