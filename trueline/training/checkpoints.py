"""Checkpoints are written to a temporary folder, flushed, then renamed, so a kill leaves the last good one."""

import difflib
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.files import UNFINISHED, atomic_path, flush
from trueline.models.suitability import is_damaged
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import duration
from trueline.training.report import Metrics

HASHED_AT_ONCE = 8  # files
TENSORS = ".safetensors"  # suffix of large files
OF_RANK = re.compile(r"-\d+(-of-\d+)?\.")  # in the name of a rank's file
STATE, METRICS, MANIFEST = "state.json", "metrics.json", "manifest.json"
State = dict[str, Any]
Digests = dict[str, str]  # SHA-256 of files by name


def save_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SaveResult:
    digests: Digests  # of large files
    seconds: float  # to write them
    problem: str | None = None  # of the disk


Note = Callable[[str], None]  # shows a line to the user
PollSave = Callable[[bool], SaveResult | None]  # returns None while files are being written, unless it is to wait


@dataclass(slots=True)
class PendingCheckpoint:
    target: Path
    temporary: Path
    state: State
    metrics: Metrics
    poll: PollSave
    paused: float  # seconds that training waited


class Checkpoints:
    """The checkpoints of one run: `checkpoints/step_000050/` with model, training state and counters."""

    def __init__(self, run_folder: Path, config: CheckpointConfig, note: Note = lambda _: None) -> None:
        self.folder, self.config, self.note = RunFolder(run_folder).checkpoints, config, note
        self.failures = 0  # saves that the disk refused
        self.pending: PendingCheckpoint | None = None
        self.has_warned = False  # of a missing checkpoint.metric
        self.held: Path | None = None  # never removed
        self.candidate: Path | None = None  # not removed, as it may be held later

    def due(self, step: int) -> bool:
        return self.config.save and self.config.every > 0 and step % self.config.every == 0

    def save(self, step: int, state: State, write: Callable[[Path], PollSave], metrics: Metrics | None = None) -> None:
        """Let `write` begin to fill a folder after the previous save is done; `settle` renames the folder."""
        if not self.config.save:
            return
        start = time.monotonic()
        self.settle(wait=True)
        target = self.folder / f"step_{step:06d}"
        if target.exists():  # the step is saved, but its counters may have changed
            self._replace_state(target, state)
            return
        temporary = target.with_suffix(UNFINISHED)
        with self._survive_disk_error(f"{temporary.stem} could not be saved", temporary):
            for left in self.folder.glob(f"*{UNFINISHED}"):  # by a kill
                shutil.rmtree(left)
            temporary.mkdir(parents=True)
            poll, paused = write(temporary), time.monotonic() - start
            self.pending = PendingCheckpoint(target, temporary, state, dict(metrics or {}), poll, paused)

    def settle(self, *, wait: bool = False) -> None:
        """Rename the pending checkpoint if it is on disk, or once it is; a broken disk costs it, not the run."""
        one = self.pending
        if one is None or (result := one.poll(wait)) is None:
            return
        self.pending = None
        with self._survive_disk_error(f"{one.target.name} could not be saved", one.temporary):
            if result.problem:
                raise OSError(result.problem)
            (one.temporary / STATE).write_text(json.dumps(one.state, indent=2))
            (one.temporary / METRICS).write_text(json.dumps(one.metrics, indent=2))
            (one.temporary / MANIFEST).write_text(json.dumps(hashes(one.temporary, result.digests), indent=2))
            for path in [*one.temporary.rglob("*"), one.temporary]:
                flush(path)
            one.temporary.rename(one.target)
            flush(self.folder)
        if not one.target.exists():
            return
        took, paused = duration(result.seconds), duration(one.paused)
        self.note(f"saved      {one.target.name} in {took} (training paused {paused})")
        with self._survive_disk_error("cannot remove older checkpoints"):
            self.rotate()
        self._look_for_metric(one.metrics)

    def add_metrics(self, step: int, metrics: Metrics) -> None:
        """Add metrics of a saved step that came later, such as its evaluation, and choose the best again."""
        target = self.folder / f"step_{step:06d}"
        if self.pending is not None and self.pending.target == target:
            self.pending.metrics |= metrics
        elif target.is_dir():
            with self._survive_disk_error(f"cannot write the metrics of {target.name}"):
                replace_file(target / METRICS, read_metrics(target) | metrics)
                self.rotate()
            self._look_for_metric(metrics)

    def _replace_state(self, target: Path, state: State) -> None:
        """Replace the counters; a kill before the manifest is replaced leaves the old ones, one after it the new."""
        with self._survive_disk_error(f"cannot write the counters of {target.name}"):
            if json.loads((target / STATE).read_text()) == state:
                return
            pending = target / f"{STATE}{UNFINISHED}"
            write_flushed(pending, state)
            replace_file(target / MANIFEST, json.loads((target / MANIFEST).read_text()) | {STATE: digest(pending)})
            finish_replacement(target)

    @contextmanager
    def _survive_disk_error(self, what: str, unfinished: Path | None = None) -> Iterator[None]:
        """Warn of an error, and remove the unfinished checkpoint that it leaves."""
        try:
            yield
        except OSError as error:
            note = f"warning: {what} ({error}); the run continues"
            if unfinished is not None:
                self.failures += 1
                shutil.rmtree(unfinished, ignore_errors=True)
                last = f"The last good checkpoint is {self.newest()}" if self.newest() else "There is no checkpoint yet"
                note += f". {last}. Make room on the disk, if it is full"
            self.note(note)

    def _look_for_metric(self, metrics: Metrics) -> None:
        name = self.config.metric.removeprefix("-")
        evaluated = any(key.startswith("evaluation/") for key in metrics)
        late = name.startswith("evaluation/") and not evaluated  # it may still come
        if not self.config.keep_best or not metrics or late or self.has_warned or name in metrics:
            return
        self.has_warned = True
        near = ", ".join(difflib.get_close_matches(name, metrics, n=3, cutoff=0.3)) or ", ".join(sorted(metrics))
        self.note(
            f"warning: this run has no metric {self.config.metric} (checkpoint.metric), so checkpoint.keep_best="
            f"{self.config.keep_best} keeps nothing; choose from {near}"
        )

    def rotate(self) -> None:
        finished = self.list_finished()
        kept = {*finished[-self.config.keep :], *self.best(), self.held, self.candidate}
        remove([old for old in finished if old not in kept])

    def hold(self, proven: int) -> None:
        """Hold the candidate if its step is at most the proven one, and choose the next candidate."""
        if self.candidate is not None and step_of(self.candidate) <= proven:
            self.held, self.candidate = self.candidate, None
        newest = self.newest()
        self.candidate = self.candidate or (newest if newest != self.held else None)

    def roll_back(self, change: Callable[[State], State]) -> int:
        """Remove all checkpoints after the held one, change its counters, and return its step."""
        assert self.held is not None
        step = step_of(self.held)
        self.settle(wait=True)
        remove([path for path in reversed(self.list_finished()) if step_of(path) > step])
        self._replace_state(self.held, change(self.peek(self.held)[0]))
        return step

    def best(self) -> list[Path]:
        name, sign = self.config.metric.removeprefix("-"), -1.0 if self.config.metric.startswith("-") else 1.0
        values = [(read_metrics(path).get(name), path) for path in self.list_finished()]
        scored = [(sign * value, path) for value, path in values if value is not None and math.isfinite(value)]
        return [path for _, path in sorted(scored, key=lambda entry: entry[0])[: self.config.keep_best]]

    def list_finished(self) -> list[Path]:
        """Return the finished checkpoints, oldest first."""
        found = self.folder.glob("step_*") if self.folder.is_dir() else []
        return sorted((path for path in found if path.suffix != UNFINISHED), key=step_of)

    def newest(self) -> Path | None:
        return next(reversed(self.list_finished()), None)

    def newest_metrics(self) -> Metrics:
        return read_metrics(newest) if (newest := self.newest()) else {}

    def read_state(self, checkpoint: Path, *, tensors: bool = True) -> State:
        """Return the counters of a checkpoint; refuse it if a file has changed, also one of `tensors`."""
        state, written = self.peek(checkpoint)
        compared = {name: value for name, value in written.items() if tensors or not name.endswith(TENSORS)}
        self.refuse(checkpoint, changed_files(checkpoint, compared))
        return state

    def check_whole(self, checkpoint: Path) -> None:
        """Refuse a checkpoint with missing or truncated files; comparing hashes takes longer."""
        files = {name: checkpoint / name for name in self.peek(checkpoint)[1]}
        lost = [name for name, file in files.items() if not file.is_file()]
        tensors = [name for name in files if name.endswith(TENSORS) and name not in lost]
        self.refuse(checkpoint, lost + [name for name in tensors if is_damaged(files[name])])

    def refuse_named(self, checkpoint: Path, failure: str) -> None:
        """Refuse a checkpoint if the message of a failed rank names a file that has changed."""
        named = {name: value for name, value in self.peek(checkpoint)[1].items() if name in failure}
        self.refuse(checkpoint, changed_files(checkpoint, named))

    def refuse(self, checkpoint: Path, wrong: list[str]) -> None:
        """Refuse a checkpoint if some of its files are wrong."""
        if not wrong:
            return
        earlier = [one.name for one in self.list_finished() if one.name < checkpoint.name]
        remedy = f"to resume from {earlier[-1]}" if earlier else "(the only one) and start over with --resume --restart"
        raise ConfigError(f"{checkpoint}: {wrong[0]} is missing or has changed; remove the folder {remedy}")

    def peek(self, checkpoint: Path) -> tuple[State, Digests]:
        """Return a checkpoint's counters and hashes without comparing them with the files."""
        try:
            finish_replacement(checkpoint)
            state, written = (json.loads((checkpoint / name).read_text()) for name in (STATE, MANIFEST))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{checkpoint}: not a checkpoint of this run ({error}); remove it to resume") from error
        return dict(state), dict(written)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def remove(checkpoints: list[Path]) -> None:
    for old in checkpoints:
        # Renamed first: a kill in between must not leave what looks like a checkpoint.
        shutil.rmtree(old.rename(old.with_suffix(UNFINISHED)))


