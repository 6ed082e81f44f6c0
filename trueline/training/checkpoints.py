"""Checkpoints are written aside, flushed to disk, then renamed, so that a kill leaves the last good one."""

import difflib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.models.suitability import is_damaged
from trueline.monitoring.run_folder import UNFINISHED, RunFolder
from trueline.monitoring.timing import duration

STATE, METRICS, MANIFEST = "state.json", "metrics.json", "manifest.json"
NONE_YET = "There is no checkpoint yet: make room on the disk, if that is the cause"


def save_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written beside the training: the SHA-256 of large files by name, and what went wrong on the disk."""

    digests: dict[str, str]
    seconds: float
    problem: str | None = None


Writing = Callable[[bool], Saved | None]  # looks how far it is, or waits for its end; None: still under way


@dataclass(slots=True)
class Underway:
    """A checkpoint that has no name yet."""

    target: Path
    aside: Path
    state: dict[str, Any]
    metrics: dict[str, float]
    look: Writing
    held: float  # seconds that the run waited


class Checkpoints:
    """The checkpoints of one run: `checkpoints/step_000050/` with model, training state and counters."""

    def __init__(
        self, run_folder: Path, config: CheckpointConfig, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self.folder, self.config, self.note = RunFolder(run_folder).checkpoints, config, note
        self.failures = 0  # saves that the disk refused
        self.underway: Underway | None = None
        self.sought = False  # in vain, the metric that keep_best looks at
        self.held: Path | None = None  # stays, whatever comes after it
        self.candidate: Path | None = None  # stays until it may be held

    def due(self, step: int) -> bool:
        return self.config.save and self.config.every > 0 and step % self.config.every == 0

    def save(
        self,
        step: int,
        state: dict[str, Any],
        write: Callable[[Path], Writing],
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Let `write` begin to fill a folder, once the one before is done; `settle` gives it its name. Of a step that
        is saved already, write only the counters, where they have changed.
        """
        if not self.config.save:
            return
        start = time.monotonic()
        self.settle(wait=True)
        target = self.folder / f"step_{step:06d}"
        if target.exists():
            self._renew(target, state)
            return
        aside = target.with_suffix(UNFINISHED)
        with self._giving_up(aside):
            for left in self.folder.glob(f"*{UNFINISHED}"):  # by a kill
                shutil.rmtree(left)
            aside.mkdir(parents=True)
            look = write(aside)
            self.underway = Underway(target, aside, state, dict(metrics or {}), look, time.monotonic() - start)

    def settle(self, *, wait: bool = False) -> None:
        """Give a checkpoint under way its name, if all of it is on disk or when it is.

        Where the disk is full or broken, say so: that costs this checkpoint, not the run.
        """
        one = self.underway
        saved = one.look(wait) if one is not None else None
        if one is None or saved is None:
            return
        self.underway = None
        with self._giving_up(one.aside):
            if saved.problem:
                raise OSError(saved.problem)
            (one.aside / STATE).write_text(json.dumps(one.state, indent=2))
            (one.aside / METRICS).write_text(json.dumps(one.metrics, indent=2))
            (one.aside / MANIFEST).write_text(json.dumps(hashes(one.aside, saved.digests), indent=2))
            flush_tree(one.aside)
            one.aside.rename(one.target)
            flush(self.folder)
        if one.target.exists():
            self._tell_of(one, saved)

    def _tell_of(self, one: Underway, saved: Saved) -> None:
        waited, took = duration(one.held), duration(saved.seconds)
        self.note(f"saved      {one.target.name}: the run waited {waited}, writing beside it took {took}")
        with self._bearing("older checkpoints could not be removed"):
            self.rotate()
        self._look_for_metric(one.metrics)

    def tell(self, step: int, metrics: dict[str, float]) -> None:
        """Add what became known of a step after it was saved, such as its evaluation, and choose the best anew."""
        target = self.folder / f"step_{step:06d}"
        if self.underway is not None and self.underway.target == target:
            self.underway.metrics |= metrics
        elif target.is_dir():
            with self._bearing(f"what became known of {target.name} could not be written"):
                replace_file(target / METRICS, read_metrics(target) | metrics)
                self.rotate()
            self._look_for_metric(metrics)

    def _renew(self, target: Path, state: dict[str, Any]) -> None:
        """Replace the counters; a kill before the manifest is replaced leaves the old ones, one after it the new."""
        with self._bearing(f"the counters of {target.name} could not be written"):
            if json.loads((target / STATE).read_text()) == state:
                return
            pending = target / f"{STATE}{UNFINISHED}"
            write_flushed(pending, state)
            replace_file(target / MANIFEST, json.loads((target / MANIFEST).read_text()) | {STATE: digest(pending)})
            finish_renewal(target)

    @contextmanager
    def _bearing(self, what: str) -> Iterator[None]:
        """Let the disk refuse something small, and say so."""
        try:
            yield
        except OSError as error:
            self.note(f"warning: {what} ({error}); the run goes on")

    def _look_for_metric(self, metrics: dict[str, float]) -> None:
        """Say once that keep_best looks at a metric that the run does not have."""
        name = self.config.metric.removeprefix("-")
        evaluated = any(key.startswith("evaluation/") for key in metrics)
        late = name.startswith("evaluation/") and not evaluated  # it may still come
        if not self.config.keep_best or not metrics or late or self.sought or name in metrics:
            return
        self.sought = True
        near = ", ".join(difflib.get_close_matches(name, metrics, n=3, cutoff=0.3)) or ", ".join(sorted(metrics))
        self.note(
            f"warning: checkpoint.metric={self.config.metric} is no metric of this run, so checkpoint.keep_best="
            f"{self.config.keep_best} keeps nothing; there are {near}"
        )

    @contextmanager
    def _giving_up(self, aside: Path) -> Iterator[None]:
        """Let the disk refuse a checkpoint, and say so."""
        try:
            yield
        except OSError as error:
            self.failures += 1
            shutil.rmtree(aside, ignore_errors=True)
            last = f"The last good checkpoint is {self.newest()}" if self.newest() else NONE_YET
            self.note(f"warning: {aside.stem} could not be saved ({error}); the run goes on. {last}")

    def rotate(self) -> None:
        finished = self.finished()
        kept = {*finished[-self.config.keep :], *self.best(), self.held, self.candidate}
        remove([old for old in finished if old not in kept])

    def hold(self, proven: int) -> None:
        """Hold the candidate if it is of a step up to the one that is proven, and choose the next."""
        if self.candidate is not None and step_of(self.candidate) <= proven:
            self.held, self.candidate = self.candidate, None
        newest = self.newest()
        self.candidate = self.candidate or (newest if newest != self.held else None)

    def go_back(self, behind: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
        """Remove all checkpoints after the one that is held, change its counters, and return its step."""
        assert self.held is not None
        step = step_of(self.held)
        self.settle(wait=True)
        remove([path for path in reversed(self.finished()) if step_of(path) > step])
        self._renew(self.held, behind(self.peek(self.held)[0]))
        return step

    def best(self) -> list[Path]:
        """Return the checkpoints that are best by the configured metric."""
        name, sign = self.config.metric.removeprefix("-"), -1.0 if self.config.metric.startswith("-") else 1.0
        scored = [(sign * value, path) for path in self.finished() if (value := saved_metric(path, name)) is not None]
        return [path for _, path in sorted(scored, key=lambda entry: entry[0])[: self.config.keep_best]]

    def finished(self) -> list[Path]:
        """Return the finished checkpoints, oldest first."""
        found = self.folder.glob("step_*") if self.folder.is_dir() else []
        whole = [path for path in found if path.suffix != UNFINISHED]
        return sorted(whole, key=step_of)

    def newest(self) -> Path | None:
        finished = self.finished()
        return finished[-1] if finished else None

    def newest_metrics(self) -> dict[str, float]:
        """Return what is known of the newest checkpoint's step, or nothing where there is no checkpoint."""
        newest = self.newest()
        return read_metrics(newest) if newest is not None else {}

    def read_state(self, checkpoint: Path) -> dict[str, Any]:
        """Return the counters of a checkpoint, or refuse it unless every file is what was written."""
        state, written = self.peek(checkpoint)
        found = hashes(checkpoint)
        self._refuse(checkpoint, [name for name, digest in written.items() if found.get(name) != digest])
        return state

    def check_whole(self, checkpoint: Path) -> None:
        """Refuse a checkpoint at once that has lost a file or a part of one; hashes take longer to compare."""
        files = {name: checkpoint / name for name in self.peek(checkpoint)[1]}
        lost = [name for name, file in files.items() if not file.is_file()]
        cut = [name for name, file in files.items() if name.endswith(".safetensors") and name not in lost]
        self._refuse(checkpoint, lost + [name for name in cut if is_damaged(files[name])])

    def _refuse(self, checkpoint: Path, wrong: list[str]) -> None:
        if not wrong:
            return
        earlier = [one.name for one in self.finished() if one.name < checkpoint.name]
        remedy = f"to go on from {earlier[-1]}" if earlier else "(the only one) and start over with --resume --restart"
        raise ConfigError(f"{checkpoint}: {wrong[0]} is missing or not what was saved; remove the folder {remedy}")

    def peek(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a checkpoint's counters and hashes, not yet compared with what is on the disk."""
        try:
            finish_renewal(checkpoint)
            state, written = (json.loads((checkpoint / name).read_text()) for name in (STATE, MANIFEST))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{checkpoint}: not a checkpoint of this run ({error}); remove it to resume") from error
        return dict(state), dict(written)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def remove(checkpoints: list[Path]) -> None:
    for old in checkpoints:
        # Renamed first: a kill while files go must not leave what looks like a checkpoint.
        shutil.rmtree(old.rename(old.with_suffix(UNFINISHED)))


def finish_renewal(checkpoint: Path) -> None:
    """Give pending counters their real name where the manifest already has their hash."""
    pending = checkpoint / f"{STATE}{UNFINISHED}"
    if pending.exists() and json.loads((checkpoint / MANIFEST).read_text())[STATE] == digest(pending):
        pending.rename(checkpoint / STATE)
        flush(checkpoint)


def replace_file(file: Path, value: Any) -> None:
    """Write a value as JSON so that the file has its old content or its new one at every moment."""
    aside = file.with_name(f"{file.name}{UNFINISHED}")
    write_flushed(aside, value)
    aside.rename(file)
    flush(file.parent)


def write_flushed(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2))
    flush(file)


def saved_metric(checkpoint: Path, name: str) -> float | None:
    value = read_metrics(checkpoint).get(name)
    return value if value is not None and math.isfinite(value) else None


def read_metrics(checkpoint: Path) -> dict[str, float]:
    try:
        return dict(json.loads((checkpoint / METRICS).read_text()))
    except (OSError, json.JSONDecodeError):
        return {}


def hashes(folder: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every file below by its relative name, except the manifest and the metrics, which grow.

    Those that are `known` are not read.
    """
    found = {} if known is None else dict(known)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, METRICS))
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return found | {name: digest(path) for name, path in names.items() if name not in found}


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Make sure that the disk has a file or folder, not only the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
