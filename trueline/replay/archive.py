"""One file with all that replays steps of a run elsewhere: no secrets and no places of this machine are in it.

An archive is data of somebody else: names that leave its folder and files of other kinds are refused, nothing is
unpickled, and code in it runs only where that is allowed.
"""

import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trueline.config.base import ConfigError, Tree
from trueline.monitoring.run_folder import HEAD, RunFolder
from trueline.monitoring.user_files import changed_places, code_values, files_of, places_in
from trueline.replay.steps import RecordedRun, missing
from trueline.training.checkpoints import MANIFEST, TENSORS
from trueline.training.kept_samples import ABOUT, as_bytes, compress, read_arrays

CODE, BASE, UNKNOWN = "code", "base", "not-in-this-archive"
WORDS = ("tokenizer.json", "vocab.json")  # of a tokenizer, in which nothing is masked
DATA = {".json", ".jsonl", ".yaml", ".npz", ".safetensors", ".txt", ".jinja", ".model"}
LARGEST = 200 * 2**30  # bytes of an opened archive
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API_?)?KEY$", re.IGNORECASE)
SECRETS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[\w-]{10,})|(?<=://)[^/\s@\"']+(?=@)|(?<=Bearer )[\w.~+/=-]+"
)
MASK, SHORTEST = "***", 6
HIDDEN = re.compile(r"/(?:home|Users)/[^/\s\"':,]+|/root\b")


@dataclass(slots=True)
class Masking:
    """Replaces secrets and places of this machine in texts."""

    places: dict[str, str] = field(default_factory=dict)  # what is in the archive, and where
    secrets: list[str] = field(default_factory=list)

    @classmethod
    def here(cls) -> "Masking":
        values = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}
        return cls({}, sorted(values, key=len, reverse=True))

    def text(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, MASK).replace(json.dumps(secret)[1:-1], MASK)
        for place in sorted(self.places, key=len, reverse=True):
            text = text.replace(place, self.places[place])
        for place in {str(Path.home()), str(Path.cwd())} - {"/"}:
            text = text.replace(place, "~")
        return HIDDEN.sub("~", SECRETS.sub(MASK, text))

    def json(self, value: Any, *, named: bool = False) -> Any:
        """Mask every text of a value; with `named`, drop those under a secret's name."""
        if isinstance(value, dict):
            hidden = {key for key, one in value.items() if isinstance(one, str) and SECRET_NAME.search(str(key))}
            kept = {key: one for key, one in value.items() if not (named and key in hidden)}
            return {self.text(str(key)): self.json(one, named=named) for key, one in kept.items()}
        if isinstance(value, list):
            return [self.json(one, named=named) for one in value]
        return self.text(value) if isinstance(value, str) else value


def pack(run: RecordedRun, steps: list[int], target: Path, *, base: bool, say: Callable[[str], None]) -> None:
    """Write the archive of some steps; without its `base` model, all of them from that model if samples allow it."""
    start = 0 if not base and 0 in run.starts(steps[0]) else run.start(steps[0])
    if left := missing(run.files.steps(), start, steps[-1]):
        raise ConfigError(f"samples of step {left[0]} are not kept, so steps {steps[0]}-{steps[-1]} cannot be packed")
    kept = run.open(steps[-1])
    files = dict(files_to_pack(run, kept.config, start, base=base))
    masking = Masking.here()
    masking.places = {str(file.resolve()): name for name, file in files.items() if name.startswith(CODE)}
    masking.places |= {str(place.resolve()): name for name, place in base_models(kept.config).items() if base}
    size = sum(file.stat().st_size for file in files.values())
    say(f"packs      steps {steps[0]}-{steps[-1]} from the weights after step {start}, {size / 2**20:.1f} MB of files")
    aside = target.with_name(f"{target.name}.unfinished")
    with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents(run, files, masking, range(start + 1, steps[-1] + 1)):
            if isinstance(content, Path):
                archive.write(content, name)
            else:
                archive.writestr(name, content)
    aside.rename(target)
    say(f"written: {target} ({target.stat().st_size / 2**20:.1f} MB)")


