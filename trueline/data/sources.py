"""Open datasets: local JSON, JSONL, CSV, TSV, Parquet and Arrow files, folders of them, and hub names."""

import csv
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import pyarrow as arrow
import pyarrow.parquet as parquet

from trueline.config.base import ConfigError
from trueline.data.stored import HELD_OUT, saved_files
from trueline.monitoring.beats import WORK

Row = dict[str, Any]
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LONGEST_FIELD = 2**31 - 1  # characters; the library's own limit is that of a short text
PACKED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
TEXT = "text"  # column of rows that are texts by themselves
HUB_SECONDS, PORTS = 10, {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Located:
    """A row and where it stands, for messages about it."""

    row: Row
    place: str
    padded: bool = False  # nested fields that it has not are there as nulls, for Arrow gives all rows the same
    bare: bool = False  # it was a text, in no column


def open_source(path: str, key: str) -> list[Located]:
    """Return all rows of `path`; `key` is the configuration key that named it."""
    with WORK.doing("data", key, path):
        return read_source(path, key)


def read_source(path: str, key: str) -> list[Located]:
    local = Path(path).expanduser()
    if not path:
        raise ConfigError(f"{key} is empty: name a dataset, e.g. {key}=prompts.jsonl")
    if local.is_dir():
        rows = [row for file in data_files(local, key) for row in read_file(file, key)]
    elif local.is_file():
        rows = list(read_file(local, key))
    elif looks_local(path):
        raise ConfigError(
            f"{key}={path}: there is no such file or folder (looked in {Path.cwd()}); a dataset of the hub is named "
            "owner/name or owner/name:split"
        )
    else:
        rows = list(read_hub(path, key))
    if not rows:
        raise ConfigError(f"{key}={path}: the dataset is empty; at least one row is needed")
    return rows


def looks_local(path: str) -> bool:
    name, _, _ = path.partition(":")
    return Path(name).suffix in READERS or not hub_name(name)


def hub_name(path: str) -> bool:
    """Tell `owner/name` from a path: it has one slash, and no folder here bears the owner's name."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).parent.is_dir()


def try_hub() -> None:
    """Try once to reach the hub; where it cannot be, its libraries look into their caches only and do not try again."""
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
    if (saved := saved_files(folder, key)) is not None:
        return saved
    files = sorted(file for file in folder.iterdir() if file.suffix in READERS)
    if not files:
        raise ConfigError(f"{key}={folder}: no data file in this folder; known endings: {', '.join(READERS)}")
    held_out = [file for file in files if HELD_OUT & set(re.split(r"[^a-z]+", file.stem.lower()))]
    if 0 < len(held_out) < len(files):
        rest = next(file for file in files if file not in held_out)
        raise ConfigError(
            f"{key}={folder}: {held_out[0].name} looks held out and stands beside {rest.name}: name one file, e.g. "
            f"{key}={rest}, and what is held out as evaluation.data={held_out[0]}"
        )
    return files


def read_file(file: Path, key: str) -> Iterator[Located]:
    reader = READERS.get(file.suffix)
    if reader is None:
        packed = "unpack it, and " if file.suffix in PACKED else ""
        raise ConfigError(f"{key}={file}: ending {file.suffix!r} is not known; {packed}use one of {', '.join(READERS)}")
    try:
        yield from reader(file)
    except (arrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={file}: cannot be read as {file.suffix[1:]}: {error}") from None


def read_json_lines(file: Path) -> Iterator[Located]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield parsed_row(line, f"{file}, line {number}")


def parsed_row(text: str, place: str) -> Located:
    try:
        row = json.loads(text, object_pairs_hook=single_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON ({error.msg} at column {error.colno}); mend or remove it") from None
    except RepeatedKey as error:
        raise ConfigError(f"{place}: {error}") from None
    return located_row(row, place)


class RepeatedKey(ValueError):
    """An object of JSON with one key twice, of which the first would be lost."""


def single_keys(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice: keep one")
    return row


def located_row(row: Any, place: str) -> Located:
    """Return a row with named columns; a text is a row of one."""
    if isinstance(row, str):
        return Located({TEXT: row}, place, bare=True)
    if not isinstance(row, dict):
        array = "; a file that is one array ends in .json" if isinstance(row, list) else "; mend or remove it"
        raise ConfigError(
            f"{place}: expected an object with named columns, or a text, found {type(row).__name__}{array}"
        )
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
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg}); mend it") from None
    except RepeatedKey as error:
        raise ConfigError(f"{file}: {error}") from None
    for number, row in enumerate(rows, 1):
        yield located_row(row, f"{file}, row {number}")


def read_csv(file: Path, separator: str = ",") -> Iterator[Located]:
    csv.field_size_limit(LONGEST_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter=separator, strict=True)
        try:
            check_header(rows.fieldnames or [], file, separator)
            for number, row in enumerate(rows, 1):
                if None in row or None in row.values():
                    raise ConfigError(f"{file}, row {number}: the number of fields differs from the header's")
                yield Located(dict(row), f"{file}, row {number}")
        except csv.Error as error:
            raise ConfigError(f"{file}, line {rows.reader.line_num}: {error}; see to its quotation marks") from None


def check_header(header: Sequence[str], file: Path, separator: str) -> None:
    """Refuse a column that is there twice, and a single one whose name holds what separates fields elsewhere."""
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ConfigError(f"{file}, line 1: the column {twice[0]!r} is there twice; rename or remove one")
    others = [other for other in SEPARATORS if other != separator and len(header) == 1 and other in header[0]]
    if others:
        raise ConfigError(
            f"{file}: its fields are separated by {SEPARATORS[others[0]]}, in a {file.suffix} file "
            f"{SEPARATORS[separator]} separate them: save it with these, or as JSONL"
        )


def read_parquet(file: Path) -> Iterator[Located]:
    yield from table_rows(parquet.read_table(file), file)


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
            f"{key}={name}: neither a file nor a dataset that can be had from the hub ({first_line(error)}); name a "
            "file, or look after the name and the network"
        ) from error
    yield from table_rows(dataset.with_format("arrow")[:], name)


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, separator="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
