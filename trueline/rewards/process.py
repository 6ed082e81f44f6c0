"""The child process that runs a reward function: one JSON object a line in, one a line out.

It starts without torch, in a second; `python -m trueline.rewards.process SPECIFICATION MEMORY_GIB`.
"""

import asyncio
import faulthandler
import inspect
import json
import math
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any, SupportsFloat

from trueline.algorithms import user_functions
from trueline.algorithms.user_functions import Function, NoSuchFunction, load_function
from trueline.rewards.base import Call, PolicyError
from trueline.rewards.functions import REWARDS
from trueline.rewards.linux import die_with_parent

Takes = dict[str, Any]
LONGEST_ERROR = 20_000  # characters
RUNNER = asyncio.Runner()  # one loop for all calls, so that clients which a function keeps go on working


def describe(function: Function) -> Takes:
    """Return the parameters that can and must be given, whether any other may be, and whether they are lists."""
    parameters = inspect.signature(function).parameters.values()
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return {
        "all": [parameter.name for parameter in named],
        "required": [parameter.name for parameter in named if parameter.default is parameter.empty],
        "any": any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        "batched": any(parameter.name == "replies" for parameter in named),
    }


def ask(function: Function, calls: list[Call], constants: dict[str, Any]) -> list[Any]:
    """Return what the function returns for each call, as it comes. Only a batched one is given several."""
    takes = describe(function)
    values = {**(columns_of(calls) if takes["batched"] else calls[0]), **constants}
    returned = function(**filled(function, values))
    if inspect.isawaitable(returned):
        returned = RUNNER.run(wait_for(returned))
    return checked_list(returned, len(calls)) if takes["batched"] else [returned]


def filled(function: Function, values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that the function takes by name."""
    takes = describe(function)
    return values if takes["any"] else {name: values[name] for name in takes["all"] if name in values}


def columns_of(calls: list[Call]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for call in calls for name in call)
    columns = {name: [call.get(name) for call in calls] for name in names}
    return {**columns, "replies": columns["reply"]}


async def wait_for(value: Any) -> Any:
    return await value


def checked_list(returned: Any, expected: int) -> list[Any]:
    try:
        values = list(returned)
    except TypeError:
        raise TypeError(f"a function of `replies` returns a list of numbers, got {returned!r:.200}") from None
    if len(values) != expected:
        raise ValueError(f"it returned {len(values)} rewards for {expected} replies")
    return values


def checked(value: Any) -> float:
    if isinstance(value, SupportsFloat):
        number = float(value)
        if math.isfinite(number):
            return number
    raise TypeError(f"a reward must be a finite number, got {value!r:.200} of type {type(value).__name__}")


def answer(function: Function, calls: list[Call], constants: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the reward of each call, or why there is none."""
    try:
        return [finite(value) for value in ask(function, calls, constants)]
    except PolicyError as error:
        if len(calls) == 1:
            return [{"policy_error": str(error)[:LONGEST_ERROR]}]
    except BaseException as error:  # noqa: BLE001  (the boundary where user code runs; sys.exit and cancellation too)
        if len(calls) == 1 or isinstance(error, MemoryError):
            return [{"error": explain(error), "exhausted": isinstance(error, MemoryError)}] * len(calls)
    return [scored for call in calls for scored in answer(function, [call], constants)]  # to see whose error it is


def finite(value: Any) -> dict[str, Any]:
    try:
        return {"reward": checked(value)}
    except Exception as error:  # noqa: BLE001  (what the function returned converts itself to a number)
        return {"error": explain(error)}


def explain(error: BaseException) -> str:
    """Return the traceback from where the function's own lines begin."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename in (__file__, user_functions.__file__):
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place))[-LONGEST_ERROR:].rstrip()


def limit_memory(gib: float) -> None:
    """Limit memory beyond what the process has by now, so that a leak ends in an error, not in the kernel's killer."""
    if Path("/proc/self/statm").exists():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(specification: str, memory_gib: float) -> None:
    """Answer calls by private copies of the standard streams, for those themselves are the function's to play with."""
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for stream in (calls, answers):
        os.register_at_fork(after_in_child=stream.close)  # what the function forks must not keep them open
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()

    def reply(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        function = load_function(specification, REWARDS)
        takes = describe(function)
    except NoSuchFunction as error:
        reply({"error": str(error)})
        return
    except BaseException as error:  # noqa: BLE001  (the boundary where user code runs)
        reply({"error": explain(error)})
        return
    limit_memory(memory_gib)
    reply(takes)
    for line in calls:
        request = json.loads(line)
        reply({"answers": answer(function, request["calls"], request["constants"])})


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
