"""The ledger: every sampled prompt is in flight or has exactly one fate, and a wrong sum stops the run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from trueline.config.data import DifficultyConfig

Row = dict[str, list[int]]  # numbers by fate


class LedgerFailure(RuntimeError):
    """A prompt has two fates, or none."""


@dataclass(slots=True)
class Pools:
    """Rows that were too easy or too hard when last sampled, and how often each is still skipped."""

    easy: dict[int, int] = field(default_factory=dict)  # length of each row's last rest
    hard: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # skips of each row that rests

    @classmethod
    def of(cls, saved: dict[str, dict[str, int]]) -> Self:
        """Restore saved pools; JSON keys are strings."""
        return cls(**{name: dict(zip(map(int, rows), rows.values(), strict=True)) for name, rows in saved.items()})

    def judge(self, row: int, rate: float, config: DifficultyConfig) -> None:
        """Let a row with this pass rate rest, or be drawn again, whatever was said of it before."""
        before = self.easy.pop(row, 0), self.hard.pop(row, 0)
        self.left.pop(row, None)
        if rate > config.low and rate < config.high:
            return
        pool, last = (self.hard, before[1]) if rate <= config.low else (self.easy, before[0])
        self.left[row] = pool[row] = min(2 * last, config.longest_rest) or config.rest

    def skip(self, row: int) -> str:
        """Count that a resting row is skipped, and return the fate of its draw; return nothing if it does not rest."""
        if row not in self.left:
            return ""
        if self.left[row] == 1:
            self.wake(row)
        else:
            self.left[row] -= 1
        return "skipped_easy" if row in self.easy else "skipped_hard"

    def next_awake(self) -> int:
        """Return the row whose rest would end first."""
        return min(self.left, key=lambda row: (self.left[row], row))

    def wake(self, row: int) -> None:
        del self.left[row]


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
