"""Memory of Python's objects, counted."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def memory_counted() -> Iterator[Callable[[], int]]:
    """Give a function that tells how many bytes were in use at most inside, beyond those before."""
    tracemalloc.start()
    before, peaks = tracemalloc.get_traced_memory()[0], [0]
    try:
        yield lambda: peaks[0]
    finally:
        peaks[0] = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
