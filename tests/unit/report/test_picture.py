"""Curves of runs as an SVG file: smoothed as on the page, named by what tells them apart."""

import re
from pathlib import Path

import pytest

from tests.support.run_folders import made_folder
from trueline.cli import main
from trueline.config.run import MonitoringConfig
from trueline.monitoring.trackers import Tracker
from trueline.report.page import curve, series_of
from trueline.report.runs import ReportedRun, find_runs


def make(path: Path, steps: int) -> Path:
    tracker = Tracker(folder := made_folder(path, "grpo", steps), MonitoringConfig(tensorboard=False))
    for step in range(steps):
        held_out = {"evaluation/reward": float(step)} if step % 10 == 0 else {}
        tracker.log(step, {"reward/mean": float(step % 2), "loss": float("nan"), **held_out})
    tracker.close()
    return folder.path


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [str(make(tmp_path / "first", 200)), str(make(tmp_path / "second", 20))]


def said(file: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", Path(file).read_text())


def test_one_metric_of_several_runs_and_several_of_one(runs: list[str]) -> None:
    assert main(["report", *runs, "--svg", "reward/mean", "--out", "curves.svg"]) == 0
    assert said("curves.svg")[:3] == ["Reward", "first", "second"]
    assert main(["report", runs[0], "--svg", "reward/mean,evaluation/reward"]) == 0
    assert said("report-first.svg")[:3] == ["first", "reward/mean", "evaluation/reward"]
    assert main(["report", *runs, "--svg", "reward/mean,evaluation/reward", "--out", "curves.svg"]) == 0
    assert said("curves.svg")[1:3] == ["first, reward/mean", "first, evaluation/reward"]
    assert main(["report", runs[0], "--svg", "reward/mean", "--out", "nowhere/curves.svg"]) == 2


def test_curves_are_smoothed_as_on_the_page(runs: list[str]) -> None:
    long, short = (ReportedRun(name, folder).read() for name, folder in find_runs(runs).items())
    assert curve(long, "reward/mean", 10)[50:60] == [(step, 0.5) for step in range(50, 60)]
    assert curve(long, "evaluation/reward", 10)[5] == (50, 50.0)  # a tenth of the steps has it: the mean of one
    assert curve(short, "reward/mean", 1)[:2] == [(0, 0.0), (1, 1.0)]
    assert set(series_of([long, short], ["reward/mean"], 1)) == {"first", "second"}


def test_an_unknown_metric_is_told_with_those_there_are(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("reward/men", "loss", ""):
        assert main(["report", *runs, "--svg", name]) == 2
        assert "there are evaluation/reward, reward/mean" in capsys.readouterr().err
    assert main(["report", *runs, "--svg", "reward/men"]) == 2
    assert "did you mean 'reward/mean'?" in capsys.readouterr().err
    assert list(Path().glob("*.svg")) == []
