import io
import re
from pathlib import Path

from rich.console import Console

from trueline.monitoring.findings import WATCH, Finding
from trueline.monitoring.metrics import SHOWN
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder

METRICS = {
    "reward/mean": 0.5,
    "loss": -0.01234,
    "response_length/truncated_share": 0.25,
    "something/else": 7.0,
    "time/rollout": 1.25,
    "time/train": 2.0,
    "time/step": 3.5,
}


def plain(total: int = 10) -> tuple[Progress, io.StringIO]:
    screen = io.StringIO()
    return Progress("my-run", total, Console(file=screen, width=40, highlight=False)), screen


def test_without_a_terminal_a_step_is_one_plain_line() -> None:
    progress, screen = plain()
    with progress:
        progress.step(3, METRICS)
    (line,) = screen.getvalue().splitlines()  # however narrow the console is
    assert line.startswith("my-run 3/10  ")
    for part in ("reward 0.500", "loss -0.0123", "truncated 25%", "3.5 s (rollout 1.2 train 2.0)", "eta "):
        assert part in line
    assert "else" not in line
    assert "\x1b" not in line


def test_the_rest_is_estimated_from_the_steps_seen_here() -> None:
    """A run resumed at step 100 made two steps in 20 seconds, so ten more take 100."""
    progress, _ = plain(total=112)
    progress.step(101, {})
    progress.started -= 20.5
    assert progress.remaining(102) in ("1:42", "1:43")
    assert progress.remaining(112) == "0:00"


def test_a_note_is_printed_as_it_is() -> None:
    progress, screen = plain()
    progress.note("path [/tmp/a] and [bold]brackets[/bold], a line longer than the console is wide")
    assert screen.getvalue() == ("path [/tmp/a] and [bold]brackets[/bold], a line longer than the console is wide\n")


def test_a_finding_is_printed_logged_and_recorded_with_its_step(tmp_path: Path) -> None:
    folder, screen = RunFolder(tmp_path), io.StringIO()
    folder.logs.mkdir()
    progress = Progress("my-run", 10, Console(file=screen, highlight=False), folder)
    found = Finding(WATCH, "clipping", "half of the tokens are clipped", "lower it", "training.learning_rate")
    progress.report(found)
    progress.step(3, METRICS)
    progress.report(found)
    progress.report(found, 7)
    line = "warning: half of the tokens are clipped; lower it (training.learning_rate)\n"
    assert screen.getvalue().count(line) == folder.log.read_text().count(line) == 3
    assert [one for _, one in folder.read_findings()] == [found] * 3
    assert [step for step, _ in folder.read_findings()] == [0, 3, 7]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_screen_that_is_a_file_on_a_full_disk_ends_nothing() -> None:
    progress = Progress("my-run", 10, Console(file=FullDisk()))
    with progress:
        progress.note("lost")
        progress.step(3, METRICS)


def test_a_note_leaves_no_markup_in_the_panel() -> None:
    """A note is printed as it is, and the panel is drawn again below it."""
    screen = io.StringIO()
    progress = Progress("[run]", 10, Console(file=screen, width=80, force_terminal=True, highlight=False))
    with progress:
        progress.step(3, METRICS)
        progress.note("stopping [after] this step")
    for part in ("stopping [after] this step", "[run]", "step 3/10", "0.500"):
        assert part in screen.getvalue()
    assert not re.search(r"\[(bold|dim|/)", screen.getvalue())


def test_a_panel_of_every_number_fits_into_80_columns() -> None:
    screen = io.StringIO()
    progress = Progress("my-run", 10, Console(file=screen, width=80, highlight=False))
    metrics = METRICS | {one.name: 1234.0 for one in SHOWN}
    progress.first_step = 0
    progress.console.print(progress.panel(3, metrics))
    assert "…" not in screen.getvalue()
    words = screen.getvalue().split()
    for one in SHOWN:
        assert set(one.label.split()) <= set(words) and f"{1234:{one.form}}" in words
    assert max(map(len, screen.getvalue().splitlines())) <= 80
