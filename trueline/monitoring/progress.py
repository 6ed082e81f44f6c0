"""What a person sees of a run: a live panel in a terminal, plain lines elsewhere."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trueline.monitoring.health import verdict_words

# key in the metrics, name on the screen, format
SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("preference/accuracy", "accuracy", ".0%"),
    ("preference/margin", "margin", ".3f"),
    ("reward_model/accuracy", "accuracy", ".0%"),
    ("reward_model/margin", "margin", ".3f"),
    ("process_reward/accuracy", "accuracy", ".0%"),
    ("kto/accuracy", "accuracy", ".0%"),
    ("evaluation/loss", "eval loss", ".4f"),
    ("response_length/mean", "length", ".0f"),
    ("response_length/truncated_share", "truncated", ".0%"),
    ("policy/kl", "kl", ".4f"),
    ("policy/sequence_kl", "kl/response", ".3f"),
    ("distill/kl_per_token", "kl to teacher", ".4f"),
    ("critic/explained_variance", "critic", ".2f"),
    ("policy/entropy", "entropy", ".3f"),
    ("mismatch/logprob_gap_mean", "gap", ".1e"),
    ("grad_norm", "grad", ".2f"),
    ("evaluation/reward", "eval", ".3f"),
    ("skipped_steps", "skipped", ".0f"),
    ("speed/tokens_per_second", "tok/s", ".0f"),
    ("speed/mfu", "mfu", ".0%"),
)


def shown_keys(metrics: dict[str, float]) -> list[tuple[str, str, str]]:
    """Return the entries of SHOWN that these metrics have; skipped steps are shown once there is one."""
    return [entry for entry in SHOWN if entry[0] in metrics and (entry[0] != "skipped_steps" or metrics[entry[0]])]


class Progress:
    """The progress of a run on the screen: a context manager around the loop; `note` prints a line that stays."""

    def __init__(self, title: str, total: int, console: Console | None = None, log: Path | None = None) -> None:
        self.title, self.total, self.log = title, total, log
        self.console = console or Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self.first_step: int | None = None
        self.started = time.monotonic()

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
        with suppress(OSError):
            if self.log is not None:
                with self.log.open("a", encoding="utf-8") as lines:
                    lines.write(message + "\n")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self.first_step is None:  # what came before the first step, starting processes above all, is no guide
            self.first_step = step - 1
            self.started = time.monotonic() - metrics.get("time/step", 0.0)
        if self.live is None:
            self.note(self.line(step, metrics))
        else:
            with suppress(OSError):
                self.live.update(self.panel(step, metrics))

    def line(self, step: int, metrics: dict[str, float]) -> str:
        numbers = "  ".join(f"{name} {metrics[key]:{form}}" for key, name, form in shown_keys(metrics))
        verdict = verdict_words(metrics)
        said = f"  health {verdict}" if verdict else ""
        return f"{self.title} {step}/{self.total}  {numbers}  {phases(metrics)}  eta {self.remaining(step)}{said}"

    def panel(self, step: int, metrics: dict[str, float]) -> Table:
        """Return the panel, as wide as the screen at most; numbers that do not fit beside each other go below."""
        # No markup: a note printed above the panel has the panel drawn again as the note is, without markup.
        head = f" step {step}/{self.total}   eta {self.remaining(step)}   {phases(metrics)}   {verdict_words(metrics)}"
        numbers = [
            Text.assemble((name, "dim"), "\n", (f"{metrics[key]:{form}}", "bold"), no_wrap=True)
            for key, name, form in shown_keys(metrics)
        ]
        panel, bar = Table.grid(), ProgressBar(total=self.total, completed=step, width=60)
        for part in (Text.assemble((self.title, "bold"), head), bar, Columns(numbers, padding=(0, 2))):
            panel.add_row(part)
        return panel

    def remaining(self, step: int) -> str:
        assert self.first_step is not None
        seconds = (time.monotonic() - self.started) / (step - self.first_step) * (self.total - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def phases(metrics: dict[str, float]) -> str:
    names = [key for key in metrics if key.startswith("time/") and key != "time/step"]
    parts = " ".join(f"{key.removeprefix('time/')} {metrics[key]:.1f}" for key in names)
    return f"{metrics['time/step']:.1f} s ({parts})" if "time/step" in metrics else ""
