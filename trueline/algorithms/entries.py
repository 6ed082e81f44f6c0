"""Tables of algorithm functions, and the user's own functions by file or module."""

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from trueline.config.base import ConfigError
from trueline.monitoring.user_files import PICKLED
from trueline.usercode.failures import NoSuchFunction
from trueline.usercode.loading import load_function

Given = ParamSpec("Given")
Result = TypeVar("Result")

# What an entry can need.
NEEDS = (
    "critic",
    "teacher",
    "reward",
    "groups",
    "greedy",
    "recompute",
    "old_logprobs",
    "batch",
    "nonnegative",
    "squares",
)


class AlgorithmFailure(RuntimeError):
    """A user's advantage or loss raised, or returned something invalid."""


LIBRARIES = re.compile(r"/site-packages/|^<|" + re.escape(str(Path(__file__).parent)))  # not user code
NOT_ITS_FAULT = (ConfigError, AlgorithmFailure, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class Blame:
    """A context in which errors are those of the user's function that a key names."""

    key: str  # with its value
    failure: type[Exception]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, NOT_ITS_FAULT):
            return
        if isinstance(error, NoSuchFunction):
            raise self.failure(f"{self.key}: {error}") from None
        if isinstance(error, ImportError):
            raise self.failure(f"{self.key}: cannot be imported ({error}): add its folder to PYTHONPATH") from error
        own = [frame for frame in traceback.extract_tb(trace) if not LIBRARIES.search(frame.filename)]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        raise self.failure(f"{self.key} raised {type(error).__name__}: {error}{place}") from error


@dataclass(frozen=True, slots=True)
class Entry(Generic[Given, Result]):
    """A function, its description, and what it needs."""

    function: Callable[Given, Result]
    words: str = "your own"  # for the recipe; {0.key} is a key of `algorithm`
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # keys of `algorithm` that others of its table do not read
    key: str = ""  # of a user's own function, with its value

    def __call__(self, *args: Given.args, **named: Given.kwargs) -> Result:
        if not self.key:
            return self.function(*args, **named)
        with Blame(self.key, AlgorithmFailure):
            return self.function(*args, **named)

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS:
                where = f"{self.function.__module__}:{self.function.__name__}"
                raise ConfigError(f"{where} has the unknown need {need!r}: choose from {', '.join(NEEDS)}")


def entry(
    words: str = "your own", *, needs: tuple[str, ...] = (), reads: tuple[str, ...] = ()
) -> Callable[[Callable[Given, Result]], Entry[Given, Result]]:
    """Decorate a function with its description, its needs, and the keys it reads."""
    return lambda function: Entry(function, words, needs, reads)


def table_of(*entries: Entry[Given, Result]) -> dict[str, Entry[Given, Result]]:
    """Return the entries by the names of their functions."""
    return {one.function.__name__: one for one in entries}


def lookup(table: Mapping[str, Entry[Given, Result]], name: str, key: str) -> Entry[Given, Result]:
    """Find the entry called `name`, or import it; `key` is the configuration key of `name`, for messages."""
    if is_own(name):
        return import_entry(name, key)
    if name not in table:
        raise ConfigError(
            f"{key}={name} is unknown: choose from {', '.join(table)}, file.py:function or package.module:function"
        )
    return table[name]


def is_own(name: str) -> bool:
    """Tell whether a name is a user's function, and not an entry of a table."""
    return ":" in name or name.endswith(PICKLED)


@cache  # until the next run of this process is planned
def import_entry(name: str, key: str) -> Entry[Any, Any]:
    with Blame(f"{key}={name}", ConfigError):
        found = load_function(name, {}, guest=True)
    return replace(found, key=f"{key}={name}") if isinstance(found, Entry) else Entry(found, key=f"{key}={name}")


def check_takes(own: Entry[Any, Any], *given: str) -> None:
    """Refuse a user's function that does not accept the arguments of a call."""
    try:
        inspect.signature(own.function).bind(*given)
    except TypeError as error:
        raise ConfigError(f"{own.key} is called with ({', '.join(given)}): {error}; change its parameters") from None
