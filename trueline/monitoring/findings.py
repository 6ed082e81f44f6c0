"""Findings: what a person should know of a run, as data; codes.csv documents each one, with its thresholds."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from trueline.files import read_table
from trueline.monitoring import limits

REFUSED, BAD, WATCH, FINE = LEVELS = ("refused", "bad", "watch", "fine")  # the worst first
FAILING = (REFUSED, BAD)
HEALTH_LEVELS = (FINE, WATCH, BAD)  # by the number in `health/level`
PREFIXES = {REFUSED: "error: ", BAD: "bad: ", WATCH: "warning: ", FINE: ""}  # of a line in the log


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found by a plan, the doctor, a start or a step; `CODES` documents its code."""

    level: str  # of LEVELS; "refused" ends a run or keeps it from starting
    code: str
    what: str
    why: str = ""
    key: str = ""  # of the configuration, to change

    def text(self) -> str:
        words = "; ".join(filter(None, (self.what, self.why)))
        return words + (f" ({self.key})" if self.key and self.key not in words else "")

    def line(self) -> str:
        return PREFIXES[self.level] + self.text()

    def row(self) -> dict[str, str]:
        return asdict(self)


class Code(NamedTuple):
    """A row of codes.csv, from which docs/troubleshooting.md is made."""

    section: str
    code: str
    meaning: str
    template: str  # of the threshold, with names of `limits`
    remedy: str

    def threshold(self) -> str:
        return self.template.format_map(vars(limits))


CODES = {row[1]: Code(*row) for row in read_table(Path(__file__).with_name("codes.csv"))}
