"""The ledger: every sampled prompt is in flight or has exactly one fate, and a wrong sum stops the run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from trueline.config.data import DifficultyConfig

Rest = tuple[int, int]  # how often a row is still skipped, and how long this rest is
Row = dict[str, list[int]]  # numbers by fate


class LedgerFailure(RuntimeError):
    """A prompt has two fates, or none."""


@dataclass(slots=True)
class Pools:
    """Rows that were too easy or too hard when last sampled, each with its rest; all others are in neither pool."""

    easy: dict[int, Rest] = field(default_factory=dict)
    hard: dict[int, Rest] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: dict[str, dict[str, list[int]]]) -> Self:
        """Restore saved pools; JSON keys are strings."""
        return cls(
            **{name: {int(row): (left, rest) for row, (left, rest) in pool.items()} for name, pool in saved.items()}
        )

    def named(self) -> dict[str, dict[int, Rest]]:
        return {"easy": self.easy, "hard": self.hard}

    def judge(self, row: int, rate: float, config: DifficultyConfig) -> None:
        """Let a row with this pass rate rest, or be drawn again, whatever was said of it before."""
        before = {name: pool.pop(row) for name, pool in self.named().items() if row in pool}
        name = "hard" if rate <= config.low else "easy" if rate >= config.high else ""
        if name:
            rest = min(2 * before[name][1], config.longest_rest) if name in before else config.rest
            self.named()[name][row] = rest, rest

    def why_resting(self, row: int) -> str:
        """Return the pool in which a row rests, or nothing."""
        return next((name for name, pool in self.named().items() if pool.get(row, (0, 0))[0]), "")

    def skip(self, row: int, name: str) -> str:
        """Count that a resting row is skipped; return the fate of its draw."""
        left, rest = self.named()[name][row]
        self.named()[name][row] = left - 1, rest
        return f"skipped_{name}"

    def wake(self) -> int:
        """End the rest that would end first, and return its row."""
        resting = [(left, row, pool) for pool in (self.easy, self.hard) for row, (left, _) in pool.items() if left]
        _, row, pool = min(resting, key=lambda one: one[:2])
        pool[row] = 0, pool[row][1]
        return row


@dataclass(slots=True)
class Ledger:
    """Numbers are positions in the order of the data. It is saved in every checkpoint."""

    drawn: int = 0
    under_way: dict[int, int] = field(default_factory=dict)  # row of each number without a fate
    fates: dict[str, int] = field(default_factory=dict)  # how many numbers have each: `trained`, or why not
    recent: Row = field(default_factory=dict)  # numbers by fate since the last row
    pools: Pools = field(default_factory=Pools)  # of rows, by the pass rates of those with a fate

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Self:
        """Restore a saved ledger; JSON keys are strings."""
        rows = {int(number): row for number, row in saved["under_way"].items()}
        return cls(saved["drawn"], rows, saved["fates"], saved["recent"], Pools.of(saved.get("pools", {})))

    def draw(self, row: int) -> int:
        number, self.drawn = self.drawn, self.drawn + 1
        self.under_way[number] = row
        return number

    def close(self, numbers: Iterable[int], fate: str) -> None:
        for number in numbers:
            if self.under_way.pop(number, None) is None:
                raise LedgerFailure(f"prompt {number} is {fate}, but it already had a fate or was never sampled")
            self.fates[fate] = self.fates.get(fate, 0) + 1
            self.recent.setdefault(fate, []).append(number)

    def roll_back(self, before: "Ledger", rows: list[Row]) -> "Ledger":
        """Return this ledger with the training since an earlier one undone, and with the pools of that one.

        The rows since then are discarded with their steps, so the next row has their numbers again.
        """
        lost = self.fates.get("trained", 0) - (kept := before.fates.get("trained", 0))
        fates = self.fates | {"trained": kept, "rolled_back": self.fates.get("rolled_back", 0) + lost}
        recent: Row = {}
        for fate, numbers in (entry for row in (*rows, self.recent) for entry in row.items()):
            recent.setdefault("rolled_back" if fate == "trained" else fate, []).extend(numbers)
        return Ledger(self.drawn, self.under_way, fates, recent, before.pools)

    def balance(self) -> str:
        """Describe the fates of all sampled prompts; refuse a sum that does not match."""
        counts = {**self.fates, "in flight": len(self.under_way)}
        parts = [f"{count} {fate.replace('_', ' ')}" for fate, count in counts.items() if count]
        words = f"{self.drawn} prompts sampled: {', '.join(parts)}"
        if sum(counts.values()) != self.drawn:
            raise LedgerFailure(f"the ledger does not balance: {words}")
        return f"{self.drawn} prompts sampled, all trained" if counts.get("trained") == self.drawn else words

    def row(self) -> Row:
        """Return the numbers by fate since the last row."""
        found, self.recent = self.recent, {}
        return found
