"""What a check finds of a run that has not begun, and all findings as a table."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueline.config.base import Config, keys_of

LEVELS = {"refused": "bold red", "bad": "red", "watch": "yellow", "fine": "green"}  # the worst first, with its colour
FAILING = ("refused", "bad")
KEY = r"[a-z_]+(?:\.[a-z_]+)+|[a-z]+(?:_[a-z]+)+|[a-z]+(?==)"  # as messages write keys
REMEDY = rf"(?:set|raise|lower|with) ({KEY})"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know before a run: how grave it is, why it matters, and the key to change."""

    level: str  # of LEVELS
    what: str
    why: str = ""
    key: str = ""


Findings = dict[str, list[Finding]]  # by family


def refusal(error: Exception, kind: type[Config]) -> Finding:
    """Make a finding of what a run would be refused with."""
    return Finding("refused", str(error), "the run would not start", named_key(str(error), kind))


def named_key(text: str, kind: type[Config]) -> str:
    """Return the key that a message asks to change, or the first that it names."""
    words = [*re.findall(REMEDY, text), *re.findall(KEY, text)]
    known = set(keys_of(kind))
    parts = (word.split(".") for word in words)
    paths = (".".join(part[:end]) for part in parts for end in range(len(part), 0, -1))
    return next((path for path in paths if path in known), "")


def line_of(one: Finding) -> str:
    """Put a finding into a line of a plan."""
    words = "; ".join(filter(None, (one.what, one.why)))
    return f"doctor     {one.level}: {words}" + (f" ({one.key})" if one.key else "")


def share(part: int, whole: int) -> str:
    percent = f"{100 * part / max(whole, 1):.0f}"
    return f"{part} of {whole} rows" + (f" ({percent} %)" if percent != "0" else "")


def show(found: Findings) -> int:
    """Print the findings, and return the exit status that they deserve."""
    console = Console(highlight=False)
    console.print(table_of(found))
    counts = Counter(one.level for findings in found.values() for one in findings)
    console.print(", ".join(f"{counts[level]} {level}" for level in LEVELS), markup=False)
    return int(any(counts[level] for level in FAILING))


def table_of(found: Findings) -> Table:
    table = Table("family", "level", "finding", "key")
    for family, findings in found.items():
        table.add_section()
        for number, one in enumerate(sorted(findings, key=lambda one: list(LEVELS).index(one.level))):
            level, text = Text(one.level, LEVELS[one.level]), Text("\n".join(filter(None, (one.what, one.why))))
            table.add_row("" if number else family, level, text, Text(one.key))
    return table


def fill(found: Iterable[Finding], checks: int, unread: str) -> list[Finding]:
    """Return the findings, or a word that there are none; and one that some were not made."""
    left_out = [Finding("watch", f"some checks were left out: {unread}")] * bool(unread)
    return [*found, *left_out] or [Finding("fine", f"nothing was found by {checks} check{'s' * (checks > 1)}")]
