"""Functions and rows that are given from Python, as files that a configuration can name and a run can take up again."""

import inspect
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trueline.config.base import ConfigError, Tree
from trueline.config.reward import RewardConfig
from trueline.data.stored import choose_split
from trueline.monitoring.run_folder import PRIVATE, UNFINISHED
from trueline.monitoring.user_files import DATASETS, FUNCTIONS, PICKLED, TOOLS


@runtime_checkable
class Table(Protocol):
    """A `datasets.Dataset` or a pandas DataFrame."""

    def to_parquet(self, stream: io.BytesIO, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Objects:
    """Files to write below `folder`, by name; equal contents have one name, so that nothing is written twice."""

    folder: Path
    files: dict[Path, bytes] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # lines about what was taken of what was given

    def named(self, tree: Tree, path: str = "") -> Tree:
        """Return the tree with the name of a file for each function and dataset in it, and text for each path."""
        return {name: self._value(value, f"{path}{name}") for name, value in tree.items()}

    def _value(self, value: Any, path: str) -> Any:
        if is_splits(value) and DATASETS.fullmatch(path):
            value = self._split(value, path)
        if isinstance(value, dict):
            return self.named(value, f"{path}.")
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if callable(value) and FUNCTIONS.fullmatch(path):
            return self._function(value, path)
        if TOOLS.fullmatch(path) and not isinstance(value, str):
            tools = value if isinstance(value, list | tuple) else [value]
            return [self._function(tool, path) if callable(tool) else tool for tool in tools]
        if isinstance(value, list | Table) and DATASETS.fullmatch(path):
            return self._rows(value, path)
        return value

    def _function(self, function: Callable[..., Any], path: str) -> str:
        from trueline.algorithms.user_functions import pickled  # noqa: PLC0415

        named = inspect.isroutine(function) or inspect.isclass(function)
        name = function.__name__ if named else type(function).__name__
        try:
            return self._add(re.sub(r"\W+", "", name), pickled(function), PICKLED)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"{path}: {name} cannot be sent to the processes that run it: {error}; make what it uses inside of "
                f"it, or give it as file.py:{name}"
            ) from None

    def _split(self, splits: dict[str, Table], path: str) -> Table:
        name, remark = choose_split(list(splits), f"{path}=DatasetDict", held_out=path.startswith("evaluation."))
        self.remarks.append(remark)
        return splits[name]

    def _rows(self, rows: list[Any] | Table, path: str) -> str:
        if isinstance(rows, Table):
            stream = io.BytesIO()
            rows.to_parquet(stream)
            return self._add("data", stream.getvalue(), ".parquet")
        return self._add(
            "data", "".join(line_of(row, number, path) for number, row in enumerate(rows, 1)).encode(), ".jsonl"
        )

    def _add(self, name: str, content: bytes, ending: str) -> str:
        file = self.folder / f"{name}-{sha256(content).hexdigest()[:12]}{ending}"
        self.files[file] = content
        return str(file)

    def write(self) -> None:
        """Write what is not there yet, for this user alone."""
        for file, content in self.files.items():
            self.folder.mkdir(PRIVATE, parents=True, exist_ok=True)
            if not file.exists():
                aside = file.with_name(f"{file.name}{UNFINISHED}")
                aside.touch(0o600)
                aside.write_bytes(content)
                aside.rename(file)


def is_splits(value: Any) -> bool:
    """Tell whether a value is a `datasets.DatasetDict`, or a dictionary like it, rather than a section of keys."""
    return isinstance(value, dict) and bool(value) and all(isinstance(part, Table) for part in value.values())


def line_of(row: Any, number: int, path: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: row {number} cannot be written as JSON: {error}; give plain values") from None


def reward_section(reward: Tree) -> Tree:
    """Return the section `reward` that a dictionary means: its keys, or several rewards by name."""
    named = any(callable(value) for name, value in reward.items() if name != "function")
    if not named and RewardConfig.model_fields.keys() & reward.keys():
        return reward
    return {"parts": {name: part if isinstance(part, dict) else {"function": part} for name, part in reward.items()}}
