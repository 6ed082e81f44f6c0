"""The timeline of a run: spans of the driver's activities, merged as they end, one row per step."""

import time
from collections import Counter
from collections.abc import Callable
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


class Lane:
    """Spans of one activity of one process, disjoint, the earliest first."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, since: float, ended: float) -> None:
        while self.spans and self.spans[-1][1] + GAP_SECONDS >= since:
            begun, before = self.spans.pop()
            since, ended = min(begun, since), max(before, ended)
        self.spans.append((since, ended))
        if len(self.spans) > 2 * MOST_SPANS:
            self.close(MOST_SPANS)

    def gaps(self) -> list[float]:
        return [later[0] - earlier[1] for earlier, later in pairwise(self.spans)]

    def close(self, count: int) -> None:
        """Close so many gaps, the shortest first."""
        gaps = self.gaps()
        closed = set(sorted(range(len(gaps)), key=gaps.__getitem__)[:count])
        starts = [place for place in range(len(self.spans)) if place - 1 not in closed]
        ends = [place - 1 for place in starts[1:]] + [len(self.spans) - 1]
        self.spans = [(self.spans[first][0], self.spans[last][1]) for first, last in zip(starts, ends, strict=True)]


class Events:
    """The activities since the last row; those in flight are split where a row ends."""

    def __init__(self, logs: Path, work: ActivityLog = WORK) -> None:
        self.logs, self.work = logs, work
        self.lanes: dict[Key, Lane] = {}
        self.start = time.time()
        self.looked = 0.0
        work.recorder = self.add

    def stop(self) -> None:
        if self.work.recorder == self.add:
            self.work.recorder = None

    def add(self, doing: Activity) -> None:
        """Add an activity that ends now; the caller holds the lock."""
        if doing.kind in ROWS:
            self._record(doing, time.time())

    def _record(self, doing: Activity, ended: float) -> None:
        key = ROWS[doing.kind](doing.who, doing.what)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane()
        since = max(doing.since, self.start)
        lane.add(since, max(since, ended))

    def row(self) -> dict[str, Any]:
        """Return the spans since the last row, in seconds from its start, and the memory of the processes."""
        with self.work.lock:
            now = time.time()
            for one in (one for one in list(self.work.all) if one.kind in ROWS):
                self._record(one, now)
            start, self.start = self.start, now
            lanes, self.lanes = self.lanes, {}
        spans, left_out = limit_spans(lanes)
        shown = [[*key, round(since - start, 3), round(ended - start, 3)] for key, since, ended in spans]
        row: dict[str, Any] = {"start": round(start, 3), "seconds": round(now - start, 3), "spans": shown}
        return row | ({"left_out": left_out} if left_out else {}) | self._memory(now)

    def _memory(self, now: float) -> dict[str, Any]:
        if now - self.looked < MEMORY_SECONDS:
            return {}
        self.looked = now
        return {"memory": resident_memory(self.logs)}


def limit_spans(lanes: dict[Key, Lane]) -> tuple[list[tuple[Key, float, float]], int]:
    """Return the spans of all lanes, few enough, and how many were left out."""
    gaps = sorted((gap, key) for key, lane in lanes.items() for gap in lane.gaps())
    excess = max(len(gaps) + len(lanes) - MOST_SPANS, 0)
    for key, count in Counter(key for _, key in gaps[:excess]).items():
        lanes[key].close(count)
    found = [(key, *span) for key, lane in lanes.items() for span in lane.spans]
    found.sort(key=lambda one: (one[0][0] != RUN, one[1] - one[2]))  # phases first, then the longest
    return sorted(found[:MOST_SPANS], key=lambda one: one[1]), max(len(found) - MOST_SPANS, 0)


def resident_memory(logs: Path) -> dict[str, float]:
    """Return the GiB of the driver and of all processes with a heartbeat on this machine."""
    found = {RUN: gib_of(psutil.Process())}
    for beat in other_beats(logs, RUN):
        process = process_of(beat)
        found |= {beat.name: gib_of(process)} if process is not None else {}
    return {name: gib for name, gib in found.items() if gib}


def gib_of(process: psutil.Process) -> float:
    try:
        return round(process.memory_info().rss / GIB, 3)
    except psutil.Error:  # it is gone
        return 0.0