def finish_replacement(checkpoint: Path) -> None:
    """Rename pending counters if the manifest already has their hash."""
    pending = checkpoint / f"{STATE}{UNFINISHED}"
    if pending.exists() and json.loads((checkpoint / MANIFEST).read_text())[STATE] == digest(pending):
        pending.rename(checkpoint / STATE)
        flush(checkpoint)


def replace_file(file: Path, value: Any) -> None:
    """Write a value as JSON, so that the file always has its old content or its new one."""
    with atomic_path(file) as temporary:
        write_flushed(temporary, value)
    flush(file.parent)


def write_flushed(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2))
    flush(file)


def read_metrics(checkpoint: Path) -> Metrics:
    try:
        return dict(json.loads((checkpoint / METRICS).read_text()))
    except (OSError, json.JSONDecodeError):
        return {}


def hashes(folder: Path, known: Digests | None = None) -> Digests:
    """Return the SHA-256 of every file except the manifest and the metrics, which change; do not read known ones."""
    known = known or {}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, METRICS))
    names = {path.relative_to(folder).as_posix(): path for path in files}
    unread = {name: path for name, path in names.items() if name not in known}
    with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:  # hashing leaves the interpreter to others
        return known | dict(zip(unread, threads.map(digest, unread.values()), strict=True))


