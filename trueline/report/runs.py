"""What the folder of a run holds, as far as it is written: half a line, or a file that is not there, is no error."""

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from trueline.config.base import ConfigError
from trueline.monitoring.run_folder import FOLDER, RUNS, UNFINISHED, RunFolder
from trueline.report.numbers import is_number

Row = dict[str, Any]
Kept = TypeVar("Kept")

FAILURES = "failures"  # folder with a file for each call behind a failed reward
MOST_RUNS = 12  # that one page compares, of a folder that holds more
MOST_FAILURES = 20  # that are read of one run
LONGEST_PLAN = 20_000  # characters
RESULTS = {"eval": ("evaluation.json", "transcripts.jsonl"), "generate": ("summary.json", "samples.jsonl")}
ROUNDS = ("raft", "iterative_dpo")
PASSWORD = re.compile(r"(\w://)[^/\s@]+@")  # in an address


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is counted of a transcript, and where it stands in its file."""

    step: int
    purpose: str
    source: str
    group: int | None  # which prompt of its step; runs of earlier versions have not written it
    reward: float | None
    start: int
    size: int

    @classmethod
    def of(cls, row: Row, start: int, size: int) -> "Transcript":
        purpose, source = (sys.intern(str(row.get(key) or "")) for key in ("purpose", "source"))
        reward = row["reward"] if is_number(row.get("reward")) else None
        group = row["group"] if isinstance(row.get("group"), int) else None
        return cls(row["step"], purpose, source, group, reward, start, size)


@dataclass(frozen=True, slots=True)
class Transcripts:
    """All transcripts of a run, of which a file holds the texts: they may be larger than memory."""

    path: Path
    entries: list[Transcript]

    def rows(self, chosen: Iterable[Transcript]) -> Iterator[Row]:
        """Read those that are chosen, one after the other; of a file that was replaced since, any that are there."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as stream:
            for one in chosen:
                stream.seek(one.start)
                yield from rows_of(stream.read(one.size))


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    verb: str
    config: dict[str, str]  # every key by its path, with its value in words
    plan: str  # as its start has said it: machine, models, algorithm, batches
    rows: list[Row]  # of metrics.jsonl
    transcripts: Transcripts
    ledger: list[Row]
    events: list[Row]
    failures: list[dict[str, str]]


def find_runs(words: list[str]) -> dict[str, RunFolder]:
    """Find runs by folder, or by name below runs/, and give each a name that tells it from the others.

    A folder of runs stands for those in it, and no word at all for the run that was touched last.
    """
    found = [folder for word in words for folder in runs_named(word)] or runs_inside(RUNS)[:1]
    if not found:
        raise ConfigError(f"there is no run that logs steps in {RUNS.resolve()}: name one, or a folder of runs")
    folders = list({folder.path.resolve(): folder for folder in found}.values())
    names = [folder.path.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder.path): folder
        for name, folder in zip(names, folders, strict=True)
    }


def runs_inside(folder: Path) -> list[RunFolder]:
    """Return the runs of a folder that a page can show, those that were touched last first."""
    return [run for run in RunFolder.all_in(folder) if not without_steps(run)]


def runs_named(word: str) -> list[RunFolder]:
    """Return the run of a word, or those of a folder of runs that were touched last; they log steps."""
    inside = [] if is_run(RunFolder(Path(word))) else runs_inside(Path(word))
    if inside:
        return inside[:MOST_RUNS]
    found = find_run(word)
    if refused := without_steps(found):
        raise ConfigError(refused)
    return [found]


def describe_choice(words: list[str], found: dict[str, RunFolder]) -> str:
    """Describe which runs were taken, where no word names each of them; nothing otherwise."""
    if not words:
        return f"run        {', '.join(str(one.path) for one in found.values())}, the one that was touched last"
    inside = {word: len(runs_inside(Path(word))) for word in words if not is_run(RunFolder(Path(word)))}
    lines = [
        f"runs       {word} holds {count} that log steps"
        + (f", of which the {MOST_RUNS} that were touched last are taken" if count > MOST_RUNS else "")
        for word, count in inside.items()
        if count
    ]
    return "\n".join([*lines, f"taken      {', '.join(found)}"]) if lines else ""


def is_run(folder: RunFolder) -> bool:
    return folder.config.is_file() or folder.metrics.is_file()


def find_run(word: str) -> RunFolder:
    for folder in (RunFolder(Path(word)), RunFolder(RUNS / word)):
        if is_run(folder):
            return folder
    near = difflib.get_close_matches(word, [file.parent.name for file in RUNS.glob("*/config.yaml")], n=1)
    raise ConfigError(
        f"{word}: neither it nor {RUNS / word} is the folder of a run (there is no config.yaml and no metrics.jsonl): "
        "give a run's folder, or its name below runs/" + (f"; did you mean {near[0]!r}?" if near else "")
    )


