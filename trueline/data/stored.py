"""Data in folders of a known make: what a run of `generate` has sampled, and what `save_to_disk` has written."""

import json
from collections.abc import Sequence
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.monitoring.run_folder import RunFolder

HELD_OUT = {"test", "tests", "validation", "valid", "val", "eval", "evaluation", "dev", "heldout"}  # in names of files
SPLITS, STATE = "dataset_dict.json", "state.json"  # of a DatasetDict, and of a Dataset
SAMPLED = {  # what a task learns from -> the file of a run of `generate`, and what it holds
    "prompts": ("samples.jsonl", "the prompts that it answered"),
    "sft": ("kept.jsonl", "the answers that it kept"),
    "distill": ("kept.jsonl", "the answers that it kept"),
    "preference": ("pairs.jsonl", "its pairs of best and worst answers"),
    "rm": ("pairs.jsonl", "its pairs of best and worst answers"),
    "kto": ("pairs.jsonl", "its pairs of best and worst answers"),
}


def choose_split(names: Sequence[str], named: str, *, held_out: bool = False) -> tuple[str, str]:
    """Return the split to take of several, and a line that names it."""
    usual = [name for name in names if (name in HELD_OUT if held_out else name == "train")]
    taken = usual if len(usual) == 1 else list(names) if len(names) == 1 else []
    if not taken:
        lacks = "" if held_out else " and no train"
        raise ConfigError(f"{named} has the splits {', '.join(names) or 'none'}{lacks}: name one of them")
    rest = ", ".join(name for name in names if name != taken[0])
    return taken[0], f"taken      {named}: its split {taken[0]}" + (f", without {rest}" if rest else "")


def stored_data(path: str, key: str, task: str, runs: str) -> tuple[str, str] | None:
    """Return the file or folder that a saved dataset or a run stands for, and a line about it; None for other data."""
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
        raise ConfigError(f"{named} is a run of {verb}, which leaves no data: name a run of generate, or a dataset")
    return sampled_file(run, named, task)


def sampled_file(run: RunFolder, named: str, task: str) -> tuple[str, str]:
    if task not in SAMPLED:
        raise ConfigError(f"{named} is a run of generate, whose answers {task} cannot learn from: name a dataset")
    name, about = SAMPLED[task]
    file = run.path.resolve() / name
    if not file.is_file():
        why = "it was made without pairs=true" if name.startswith("pairs") else "it has not ended"
        again = f"`{run.resume_command()}{' pairs=true' * name.startswith('pairs')}`"
        raise ConfigError(f"{named} is a run of generate without {name}, for {why}: {again} writes it")
    return str(file), f"taken      {named}: {about} ({file})"


def saved_files(folder: Path, key: str) -> list[Path] | None:
    """Return the files of a dataset that was saved by itself; None for other folders, a run is refused."""
    if RunFolder(folder).config.is_file():
        raise ConfigError(f"{key}={folder} is a run: name one of its files, e.g. {folder / 'kept.jsonl'}")
    if not (folder / STATE).is_file():
        return None
    listed = json.loads((folder / STATE).read_text(encoding="utf-8")).get("_data_files", [])
    return [folder / one["filename"] for one in listed]
