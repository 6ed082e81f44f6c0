"""Names -> functions: an entry of a table, or the user's own by import path."""

import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from trueline.config.base import ConfigError

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], name: str, key: str) -> Entry:
    """`key` is the configuration key that holds `name`, for messages."""
    if ":" in name:
        return imported(name, key)
    if name not in table:
        raise ConfigError(f"{key}={name}: not known; choose from {', '.join(table)} or give package.module:function")
    return table[name]


def imported(path: str, key: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={path}: cannot be imported ({error}); is its folder on PYTHONPATH?") from error
