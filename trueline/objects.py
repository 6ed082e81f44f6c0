"""Functions and rows from Python as files, which a configuration can name and a resumed run can load."""

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
from trueline.data.sources import choose_split
from trueline.files import PRIVATE_FILE, write_atomically
from trueline.monitoring.run_folder import PRIVATE
from trueline.monitoring.user_files import DATASETS, FUNCTIONS, PICKLED, TOOLS


@runtime_checkable
class Table(Protocol):
    """A `datasets.Dataset` or a pandas DataFrame."""

    def to_parquet(self, stream: io.BytesIO, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Objects:
    """Files to write into `folder`, by name; equal contents have one name."""

    folder: Path
    files: dict[Path, bytes] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # lines about which split was taken

    def with_file_names(self, tree: Tree, path: str = "") -> Tree:
        """Return the tree with a file name for each function and dataset, and text for each path."""
        return {name: self._value(value, f"{path}{name}") for name, value in tree.items()}

    def _value(self, value: Any, path: str) -> Any:
        if is_splits(value) and DATASETS.fullmatch(path):
            name, remark = choose_split(list(value), f"{path}=DatasetDict", held_out=path.startswith("evaluation."))
            self.remarks.append(remark)
            value = value[name]
        if isinstance(value, dict):
            return self.with_file_names(value, f"{path}.")
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
        from trueline.usercode.loading import pickle_function  # noqa: PLC0415

        named = inspect.isroutine(function) or inspect.isclass(function)
        name = function.__name__ if named else type(function).__name__
        try:
            return self._add(re.sub(r"\W+", "", name), pickle_function(function), PICKLED)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            remedy = f"make what it uses inside of it, or give it as file.py:{name}"
            text = f"{path}: {name} cannot be sent to the processes that run it: {error}; {remedy}"
            raise ConfigError(text) from None

    def _rows(self, rows: list[Any] | Table, path: str) -> str:
        if isinstance(rows, Table):
            stream = io.BytesIO()
            rows.to_parquet(stream)
            return self._add("data", stream.getvalue(), ".parquet")
        lines = []
        for number, row in enumerate(rows, 1):
            try:
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                text = f"{path}: row {number} cannot be written as JSON: {error}; give plain values"
                raise ConfigError(text) from None
        return self._add("data", "".join(lines).encode(), ".jsonl")

    def _add(self, name: str, content: bytes, ending: str) -> str:
        file = self.folder / f"{name}-{sha256(content).hexdigest()[:12]}{ending}"
        self.files[file] = content
        return str(file)

    def write(self) -> None:
        """Write missing files, readable by this user only."""
        for file, content in self.files.items():
            self.folder.mkdir(PRIVATE, parents=True, exist_ok=True)
            if not file.exists():
                write_atomically(file, content, mode=PRIVATE_FILE)


def is_splits(value: Any) -> bool:
    """Return whether a value is a `datasets.DatasetDict`, or a dictionary like it, and no section of keys."""
    return isinstance(value, dict) and bool(value) and all(isinstance(part, Table) for part in value.values())


def reward_section(reward: Tree) -> Tree:
    """Return a dictionary as the section `reward`: its keys, or several rewards by name."""
    named = any(callable(value) for name, value in reward.items() if name != "function")
    if not named and RewardConfig.model_fields.keys() & reward.keys():
        return reward
    return {"parts": {name: part if isinstance(part, dict) else {"function": part} for name, part in reward.items()}}
