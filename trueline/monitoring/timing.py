"""Seconds per phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """The phases since the last flush, and their sum."""
        taken, self.seconds = self.seconds, {}
        return {f"time/{name}": value for name, value in taken.items()} | {"time/step": sum(taken.values())}
