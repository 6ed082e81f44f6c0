"""All metrics that a run may report: metrics.csv has a row for each, from which the docs are made."""

import re
from pathlib import Path
from typing import NamedTuple

from trueline.files import read_table


class Metric(NamedTuple):
    """A metric; a word in capitals in its name stands for any text."""

    section: str  # of docs/metrics.md
    name: str
    unit: str
    better: str  # higher or lower, where one of them is
    meaning: str
    healthy: str  # and what to do otherwise
    chart: str  # title of its chart in a report
    label: str  # on the screen
    form: str  # of its number there

    def pattern(self) -> str:
        return re.sub(r"\b[A-Z]+\b", ".+", re.escape(self.name))


METRICS = tuple(Metric(*row) for row in read_table(Path(__file__).with_suffix(".csv")))
NAMES = {one.name: one for one in METRICS}
CHARTS = {one.name: one.chart for one in METRICS if one.chart}
SHOWN = tuple(one for one in METRICS if one.label)


def find(name: str) -> Metric | None:
    return NAMES.get(name) or next((one for one in METRICS if re.fullmatch(one.pattern(), name)), None)


def is_known(name: str) -> bool:
    return find(name) is not None


def better(name: str) -> str:
    """Return whether a metric had better be `higher` or `lower`; empty if neither, or if it is unknown."""
    known = find(name)
    return known.better if known else ""
