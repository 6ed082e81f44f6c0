"""The user's own functions: by file, by module, or as a pickle."""

import importlib
import importlib.util
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trueline.monitoring.user_files import PICKLED

Function = Callable[..., Any]


class NoSuchFunction(ValueError):
    """The specification names nothing; a traceback would not help."""


def load_function(specification: str, built_in: Mapping[str, Function], *, guest: bool = False) -> Function:
    """Load a function by a built-in name, `file.py:function`, `package.module:function` or a `.pickle` file.

    A guest is loaded into a process that does other work, too, whose modules must not be replaced by the user's.
    """
    if specification in built_in:
        return built_in[specification]
    if specification.endswith(PICKLED):
        return load_pickled(Path(specification))
    place, separator, name = specification.rpartition(":")
    if specification.endswith(".py") and Path(specification).is_file():
        there = public_names(load_file(Path(specification), guest))
        raise NoSuchFunction(f"name a function of it, as {specification}:FUNCTION; it has {', '.join(there) or 'none'}")
    if not separator:
        raise NoSuchFunction(
            f"not a built-in ({', '.join(built_in)}), nor file.py:function, package.module:function or a folder"
        )
    with importing_from(os.getcwd(), guest):
        module = load_file(Path(place), guest) if place.endswith(".py") else importlib.import_module(place)
    function = vars(module).get(name)
    if not callable(function):
        there = public_names(module)
        raise NoSuchFunction(f"{place} has no function {name!r}; it has {', '.join(there) or 'none'}")
    return function


def public_names(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def pickled(function: Function) -> bytes:
    """Return a function as a file holds it: behind the places that it may import from."""
    import cloudpickle  # noqa: PLC0415  (only who sends a function needs it)

    places = [os.path.abspath(place) for place in sys.path]
    return pickle.dumps((places, cloudpickle.dumps(function)))


def load_pickled(file: Path) -> Function:
    """Unpickle a function of this user's own; a pickle can run any code, so nobody else may have a hand in it."""
    check_file(file)
    with file.open("rb") as stream:
        about = os.fstat(stream.fileno())
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NoSuchFunction(
                f"{file} is not loaded, for a pickle can run any code: the file must belong to the user of the run "
                "and be writable by nobody else (chmod go-w)"
            )
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
    """Let the user's modules be found in a folder: those of a guest first while it is loaded, and last later on."""
    sys.path.insert(0, folder)
    yield
    if guest:
        sys.path.remove(folder)
        sys.path.append(folder)
