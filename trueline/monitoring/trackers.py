"""Write a run's metrics: as JSON lines always, and to every chosen tracker, with keys, completions and the report."""

import html
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.files import UNFINISHED, parse_line, read_rows, write_once
from trueline.monitoring.events import Events
from trueline.monitoring.metrics import METRICS
from trueline.monitoring.run_folder import PICTURES, RunFolder, read_config

Note = Callable[[str], object]
Ids = Mapping[str, str]  # of a run in its trackers, by their keys
NEW: Ids = {}  # a run that no tracker has
NO_PICTURES: Mapping[str, bytes] = {}
REPORT = "report.html"  # in the folder of a run, if a tracker keeps it
COLUMNS = ("step", "purpose", "prompt", "reply", "label", "reward", "outcome")  # of the tables of completions
LONGEST = 20_000  # characters of a cell
WANDB_REMEDY = "run `wandb login`, or set WANDB_MODE=offline to keep it on this disk"
MLFLOW_REMEDY = "check MLFLOW_TRACKING_URI, which names the server or folder"
MOST_PARAMETERS, MOST_IN_PARAMETER = 100, 500  # that MLflow takes in a call, and their characters


@dataclass(frozen=True, slots=True)
class OpenTracker:
    write: Callable[[int, dict[str, float]], object]
    show: Callable[[int, list[list[Any]]], object]  # rows of a table with COLUMNS
    run_id: str = ""  # by which a resumed run is found again
    keep: Callable[[str], object] | None = None  # a file of the run, where the tracker keeps files
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """A tracker: how to open it, and the error of an unreachable server; its key is the name of its package."""

    open: Callable[[Any, "TrackedRun"], OpenTracker]  # with the package
    install: str  # what pip installs
    failures: tuple[str, ...] = ()  # exceptions of the package; OSError is one everywhere
    remedy: str = "check its permissions and the space on the disk"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    folder: Path
    project: Any  # value of the tracker's key
    run_id: str | None  # there; None: it is new
    resume_step: int
    keys: dict[str, str]  # its configuration, flat and without passwords


class Tracker:
    """Write the metrics, transcripts, ledger and events of a run; each file is opened by its first row."""

    def __init__(
        self, folder: RunFolder, config: MonitoringConfig, resume_step: int = 0, run_ids: Ids = NEW, note: Note = str
    ) -> None:
        chosen = check_trackers(config)
        self.folder, self.note = folder, note
        self.last_step = keep_until(folder.metrics, resume_step, note)
        for file in (folder.transcripts, folder.ledger, folder.events):
            keep_until(file, resume_step, note)
        self.files: dict[Path, Sink] = {}
        self.pictures = Sink(write_once, PICTURES, note)
        self.events: Events | None = None  # of runs that train
        self.opened: dict[str, OpenTracker] = {}
        self.scalars: list[Sink] = []
        self.tables: list[Sink] = []
        self.keepers: list[Sink] = []
        keys = read_config(folder.config)
        for file in (folder.metrics, folder.transcripts):
            self._sink(file)
        for key, project in chosen.items():
            row, package, run_id = TRACKERS[key], importlib.import_module(key), run_ids.get(key)
            failures = (OSError, *map(pkgutil.resolve_name, row.failures))
            try:
                one = row.open(package, TrackedRun(folder.path, project, run_id, resume_step, keys))
            except failures as error:
                raise ConfigError(f"monitoring.{key}={project}: {error}; {row.remedy}") from error
            self.opened[key] = one
            self.scalars.append(Sink(one.write, key, note, failures))
            self.tables.append(Sink(one.show, f"{key}'s table", note, failures))
            self.keepers += [Sink(one.keep, f"{key}'s report", note, (*failures, ConfigError))] if one.keep else []
        self.run_ids = {key: one.run_id for key, one in self.opened.items() if one.run_id}

    def _sink(self, file: Path) -> "Sink":
        if file not in self.files:
            self.files[file] = Sink(AppendedFile(file).add_line, file.name, self.note)
        return self.files[file]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._sink(self.folder.metrics).put(json.dumps({"step": step, **metrics}))
        for sink in self.scalars:
            sink.put(step, metrics)
        if self.events is not None and "time/step" in metrics:  # the phases of a step end with it
            self._sink(self.folder.events).put(compact({"step": step, **self.events.row()}))

    def follow(self, events: Events) -> None:
        self.events = events
        self._sink(self.folder.events)

    def show(self, step: int, transcripts: list[dict[str, Any]], pictures: Mapping[str, bytes] = NO_PICTURES) -> None:
        """Write transcripts, after the pictures that they name by files."""
        for name, content in pictures.items():
            self.pictures.put(self.folder.path / name, content)
        for transcript in transcripts:
            self._sink(self.folder.transcripts).put(compact({"step": step, **transcript}))
        rows = [[cell({"step": step, **transcript}.get(name)) for name in COLUMNS] for transcript in transcripts]
        for sink in self.tables if rows else ():
            sink.put(step, rows)

    def account(self, step: int, fates: dict[str, list[int]]) -> None:
        self._sink(self.folder.ledger).put(json.dumps({"step": step, **fates}))

    def close(self, write_report: Callable[[RunFolder, Path], object] | None = None) -> None:
        """Give the run's report to the trackers that keep files, and close all."""
        file = self.folder.path / REPORT
        if write_report is not None and self.keepers:
            Sink(write_report, REPORT, self.note, (OSError, ConfigError)).put(self.folder, file)
        for sink in self.keepers if file.is_file() else ():
            sink.put(str(file))
        for sink in (*self.files.values(), self.pictures, *self.scalars, *self.tables):
            rows, were = ("1 row", "was") if sink.lost == 1 else (f"{sink.lost} rows", "were")
            if sink.lost:
                self.note(f"warning: {rows} of {sink.name} {were} lost")
        if self.events is not None:
            self.events.stop()
        for one in self.opened.values():
            one.close()


