import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from trueline.config.run import MonitoringConfig
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker

QUIET = MonitoringConfig(tensorboard=False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def write_run(folder: RunFolder, steps: range, reply: str = "größe", resume: int = 0) -> None:
    tracker = Tracker(folder, QUIET, resume_step=resume)
    for step in steps:
        tracker.log(step, {"loss": step / 10})
        tracker.show(step, [{"reply": reply, "label": Path("x")}] * 2)
    tracker.close()


def test_numbers_and_transcripts_are_json_lines(folder: RunFolder) -> None:
    write_run(folder, range(1, 3))
    assert lines(folder.metrics) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}]
    assert lines(folder.transcripts) == [{"step": step, "reply": "größe", "label": "x"} for step in (1, 1, 2, 2)]


def test_a_line_can_be_read_as_soon_as_it_is_logged(folder: RunFolder) -> None:
    tracker = Tracker(folder, QUIET)
    tracker.log(1, {"loss": 0.5})
    assert lines(folder.metrics) == [{"step": 1, "loss": 0.5}]
    tracker.close()


def test_steps_after_the_checkpoint_are_dropped_on_resuming(folder: RunFolder) -> None:
    write_run(folder, range(1, 6))
    write_run(folder, range(4, 7), resume=3)
    assert [line["step"] for line in lines(folder.metrics)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(folder.transcripts)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_a_line_that_a_kill_tore_off_is_dropped_on_resuming(folder: RunFolder) -> None:
    write_run(folder, range(1, 4))
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    write_run(folder, range(4, 5), resume=3)
    assert [line["step"] for line in lines(folder.metrics)] == [1, 2, 3, 4]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\r", "\n"])
def test_replies_with_line_separators_survive_resuming(folder: RunFolder, separator: str) -> None:
    reply = f"one{separator}two"
    write_run(folder, range(1, 3), reply)
    write_run(folder, range(2, 3), reply, resume=1)
    assert [line["reply"] for line in lines(folder.transcripts)] == [reply] * 4


def test_tensorboard_gets_every_number(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(folder, MonitoringConfig())
    for step in (1, 2):
        tracker.log(step, {"loss": step / 4, "speed/mfu": 0.5})
    tracker.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 0.5)]
    assert [event.value for event in events.Scalars("speed/mfu")] == [0.5, 0.5]


def test_nothing_else_is_written_where_nothing_is_wanted(folder: RunFolder) -> None:
    tracker = Tracker(folder, QUIET)
    assert tracker.run_id == ""
    tracker.close()
    assert {path.name for path in folder.path.iterdir()} == {"metrics.jsonl", "transcripts.jsonl"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_keeps_the_id_of_a_run_that_goes_on(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "DISABLE_GIT": "true", "_DISABLE_STATS": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = MonitoringConfig(tensorboard=False, wandb="project")
    tracker = Tracker(folder, config, resume_step=2, run_id="k3pt1d00")
    tracker.log(3, {"loss": 0.5})
    tracker.close()
    assert tracker.run_id == "k3pt1d00"
    (file,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    assert "k3pt1d00" in file.name
    assert lines(folder.metrics) == [{"step": 3, "loss": 0.5}]