def files_to_pack(run: RecordedRun, config: Tree, start: int, *, base: bool) -> Iterator[tuple[str, Path]]:
    """Yield files by their names in the archive: the model that the run began from, a checkpoint, and user code."""
    for name, place in base_models(config).items() if base else ():
        for file in sorted(place.glob("*")):
            if file.is_file() and file.suffix in DATA:
                yield f"{name}/{file.name}", file
    if start:
        folder = run.checkpoints[start]
        for file in sorted(folder.rglob("*")):
            inside = file.relative_to(folder)
            if "model" not in inside.parts and (file.suffix == TENSORS or file.name == MANIFEST):
                yield f"checkpoints/{folder.name}/{inside.as_posix()}", file
    for key, value in code_values(config):
        if not key.startswith("evaluation."):
            for file in (file for named in places_in(value, key) for file in files_of(named)):
                yield f"{CODE}/{file.name}", file


def base_models(config: Tree) -> dict[str, Path]:
    """Return the models that a run began from, by their folders in an archive."""
    named = {BASE: config["model"]["path"], f"{BASE}-critic": config["critic"]["path"]}
    return {name: Path(place) for name, place in named.items() if place and Path(place).is_dir()}


def contents(
    run: RecordedRun, files: dict[str, Path], masking: Masking, steps: range
) -> Iterator[tuple[str, bytes | Path]]:
    for name, file in files.items():
        if file.name == MANIFEST:
            hashes: dict[str, str] = json.loads(file.read_text())
            folder = PurePosixPath(name).parent
            here = {inside: value for inside, value in hashes.items() if (folder / inside).as_posix() in files}
            yield name, json.dumps(here, indent=2).encode()
        elif file.suffix in (".py", ".json") and file.name not in WORDS:
            yield name, masking.text(file.read_text()).encode()
        else:
            yield name, file
    tree = packed_config(yaml.safe_load(run.folder.config.read_text()), masking)
    yield "config.yaml", f"{HEAD}{run.folder.verb()}\n{yaml.safe_dump(tree, sort_keys=False)}".encode()
    rows = [masking.json(row) for step, row in sorted(run.log.items()) if step in steps]
    yield "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()
    for step in steps:
        about, arrays = read_arrays(run.files.file(step))
        about = about | {"config": packed_config(about["config"], masking), "calls": masking.json(about["calls"])}
        yield f"samples/{run.files.file(step).name}", compress({ABOUT: as_bytes(about)} | arrays)


def packed_config(tree: Tree, masking: Masking) -> Tree:
    """Return a configuration whose places are in the archive, or nowhere."""

    def inside(place: str) -> str:
        found = masking.places.get(str(Path(place).resolve()), "")
        return found or (f"{UNKNOWN}/{Path(place).name}" if os.path.isabs(place) else place)

    return dict(masking.json(changed_places(tree, inside) | {"folder": "."}, named=True))


def unpack(file: Path, folder: Path, *, trusts_code: bool) -> RunFolder:
    """Open an archive in an empty folder, or refuse it."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            for entry in entries:
                check_entry(file, entry)
            if sum(entry.file_size for entry in entries) > LARGEST:
                raise ConfigError(f"{file}: it would take more than {LARGEST / 2**30:.0f} GiB")
            for entry in entries:
                if trusts_code or not entry.filename.startswith(f"{CODE}/"):
                    archive.extract(entry, folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file}: not an archive of `trueline replay --pack` ({error})") from None
    found = RunFolder(folder)
    if not found.config.is_file():
        raise ConfigError(f"{file}: not an archive of `trueline replay --pack` (it has no config.yaml)")
    return found


def check_entry(file: Path, entry: zipfile.ZipInfo) -> None:
    """Refuse a name that leads out of the folder, a link, and a file of another kind."""
    place = PurePosixPath(entry.filename)
    code = len(place.parts) > 1 and place.parts[0] == CODE and place.suffix == ".py"
    linked = stat.S_ISLNK(entry.external_attr >> 16)
    if place.is_absolute() or ".." in place.parts or "\\" in entry.filename or ":" in entry.filename or linked:
        raise ConfigError(f"{file}: {entry.filename!r} leads out of the archive; nothing was opened")
    if place.suffix not in DATA and not code:
        raise ConfigError(f"{file}: {entry.filename!r} is no file of a replay; nothing was opened")
