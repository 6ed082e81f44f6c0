"""Write a run's metrics: as JSON lines always, and to every chosen tracker."""

import importlib.util
import itertools
import json
import os
import pkgutil
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.files import UNFINISHED, parse_line, read_rows, write_once
from trueline.monitoring.events import Events
from trueline.monitoring.metrics import METRICS
from trueline.monitoring.run_folder import PICTURES, RunFolder

Note = Callable[[str], object]
Ids = Mapping[str, str]  # of a run in its trackers, by their keys
NEW: Ids = {}  # a run that no tracker has
NO_PICTURES: Mapping[str, bytes] = {}
WANDB_REMEDY = "run `wandb login`, or set WANDB_MODE=offline to keep it on this disk"
MLFLOW_REMEDY = "check MLFLOW_TRACKING_URI, which names the server or folder"


@dataclass(frozen=True, slots=True)
class OpenTracker:
    write: Callable[[int, dict[str, float]], object]
    run_id: str = ""  # by which a resumed run is found again
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """A tracker: how to open it, and the error of an unreachable server; its key is the name of its package."""

    # Of the package, the run's folder, the key's value, the run's id there (None: it is new) and the step to resume.
    open: Callable[[Any, Path, Any, str | None, int], OpenTracker]
    install: str  # what pip installs
    failures: tuple[str, ...] = ()  # exceptions of the package; OSError is one everywhere
    remedy: str = "check its permissions and the space on the disk"


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
        for file in (folder.metrics, folder.transcripts):
            self._sink(file)
        for key, project in chosen.items():
            row, package, run_id = TRACKERS[key], importlib.import_module(key), run_ids.get(key)
            failures = (OSError, *map(pkgutil.resolve_name, row.failures))
            try:
                one = row.open(package, folder.path, project, run_id, resume_step)
            except failures as error:
                raise ConfigError(f"monitoring.{key}={project}: {error}; {row.remedy}") from error
            self.opened[key] = one
            self.scalars.append(Sink(one.write, key, note, failures))
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

    def account(self, step: int, fates: dict[str, list[int]]) -> None:
        self._sink(self.folder.ledger).put(json.dumps({"step": step, **fates}))

    def close(self) -> None:
        for sink in (*self.files.values(), self.pictures, *self.scalars):
            rows, were = ("1 row", "was") if sink.lost == 1 else (f"{sink.lost} rows", "were")
            if sink.lost:
                self.note(f"warning: {rows} of {sink.name} {were} lost")
        if self.events is not None:
            self.events.stop()
        for one in self.opened.values():
            one.close()


def compact(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str, separators=(",", ":"))


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


def open_board(_: Any, run: Path, project: Any, run_id: str | None, resume_step: int) -> OpenTracker:
    """Append to an event file, hiding what comes again; not in torch's thread, so a full disk does not end the run."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415  (seconds to import)
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

    (folder := run / "tensorboard").mkdir(exist_ok=True)
    now = time.time_ns()
    file = RecordWriter(AppendedFile(folder / f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now}"))

    def write(**event: Any) -> None:
        file.write(Event(wall_time=time.time(), **event).SerializeToString())

    def add(step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        write(step=step, summary=Summary(value=values))

    write(file_version="brain.Event:2")
    write(step=first_again(resume_step), session_log=SessionLog(status=SessionLog.START))
    return OpenTracker(add)


def open_wandb(wandb: Any, folder: Path, project: Any, run_id: str | None, _: int) -> OpenTracker:
    run = wandb.init(project=project, name=folder.name, dir=folder, id=run_id, resume="allow")
    for one in METRICS:
        if one.better and ".+" not in one.pattern():
            run.define_metric(one.name, summary={"higher": "max", "lower": "min"}[one.better])
    return OpenTracker(lambda step, row: run.log(row, step=step), str(run.id), run.finish)


def open_mlflow(mlflow: Any, folder: Path, project: Any, run_id: str | None, _: int) -> OpenTracker:
    mlflow.set_experiment(project)
    run = mlflow.start_run(run_id=run_id, run_name=folder.name)

    def add(step: int, row: dict[str, float]) -> None:
        mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", name): value for name, value in row.items()}, step=step)

    return OpenTracker(add, run.info.run_id, mlflow.end_run)


def open_trackio(trackio: Any, folder: Path, project: Any, run_id: str | None, _: int) -> OpenTracker:
    trackio.init(project=project, name=folder.name, resume="allow")
    return OpenTracker(lambda step, row: trackio.log(row, step=step), close=trackio.finish)


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
