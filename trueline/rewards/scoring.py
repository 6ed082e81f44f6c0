"""Call a reward function in the process that has loaded it: fill its parameters, and check its result."""

import asyncio
import base64
import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trueline.rewards.base import IMAGES, Call
from trueline.rewards.functions import REWARDS
from trueline.usercode.failures import LONGEST_ERROR, NoSuchFunction, PolicyError, explain
from trueline.usercode.loading import Function, Parameters, finite_number, load_function, select_arguments

RUNNER = asyncio.Runner()  # one loop for all calls, so that clients which a function keeps stay usable
CONVERSATIONAL = "conversational"  # in a call whose row has its prompt as messages
OWN_NAMES = {"reply", "replies"}  # parameters of a function written for Trueline
ADVICE: tuple[tuple[Any, str], ...] = (  # what to do about results of these types
    (type(None), "a `return` is missing"),
    (str, "return float(...) of it"),
    ((list, tuple), "return the number itself, or take `replies` and return one number for each"),
    (Mapping, "return one number, and name several rewards in reward.parts"),
    (Generator, "write `return` in place of `yield`"),
)
Result = dict[str, Any]  # of one call: `reward`, or `policy_error`, or `error` and whether memory is `exhausted`


class RewardCode:
    def __init__(self, specification: list[str], constants: dict[str, Any]) -> None:
        """Load a function, and refuse what can be called and is no reward function."""
        self.function, self.constants = load_function(specification[0], REWARDS), constants
        parameters = inspect.signature(self.function).parameters.values()
        if inspect.isclass(self.function):
            name, file = self.function.__name__, specification[0].rpartition(":")[0]
            raise NoSuchFunction(
                f"{name} is a class, not a function: name a function, or an instance that can be called "
                f"(reward = {name}() in the file, and --reward {file}:reward)"
            )
        if parameters and all(one.kind is one.VAR_POSITIONAL for one in parameters):
            only = "it takes only *args, but values are passed by name: name its parameters, e.g. `reply`"
            raise NoSuchFunction(only)

    def describe(self) -> dict[str, Any]:
        return asdict(Parameters.of(self.function))

    def score(self, calls: list[Call]) -> list[Result]:
        """Return the reward of each call, or why there is none."""
        try:
            return [check_result(value) for value in call_function(self.function, calls, self.constants)]
        except PolicyError as error:
            if len(calls) == 1:
                return [{"policy_error": str(error)[:LONGEST_ERROR]}]
        except BaseException as error:  # noqa: BLE001  (the boundary where user code runs; sys.exit and cancellation too)
            if len(calls) == 1 or isinstance(error, MemoryError):
                return [{"error": explain(error), "exhausted": isinstance(error, MemoryError)}] * len(calls)
        return [result for call in calls for result in self.score([call])]  # to find the culprit


def check_result(value: Any) -> Result:
    try:
        return {"reward": reward_of(value)}
    except Exception as error:  # noqa: BLE001  (what the function returned converts itself to a number)
        return {"error": explain(error)}


def reward_of(value: Any) -> float:
    if (number := finite_number(value)) is None:
        advice = next((f": {text}" for kind, text in ADVICE if isinstance(value, kind)), "")
        raise TypeError(f"a reward must be a finite number, got {value!r:.200} of type {type(value).__name__}{advice}")
    return number


def call_function(function: Function, calls: list[Call], constants: dict[str, Any]) -> list[Any]:
    """Return what the function returns for each call, as it comes. Only a batched one takes several."""
    parameters = Parameters.of(function)
    if IMAGES in parameters.names or any(IMAGES in call for call in calls):
        calls = [{**call, IMAGES: list(map(open_picture, call.get(IMAGES, [])))} for call in calls]
    given = select_arguments(function, {**values_of(parameters, calls), **constants})
    inspected = inspect.signature(function).parameters.values()
    unnamed = [one.name for one in inspected if one.kind is one.POSITIONAL_ONLY and one.name in given]
    returned = function(*[given.pop(name) for name in unnamed], **given)
    if inspect.isawaitable(returned):
        returned = RUNNER.run(asyncio.wait_for(returned, None))  # which makes a coroutine of it
    if signature := signature_of(parameters):
        returned = signature.result(returned)
    return check_list(returned, len(calls)) if is_batched(parameters) else [returned]


def open_picture(url: str) -> Any:
    """Return PIL's image of a data URL; only functions that ask for pictures wait for what this imports."""
    from trueline.data.pictures import decode  # noqa: PLC0415

    return decode(base64.b64decode(url.partition(",")[2]))


def is_batched(parameters: Parameters) -> bool:
    return "replies" in parameters.names


def values_of(parameters: Parameters, calls: list[Call]) -> dict[str, Any]:
    """Return all that a function may take by name, in the form that its signature has."""
    if signature := signature_of(parameters):
        values = {**calls[0], **signature.values(calls[0])}
        return {name: [value] for name, value in values.items()} if signature.takes_lists else values
    if not is_batched(parameters):
        return calls[0]
    names = dict.fromkeys(name for call in calls for name in call)
    columns = {name: [call.get(name) for call in calls] for name in names}
    return {**columns, "replies": columns["reply"]}


def check_list(returned: Any, expected: int) -> list[Any]:
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

    project: str
    mark: str  # the parameter by which its functions are recognised
    values: Callable[[Call], dict[str, Any]]  # under its own names; those of the call are given, too
    result: Callable[[Any], Any]  # the reward in what is returned
    takes_lists: bool = True  # all values are lists of one


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
    return check_list(named_result(returned, "rewards", "scores"), 1)[0]


def named_result(returned: Any, *names: str) -> Any:
    if not isinstance(returned, Mapping):
        return returned
    if not (found := [name for name in names if name in returned]):
        raise ValueError(f"it returned a dict without {' or '.join(map(repr, names))}: {returned!r:.200}")
    return returned[found[0]]


TRL = Signature("TRL", "completions", trl_values, only_reward)
SIGNATURES = (
    TRL,
    Signature("OpenRLHF", "queries", openrlhf_values, only_reward),
    Signature("verl", "solution_str", verl_values, lambda value: named_result(value, "score"), takes_lists=False),
)


def signature_of(parameters: Parameters) -> Signature | None:
    """Return how another project would call the function; None for one written for Trueline."""
    if not OWN_NAMES.isdisjoint(parameters.names):
        return None
    return next((one for one in SIGNATURES if one.mark in parameters.names), None)
