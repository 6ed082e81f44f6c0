"""Open datasets: files, folders, saved datasets, runs of `generate`, names of libraries, and hub names."""

import csv
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import pyarrow as arrow
import pyarrow.parquet as parquet

from trueline.config.base import ConfigError
from trueline.data.named.names import is_name, open_name
from trueline.data.rows import (
    BLOCK_ROWS,
    Joined,
    Lines,
    Located,
    SourceFile,
    TableRows,
    is_large,
    locate_row,
    parse_row,
    repeats,
    single_keys,
)
from trueline.files import UNFINISHED, atomic_path
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.run_folder import RunFolder

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LONGEST_FIELD = 2**31 - 1  # characters of a CSV field
PACKED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
HUB_SECONDS, PORTS = 10, {"https": 443, "http": 80}
HELD_OUT = {"test", "tests", "validation", "valid", "val", "eval", "evaluation", "dev", "heldout"}  # in names of files
SPLITS, STATE = "dataset_dict.json", "state.json"  # files of a saved DatasetDict and Dataset
SAMPLED = {  # task -> the file of a run of `generate` that it reads, and what that contains
    "prompts": ("samples.jsonl", "its prompts"),
    **dict.fromkeys(("sft", "distill"), ("kept.jsonl", "the completions it kept")),
    **dict.fromkeys(("preference", "rm", "kto"), ("pairs.jsonl", "its pairs of best and worst completions")),
}


def open_source(path: str, key: str) -> Sequence[Located]:
    """Open the rows of `path`, and read them all unless they are many; `key` is the key that named it."""
    with WORK.doing("data", key, path):
        try:
            rows = find_rows(path, key)
            return rows if is_large(len(rows)) else list(rows)
        except ConfigError as error:
            error.key = error.key or key
            raise


def find_rows(path: str, key: str) -> Sequence[Located]:
    local, name = Path(path).expanduser(), path.partition(":")[0]
    rows: Sequence[Located]
    if not path:
        raise ConfigError(f"{key} is empty: name a dataset, e.g. {key}=prompts.jsonl")
    if local.is_dir():
        rows = Joined([read_file(file, key) for file in data_files(local, key)])
    elif local.is_file():
        rows = read_file(local, key)
    elif is_name(path):
        rows = open_name(path, key)
    elif Path(name).suffix in READERS or not hub_name(name):
        named = "hub datasets are named owner/name[:split]"
        raise ConfigError(f"{key}={path}: no such file or folder in {Path.cwd()}; {named}")
    else:
        rows = read_hub(path, key)
    if not len(rows):
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


def read_file(file: Path, key: str) -> Sequence[Located]:
    if (reader := READERS.get(file.suffix)) is None:
        packed = "unpack it and " if file.suffix in PACKED else ""
        raise ConfigError(f"{key}={file}: unknown ending {file.suffix!r}: {packed}use one of {', '.join(READERS)}")
    try:
        return reader(file)
    except (arrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={file}: cannot be read as {file.suffix[1:]}: {error}") from None


def read_json_lines(file: Path) -> Sequence[Located]:
    """Read JSON lines; those of a pipe, which can be read only once, stay in memory."""
    if file.is_file():
        return Lines(file)
    with file.open(encoding="utf-8-sig") as lines:
        numbered = [(line, f"{file}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
    return [parse_row(line, place, file.parent) for line, place in numbered]


def read_json(file: Path) -> Sequence[Located]:
    text = file.read_text(encoding="utf-8-sig")
    try:
        whole = json.loads(text, object_pairs_hook=single_keys)
        rows = whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("["):
            return read_json_lines(file)
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg}): fix it") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return [locate_row(row, f"{file}, row {number}", file.parent) for number, row in enumerate(rows, 1)]


def read_csv(file: Path, separator: str = ",") -> list[Located]:
    return list(csv_rows(file, separator))


def csv_rows(file: Path, separator: str) -> Iterator[Located]:
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
                yield Located(dict(row), f"{file}, row {number}", folder=file.parent)
        except csv.Error as error:
            raise ConfigError(f"{file}, line {rows.reader.line_num}: {error}: check its quotation marks") from None


def read_arrow(file: Path) -> TableRows:
    return TableRows(map_table(file), file, [SourceFile(file)])


def map_table(file: Path) -> arrow.Table:
    with arrow.memory_map(str(file)) as source:
        try:
            return arrow.ipc.open_file(source).read_all()
        except arrow.ArrowInvalid:
            return arrow.ipc.open_stream(source).read_all()


def read_parquet(file: Path) -> TableRows:
    """Read a Parquet file; of a large one, the copy whose rows can be drawn one by one."""
    source = SourceFile(file)
    with parquet.ParquetFile(file) as table:
        rows = table.metadata.num_rows
    if not is_large(rows):
        return TableRows(parquet.read_table(file), file, [source])
    copy = cache_folder() / "tables" / f"{source.digest()}.arrow"
    if not copy.exists():
        write_copy(file, copy)
    return TableRows(map_table(copy), file, [source])


def write_copy(file: Path, copy: Path) -> None:
    """Write a Parquet file's rows as an Arrow file, which can be mapped into memory."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with (
            parquet.ParquetFile(file) as source,
            atomic_path(copy, f".{os.getpid()}{UNFINISHED}") as aside,
            arrow.ipc.new_file(str(aside), source.schema_arrow) as writer,
        ):
            for batch in source.iter_batches(BLOCK_ROWS):
                writer.write_batch(batch)
    except OSError as error:
        raise ConfigError(
            f"{file} has many rows, and a copy whose rows can be drawn one by one cannot be written to {copy}: "
            f"{first_line(error)}; set XDG_CACHE_HOME to a folder with room"
        ) from None


def cache_folder() -> Path:
    """Return the folder of what is made from large datasets once, and found again by their content."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trueline"


def read_hub(name: str, key: str) -> TableRows:
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
    files = [SourceFile(Path(one["filename"])) for one in dataset.cache_files]
    return TableRows(dataset.with_format("arrow")[:], name, files)


READERS: dict[str, Callable[[Path], Sequence[Located]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, separator="\t"),
    ".parquet": read_parquet,
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
