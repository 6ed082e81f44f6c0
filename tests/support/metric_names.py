"""The metrics that docs/metrics.md describes; words in capitals stand for any name."""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANY = re.compile(r"\b[A-Z]+\b")


def documented() -> list[str]:
    text = (ROOT / "docs/metrics.md").read_text()
    return re.findall(r"^\| `([^` ]+)` \|", text.partition("## What the numbers are")[2], re.MULTILINE)


KNOWN = re.compile("|".join(ANY.sub(".+", re.escape(name)) for name in documented()))


def undocumented(names: Iterable[str]) -> list[str]:
    return [name for name in names if not KNOWN.fullmatch(name)]
