"""Open datasets: files, folders, saved datasets, runs of `generate`, and hub names."""

import csv
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import pyarrow as arrow
import pyarrow.parquet as parquet

from trueline.config.base import ConfigError
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.run_folder import RunFolder

Row = dict[str, Any]
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LONGEST_FIELD = 2**31 - 1  # characters of a CSV field
PACKED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
TEXT = "text"  # column of rows that are plain strings
HUB_SECONDS, PORTS = 10, {"https": 443, "http": 80}
HELD_OUT = {"test", "tests", "validation", "valid", "val", "eval", "evaluation", "dev", "heldout"}  # in names of files
SPLITS, STATE = "dataset_dict.json", "state.json"  # files of a saved DatasetDict and Dataset
SAMPLED = {  # task -> the file of a run of `generate` that it reads, and what that contains
    "prompts": ("samples.jsonl", "its prompts"),
    **dict.fromkeys(("sft", "distill"), ("kept.jsonl", "the completions it kept")),
    **dict.fromkeys(("preference", "rm", "kto"), ("pairs.jsonl", "its pairs of best and worst completions")),
}


@dataclass(frozen=True, slots=True)
class Located:
    """A row and its place, for error messages."""

    row: Row
    place: str
    padded: bool = False  # absent nested fields are nulls, because Arrow gives all rows the same fields
    bare: bool = False  # a plain string without columns


def open_source(path: str, key: str) -> list[Located]:
    """Read all rows of `path`; `key` is the configuration key that named it."""
    with WORK.doing("data", key, path):
        try:
            return read_source(path, key)
        except ConfigError as error:
            error.key = error.key or key
            raise


def read_source(path: str, key: str) -> list[Located]:
    local, name = Path(path).expanduser(), path.partition(":")[0]
    if not path:
        raise ConfigError(f"{key} is empty: name a dataset, e.g. {key}=prompts.jsonl")
    if local.is_dir():
        rows = [row for file in data_files(local, key) for row in read_file(file, key)]
    elif local.is_file():
        rows = list(read_file(local, key))
    elif Path(name).suffix in READERS or not hub_name(name):
        named = "hub datasets are named owner/name[:split]"
        raise ConfigError(f"{key}={path}: no such file or folder in {Path.cwd()}; {named}")
    else:
        rows = list(read_hub(path, key))
    if not rows:
        raise ConfigError(f"{key}={path}: the dataset is empty: add at least one row")
    return rows