def without_steps(folder: RunFolder) -> str:
    """Return where to look instead, of a run whose verb logs no steps: a page would show nothing of it."""
    verb = folder.verb() if folder.config.is_file() and not folder.metrics.is_file() else ""
    if files := RESULTS.get(verb):
        where = ", ".join(str(folder.path / file) for file in files)
        return f"{folder.path} is a run of {verb}, which logs no steps: look at {where}"
    if verb in ROUNDS:
        stages = [str(file.parent) for file in sorted(folder.path.glob("round_*/*/metrics.jsonl"))]
        known = f": name some of them, {', '.join(stages)}" if stages else "; none of them has logged a step yet"
        return f"{folder.path} is a run of {verb}, whose rounds are runs of their own{known}"
    return ""


class RunReader:
    """Reads a run again and again, of its growing files only what is new."""

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name, self.folder = name, folder
        self.files = [GrowingRows(file, whole_row) for file in (folder.metrics, folder.ledger, folder.events)]
        self.transcripts = GrowingRows(folder.transcripts, Transcript.of)

    def read(self) -> Run:
        rows, ledger, events = (file.read() for file in self.files)
        return Run(
            name=self.name,
            verb=self.folder.verb() if self.folder.config.is_file() else "",
            config=read_config(self.folder.config),
            plan=read_plan(self.folder.log),
            rows=rows,
            transcripts=Transcripts(self.transcripts.path, self.transcripts.read()),
            ledger=ledger,
            events=events,
            failures=read_failures(self.folder.path / FAILURES),
        )

    def stamp(self) -> str:
        """Return a text that changes with the files of the run."""
        growing = [*(file.path for file in self.files), self.transcripts.path]
        paths = [*growing, self.folder.path / FAILURES]
        states = [path.stat() for path in paths if path.exists()]
        return "-".join(f"{state.st_mtime_ns:x}.{state.st_size:x}" for state in states)


def read_run(name: str, folder: RunFolder) -> Run:
    return RunReader(name, folder).read()


def whole_row(row: Row, start: int, size: int) -> Row:
    return row


class GrowingRows(Generic[Kept]):
    """What is kept of each row of a file that may still be written to; it is read line by line, and from its first
    one again where it was cut or replaced.
    """

    def __init__(self, path: Path, keep: Callable[[Row, int, int], Kept]) -> None:
        self.path, self.keep = path, keep  # which is given a row, and where it begins and how long it is in bytes
        self.rows: list[Kept] = []
        self.place, self.file = 0, 0  # how far it is read, and which file that was

    def read(self) -> list[Kept]:
        if not self.path.is_file():
            return []
        with self.path.open("rb") as stream:
            state = os.fstat(stream.fileno())
            if state.st_size < self.place or state.st_ino != self.file:
                self.rows, self.place, self.file = [], 0, state.st_ino
            stream.seek(self.place)
            for line in stream:
                found = [self.keep(row, self.place, len(line)) for row in rows_of(line)]
                if not line.endswith(b"\n"):  # it is looked at again when it is whole
                    return [*self.rows, *found]
                self.rows += found
                self.place += len(line)
        return list(self.rows)


def rows_of(text: bytes) -> list[Row]:
    """Return the rows among the lines of a text."""
    found = map(parsed, text.split(b"\n"))
    return [row for row in found if isinstance(row, dict) and isinstance(row.get("step"), int)]


def parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def read_config(file: Path) -> dict[str, str]:
    try:
        tree = yaml.safe_load(file.read_text(errors="replace")) if file.is_file() else {}
    except yaml.YAMLError as error:
        return {file.name: f"cannot be read: {error}"}
    return {path: without_password(text) for path, text in flat(tree)}


def read_plan(log: Path) -> str:
    """Read what a run's log begins with, up to where its folder is named."""
    if not log.is_file():
        return ""
    with log.open(errors="replace") as lines:
        plan, named, _ = lines.read(LONGEST_PLAN).partition(f"\n{FOLDER}")
    return without_password(plan) if named else ""


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Walk a tree of keys: the path of each leaf, with its value in words."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)


def without_password(text: str) -> str:
    """Leave out who signs in where an address says so: a report is passed on, a run's folder is not."""
    return PASSWORD.sub(r"\1", text)


def read_failures(folder: Path) -> list[dict[str, str]]:
    """Read the calls that failed, each with the command that makes it again."""
    return [failure(file) for file in sorted(folder.glob("*"))[:MOST_FAILURES] if file.suffix != UNFINISHED]


def failure(file: Path) -> dict[str, str]:
    record = parsed(file.read_bytes())
    known = record if isinstance(record, dict) else {}
    return {
        "file": file.name,
        "function": str(known.get("function", "")),
        "error": str(known.get("error", "the file cannot be read")),
        "command": f"python -m trueline.rewards.replay {shlex.quote(str(file))}",
    }
