"""The child process that runs a reward function: one JSON object a line in, one a line out.

It starts without torch, in a second; `python -m trueline.rewards.process SPECIFICATION MEMORY_GIB`.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsFloat

from trueline.rewards.functions import REWARDS

Function = Callable[..., Any]


class NoSuchFunction(ValueError):
    """The specification names nothing; a traceback would not help."""


def load_function(specification: str) -> Function:
    """A built-in name, `file.py:function` or `package.module:function`."""
    if specification in REWARDS:
        return REWARDS[specification]
    place, separator, name = specification.rpartition(":")
    if not separator:
        raise NoSuchFunction(f"not a built-in ({', '.join(REWARDS)}), nor file.py:function or package.module:function")
    module = load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = vars(module).get(name)
    if not callable(function):
        raise NoSuchFunction(f"{place} has no function {name!r}")
    return function


def load_file(file: Path) -> Any:
    if not file.is_file():
        raise NoSuchFunction(f"there is no file {file} (looked in {Path.cwd()})")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def describe(function: Function) -> dict[str, Any]:
    """The parameters that must be given, and whether any other may be."""
    parameters = inspect.signature(function).parameters.values()
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return {
        "all": [parameter.name for parameter in named],
        "required": [parameter.name for parameter in named if parameter.default is parameter.empty],
        "any": any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    }


def answer(function: Function, takes: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    given = call if takes["any"] else {name: call[name] for name in takes["all"] if name in call}
    try:
        value = function(**given)
        if inspect.isawaitable(value):
            value = asyncio.run(wait_for(value))
        return {"reward": checked(value)}
    except Exception:  # noqa: BLE001  (the boundary where user code runs)
        return {"error": traceback.format_exc()}


async def wait_for(value: Any) -> Any:
    return await value


def checked(value: Any) -> float:
    if isinstance(value, SupportsFloat):
        number = float(value)
        if math.isfinite(number):
            return number
    raise TypeError(f"a reward must be a finite number, got {value!r:.200} of type {type(value).__name__}")


def limit_memory(gib: float) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(specification: str, memory_gib: float) -> None:
    """Answers leave by a private copy of standard output; what user code prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())

    def reply(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        function = load_function(specification)
        takes = describe(function)
    except NoSuchFunction as error:
        reply({"error": str(error)})
        return
    except Exception as error:  # noqa: BLE001  (the boundary where user code runs)
        reply({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    if Path("/proc/self/statm").exists():
        limit_memory(memory_gib)
    reply(takes)
    for line in sys.stdin:
        reply(answer(function, takes, json.loads(line)))


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