def hub_name(path: str) -> bool:
    """Tell whether a path is `owner/name` of the hub: one slash, and no local folder named like the owner."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).parent.is_dir()


def try_hub() -> None:
    """Try once to reach the hub; if that fails, its libraries use only their caches."""
    from huggingface_hub import constants  # noqa: PLC0415

    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or getproxies():
        return
    try:
        socket.create_connection((hub.hostname or "", hub.port or PORTS[hub.scheme]), HUB_SECONDS).close()
    except OSError:
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def data_files(folder: Path, key: str) -> list[Path]:
    """Return the data files of a folder, or those of a dataset that `save_to_disk` wrote. Runs are refused."""
    if RunFolder(folder).config.is_file():
        raise ConfigError(f"{key}={folder} is a run: name one of its files, e.g. {folder / 'kept.jsonl'}")
    if (folder / STATE).is_file():
        listed = json.loads((folder / STATE).read_text(encoding="utf-8")).get("_data_files", [])
        return [folder / one["filename"] for one in listed]
    if not (files := sorted(file for file in folder.iterdir() if file.suffix in READERS)):
        raise ConfigError(f"{key}={folder}: no data file in this folder; supported endings: {', '.join(READERS)}")
    held_out = [file for file in files if HELD_OUT & set(re.split(r"[^a-z]+", file.stem.lower()))]
    if 0 < len(held_out) < len(files):
        rest = next(file for file in files if file not in held_out)
        raise ConfigError(
            f"{key}={folder} contains {rest.name} and {held_out[0].name}, which looks held out: set {key}={rest} and "
            f"evaluation.data={held_out[0]}"
        )
    return files


def read_file(file: Path, key: str) -> Iterator[Located]:
    if (reader := READERS.get(file.suffix)) is None:
        packed = "unpack it and " if file.suffix in PACKED else ""
        raise ConfigError(f"{key}={file}: unknown ending {file.suffix!r}: {packed}use one of {', '.join(READERS)}")
    try:
        yield from reader(file)
    except (arrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={file}: cannot be read as {file.suffix[1:]}: {error}") from None


def read_json_lines(file: Path) -> Iterator[Located]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parse_row(line, f"{file}, line {number}")


def parse_row(text: str, place: str) -> Located:
    try:
        row = json.loads(text, object_pairs_hook=single_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON ({error.msg}, column {error.colno}): fix or delete this line") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return locate_row(row, place)


def single_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Refuse a JSON object with a repeated key, whose first value would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ConfigError(f"the key {repeats(name for name, _ in pairs)[0]!r} is repeated: delete one")
    return row


def repeats(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def locate_row(row: Any, place: str) -> Located:
    """Return a row with named columns; a plain string has one."""
    if isinstance(row, str):
        return Located({TEXT: row}, place, bare=True)
    if not isinstance(row, dict):
        remedy = "rename a file that is one array to .json" if isinstance(row, list) else "fix or delete it"
        raise ConfigError(f"{place}: expected an object or a string, found {type(row).__name__}: {remedy}")
    return Located(row, place)


def read_json(file: Path) -> Iterator[Located]:
    text = file.read_text(encoding="utf-8-sig")
    try:
        whole = json.loads(text, object_pairs_hook=single_keys)
        rows = whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("["):
            yield from read_json_lines(file)
            return
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg}): fix it") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for number, row in enumerate(rows, 1):
        yield locate_row(row, f"{file}, row {number}")


def read_csv(file: Path, separator: str = ",") -> Iterator[Located]:
    csv.field_size_limit(LONGEST_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter=separator, strict=True)
        try:
            header = rows.fieldnames or []
            if repeated := repeats(header):
                raise ConfigError(f"{file}, line 1: the column {repeated[0]!r} is repeated: rename or remove one")
            others = [other for other in SEPARATORS if other != separator and len(header) == 1 and other in header[0]]
            if others:
                raise ConfigError(
                    f"{file}: fields of a {file.suffix} file are separated by {SEPARATORS[separator]}, not "
                    f"{SEPARATORS[others[0]]}: save it so, or as JSONL"
                )
            for number, row in enumerate(rows, 1):
                if None in row or None in row.values():
                    raise ConfigError(f"{file}, row {number}: it has more or fewer fields than the header")
                yield Located(dict(row), f"{file}, row {number}")
        except csv.Error as error:
            raise ConfigError(f"{file}, line {rows.reader.line_num}: {error}: check its quotation marks") from None


def read_arrow(file: Path) -> Iterator[Located]:
    with arrow.memory_map(str(file)) as source:
        try:
            table = arrow.ipc.open_file(source).read_all()
        except arrow.ArrowInvalid:
            table = arrow.ipc.open_stream(source).read_all()
        yield from table_rows(table, file)


def table_rows(table: arrow.Table, place: Path | str) -> Iterator[Located]:
    for number, row in enumerate(table.to_pylist(), 1):
        yield Located(row, f"{place}, row {number}", padded=True)


def read_hub(name: str, key: str) -> Iterator[Located]:
    """Read `owner/name` or `owner/name:split` from the Hugging Face hub or its local cache."""
    try_hub()
    import datasets  # noqa: PLC0415  (seconds to import, and only hub names need it)

    repository, _, split = name.partition(":")
    try:
        dataset = datasets.load_dataset(repository, split=split or "train")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={name}: neither a file nor a dataset of the hub ({first_line(error)}): name a file, or check the "
            "name and the network"
        ) from error
    yield from table_rows(dataset.with_format("arrow")[:], name)


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, separator="\t"),
    ".parquet": lambda file: table_rows(parquet.read_table(file), file),
    ".arrow": read_arrow,
}


def choose_split(names: Sequence[str], named: str, *, held_out: bool = False) -> tuple[str, str]:
    """Choose one of several splits; return it and a line about it."""
    usual = [name for name in names if (name in HELD_OUT if held_out else name == "train")]
    taken = usual if len(usual) == 1 else list(names) if len(names) == 1 else []
    if not taken:
        lacks = "" if held_out else " and no train"
        raise ConfigError(f"{named} has the splits {', '.join(names) or 'none'}{lacks}: choose one of them")
    rest = ", ".join(name for name in names if name != taken[0])
    return taken[0], f"taken      {named}: its split {taken[0]}" + (f", without {rest}" if rest else "")


def stored_data(path: str, key: str, task: str, runs: str) -> tuple[str, str] | None:
    """Return the file or folder to read of a saved dataset or a run, and a line about it; None for other data."""
    folder, named = Path(path).expanduser(), f"{key}={path}"
    if path and "/" not in path and not folder.exists():
        folder = Path(runs) / path
    if (folder / SPLITS).is_file():
        splits = json.loads((folder / SPLITS).read_text(encoding="utf-8"))["splits"]
        name, line = choose_split(splits, named, held_out=key.startswith("evaluation."))
        return str(folder / name), line
    run = RunFolder(folder)
    if not path or not run.config.is_file() or not (verb := run.verb()):
        return None
    if verb != "generate":
        raise ConfigError(f"{named} is a run of {verb}, which writes no data: name a run of generate, or a dataset")
    if task not in SAMPLED:
        raise ConfigError(f"{named} is a run of generate, whose completions {task} cannot train on: name a dataset")
    name, about = SAMPLED[task]
    file = run.path.resolve() / name
    if not file.is_file():
        pairs = name.startswith("pairs")
        why = "it ran without pairs=true" if pairs else "it has not finished"
        again = f"`{run.resume_command()}{' pairs=true' * pairs}`"
        raise ConfigError(f"{named} is a run of generate without {name}, because {why}: run {again}")
    return str(file), f"taken      {named}: {about} ({file})"
