"""Look up entries of a table by name, or the user's own functions by import path."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from trueline.config.base import ConfigError

Given = ParamSpec("Given")
Result = TypeVar("Result")

NEEDS = ("critic", "teacher", "reward", "groups", "greedy", "recompute")  # what an entry can ask of a run


@dataclass(frozen=True, slots=True)
class Entry(Generic[Given, Result]):
    """A function, and what a run must know of it."""

    function: Callable[Given, Result]
    words: str = "your own"  # for the recipe; {0.key} is a key of `algorithm`
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # keys of `algorithm` that others of its table do not read

    def __call__(self, *args: Given.args, **named: Given.kwargs) -> Result:
        return self.function(*args, **named)

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS:
                where = f"{self.function.__module__}:{self.function.__name__}"
                raise ConfigError(f"{where} needs {need!r}: not known; choose from {', '.join(NEEDS)}")


def entry(
    words: str = "your own", *, needs: tuple[str, ...] = (), reads: tuple[str, ...] = ()
) -> Callable[[Callable[Given, Result]], Entry[Given, Result]]:
    """Say in words what the function below does, what it needs and which keys it reads."""
    return lambda function: Entry(function, words, needs, reads)


def named(*entries: Entry[Given, Result]) -> dict[str, Entry[Given, Result]]:
    """Make a table in which every entry has its function's name."""
    return {one.function.__name__: one for one in entries}


def lookup(table: Mapping[str, Entry[Given, Result]], name: str, key: str) -> Entry[Given, Result]:
    """Find the entry called `name`, or import it; `key` is the configuration key that holds `name`, for messages."""
    if ":" in name:
        found = imported(name, key)
        return found if isinstance(found, Entry) else Entry(found)
    if name not in table:
        raise ConfigError(f"{key}={name}: not known; choose from {', '.join(table)} or give package.module:function")
    return table[name]


def imported(path: str, key: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={path}: cannot be imported ({error}); is its folder on PYTHONPATH?") from error
