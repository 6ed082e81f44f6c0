"""Numbers and lists as a page takes them: finite, short, and not too many."""

import math
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def rounded(value: Any) -> float | None:
    if not is_number(value) or isinstance(value, int):
        return value if is_number(value) else None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short


def evenly(items: list[Any], count: int) -> list[Any]:
    """Choose so many, from the first to the last."""
    if len(items) <= count:
        return items
    return [items[place * (len(items) - 1) // max(count - 1, 1)] for place in range(count)]
