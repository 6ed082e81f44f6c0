"""The progress of a run: a live panel in a terminal or a notebook, plain lines elsewhere, and who follows it."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trueline.monitoring.findings import Finding
from trueline.monitoring.health import describe_health
from trueline.monitoring.metrics import SHOWN
from trueline.monitoring.run_folder import RunFolder


def shown_metrics(metrics: dict[str, float]) -> dict[str, str]:
    """Return what the screen shows of these metrics, by label; skipped steps once there is one."""
    shown = [one for one in SHOWN if one.name in metrics and (one.name != "skipped_steps" or metrics[one.name])]
    return {one.label: f"{metrics[one.name]:{one.form}}" for one in shown}


@dataclass(slots=True, eq=False)
class Follower:
    """The code that started a run: it hears of every step, may ask the run to stop, and can write its report."""

    tell: Callable[[dict[str, Any]], object] = lambda metrics: None
    stops: bool = False
    write_report: Callable[[RunFolder, Path], object] | None = None


class NotebookPanel:
    """The panel below a notebook's cell: one display, which every step draws again."""

    def __init__(self) -> None:
        self.handle: Any = None

    def start(self) -> None:
        self.handle = None

    def update(self, panel: Any) -> None:
        from IPython.display import display  # noqa: PLC0415

        if self.handle is None:
            self.handle = display(panel, display_id=True)
        else:
            self.handle.update(panel)

    def stop(self) -> None:
        """Leave the panel as it is: a cell keeps what it has shown."""


class Progress:
    """A context manager around the loop; what it prints is also written to the run's log."""

    def __init__(
        self,
        title: str,
        total: int,
        console: Console | None = None,
        folder: RunFolder | None = None,
        follower: Follower | None = None,
    ) -> None:
        self.title, self.total, self.folder = title, total, folder
        self.console, self.follower = console or Console(highlight=False), follower or Follower()
        self.live: Live | NotebookPanel | None = None
        if self.console.is_jupyter:
            self.live = NotebookPanel()
        elif self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=4)
        self.first_step: int | None = None
        self.last_step, self.started = 0, time.monotonic()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            if self.live is not None:
                self.live.stop()

    def note(self, message: str) -> None:
        with suppress(OSError):  # the screen may be gone, or a file on a full disk
            self.console.print(message, markup=False, soft_wrap=True)
        if self.folder is not None:
            add_line(self.folder.log, message)

    def report(self, finding: Finding, step: int | None = None) -> None:
        self.note(finding.line())
        self.record([finding], step)

    def record(self, findings: Iterable[Finding], step: int | None = None) -> None:
        """Write findings to findings.jsonl, with the step after which they were found."""
        if self.folder is None:
            return
        for one in findings:
            row = {"step": self.last_step if step is None else step, **one.row()}
            add_line(self.folder.findings, json.dumps(row, ensure_ascii=False))

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.last_step = step
        if self.first_step is None:  # the time before the first step says little about the others
            self.first_step = step - 1
            self.started = time.monotonic() - metrics.get("time/step", 0.0)
        if self.live is None:
            self.note(self.line(step, metrics))
        else:
            with suppress(OSError):
                self.live.update(self.panel(step, metrics))
        self.follower.tell({"step": step, **metrics})

    def stops(self) -> bool:
        """Tell whether the code that follows the run has asked for its end."""
        return self.follower.stops

    def line(self, step: int, metrics: dict[str, float]) -> str:
        numbers = "  ".join(f"{label} {number}" for label, number in shown_metrics(metrics).items())
        health = f"  health {found}" if (found := describe_health(metrics)) else ""
        return f"{self.title} {step}/{self.total}  {numbers}  {phases(metrics)}  eta {self.remaining(step)}{health}"

    def panel(self, step: int, metrics: dict[str, float]) -> Table:
        # No markup: a note printed above the panel has the panel drawn again as the note is, without markup.
        head = f" step {step}/{self.total}   eta {self.remaining(step)}   {phases(metrics)}   "
        pairs = [((label, "dim"), "\n", (number, "bold")) for label, number in shown_metrics(metrics).items()]
        numbers = [Text.assemble(*pair, no_wrap=True) for pair in pairs]
        panel = Table.grid()
        panel.add_row(Text.assemble((self.title, "bold"), head + describe_health(metrics)))
        panel.add_row(ProgressBar(total=self.total, completed=step, width=60))
        panel.add_row(Columns(numbers, padding=(0, 2)))
        return panel

    def remaining(self, step: int) -> str:
        assert self.first_step is not None
        seconds = (time.monotonic() - self.started) / (step - self.first_step) * (self.total - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def phases(metrics: dict[str, float]) -> str:
    names = [key for key in metrics if key.startswith("time/") and key != "time/step"]
    parts = " ".join(f"{key.removeprefix('time/')} {metrics[key]:.1f}" for key in names)
    return f"{metrics['time/step']:.1f} s ({parts})" if "time/step" in metrics else ""


def add_line(file: Path, line: str) -> None:
    with suppress(OSError), file.open("a", encoding="utf-8", errors="backslashreplace") as lines:
        lines.write(line + "\n")
