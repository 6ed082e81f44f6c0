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
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from trueline.algorithms.user_functions import Function, NoSuchFunction, load_function
from trueline.rewards.base import Call, PolicyError
from trueline.rewards.functions import REWARDS
from trueline.rewards.linux import die_with_parent

Takes = dict[str, Any]
LONGEST_ERROR = 20_000  # characters
CALLERS = (  # where files begin that call user code
    __file__,
    *(
        str(Path(__file__).parents[1] / name)
        for name in ("algorithms/user_functions.py", "environments/process.py", "environments/tools/toolbox.py")
    ),
    *(str(Path(inspect.__file__).parent / name) for name in ("asyncio", "concurrent", "importlib")),
    "<frozen importlib",
)
RUNNER = asyncio.Runner()  # one loop for all calls, so that clients which a function keeps go on working
CONVERSATIONAL = "conversational"  # in a call whose row has its prompt as messages
OWN = {"reply", "replies"}  # parameters of a function written for Trueline
ADVICE: tuple[tuple[Any, str], ...] = (  # what to do about results of these types
    (type(None), "a `return` is missing"),
    (str, "return float(...) of it"),
    ((list, tuple), "return the number itself, or take `replies` and return one number for each"),
    (Mapping, "return one number, and name several rewards in reward.parts"),
    (Generator, "write `return` in place of `yield`"),
)


def check_kind(function: Function, specification: str) -> None:
    """Refuse what can be called and is no reward function."""
    parameters = inspect.signature(function).parameters.values()
    if inspect.isclass(function):
        raise NoSuchFunction(
            f"{function.__name__} is a class, not a function: name a function, or an instance that can be called "
            f"(reward = {function.__name__}() in the file, and --reward {specification.rpartition(':')[0]}:reward)"
        )
    if parameters and all(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        raise NoSuchFunction("it takes only *args, and values are given by name: name its parameters, e.g. `reply`")


def describe(function: Function) -> Takes:
    """Return the parameters that can and must be given, whether any other may be, and what form they have."""
    parameters = inspect.signature(function).parameters.values()
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    names = [parameter.name for parameter in named]
    return {
        "all": names,
        "required": [parameter.name for parameter in named if parameter.default is parameter.empty],
        "any": any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        "batched": "replies" in names,
        "signature": next(
            (name for name, one in SIGNATURES.items() if one.mark in names and OWN.isdisjoint(names)), ""
        ),
    }


def ask(function: Function, calls: list[Call], constants: dict[str, Any]) -> list[Any]:
    """Return what the function returns for each call, as it comes. Only a batched one is given several."""
    takes = describe(function)
    returned = call_with(function, {**values_of(takes, calls), **constants})
    if inspect.isawaitable(returned):
        returned = RUNNER.run(wait_for(returned))
    if takes["signature"]:
        returned = SIGNATURES[takes["signature"]].result(returned)
    return checked_list(returned, len(calls)) if takes["batched"] else [returned]


def call_with(function: Function, values: dict[str, Any]) -> Any:
    given = filled(function, values)
    parameters = inspect.signature(function).parameters.values()
    unnamed = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY and one.name in given]
    return function(*[given.pop(name) for name in unnamed], **given)


def values_of(takes: Takes, calls: list[Call]) -> dict[str, Any]:
    """Return all that a function may ask for by name, in the form that its signature has."""
    if not takes["signature"]:
        return columns_of(calls) if takes["batched"] else calls[0]
    signature = SIGNATURES[takes["signature"]]
    values = {**calls[0], **signature.values(calls[0])}
    return {name: [value] for name, value in values.items()} if signature.listed else values


def filled(function: Function, values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that the function takes by name."""
    takes = describe(function)
    return dict(values) if takes["any"] else {name: values[name] for name in takes["all"] if name in values}


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
        raise TypeError(f"a function of lists returns a list of numbers, got {returned!r:.200}") from None
    if len(values) != expected:
        raise ValueError(f"it returned {len(values)} rewards for {expected} replies")
    return values


@dataclass(frozen=True, slots=True)
class Signature:
    """How another project calls its reward functions, one completion at a time."""

    mark: str  # the parameter by which its functions are recognised
    values: Callable[[Call], dict[str, Any]]  # under its own names, beside those of the call
    result: Callable[[Any], Any]  # what stands for the reward in what is returned
    listed: bool = True  # all values are lists of one


def trl_values(call: Call) -> dict[str, Any]:
    """Return prompt and completion: as messages where the row's prompt is a list of messages, else as text."""
    if call.get(CONVERSATIONAL):
        return {"prompts": call["messages"], "completions": [{"role": "assistant", "content": call["reply"]}]}
    return {"prompts": call["prompt"], "completions": call["reply"]}


def openrlhf_values(call: Call) -> dict[str, Any]:
    return {"queries": call["prompt"] + call["reply"], "prompts": call["prompt"], "labels": call.get("label")}


def verl_values(call: Call) -> dict[str, Any]:
    """Return completion and ground truth: that of the columns `ground_truth` or `reward_model`, else the label."""
    own = call.get("reward_model")
    found = own.get("ground_truth") if isinstance(own, dict) else call.get("ground_truth", call.get("label"))
    return {"solution_str": call["reply"], **({} if found is None else {"ground_truth": found})}


def only_reward(returned: Any) -> Any:
    """Return the one number of a list or tensor, or of one under `rewards` or `scores`."""
    if isinstance(returned, Mapping):
        returned = named_result(returned, "rewards", "scores")
    return checked_list(returned, 1)[0]


def named_result(returned: Any, *names: str) -> Any:
    if not isinstance(returned, Mapping):
        return returned
    found = [name for name in names if name in returned]
    if not found:
        raise ValueError(f"it returned a dict without {' or '.join(map(repr, names))}: {returned!r:.200}")
    return returned[found[0]]


SIGNATURES = {
    "TRL": Signature("completions", trl_values, only_reward),
    "OpenRLHF": Signature("queries", openrlhf_values, only_reward),
    "verl": Signature("solution_str", verl_values, lambda value: named_result(value, "score"), listed=False),
}


def checked(value: Any) -> float:
    with suppress(TypeError, ValueError):  # an array of several numbers
        if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
            return number
    advice = next((f": {said}" for kind, said in ADVICE if isinstance(value, kind)), "")
    raise TypeError(f"a reward must be a finite number, got {value!r:.200} of type {type(value).__name__}{advice}")


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
    """Return the traceback from where the user's own lines begin."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith(CALLERS):
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
        check_kind(function, specification)
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
