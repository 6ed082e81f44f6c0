"""Seconds per phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.flushed = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """Return the seconds of the phases since the last flush, and all the time since then, phases or not."""
        taken, self.seconds = self.seconds, {}
        before, self.flushed = self.flushed, time.perf_counter()
        return {f"time/{name}": value for name, value in taken.items()} | {"time/step": self.flushed - before}
