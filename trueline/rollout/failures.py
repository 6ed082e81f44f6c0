"""Completions without a reward are counted by cause; too many of them stop the run."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trueline.rewards.base import short_cause
from trueline.rollout.summary import Episode
from trueline.runtime.actors import ActorFailure

SMALLEST_WINDOW = 100  # completions; a share of fewer would let a single failure stop a small run
SHOWN, MOST_FILES = 3, 20  # causes that are shown, and that get a file

Report = Callable[[int, Any], str]  # writes a numbered file about a failure, and returns how to reproduce it


class RolloutFailure(RuntimeError):
    """Sampling cannot continue."""


class NothingToLearn(RolloutFailure):
    """All groups of a step have equal rewards."""


class UnusableData(RolloutFailure):
    """A row of a large dataset, which is read when it is drawn, cannot be used."""


class EngineCrashLoop(ActorFailure):
    """Engines keep dying of the same cause."""


class EngineLost(ActorFailure):
    """An engine is gone; sampling continues after its restart, and keeps what was sampled."""


@dataclass(slots=True)
class Cause:
    first: Episode
    reproduce: str
    count: int = 0

    def words(self) -> str:
        return f"{self.first.outcome}: {short_cause(self.first.error)}"


class FailureBudget:
    def __init__(self, share: float, completions_per_step: int, report: Report = lambda *_: "") -> None:
        self.share, self.report = share, report
        self.recent: deque[bool] = deque(maxlen=max(completions_per_step, SMALLEST_WINDOW))
        self.causes: dict[str, Cause] = {}
        self.seen = self.failed = 0  # completions
        self.reported_seen = self.reported_failed = 0  # of them, by the last report
        self.unreported: list[Cause] = []

    def add(self, group: Sequence[Episode]) -> int:
        """Return how many of these completions failed; raise RolloutFailure when the budget is exceeded."""
        failed = self.count(group)
        self.recent.extend(trajectory.outcome.is_failure for trajectory in group)
        if sum(self.recent) > self.share * (self.recent.maxlen or 0):
            limit = f"more than reward.max_failure_share={self.share:g} of {self.recent.maxlen}"
            counts = f"{sum(self.recent)} of the last {len(self.recent)} completions have no reward"
            raise RolloutFailure(f"{counts}, {limit}. {self.explain()}")
        return failed

    def count(self, group: Sequence[Episode]) -> int:
        """Count failures by cause, without charging the budget."""
        failed = [trajectory for trajectory in group if trajectory.outcome.is_failure]
        self.seen, self.failed = self.seen + len(group), self.failed + len(failed)
        for trajectory in failed:
            if (kind := cause_of(trajectory)) not in self.causes:
                reproduce = self.report(len(self.causes) + 1, trajectory) if len(self.causes) < MOST_FILES else ""
                self.causes[kind] = Cause(trajectory, reproduce)
                self.unreported.append(self.causes[kind])
            self.causes[kind].count += 1
        return len(failed)

    def news(self) -> list[str]:
        """Return a line if a cause is new, or failures have doubled since the last line."""
        if not self.unreported and self.failed < 2 * max(self.reported_failed, 1):
            return []
        seen, failed = self.seen - self.reported_seen, self.failed - self.reported_failed
        first = self.unreported[0] if self.unreported else max(self.causes.values(), key=lambda cause: cause.count)
        self.reported_seen, self.reported_failed, self.unreported = self.seen, self.failed, []
        again = f"; reproduce it: {first.reproduce}" if first.reproduce else ""
        return [f"warning: {failed} of the last {seen} completions got no reward ({first.words()}){again}"]

    def total(self) -> list[str]:
        if not self.failed:
            return []
        frequent = "; ".join(f"{cause.count} x {cause.words()}" for cause in self.frequent())
        return [f"failed     {self.failed} of {self.seen} completions got no reward: {frequent}"]

    def frequent(self) -> list[Cause]:
        return sorted(self.causes.values(), key=lambda cause: -cause.count)[:SHOWN]

    def explain(self) -> str:
        """Describe the most frequent causes with an example of each, and how to reproduce them."""
        shown = [f"{cause.count} x {cause.first.outcome}: {cause.first.error.strip()}" for cause in self.frequent()]
        again = "".join(f"\n{cause.reproduce}" for cause in self.frequent() if cause.reproduce)
        return "Most frequent:\n" + "\n".join(shown) + (f"\nReproduce them:{again}" if again else "")


def cause_of(trajectory: Episode) -> str:
    """Return the same text for failures of one cause: exception type and place, or the error without its numbers."""
    error = trajectory.error
    if places := re.findall(r'File ".+", line \d+', error):
        return f"{trajectory.outcome}: {places[-1]}: {short_cause(error).partition(':')[0]}"
    return f"{trajectory.outcome}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', error)}"
