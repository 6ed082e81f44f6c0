"""Write a run's numbers: JSON lines always, and to every tracker of TRACKERS that is wanted."""

import importlib.util
import itertools
import json
import os
import pkgutil
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.monitoring.events import Events
from trueline.monitoring.run_folder import UNFINISHED, RunFolder

Note = Callable[[str], None]
TIMED = "time/step"  # is among the metrics of a step whose phases end with it


def no_note(message: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """A run as a tracker is opened for it: its folder, the value of the tracker's key, and where it goes on."""

    folder: Path
    project: Any
    run_id: str  # empty for a run that is new to the tracker
    resume_step: int


@dataclass(frozen=True, slots=True)
class Opened:
    write: Callable[[int, dict[str, float]], object]
    run_id: str = ""  # by which a resumed run is found again
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """A tracker: how it is opened, the package that it needs, and what that raises when it cannot be reached."""

    open: Callable[[Any, Place], Opened]  # of the package and a place
    package: str
    install: str
    failure: str = ""  # name of an exception of the package; OSError is one everywhere
    remedy: str = "see to its permissions and to room on the disk"

    def failures(self) -> tuple[type[Exception], ...]:
        return (OSError, *([pkgutil.resolve_name(f"{self.package}:{self.failure}")] if self.failure else []))


class Tracker:
    def __init__(
        self,
        folder: RunFolder,
        config: MonitoringConfig,
        resume_step: int = 0,
        run_ids: dict[str, str] | None = None,
        note: Note = no_note,
    ) -> None:
        check_trackers(config)
        self.last_step = keep_until(folder.metrics, resume_step, note)
        for file in (folder.transcripts, folder.ledger, folder.events):
            keep_until(file, resume_step, note)
        self.metrics = Sink(Appended(folder.metrics).add_line, folder.metrics.name, note)
        self.transcripts = Sink(Appended(folder.transcripts).add_line, folder.transcripts.name, note)
        self.folder, self.note = folder, note
        self.ledger: Sink | None = None  # of runs that sample
        self.events: Events | None = None  # of runs that train
        self.happened: Sink | None = None
        self.scalars: list[Sink] = []
        self.opened: dict[str, Opened] = {}
        for key, project in wanted(config).items():
            place = Place(folder.path, project, (run_ids or {}).get(key, ""), resume_step)
            self.opened[key] = open_tracker(key, place)
            self.scalars.append(Sink(self.opened[key].write, key, note, TRACKERS[key].failures()))
        self.run_ids = {key: one.run_id for key, one in self.opened.items() if one.run_id}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.put(json.dumps({"step": step, **metrics}))
        for sink in self.scalars:
            sink.put(step, metrics)
        if self.events is not None and self.happened is not None and TIMED in metrics:
            self.happened.put(compact({"step": step, **self.events.row()}))

    def follow(self, events: Events) -> None:
        """Write from now on, with the times of each step, who has done what in it."""
        self.events = events
        self.happened = Sink(Appended(self.folder.events).add_line, self.folder.events.name, self.note)

    def show(self, step: int, transcripts: list[dict[str, Any]]) -> None:
        for transcript in transcripts:
            self.transcripts.put(compact({"step": step, **transcript}))

    def account(self, step: int, fates: dict[str, list[int]]) -> None:
        """Write which prompts met which fate in a step."""
        if self.ledger is None:
            self.ledger = Sink(Appended(self.folder.ledger).add_line, self.folder.ledger.name, self.note)
        self.ledger.put(json.dumps({"step": step, **fates}))

    def close(self) -> None:
        for sink in (self.metrics, self.transcripts, self.ledger, self.happened, *self.scalars):
            if sink is not None:
                sink.tell()
        if self.events is not None:
            self.events.stop()
        for one in self.opened.values():
            one.close()


def compact(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str, separators=(",", ":"))


class Sink:
    """Write row by row: what a disk or server refuses costs the row, not the run; it is said once, and counted."""

    def __init__(
        self,
        write: Callable[..., object],
        name: str,
        note: Note,
        failures: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        self.write, self.name, self.note, self.failures = write, name, note, failures
        self.lost = 0

    def put(self, *row: Any) -> None:
        try:
            self.write(*row)
        except self.failures as error:
            if not self.lost:
                self.note(f"warning: {self.name} cannot be written ({error}); the run goes on, its rows are lost")
            self.lost += 1

    def tell(self) -> None:
        if self.lost:
            self.note(f"warning: {self.lost} rows of {self.name} could not be written and are lost")


class Appended:
    """A file that grows by whole pieces: of one that the disk refused, nothing stays."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("ab", buffering=0)
        self.torn = False  # whether something does stay, for not even cutting it off worked

    def write(self, piece: bytes) -> None:
        end = self.stream.seek(0, os.SEEK_END)
        try:
            while piece:
                piece = piece[self.stream.write(piece) :]
        except OSError:
            self.torn = True
            with suppress(OSError):
                self.stream.truncate(end)
                self.torn = False
            raise
        self.torn = False

    def add_line(self, line: str) -> None:
        # A reply may hold half a character, which UTF-8 cannot: it is written as JSON's escape.
        whole = (line + "\n").encode(errors="backslashreplace")
        self.write(b"\n" + whole if self.torn else whole)


def keep_until(file: Path, step: int, note: Note = no_note) -> int:
    """Set aside what was written behind the step resumed from, for it comes again; return the last step kept."""
    if not file.exists():
        return -1
    first, last, behind = first_again(step), -1, 0
    aside = unused_name(file, step)
    with file.open("rb") as lines, unfinished(file).open("wb") as kept, unfinished(aside).open("wb") as rest:
        for line in lines:
            if (at := step_of(line)) is None:
                continue
            (kept if at < first else rest).write(line.removesuffix(b"\n") + b"\n")
            last, behind = (at, behind) if at < first else (last, behind + 1)
    if behind:
        unfinished(aside).rename(aside)
        note(f"{file.name}: {behind} rows behind step {step} are set aside in {aside.name}")
    else:
        unfinished(aside).unlink()
    unfinished(file).rename(file)
    return last


def fates_after(ledger: Path, step: int) -> list[dict[str, list[int]]]:
    """Read which prompts met which fate in each step after this one."""
    lines = ledger.read_bytes().split(b"\n") if ledger.exists() else []
    rows = [json.loads(line) for line in lines if (at := step_of(line)) is not None and at > step]
    return [{fate: numbers for fate, numbers in row.items() if fate != "step"} for row in rows]


def first_again(step: int) -> int:
    """Return the first step that is written again; a run that starts over writes step 0 again too."""
    return step + 1 if step else 0


def step_of(line: bytes) -> int | None:
    """Return the step of a line; None of half a line, as a kill or a full disk leaves it."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return None


def unused_name(file: Path, step: int) -> Path:
    """Return a name that is not in use, so that what earlier resumptions set aside stays."""
    stem, more = f"{file.stem}.after_step_{step:06d}", (f".{number}" for number in itertools.count(2))
    names = (f"{stem}{number}{file.suffix}" for number in itertools.chain([""], more))
    return next(path for name in names if not (path := file.with_name(name)).exists())


def unfinished(file: Path) -> Path:
    return file.with_suffix(UNFINISHED)


def open_board(package: Any, place: Place) -> Opened:
    """Open what appends a step's numbers to an event file, and hide those behind the step resumed from.

    They are written here and not in torch's thread, so that a full disk is met where it can be borne.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415  (seconds to import)
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

    folder = place.folder / "tensorboard"
    folder.mkdir(exist_ok=True)
    now = time.time_ns()
    file = RecordWriter(Appended(folder / f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now}"))

    def write(**event: Any) -> None:
        file.write(Event(wall_time=time.time(), **event).SerializeToString())

    def add(step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        write(step=step, summary=Summary(value=values))

    write(file_version="brain.Event:2")
    write(step=first_again(place.resume_step), session_log=SessionLog(status=SessionLog.START))
    return Opened(add)


def open_wandb(wandb: Any, place: Place) -> Opened:
    name, run_id = place.folder.name, place.run_id or None
    run = wandb.init(project=place.project, name=name, dir=place.folder, id=run_id, resume="allow")
    return Opened(lambda step, row: run.log(row, step=step), str(run.id), run.finish)


def open_mlflow(mlflow: Any, place: Place) -> Opened:
    mlflow.set_experiment(place.project)
    run = mlflow.start_run(run_id=place.run_id or None, run_name=place.folder.name)

    def add(step: int, row: dict[str, float]) -> None:
        mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", name): value for name, value in row.items()}, step=step)

    return Opened(add, run.info.run_id, mlflow.end_run)


def open_trackio(trackio: Any, place: Place) -> Opened:
    trackio.init(project=place.project, name=place.folder.name, resume="allow")
    return Opened(lambda step, row: trackio.log(row, step=step), close=trackio.finish)


def wanted(config: MonitoringConfig) -> dict[str, Any]:
    """Return the value of every tracker's key that is set."""
    return {key: value for key, value in dict(config).items() if key in TRACKERS and value}


def check_trackers(config: MonitoringConfig) -> None:
    for key in wanted(config):
        if importlib.util.find_spec(TRACKERS[key].package) is None:
            raise ConfigError(f"monitoring.{key}: {TRACKERS[key].package} is not installed; {TRACKERS[key].install}")


def open_tracker(key: str, place: Place) -> Opened:
    row = TRACKERS[key]
    package = importlib.import_module(row.package)
    try:
        return row.open(package, place)
    except row.failures() as error:
        raise ConfigError(f"monitoring.{key}={place.project}: {error}; {row.remedy}") from error


# By the key of `monitoring` that asks for it; metrics.jsonl is written beside them, always.
TRACKERS = {
    "tensorboard": TrackerRow(open_board, "tensorboard", "pip install tensorboard"),
    "wandb": TrackerRow(
        open_wandb,
        "wandb",
        "pip install 'trueline[wandb]'",
        "errors.Error",
        "run `wandb login`, or set WANDB_MODE=offline to keep it on this disk",
    ),
    "mlflow": TrackerRow(
        open_mlflow,
        "mlflow",
        "pip install mlflow",
        "exceptions.MlflowException",
        "see to MLFLOW_TRACKING_URI, which names the server or folder",
    ),
    "trackio": TrackerRow(open_trackio, "trackio", "pip install trackio"),
}
