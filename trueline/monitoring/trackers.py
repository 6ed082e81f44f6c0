"""Write a run's numbers: JSON lines always, TensorBoard and Weights & Biases where they are wanted."""

import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.monitoring.run_folder import UNFINISHED, RunFolder

Note = Callable[[str], None]


def no_note(message: str) -> None:
    return None


class Tracker:
    def __init__(
        self,
        folder: RunFolder,
        config: MonitoringConfig,
        resume_step: int = 0,
        run_id: str = "",
        note: Note = no_note,
    ) -> None:
        self.last_step = keep_until(folder.metrics, resume_step, note)
        keep_until(folder.transcripts, resume_step, note)
        self.metrics = Sink(Appended(folder.metrics).add_line, folder.metrics.name, note)
        self.transcripts = Sink(Appended(folder.transcripts).add_line, folder.transcripts.name, note)
        self.scalars: list[Sink] = []
        if config.tensorboard:
            self.scalars.append(Sink(make_board(folder.path / "tensorboard", resume_step), "tensorboard", note))
        self.remote: Any = open_wandb(folder, config.wandb, run_id) if config.wandb else None
        if self.remote is not None:
            self.scalars.append(Sink(lambda step, row: self.remote.log(row, step=step), "wandb", note))
        self.run_id = str(self.remote.id) if self.remote is not None else ""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.put(json.dumps({"step": step, **metrics}))
        for sink in self.scalars:
            sink.put(step, metrics)

    def show(self, step: int, transcripts: list[dict[str, Any]]) -> None:
        for transcript in transcripts:
            self.transcripts.put(json.dumps({"step": step, **transcript}, ensure_ascii=False, default=str))

    def close(self) -> None:
        for sink in (self.metrics, self.transcripts, *self.scalars):
            sink.tell()
        if self.remote is not None:
            self.remote.finish()


class Sink:
    """Write row by row: what the disk refuses costs the row, not the run; it is said once, and counted."""

    def __init__(self, write: Callable[..., object], name: str, note: Note) -> None:
        self.write, self.name, self.note = write, name, note
        self.lost = 0

    def put(self, *row: Any) -> None:
        try:
            self.write(*row)
        except OSError as error:
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
    lines = file.read_bytes().split(b"\n")
    rows = [(at, line) for line in lines if (at := step_of(line)) is not None]
    first = first_again(step)
    kept, behind = ([row for row in rows if (row[0] < first) is wanted] for wanted in (True, False))
    if behind:
        aside = unused_name(file, step)
        write_lines(aside, [line for _, line in behind])
        note(f"{file.name}: {len(behind)} rows behind step {step} are set aside in {aside.name}")
    write_lines(file, [line for _, line in kept])
    return kept[-1][0] if kept else -1


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


def write_lines(file: Path, lines: list[bytes]) -> None:
    aside = file.with_suffix(UNFINISHED)
    aside.write_bytes(b"".join(line + b"\n" for line in lines))
    aside.rename(file)


def make_board(folder: Path, resume_step: int) -> Callable[[int, dict[str, float]], None]:
    """Return what appends a step's numbers to an event file, and hide those behind the step resumed from.

    They are written here and not in torch's thread, so that a full disk is met where it can be borne.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415  (seconds to import)
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

    folder.mkdir(exist_ok=True)
    now = time.time_ns()
    file = RecordWriter(Appended(folder / f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now}"))

    def write(**event: Any) -> None:
        file.write(Event(wall_time=time.time(), **event).SerializeToString())

    def add(step: int, metrics: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        write(step=step, summary=Summary(value=values))

    write(file_version="brain.Event:2")
    write(step=first_again(resume_step), session_log=SessionLog(status=SessionLog.START))
    return add


def open_wandb(folder: RunFolder, project: str, run_id: str) -> Any:
    """Go on with the run of this id; an empty id starts one."""
    try:
        import wandb  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigError("monitoring.wandb: wandb is not installed; pip install 'trueline[wandb]'") from None
    try:
        return wandb.init(project=project, name=folder.path.name, dir=folder.path, id=run_id or None, resume="allow")
    except wandb.errors.Error as error:
        raise ConfigError(
            f"monitoring.wandb={project}: {error}; run `wandb login`, or set WANDB_MODE=offline to keep it on this disk"
        ) from error