def changed_files(folder: Path, written: Digests) -> list[str]:
    """Return the files that are missing or have another hash than was written."""

    def is_changed(name: str) -> bool:
        return not (folder / name).is_file() or digest(folder / name) != written[name]

    with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
        return [name for name, is_wrong in zip(written, threads.map(is_changed, written), strict=True) if is_wrong]


def check_tensors(folder: Path, rank: int, world: int) -> None:
    """Refuse a damaged checkpoint by one rank's share of the files; a folder outside of runs has no hashes."""
    checkpoint = next((one for one in (folder, folder.parent) if (one / MANIFEST).is_file()), None)
    if checkpoint is not None:
        written = json.loads((checkpoint / MANIFEST).read_text())
        mine = share_of_files(written, folder.relative_to(checkpoint), rank, world)
        wrong = changed_files(checkpoint, {name: written[name] for name in mine})
        Checkpoints(checkpoint.parent.parent, CheckpointConfig()).refuse(checkpoint, wrong)


def share_of_files(names: Iterable[str], model: Path, rank: int, world: int) -> list[str]:
    """Return the large files of a model that a rank compares; on as many ranks as before, those that it wrote."""
    files = [Path(name) for name in sorted(names) if name.endswith(TENSORS)]
    models = {file.parent for file in files if OF_RANK.sub(".", file.name) == f"training{TENSORS}"}
    families: dict[str, list[str]] = {}
    for file in files:
        if next((place for place in file.parents if place in models), Path()) == model:
            families.setdefault(OF_RANK.sub(".", file.as_posix()), []).append(file.as_posix())
    return [name for family in families.values() for name in family[rank::world]]


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
