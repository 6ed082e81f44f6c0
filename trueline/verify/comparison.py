"""What two ways of computing the same thing agree on: gaps, their limits, and the table of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from trueline.config.base import Tree
from trueline.models.scorer import NOISE

LEAST_MEAN, LEAST_LARGEST = 5e-5, 5e-4  # nats; a gap up to this is rounding in any model
LEAST_GRADIENT = 5e-4  # relative
Rows = list[np.ndarray]  # numbers of each sample's tokens


class Result(StrEnum):
    HOLDS = "holds"
    DIFFERS = "differs"
    REFUSED = "refused"  # a run would refuse it, too
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Comparison:
    check: str
    what: str  # is compared
    result: Result
    gap: float | None = None
    limit: float | None = None  # 0: bit for bit
    remark: str = ""
    parts: dict[str, float] = field(default_factory=dict)  # gaps of parts of it

    def as_row(self) -> Tree:
        names = ("check", "what", "result", "gap", "limit", "remark", "parts")
        return {name: finite(getattr(self, name)) for name in names}


def finite(value: object) -> object:
    """Return what JSON can hold."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(check: str, what: str, gap: float, limit: float, remark: str = "", **parts: float) -> Comparison:
    return Comparison(check, what, Result.HOLDS if gap <= limit else Result.DIFFERS, gap, limit, remark, parts)


class Bounds(NamedTuple):
    """How far the last bit of every embedded number moves the outputs, times a factor; real faults do far more."""

    mean: float
    largest: float
    gradient: float

    @classmethod
    def of(cls, plain: "Measurement", rounded: "Measurement") -> "Bounds":
        mean, largest = gaps(plain.logprobs, rounded.logprobs)
        gradient = distance(plain.gradient, rounded.gradient)
        found = (mean, LEAST_MEAN), (largest, LEAST_LARGEST), (gradient, LEAST_GRADIENT)
        return cls(*(max(least, NOISE * moved) for moved, least in found))


class Measurement(NamedTuple):
    """What a model says of the samples, and their gradient."""

    logprobs: Rows
    gradient: np.ndarray  # some numbers of every trained tensor


def gaps(one: Rows, other: Rows) -> tuple[float, float]:
    """Return the mean and the largest difference."""
    differences = np.abs(np.concatenate(one) - np.concatenate(other))
    return float(differences.mean()), float(differences.max())


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the length of the difference, relative to the first vector's; of other tensors it is endless."""
    if one.shape != other.shape:
        return math.inf
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(one)), 1e-30))


def compare_logprobs(check: str, expected: Rows, found: Rows, limits: Bounds, remark: str = "") -> Comparison:
    """Compare log-probs by their mean gap, unless it is a single token that differs."""
    mean, largest = gaps(expected, found)
    if mean <= limits.mean and not largest <= limits.largest:
        return compare(check, "log-probs, largest gap", largest, limits.largest, remark, mean=mean)
    return compare(check, "log-probs", mean, limits.mean, remark, largest=largest)


def compare_all(
    check: str, expected: Measurement, found: Measurement, limits: Bounds, remark: str = ""
) -> list[Comparison]:
    return [
        compare_logprobs(check, expected.logprobs, found.logprobs, limits, remark),
        compare(check, "gradients", distance(expected.gradient, found.gradient), limits.gradient, remark),
    ]


def table(found: Sequence[Comparison]) -> str:
    """Return a row for each comparison."""
    rows = [("check", "compared", "gap", "limit", "result")]
    for one in found:
        result = f"{one.result}: {one.remark}" if one.remark else one.result
        rows.append((one.check, one.what, number_text(one.gap), number_text(one.limit), result))
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    lines = ("  ".join([*(row[at].ljust(widths[at]) for at in range(4)), row[4]]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def number_text(number: float | None) -> str:
    if number is None:
        return ""
    return "0" if number == 0 else f"{number:.1e}"


def summary(found: Sequence[Comparison]) -> str:
    counts = {result: sum(one.result == result for one in found) for result in Result}
    always = (Result.HOLDS, Result.DIFFERS)
    return ", ".join(f"{count} {result}" for result, count in counts.items() if count or result in always)
