"""Read the folder of a run, also while it is written: half a line or a missing file is no error."""

import base64
import difflib
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from trueline.config.base import ConfigError
from trueline.files import UNFINISHED, Row, parse_line
from trueline.monitoring.run_folder import PICTURES, RUNS, RunFolder, read_config, without_password

Kept = TypeVar("Kept")

FAILURES = "failures"  # folder with a file for each failed call of a reward
MOST_RUNS = 12  # that one page compares
MOST_FAILURES = 20  # of one run
RESULTS = {"eval": ("evaluation.json", "transcripts.jsonl"), "generate": ("summary.json", "samples.jsonl")}
ROUNDS = ("raft", "iterative_dpo")
PICTURE = re.compile(rf"{PICTURES}/[0-9a-f]+\.(jpeg|png)")  # a transcript may name nothing else


@dataclass(frozen=True, slots=True)
class Transcript:
    """The countable part of a transcript, and its place in its file."""

    step: int
    purpose: str
    source: str
    group: int | None  # which prompt of its step
    reward: float | None
    start: int
    size: int

    @classmethod
    def of(cls, row: Row, start: int, size: int) -> "Transcript":
        purpose, source = (sys.intern(str(row.get(key) or "")) for key in ("purpose", "source"))
        reward = row["reward"] if is_number(row.get("reward")) else None
        group = row["group"] if isinstance(row.get("group"), int) else None
        return cls(row["step"], purpose, source, group, reward, start, size)


def find_runs(words: list[str]) -> dict[str, RunFolder]:
    """Find runs by folder, or by name in runs/, and give each a unique name.

    A folder of runs means those in it, and no word means the run that changed last.
    """
    if not (found := [folder for word in words for folder in runs_named(word)] or runs_inside(RUNS)[:1]):
        raise ConfigError(f"{RUNS.resolve()} holds no run that logs steps: name one, or a folder of runs")
    folders = list({folder.path.resolve(): folder for folder in found}.values())
    names = [folder.path.resolve().name for folder in folders]
    named = zip(names, folders, strict=True)
    return {name if names.count(name) == 1 else str(folder.path): folder for name, folder in named}


def runs_inside(folder: Path) -> list[RunFolder]:
    """Return the runs of a folder that a page can show, the last changed first."""
    return [run for run in RunFolder.all_in(folder) if not without_steps(run)]


def runs_named(word: str) -> list[RunFolder]:
    """Return the run of a word, or the last changed runs of a folder of runs; all of them log steps."""
    if not is_run(RunFolder(Path(word))) and (inside := runs_inside(Path(word))):
        return inside[:MOST_RUNS]
    found = find_run(word)
    if refused := without_steps(found):
        raise ConfigError(refused)
    return [found]


def describe_choice(words: list[str], found: dict[str, RunFolder]) -> str:
    """Describe which runs were chosen, unless the words name each of them."""
    if not words:
        return f"run        {', '.join(str(one.path) for one in found.values())}, the latest"
    inside = {word: len(runs_inside(Path(word))) for word in words if not is_run(RunFolder(Path(word)))}
    most = f", of which the {MOST_RUNS} latest are shown"
    counts = [(word, count, most if count > MOST_RUNS else "") for word, count in inside.items() if count]
    lines = [f"runs       {word} has {count} that log steps{more}" for word, count, more in counts]
    return "\n".join([*lines, f"shown      {', '.join(found)}"]) if lines else ""


def is_run(folder: RunFolder) -> bool:
    return folder.config.is_file() or folder.metrics.is_file()


def find_run(word: str) -> RunFolder:
    for folder in (RunFolder(Path(word)), RunFolder(RUNS / word)):
        if is_run(folder):
            return folder
    near = difflib.get_close_matches(word, [file.parent.name for file in RUNS.glob("*/config.yaml")], n=1)
    why = "is the folder of a run (there is no config.yaml and no metrics.jsonl)"
    remedy = "give a run's folder, or its name below runs/" + (f"; did you mean {near[0]!r}?" if near else "")
    raise ConfigError(f"{word}: neither it nor {RUNS / word} {why}: {remedy}")


