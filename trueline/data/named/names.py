"""Datasets that a library makes, by name: `reasoning_gym:countdown?size=500&seed=0`."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

from trueline.config.base import ConfigError
from trueline.data.named.reasoning import make_tasks
from trueline.data.named.verifiers_rows import read_rows
from trueline.data.rows import Located

Options = dict[str, Any]
MAKERS: dict[str, Callable[[str, Options, str], Sequence[Located]]] = {
    "reasoning_gym": make_tasks,
    "verifiers": read_rows,
}


def is_name(path: str) -> bool:
    return path.partition(":")[0] in MAKERS


def open_name(path: str, key: str) -> Sequence[Located]:
    """Return the rows of `LIBRARY:NAME?option=value&option=value`."""
    address, _, query = path.partition("?")
    library, _, name = address.partition(":")
    options = {option: as_value(text) for option, text in parse_qsl(query, keep_blank_values=True)}
    for option in ("size", "seed"):
        if not isinstance(number := options.get(option, 1), int) or number < (option == "size"):
            raise ConfigError(f"{key}={path}: {option}={number}: give a whole number, such as {option}=500")
    return MAKERS[library](name, options, f"{key}={path}")


def as_value(text: str) -> Any:
    """Return what JSON says, and anything else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
