"""Load user functions by file, module or pickle, and choose the values that their parameters name."""

import importlib
import importlib.util
import inspect
import math
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from trueline.monitoring.user_files import PICKLED
from trueline.usercode.failures import NoSuchFunction

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function that can be given by name."""

    names: list[str]
    required: list[str]
    takes_any: bool  # other names too, by **

    @classmethod
    def of(cls, function: Function) -> "Parameters":
        parameters = inspect.signature(function).parameters.values()
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        required = [one.name for one in named if one.default is one.empty]
        return cls([one.name for one in named], required, any(one.kind is one.VAR_KEYWORD for one in parameters))

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names


def select_arguments(function: Function, values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that the function takes by name."""
    parameters = Parameters.of(function)
    return dict(values) if parameters.takes_any else {name: values[name] for name in parameters.names if name in values}


def finite_number(value: Any) -> float | None:
    """Return a value of any numeric type as a number, or None where it is none."""
    with suppress(TypeError, ValueError):  # an array of several numbers
        if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
            return number
    return None


def load_function(specification: str, built_in: Mapping[str, Function], *, guest: bool = False) -> Function:
    """Load a function by a built-in name, `file.py:function`, `package.module:function` or a `.pickle` file.

    A guest is loaded into a process with other work, whose modules the user's must not replace.
    """
    if specification in built_in:
        return built_in[specification]
    if specification.endswith(PICKLED):
        return load_pickled(Path(specification))
    place, separator, name = specification.rpartition(":")
    if specification.endswith(".py") and Path(specification).is_file():
        names = public_names(load_file(Path(specification), guest))
        raise NoSuchFunction(f"name a function of it, as {specification}:FUNCTION; it has {names}")
    if not separator:
        forms = "file.py:function, package.module:function or a folder"
        raise NoSuchFunction(f"not a built-in ({', '.join(built_in)}), nor {forms}")
    with importing_from(os.getcwd(), guest):
        module = load_file(Path(place), guest) if place.endswith(".py") else importlib.import_module(place)
    function = vars(module).get(name)
    if not callable(function):
        raise NoSuchFunction(f"{place} has no function {name!r}; it has {public_names(module)}")
    return function


def public_names(module: Any) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return ", ".join(names) or "none"


def pickle_function(function: Function) -> bytes:
    """Return a function as the content of a file, with the folders that it may import from."""
    import cloudpickle  # noqa: PLC0415  (only who sends a function needs it)

    return pickle.dumps(([os.path.abspath(place) for place in sys.path], cloudpickle.dumps(function)))


def load_pickled(file: Path) -> Function:
    """Unpickle a function; because a pickle can run any code, only this user may have written it."""
    check_file(file)
    with file.open("rb") as stream:
        about = os.fstat(stream.fileno())
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            remedy = "the file must belong to the user of the run and be writable by nobody else (chmod go-w)"
            raise NoSuchFunction(f"{file} is not loaded, because a pickle can run any code: {remedy}")
        places, function = pickle.load(stream)
    sys.path += [place for place in places if place not in sys.path]
    return pickle.loads(function)


def check_file(file: Path) -> None:
    if not file.is_file():
        raise NoSuchFunction(f"there is no file {file} (looked in {Path.cwd()})")


def load_file(file: Path, guest: bool = False) -> Any:
    check_file(file)
    name = f"user_{file.stem}" if guest else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with importing_from(str(file.resolve().parent), guest):
        spec.loader.exec_module(module)
    return module


@contextmanager
def importing_from(folder: str, guest: bool) -> Iterator[None]:
    """Import the user's modules from a folder: of a guest first while it is loaded, and last afterwards."""
    sys.path.insert(0, folder)
    yield
    if guest:
        sys.path.remove(folder)
        sys.path.append(folder)
