"""The page in a real browser: drawn in time, without a word of complaint, whatever the runs hold."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.run_folders import made_folder, make_failure, make_run
from tests.unit.report.test_page import HOSTILE
from trueline.config.run import MonitoringConfig
from trueline.monitoring.trackers import Tracker
from trueline.report.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MOST_MILLISECONDS = 3000  # until all is drawn

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")


def drawn(file: Path) -> str:
    """Return the page as a browser has made it, which must have had nothing to complain of."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    profile = f"--user-data-dir={file.parent / 'profile'}"
    command = [BROWSER, *options, profile, "--window-size=1400,900", "--dump-dom", file.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "data-broken" not in done.stdout.partition("<head>")[0]
    (milliseconds,) = re.findall(r'<html[^>]* data-drawn="(\d+)"', done.stdout)
    assert int(milliseconds) < MOST_MILLISECONDS
    return done.stdout


def section(text: str, name: str) -> str:
    (found,) = re.findall(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return found


def test_long_runs_side_by_side(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 1000, seed=seed, judged=seed == 1) for seed, name in enumerate(("a", "b", "c"))]
    make_failure(runs[0])
    text = drawn(write_report([str(run.path) for run in runs], tmp_path / "page.html"))
    curves = section(text, "curves")
    assert curves.count("<figure") == 11 and curves.count('class="line"') == 33
    assert curves.count('class="mark level1"') and curves.count('class="mark level2"')
    assert section(text, "times").count("<figure") == 3 and section(text, "rewards").count("<figure") == 4
    assert section(text, "transcripts").count("<details") == 40
    assert "trueline.rewards.replay" in section(text, "failures") and "too_old" in section(text, "ledger")
    assert "The runs do not differ" not in section(text, "configuration")


def test_hostile_text(tmp_path: Path) -> None:
    tracker = Tracker(folder := made_folder(tmp_path / "run", "grpo", 1), MonitoringConfig(tensorboard=False))
    tracker.log(0, {HOSTILE: 1.0, "reward/mean": 0.5})
    odd = {
        "turns": [HOSTILE, None, {"role": HOSTILE, "tool_calls": [None, {"function": None}]}],
        "label": {"a": [HOSTILE]},
    }
    tracker.show(0, [{"purpose": HOSTILE, "outcome": HOSTILE, "prompt": HOSTILE, "reply": None, **odd}])
    text = drawn(write_report([str(folder.path)], tmp_path / "page.html"))
    assert "&lt;/script&gt;" in section(text, "transcripts")


def test_runs_with_little_in_them(tmp_path: Path) -> None:
    made_folder(tmp_path / "empty", "grpo", 5)
    tracker = Tracker(offline := made_folder(tmp_path / "offline", "sft", 5), MonitoringConfig(tensorboard=False))
    alone = drawn(write_report([str(tmp_path / "empty")], tmp_path / "page.html"))
    assert "No step has been logged yet" in alone
    tracker.log(1, {"loss": 2.0, "time/train": 0.5, "time/step": 0.6})
    text = drawn(write_report([str(tmp_path / "empty"), str(offline.path)], tmp_path / "page.html"))
    assert section(text, "curves").count("<figure") == 1 and section(text, "times").count("<figure") == 1
    assert all(f'<section id="{name}" hidden' in text for name in ("rewards", "transcripts", "failures", "ledger"))
