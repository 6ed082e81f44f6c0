import importlib.util
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk import files_up_to
from tests.support.memory import memory_counted
from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import COLUMNS, REPORT, TRACKERS, AppendedFile, Tracker, check_trackers, keep_until

QUIET = MonitoringConfig(tensorboard=False)
KEYS = "steps: 4\ndata:\n  path: http://me:secret@host/a\n"
SHOWN = {"purpose": "train", "prompt": "1|2", "reply": "a\n<b>", "reward": 0.5, "outcome": "scored", "entropy": 1.0}
TABLED = [3, "train", "1|2", "a\n<b>", None, 0.5, "scored"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def losses_on_the_board(folder: RunFolder) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def write_everything(tracker: Tracker, step: int) -> None:
    tracker.log(step, {"loss": 0.5})
    tracker.show(step, [SHOWN])
    tracker.close(lambda folder, file: file.write_text(f"report of {folder.path.name}"))


def write_run(folder: RunFolder, steps: range, reply: str = "größe", resume: int = 0) -> None:
    tracker = Tracker(folder, QUIET, resume_step=resume)
    for step in steps:
        tracker.log(step, {"loss": step / 10})
        assert lines(folder.metrics)[-1] == {"step": step, "loss": step / 10}  # read as soon as it is logged
        tracker.show(step, [{"reply": reply, "label": Path("x")}] * 2)
    tracker.close()


def test_numbers_and_transcripts_are_json_lines(folder: RunFolder) -> None:
    write_run(folder, range(1, 3))
    assert lines(folder.metrics) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}]
    assert lines(folder.transcripts) == [{"step": step, "reply": "größe", "label": "x"} for step in (1, 1, 2, 2)]


