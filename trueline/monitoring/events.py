"""The timeline of a run: spans of the driver's activities, merged as they end, one row per step."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from trueline.monitoring.heartbeat import RUN, WORK, Activity, ActivityLog, other_beats, process_of

MOST_SPANS = 200  # of a step; beyond, gaps are closed, the shortest first
GAP_SECONDS = 0.002  # between two spans that count as one
MEMORY_SECONDS = 1.0  # at least, between two looks at it
GIB = 2**30
Key = tuple[str, str]  # who and what
Span = tuple[float, float]  # from and to, in seconds since the epoch

ROWS: dict[str, Callable[[str, str], Key]] = {  # of a timeline, by the kind of work; other kinds only wait
    "phase": lambda who, what: (RUN, who),
    "call": lambda who, what: (who, what),
    "reward": lambda who, what: ("rewards", who),
    "environment": lambda who, what: ("environments", who),
}


def add_span(spans: list[Span], since: float, ended: float) -> None:
    """Add a span to a lane: the spans of one activity of one process, disjoint, the earliest first."""
    while spans and spans[-1][1] + GAP_SECONDS >= since:
        begun, before = spans.pop()
        since, ended = min(begun, since), max(before, ended)
    spans.append((since, ended))
    if len(spans) > 2 * MOST_SPANS:
        close_gaps(spans, MOST_SPANS)


def gaps_of(spans: list[Span]) -> list[float]:
    return [later[0] - earlier[1] for earlier, later in pairwise(spans)]


def close_gaps(spans: list[Span], count: int) -> None:
    """Close so many gaps, the shortest first."""
    gaps = gaps_of(spans)
    for place in sorted(sorted(range(len(gaps)), key=gaps.__getitem__)[:count], reverse=True):
        spans[place : place + 2] = [(spans[place][0], spans[place + 1][1])]


class Events:
    """The activities since the last row; those in flight are split where a row ends."""

    def __init__(self, logs: Path, work: ActivityLog = WORK) -> None:
        self.logs, self.work = logs, work
        self.lanes: dict[Key, list[Span]] = {}
        self.start, self.looked = time.time(), 0.0
        work.recorder = self.add

    def stop(self) -> None:
        if self.work.recorder == self.add:
            self.work.recorder = None

    def add(self, doing: Activity, ended: float | None = None) -> None:
        """Add an activity that ends now, or is split now; the caller holds the lock."""
        if doing.kind not in ROWS:
            return
        spans = self.lanes.setdefault(ROWS[doing.kind](doing.who, doing.what), [])
        since = max(doing.since, self.start)
        add_span(spans, since, max(since, time.time() if ended is None else ended))

    def row(self) -> dict[str, Any]:
        """Return the spans since the last row, in seconds from its start, and the memory of the processes."""
        with self.work.lock:
            now = time.time()
            for one in list(self.work.all):
                self.add(one, now)
            start, self.start = self.start, now
            lanes, self.lanes = self.lanes, {}
        spans, left_out = limit_spans(lanes)
        shown = [[*key, round(since - start, 3), round(ended - start, 3)] for key, since, ended in spans]
        row: dict[str, Any] = {"start": round(start, 3), "seconds": round(now - start, 3), "spans": shown}
        if left_out:
            row["left_out"] = left_out
        if now - self.looked >= MEMORY_SECONDS:
            self.looked, row["memory"] = now, resident_memory(self.logs)
        return row


def limit_spans(lanes: dict[Key, list[Span]]) -> tuple[list[tuple[Key, float, float]], int]:
    """Return the spans of all lanes, few enough, and how many were left out."""
    gaps = sorted((gap, key) for key, spans in lanes.items() for gap in gaps_of(spans))
    excess = max(len(gaps) + len(lanes) - MOST_SPANS, 0)
    for key, count in Counter(key for _, key in gaps[:excess]).items():
        close_gaps(lanes[key], count)
    found = [(key, *span) for key, spans in lanes.items() for span in spans]
    found.sort(key=lambda one: (one[0][0] != RUN, one[1] - one[2]))  # phases first, then the longest
    return sorted(found[:MOST_SPANS], key=lambda one: one[1]), max(len(found) - MOST_SPANS, 0)


def resident_memory(logs: Path) -> dict[str, float]:
    """Return the GiB of the driver and of all processes with a heartbeat on this machine."""
    processes: dict[str, psutil.Process | None] = {RUN: psutil.Process()}
    processes |= {beat.name: process_of(beat) for beat in other_beats(logs, RUN)}
    found: dict[str, float] = {}
    for name, process in processes.items():
        with suppress(psutil.Error):  # it is gone
            found |= {name: round(process.memory_info().rss / GIB, 3)} if process is not None else {}
    return {name: gib for name, gib in found.items() if gib}
