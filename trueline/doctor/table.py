"""The findings of an examination as a table."""

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueline.config.base import ConfigError
from trueline.monitoring.findings import BAD, FAILING, FINE, LEVELS, REFUSED, WATCH, Finding

COLOURS = {REFUSED: "bold red", BAD: "red", WATCH: "yellow", FINE: "green"}
Findings = dict[str, list[Finding]]  # by family


def refusal(error: ConfigError) -> Finding:
    return Finding(REFUSED, "refused", str(error), "the run would not start", error.key)


def show(found: Findings) -> int:
    """Print the findings as a table, and return the exit status."""
    console, table = Console(highlight=False), Table("family", "level", "finding", "key")
    for family, findings in found.items():
        table.add_section()
        for number, one in enumerate(sorted(findings, key=lambda one: LEVELS.index(one.level))):
            level, text = Text(one.level, COLOURS[one.level]), Text("\n".join(filter(None, (one.what, one.why))))
            table.add_row("" if number else family, level, text, Text(one.key))
    console.print(table)
    counts = Counter(one.level for findings in found.values() for one in findings)
    console.print(", ".join(f"{counts[level]} {level}" for level in LEVELS), markup=False)
    return int(any(counts[level] for level in FAILING))