def test_rows_behind_the_checkpoint_are_set_aside_and_not_lost(folder: RunFolder) -> None:
    """Twice from the same step: what the first resumption set aside stays."""
    write_run(folder, range(1, 6))
    notes: list[str] = []
    Tracker(folder, QUIET, 3, note=notes.append)
    assert notes[0] == "metrics.jsonl: 2 rows after step 3 moved to metrics.after_step_000003.jsonl"
    assert notes[1] == "transcripts.jsonl: 4 rows after step 3 moved to transcripts.after_step_000003.jsonl"
    write_run(folder, range(4, 5), "again", resume=3)
    write_run(folder, range(4, 7), resume=3)
    first, second = ("metrics.after_step_000003.jsonl", "metrics.after_step_000003.2.jsonl")
    assert lines(folder.path / first) == [{"step": 4, "loss": 0.4}, {"step": 5, "loss": 0.5}]
    assert lines(folder.path / second) == [{"step": 4, "loss": 0.4}]
    assert [line["step"] for line in lines(folder.metrics)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(folder.transcripts)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    kept = lines(folder.path / "transcripts.after_step_000003.2.jsonl")
    assert [line["reply"] for line in kept] == ["again"] * 2


def test_a_run_that_starts_over_sets_everything_aside(folder: RunFolder) -> None:
    write_run(folder, range(3))
    write_run(folder, range(2))
    assert [line["step"] for line in lines(folder.metrics)] == [0, 1]
    assert [line["step"] for line in lines(folder.path / "metrics.after_step_000000.jsonl")] == [0, 1, 2]


def test_where_nothing_is_behind_nothing_is_set_aside(folder: RunFolder) -> None:
    write_run(folder, range(1, 4))
    write_run(folder, range(4, 5), resume=3)
    assert {path.name for path in folder.path.iterdir()} == {"metrics.jsonl", "transcripts.jsonl"}


def test_half_a_line_in_the_middle_or_at_the_end_is_left_out_on_resuming(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n{"step": 4, "lo')
    assert keep_until(folder.metrics, 3) == 3
    assert lines(folder.metrics) == [{"step": 1}, {"step": 3}]


def test_resuming_reads_a_large_file_line_by_line(folder: RunFolder) -> None:
    row = json.dumps({"reply": "y" * 10_000})[1:]
    folder.transcripts.write_text("".join(f'{{"step": {step}, {row}\n' for step in range(1, 1001)))
    size = folder.transcripts.stat().st_size
    with memory_counted() as peak:
        assert keep_until(folder.transcripts, 600) == 600
    assert peak() < 0.1 * size
    assert [line["step"] for line in lines(folder.transcripts)] == list(range(1, 601))
    behind = folder.path / "transcripts.after_step_000600.jsonl"
    assert [line["step"] for line in lines(behind)] == list(range(601, 1001))
    assert {path.name for path in folder.path.iterdir()} == {folder.transcripts.name, behind.name}


def test_a_full_disk_costs_rows_and_not_the_run(folder: RunFolder) -> None:
    """One warning for each file, no half line, and what comes once there is room again is written."""
    notes: list[str] = []
    tracker = Tracker(folder, MonitoringConfig(), note=notes.append)
    (events,) = (folder.path / "tensorboard").iterdir()
    tracker.log(1, {"loss": 0.5})
    tracker.show(1, [{"reply": "x"}])
    files = (folder.metrics, folder.transcripts, events)
    sizes = [file.stat().st_size for file in files]
    with files_up_to(min(sizes) + 5):
        for step in (2, 3):
            tracker.log(step, {"loss": 0.5})
            tracker.show(step, [{"reply": "x"}] * 2)
    assert [file.stat().st_size for file in files] == sizes
    assert len(notes) == 4
    names = ("metrics.jsonl", "tensorboard", "transcripts.jsonl", "tensorboard's table")
    for name, note in zip(names, notes, strict=True):
        assert note.startswith(f"warning: {name} cannot be written (") and "File too large" in note
    tracker.log(4, {"loss": 0.25})
    tracker.show(4, [{"reply": "y"}])
    tracker.close()
    assert [line["step"] for line in lines(folder.metrics)] == [1, 4]
    assert [line["step"] for line in lines(folder.transcripts)] == [1, 4]
    assert losses_on_the_board(folder) == [(1, 0.5), (4, 0.25)]
    assert notes[4:] == [
        f"warning: {count} rows of {name} were lost"
        for count, name in ((2, names[0]), (4, names[2]), (2, names[1]), (2, names[3]))
    ]


def test_pictures_that_cannot_be_written_cost_no_transcript(folder: RunFolder) -> None:
    notes: list[str] = []
    tracker = Tracker(folder, MonitoringConfig(tensorboard=False), note=notes.append)
    content, row = b"x" * 2000, {"images": ["pictures/a.png"]}
    with files_up_to(1000):
        tracker.show(1, [row], {"pictures/a.png": content})
    assert not list((folder.path / "pictures").iterdir())
    assert len(notes) == 1 and "pictures cannot be written" in notes[0]
    tracker.show(2, [row], {"pictures/a.png": content})
    (file,) = (folder.path / "pictures").iterdir()
    written = file.stat().st_mtime_ns
    tracker.show(3, [row], {"pictures/a.png": content})
    tracker.close()
    assert file.read_bytes() == content and file.stat().st_mtime_ns == written  # once
    assert [line["images"] for line in lines(folder.transcripts)] == [["pictures/a.png"]] * 3
    assert notes[1:] == ["warning: 1 row of pictures was lost"]


def test_where_half_a_line_cannot_be_cut_off_the_next_one_begins_below_it(tmp_path: Path) -> None:
    full, real = AppendedFile(Path("/dev/full")), tmp_path / "rows.jsonl"
    with pytest.raises(OSError, match="No space left"):
        full.add_line('{"step": 1}')
    real.write_text('{"step": 1, "lo')
    full.stream = real.open("ab", buffering=0)
    for step in (2, 3):
        full.add_line(json.dumps({"step": step}))
    assert real.read_text() == '{"step": 1, "lo\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\r", "\n", "\ud83d"])
def test_replies_with_line_separators_or_half_a_character_survive_resuming(folder: RunFolder, separator: str) -> None:
    reply = f"one{separator}two"
    write_run(folder, range(1, 3), reply)
    write_run(folder, range(2, 3), reply, resume=1)
    assert [line["reply"] for line in lines(folder.transcripts)] == [reply] * 4


def test_tensorboard_forgets_the_steps_that_come_again(folder: RunFolder) -> None:
    for resume, steps in ((0, range(1, 5)), (2, range(3, 4))):
        tracker = Tracker(folder, MonitoringConfig(), resume)
        for step in steps:
            tracker.log(step, {"loss": float(resume)})
        tracker.close()
    assert losses_on_the_board(folder) == [(1, 0), (2, 0), (3, 2)]


def test_tensorboard_gets_keys_and_completions_as_text(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder.config.write_text(KEYS)
    write_everything(Tracker(folder, MonitoringConfig()), 3)
    assert not (folder.path / REPORT).exists()  # TensorBoard keeps no files
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag)[0] for tag in ("configuration", "completions")}
    keys, rows = (one.tensor_proto.string_val[0].decode() for one in texts.values())
    assert "| data.path | http://host/a |" in keys and "secret" not in keys and texts["completions"].step == 3
    assert rows.splitlines()[2] == "| 3 | train | 1&#124;2 | a<br>&lt;b&gt; | None | 0.5 | scored |"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_keeps_the_id_of_a_run_that_goes_on(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "DISABLE_GIT": "true", "_DISABLE_STATS": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    folder.config.write_text(KEYS)
    config = MonitoringConfig(tensorboard=False, wandb="project")
    tracker = Tracker(folder, config, resume_step=2, run_ids={"wandb": "k3pt1d00"})
    write_everything(tracker, 3)
    assert tracker.run_ids == {"wandb": "k3pt1d00"}
    (file,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    assert "k3pt1d00" in file.name
    assert lines(folder.metrics) == [{"step": 3, "loss": 0.5}]
    (table,) = file.parent.rglob("media/table/completions/*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == list(COLUMNS) and found["data"] == [TABLED]
    records: list[Any] = []
    while not any(record.HasField("exit") for record in records):  # W&B's service writes on for a moment
        time.sleep(0.1)
        records = wandb_records(file)
    keys = {one.key or one.nested_key[0]: one.value_json for record in records for one in record.run.config.update}
    assert keys["data.path"] == '"http://host/a"'
    assert [record.artifact.type for record in records if record.HasField("artifact")][-1] == "report"


def wandb_records(file: Path) -> list[Any]:
    """Read an offline run: blocks of pieces, each behind its checksum, size and kind (whole, first, middle, last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:  # too little for another piece
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts = data[place + 7 : place + 7 + size] if kind in (1, 2) else parts + data[place + 7 : place + 7 + size]
        found += [Record.FromString(parts)] if kind in (1, 4) else []
        place += 7 + size
    return found


REAL = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mlflow", "trackio"))), reason="mlflow-skinny or trackio is not installed"
)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run's folder, and stores of MLflow and Trackio on this disk."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


@REAL
def test_mlflow_gets_every_number_and_finds_a_resumed_run_again(stores: RunFolder) -> None:
    """It takes no `@` in names; a row that it refuses is lost, and the run continues."""
    import mlflow

    notes: list[str] = []
    config = MonitoringConfig(tensorboard=False, mlflow="sums")
    tracker = Tracker(stores, config, note=notes.append)
    tracker.log(1, {"evaluation/pass@2": 0.5})
    tracker.log(2, {"loss?": 0.25, "x" * 300: 1.0})
    tracker.close()
    assert "mlflow cannot be written" in notes[0] and notes[1] == "warning: 1 row of mlflow was lost"
    again = Tracker(stores, config, 2, tracker.run_ids)
    again.log(3, {"evaluation/pass@2": 0.75})
    again.close()
    assert again.run_ids == tracker.run_ids
    history = mlflow.MlflowClient().get_metric_history(tracker.run_ids["mlflow"], "evaluation/pass_2")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (3, 0.75)]
    assert mlflow.get_run(tracker.run_ids["mlflow"]).info.run_name == "run"


@REAL
def test_mlflow_gets_keys_completions_and_the_report(stores: RunFolder) -> None:
    """Also of a resumed run with other keys: MLflow keeps the first value of each."""
    import mlflow

    config, notes, many = MonitoringConfig(tensorboard=False, mlflow="sums"), [], {f"key_{n}": n for n in range(150)}
    stores.config.write_text(KEYS + json.dumps(many)[1:-1].replace(", ", "\n").replace('"', ""))
    tracker = Tracker(stores, config, note=notes.append)
    write_everything(tracker, 3)
    stores.config.write_text(KEYS.replace("4", "9") + "more: 1\n")
    again = Tracker(stores, config, 3, tracker.run_ids, note=notes.append)
    again.close(lambda folder, file: 1 / 0 if not file.exists() else None)
    run = mlflow.get_run(tracker.run_ids["mlflow"])
    assert run.data.params == {"steps": "4", "data.path": "http://host/a", "more": "1"} | {
        key: str(value) for key, value in many.items()
    }
    kept = {one.path for one in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert kept == {"completions", "report.html"} and notes == []
    rows = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/completions/train_step_000003.json")
    assert list(rows) == list(COLUMNS) and [column[0] for column in rows.values()] == TABLED


@REAL
def test_what_a_tracker_refuses_costs_no_run(stores: RunFolder) -> None:
    def fail(folder: RunFolder, file: Path) -> None:
        raise OSError("the disk is full")

    notes: list[str] = []
    tracker = Tracker(stores, MonitoringConfig(tensorboard=False, mlflow="sums"), note=notes.append)
    tracker.close(fail)
    assert notes == ["warning: report.html cannot be written (the disk is full); the run continues, its rows are lost"]


@REAL
def test_a_tracker_that_cannot_be_reached_is_refused(stores: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    mlflow.set_tracking_uri("nowhere://server")
    with pytest.raises(ConfigError, match=r"monitoring\.mlflow=sums: .*; check MLFLOW_TRACKING_URI"):
        Tracker(stores, MonitoringConfig(tensorboard=False, mlflow="sums"))
    mlflow.set_tracking_uri(None)


@REAL
def test_trackio_gets_every_number_of_a_run_and_of_its_resumption(stores: RunFolder) -> None:
    import sqlite3

    stores.config.write_text(KEYS)
    for resume, step in ((0, 1), (1, 2)):
        tracker = Tracker(stores, MonitoringConfig(tensorboard=False, trackio="mine"), resume)
        tracker.log(step, {"loss": step / 4})
        tracker.show(step, [SHOWN])
        tracker.close(lambda folder, file: file.write_text("report"))
    (file,) = (stores.path.parent / "trackio").glob("mine*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
        keys = store.execute("select config from configs").fetchone()
    found = [(name, step, json.loads(row)) for name, step, row in rows]
    assert [(name, step, row["loss"]) for name, step, row in found if "loss" in row] == [
        ("run", 1, 0.25),
        ("run", 2, 0.5),
    ]
    tables = [row["completions/train"]["_value"] for _, _, row in found if "completions/train" in row]
    assert [list(table[0].values()) for table in tables] == [[1, *TABLED[1:]], [2, *TABLED[1:]]]
    assert json.loads(keys[0])["data.path"] == "http://host/a"
    assert any(
        one.read_text() == "report"
        for one in (stores.path.parent / "trackio").rglob("*")
        if one.is_file() and one.suffix not in (".db", ".lock") and "db-" not in one.name
    )


def test_a_tracker_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for key, package in (("mlflow", "mlflow"), ("trackio", "trackio"), ("wandb", r"'trueline\[wandb\]'")):
        with pytest.raises(ConfigError, match=f"monitoring.{key}: {key} is not installed; pip install {package}"):
            check_trackers(MonitoringConfig.parse({key: "mine", "tensorboard": False}))


def test_every_tracker_has_a_key() -> None:
    assert set(TRACKERS) <= set(MonitoringConfig.model_fields)
