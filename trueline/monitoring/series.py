"""One metric over the steps of a run: where it began, where it is now, and whether chance explains the difference."""

from collections import deque
from dataclasses import dataclass, field
from math import copysign, inf, sqrt
from statistics import median

WINDOW = 5  # steps at the start that are compared with those at the end
LONGEST_WINDOW = 20  # at the end, in longer runs
REMEMBERED = 100  # steps
MEDIAN_ERROR = 1.2533  # standard error of a median, in that of a mean
MEAN_CHANGE = 1.1284  # mean distance of two normal numbers, in their standard deviation


@dataclass(slots=True)
class Series:
    """The first and the last values of a metric, and of all others as much as rules ask for."""

    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    count: int = 0
    changes: float = 0.0  # sum of what changed from step to step
    window: int = WINDOW
    recent: float = 0.0  # median of the last window
    lowest: float = inf
    best: float = -inf  # highest median of a window

    def add(self, value: float) -> None:
        if self.last:
            self.changes += abs(value - self.last[-1])
        if self.count < WINDOW:
            self.first.append(value)
        self.last.append(value)
        self.count += 1
        self.window = min(max(self.count // 4, WINDOW), LONGEST_WINDOW)
        self.recent = median(self.values()[-self.window :])
        self.lowest = min(self.lowest, value)
        if self.count >= 2 * WINDOW:
            self.best = max(self.best, self.recent)

    def values(self) -> list[float]:
        return list(self.last)

    def start(self) -> float:
        return median(self.first)

    def noise(self) -> float:
        """Return the standard deviation of a step, by what changes from step to step: a slow trend is no noise."""
        return self.changes / max(self.count - 1, 1) / MEAN_CHANGE

    def sigmas(self, change: float, steps_before: int = WINDOW) -> float:
        """Return a change from the median of `steps_before` to that of the last window, in its standard errors.

        A noise that few steps tell is uncertain: early changes count for less, and for nothing before two windows.
        """
        if change == 0 or self.count < 2 * WINDOW:
            return 0.0
        steps = 1 / steps_before + 1 / self.window
        error = MEDIAN_ERROR * self.noise() * sqrt(steps) * (1 + WINDOW / self.count)
        return change / error if error else copysign(inf, change)