def without_steps(folder: RunFolder) -> str:
    """Return where to look instead, for a run whose verb logs no steps."""
    verb = folder.verb() if folder.config.is_file() and not folder.metrics.is_file() else ""
    if files := RESULTS.get(verb):
        where = ", ".join(str(folder.path / file) for file in files)
        return f"{folder.path} is a run of {verb}, which logs no steps: look at {where}"
    if verb in ROUNDS:
        stages = [str(file.parent) for file in sorted(folder.path.glob("round_*/*/metrics.jsonl"))]
        known = f": name some of them, {', '.join(stages)}" if stages else "; none of them has logged a step yet"
        return f"{folder.path} is a run of {verb}, whose rounds are runs of their own{known}"
    return ""


def read_json(file: Path) -> Row | None:
    return parse_line(file.read_bytes()) if file.is_file() else None


class ReportedRun:
    """A run, which can be read again and again; only the new lines of its files are read then."""

    verb: str
    config: dict[str, str]  # every key by its path, with its value as text
    versions: dict[str, str]  # of the libraries that computed it
    plan: str  # its text: machine, models, algorithm, batches
    verified: str  # the table of `trueline verify`, if its model was given to it
    findings: list[Row]
    failures: list[dict[str, str]]

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name, self.folder = name, folder
        files = (folder.metrics, folder.ledger, folder.events)
        self.files = [GrowingRows(file, lambda row, start, size: row) for file in files]
        self.transcript_file = GrowingRows(folder.transcripts, Transcript.of)

    def read(self) -> Self:
        folder = self.folder
        self.rows, self.ledger, self.events = (file.read() for file in self.files)
        self.transcripts = self.transcript_file.read()
        plan = read_json(folder.plan) or {}
        self.verb, self.config = folder.verb() if folder.config.is_file() else "", read_config(folder.config)
        self.plan = without_password(str(plan.get("text", "")))
        self.versions = plan.get("versions", {})
        self.verified = str((read_json(folder.verified) or {}).get("text", ""))
        self.findings = [{"step": step, **one.row()} for step, one in folder.read_findings()]
        self.failures = read_failures(folder.path / FAILURES)
        return self

    def texts(self, chosen: Iterable[Transcript]) -> Iterator[Row]:
        """Read transcripts whole, one by one, as all may exceed memory; if the file was replaced, what is left."""
        if not self.folder.transcripts.is_file():
            return
        with self.folder.transcripts.open("rb") as stream:
            for one in chosen:
                stream.seek(one.start)
                yield from rows_of(stream.read(one.size))

    def picture(self, name: str) -> str:
        """Return a picture that a transcript names as a data URL; empty if it is not there."""
        known, file = PICTURE.fullmatch(name), self.folder.path / name
        if not known or not file.is_file():
            return ""
        return f"data:image/{known[1]};base64,{base64.b64encode(file.read_bytes()).decode()}"

    def stamp(self) -> str:
        """Return a text that changes whenever the files of the run do."""
        others = (self.folder.transcripts, self.folder.findings, self.folder.path / FAILURES)
        states = [path.stat() for path in (*(file.path for file in self.files), *others) if path.exists()]
        return "-".join(f"{state.st_mtime_ns:x}.{state.st_size:x}" for state in states)


class GrowingRows(Generic[Kept]):
    """What is kept of each row of a file that grows; one that was cut or replaced is read from its first line again."""

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
    found = map(parse_line, text.split(b"\n"))
    return [row for row in found if row is not None and isinstance(row.get("step"), int)]


def read_failures(folder: Path) -> list[dict[str, str]]:
    """Read the failed calls, each with the command that repeats it."""
    files = [file for file in sorted(folder.glob("*"))[:MOST_FAILURES] if file.suffix != UNFINISHED]
    found = []
    for file in files:
        record = {"function": "", "error": "the file cannot be read"} | (parse_line(file.read_bytes()) or {})
        shown = {"file": file.name, "function": str(record["function"]), "error": str(record["error"])}
        found.append(shown | {"command": f"python -m trueline.rewards.replay {shlex.quote(str(file))}"})
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def round_short(value: Any) -> float | None:
    if not is_number(value) or isinstance(value, int):
        return value if is_number(value) else None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short


def pick_evenly(items: list[Any], count: int) -> list[Any]:
    """Choose so many, from the first to the last."""
    if len(items) <= count:
        return items
    return [items[place * (len(items) - 1) // max(count - 1, 1)] for place in range(count)]