def compact(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str, separators=(",", ":"))


def cell(value: Any) -> Any:
    """Return what a table of completions shows of a value."""
    return value if value is None or isinstance(value, int | float) else str(value)[:LONGEST]


class Sink:
    """Write row by row: if a disk or server refuses a row, the row is lost, not the run; warn once, and count."""

    def __init__(
        self, write: Callable[..., object], name: str, note: Note, failures: tuple[type[Exception], ...] = (OSError,)
    ) -> None:
        self.write, self.name, self.note, self.failures = write, name, note, failures
        self.lost = 0

    def put(self, *row: Any) -> None:
        try:
            self.write(*row)
        except self.failures as error:
            if not self.lost:
                self.note(f"warning: {self.name} cannot be written ({error}); the run continues, its rows are lost")
            self.lost += 1


class AppendedFile:
    """A file that grows by whole pieces: nothing remains of a piece that the disk refused."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("ab", buffering=0)
        self.torn = False  # a part did remain, because it could not be cut off either

    def write(self, piece: bytes) -> None:
        end, self.torn = self.stream.seek(0, os.SEEK_END), True
        try:
            while piece:
                piece = piece[self.stream.write(piece) :]
            self.torn = False
        except OSError:
            with suppress(OSError):
                self.stream.truncate(end)
                self.torn = False
            raise

    def add_line(self, line: str) -> None:
        # A reply may contain half a character, which UTF-8 cannot encode: it is written as JSON's escape.
        whole = (line + "\n").encode(errors="backslashreplace")
        self.write(b"\n" + whole if self.torn else whole)


def keep_until(file: Path, step: int, note: Note = str) -> int:
    """Move rows after the resumed step to another file, as they come again; return the last step kept."""
    if not file.exists():
        return -1
    first, last, behind = first_again(step), -1, 0
    stem = f"{file.stem}.after_step_{step:06d}"
    names = itertools.chain([stem], (f"{stem}.{number}" for number in itertools.count(2)))  # earlier ones are kept
    aside = next(path for name in names if not (path := file.with_name(name + file.suffix)).exists())
    before, after = (path.with_suffix(UNFINISHED) for path in (file, aside))
    with file.open("rb") as lines, before.open("wb") as kept, after.open("wb") as rest:
        for line in lines:
            if (row := parse_line(line)) is None:  # half a line, which a kill or a full disk may leave
                continue
            is_kept = row["step"] < first
            (kept if is_kept else rest).write(line.removesuffix(b"\n") + b"\n")
            last, behind = (row["step"], behind) if is_kept else (last, behind + 1)
    if behind:
        after.rename(aside)
        note(f"{file.name}: {behind} rows after step {step} moved to {aside.name}")
    after.unlink(missing_ok=True)
    before.rename(file)
    return last


def fates_after(ledger: Path, step: int) -> list[dict[str, list[int]]]:
    return [row for row in read_rows(ledger) if row.pop("step") > step]


def first_again(step: int) -> int:
    """Return the first step that is written again; a run that starts over also writes step 0 again."""
    return step + 1 if step else 0


def open_board(_: Any, tracked: TrackedRun) -> OpenTracker:
    """Append to an event file, hiding what comes again; not in torch's thread, so a full disk does not end the run."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415  (seconds to import)
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

    (folder := tracked.folder / "tensorboard").mkdir(exist_ok=True)
    now = time.time_ns()
    file = RecordWriter(AppendedFile(folder / f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now}"))

    def write(**event: Any) -> None:
        file.write(Event(wall_time=time.time(), **event).SerializeToString())

    def add(step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        write(step=step, summary=Summary(value=values))

    def show(step: int, rows: list[list[Any]], columns: Sequence[str] = COLUMNS, tag: str = "completions") -> None:
        write(step=step, summary=text_pb(tag, markdown_table(columns, rows)))

    write(file_version="brain.Event:2")
    write(step=(first := first_again(tracked.resume_step)), session_log=SessionLog(status=SessionLog.START))
    show(first, [list(pair) for pair in tracked.keys.items()], ("key", "value"), "configuration")
    return OpenTracker(add, show)


def markdown_table(columns: Sequence[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown; a cell's own lines and bars stay inside it."""
    lines = [columns, ["---"] * len(columns), *rows]
    clean = [[html.escape(str(one)).replace("|", "&#124;").replace("\n", "<br>") for one in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in clean)


def open_wandb(wandb: Any, tracked: TrackedRun) -> OpenTracker:
    name = tracked.folder.name
    where = {"project": tracked.project, "name": name, "dir": tracked.folder, "id": tracked.run_id}
    run = wandb.init(**where, config=tracked.keys, resume="allow", allow_val_change=True)
    for one in METRICS:
        if one.better and ".+" not in one.pattern():
            run.define_metric(one.name, summary={"higher": "max", "lower": "min"}[one.better])

    def show(step: int, rows: list[list[Any]]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)
        run.log({f"completions/{rows[0][1]}": table}, step=step)

    def keep(file: str) -> None:
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", f"{name}-report"), type="report")
        artifact.add_file(file)
        run.log_artifact(artifact)

    return OpenTracker(lambda step, row: run.log(row, step=step), show, str(run.id), keep, run.finish)


def open_mlflow(mlflow: Any, tracked: TrackedRun) -> OpenTracker:
    mlflow.set_experiment(tracked.project)
    run = mlflow.start_run(run_id=tracked.run_id, run_name=tracked.folder.name)
    known = run.data.params  # which cannot be changed
    new = [(name, value[:MOST_IN_PARAMETER]) for name, value in tracked.keys.items() if name not in known]
    for start in range(0, len(new), MOST_PARAMETERS):
        mlflow.log_params(dict(new[start : start + MOST_PARAMETERS]))

    def add(step: int, row: dict[str, float]) -> None:
        mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", name): value for name, value in row.items()}, step=step)

    def show(step: int, rows: list[list[Any]]) -> None:
        columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
        mlflow.log_dict(columns, f"completions/{rows[0][1]}_step_{step:06d}.json")

    return OpenTracker(add, show, run.info.run_id, mlflow.log_artifact, mlflow.end_run)


def open_trackio(trackio: Any, tracked: TrackedRun) -> OpenTracker:
    trackio.init(project=tracked.project, name=tracked.folder.name, config=tracked.keys, resume="allow")

    def show(step: int, rows: list[list[Any]]) -> None:
        trackio.log({f"completions/{rows[0][1]}": trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)

    add = lambda step, row: trackio.log(row, step=step)  # noqa: E731
    return OpenTracker(add, show, keep=trackio.log_artifact, close=trackio.finish)


def check_trackers(config: MonitoringConfig) -> dict[str, Any]:
    """Return the value of every tracker's key that is set, or refuse one that is not installed."""
    chosen = {key: value for key, value in dict(config).items() if key in TRACKERS and value}
    for key in chosen:
        if importlib.util.find_spec(key) is None:
            raise ConfigError(f"monitoring.{key}: {key} is not installed; pip install {TRACKERS[key].install}")
    return chosen


TRACKERS = {  # by the key of `monitoring` that chooses it
    "tensorboard": TrackerRow(open_board, "tensorboard"),
    "wandb": TrackerRow(open_wandb, "'trueline[wandb]'", ("wandb:errors.Error",), WANDB_REMEDY),
    "mlflow": TrackerRow(open_mlflow, "mlflow", ("mlflow:exceptions.MlflowException",), MLFLOW_REMEDY),
    "trackio": TrackerRow(open_trackio, "trackio"),
}
