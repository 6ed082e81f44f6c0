"""Every prompt that was drawn has a number and one fate, or is under way; what does not add up stops the run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

Row = dict[str, list[int]]  # numbers by fate


class LedgerFailure(RuntimeError):
    """A prompt has two fates, or none."""


@dataclass(slots=True)
class Ledger:
    """Numbers are places in the order of the data. It is a part of every checkpoint."""

    drawn: int = 0
    under_way: dict[int, int] = field(default_factory=dict)  # row of each number that has no fate yet
    fates: dict[str, int] = field(default_factory=dict)  # how many numbers have met each: `trained`, or why not
    recent: Row = field(default_factory=dict)  # numbers by fate, since the last row was written

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Self:
        """Take up what was saved; JSON has no numbers as keys."""
        rows = {int(number): row for number, row in saved["under_way"].items()}
        return cls(saved["drawn"], rows, saved["fates"], saved["recent"])

    def draw(self, row: int) -> int:
        """Return the number of the next prompt of the order, which is this row of the data."""
        number, self.drawn = self.drawn, self.drawn + 1
        self.under_way[number] = row
        return number

    def close(self, numbers: Iterable[int], fate: str) -> None:
        for number in numbers:
            if self.under_way.pop(number, None) is None:
                raise LedgerFailure(f"prompt {number} is {fate}, and had its fate before or was never drawn")
            self.fates[fate] = self.fates.get(fate, 0) + 1
            self.recent.setdefault(fate, []).append(number)

    def rolled_back(self, before: "Ledger", rows: list[Row]) -> "Ledger":
        """Return this ledger as of a run that has lost what it trained on since an earlier one.

        The rows written since are given up with their steps, so the next row tells their numbers again.
        """
        lost = self.fates.get("trained", 0) - (kept := before.fates.get("trained", 0))
        fates = self.fates | {"trained": kept, "rolled_back": self.fates.get("rolled_back", 0) + lost}
        told: Row = {}
        for fate, numbers in (met for row in (*rows, self.recent) for met in row.items()):
            told.setdefault("rolled_back" if fate == "trained" else fate, []).extend(numbers)
        return Ledger(self.drawn, self.under_way, fates, told)

    def balance(self) -> str:
        """Return the sum of all that was drawn, in words; refuse one that does not come out even."""
        if sum(self.fates.values()) + len(self.under_way) != self.drawn:
            raise LedgerFailure(f"the ledger does not balance: {self._sum()}")
        return self._sum()

    def _sum(self) -> str:
        parts = [*self.fates.items(), ("under way", len(self.under_way))]
        return f"{self.drawn} prompts drawn = " + " + ".join(f"{count} {fate}" for fate, count in parts)

    def row(self) -> Row:
        """Return the numbers that met their fate since the last row."""
        found, self.recent = self.recent, {}
        return found
