"""What a page shows of a run's events: some of its steps span by span, and the memory of its processes."""

from typing import Any

from trueline.report.numbers import evenly, is_number, rounded
from trueline.report.runs import Row

MOST_STEPS = 20  # in a row, that are shown at once
MOST_POINTS, MOST_PROCESSES = 200, 16  # of the memory


def timeline(events: list[Row], count: int) -> Row | None:
    """Return so many of the first, middle and last steps, and the longest; None where nothing is recorded."""
    rows = [row for row in events if is_number(row.get("start")) and is_number(row.get("seconds"))]
    if not rows or not count:
        return None
    middle, worst = max((len(rows) - count) // 2, 0), max(range(len(rows)), key=lambda place: rows[place]["seconds"])
    windows = {
        "last": range(len(rows))[-count:],
        "first": range(len(rows))[:count],
        "middle": range(len(rows))[middle : middle + count],
        "worst": range(worst, worst + 1),
    }
    kept = sorted({place for window in windows.values() for place in window})
    names: dict[str, int] = {}
    return {
        "steps": [step_of(rows[place], names) for place in kept],
        "names": list(names),
        "windows": {name: [kept.index(window[0]), len(window)] for name, window in windows.items()},
    }


def step_of(row: Row, names: dict[str, int]) -> Row:
    """Return a step whose names are numbers, and number those that are new."""
    spans = [span for span in listed(row.get("spans")) if is_span(span)]
    numbered = [[names.setdefault(name, len(names)) for name in span[:2]] + span[2:] for span in spans]
    return {"step": row["step"], "start": row["start"], "seconds": row["seconds"], "spans": numbered}


def is_span(value: Any) -> bool:
    told = isinstance(value, list) and len(value) == 4
    return told and all(isinstance(name, str) for name in value[:2]) and all(map(is_number, value[2:]))


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def memory(events: list[Row]) -> Row | None:
    """Return the GiB of the largest processes along the steps; None where nobody looked."""
    rows = evenly([row for row in events if isinstance(row.get("memory"), dict)], MOST_POINTS)
    most: dict[str, float] = {}
    for name, gib in (pair for row in rows for pair in row["memory"].items() if is_number(pair[1])):
        most[name] = max(gib, most.get(name, 0.0))
    largest = sorted(most, key=lambda name: -most[name])[:MOST_PROCESSES]
    found = {name: [rounded(row["memory"].get(name)) for row in rows] for name in largest}
    return {"step": [row["step"] for row in rows], "gib": found} if found else None
