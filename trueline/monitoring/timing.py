"""Measure the seconds of each phase of a step, and say durations in words."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trueline.monitoring.beats import WORK


def duration(seconds: float) -> str:
    """Return a time as people say it, in its largest unit and the one below."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.flushed = time.perf_counter()
        self.latest = ""  # phase that was begun last

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, self.latest = time.perf_counter(), name
        try:
            with WORK.doing("phase", name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """Return the seconds of the phases since the last flush, and all the time since then, phases or not."""
        taken, self.seconds = self.seconds, {}
        before, self.flushed = self.flushed, time.perf_counter()
        return {f"time/{name}": value for name, value in taken.items()} | {"time/step": self.flushed - before}
