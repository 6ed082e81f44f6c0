"""Environments, tools and agents in the process that has loaded them: what hosts call for their episodes."""

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import httpx

from trueline.data.messages import TEMPLATE_ROLES, Message, Tool
from trueline.environments.tools.toolbox import call_contained
from trueline.monitoring.user_files import PICKLED
from trueline.usercode.failures import NoSuchFunction, ProgramEnded, WrongResult
from trueline.usercode.host import EpisodeCode
from trueline.usercode.loading import Parameters, finite_number, load_function, select_arguments

Values = dict[str, Any]  # what a row gives: prompt, messages, label and columns
STEP = (
    "a text to continue, a number to end with that reward, or a dict such as "
    '{"messages": "...", "reward": 0.0, "done": False, "metrics": {}}'
)


async def call_user(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a plain function in a thread, and await a coroutine function."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **named)
    returned = await asyncio.to_thread(call_contained, partial(function, *args), named)
    return await returned if inspect.isawaitable(returned) else returned


class StepCode:
    """A class with `reset` and `step`, an instance for each episode."""

    def __init__(self, kind: type, options: dict[str, Any]) -> None:
        self.kind, self.options = kind, options
        self.instances: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        has = members_of(self.kind)
        missing = [name for name in ("reset", "step") if not callable(has.get(name))]
        if missing:
            raise NoSuchFunction(f"{self.kind.__name__} has no method {missing[0]!r}: it needs `reset` and `step`")
        unset = [name for name in Parameters.of(self.kind).required if name not in self.options]
        if unset:
            raise NoSuchFunction(f"{self.kind.__name__} takes {unset[0]!r}: set it in environment.options")
        check_options(self.kind, self.options)
        if inspect.isfunction(has["step"]) and not takes_reply(has["step"]):
            raise NoSuchFunction(f"`step` of {self.kind.__name__} is given the reply: write def step(self, reply)")
        return {"plays": "steps", "required": Parameters.of(has["reset"]).required[1:]}

    async def reset(self, episode: str, values: Values) -> list[Message]:
        instance = self.instances[episode] = await asyncio.to_thread(self.kind, **self.options)
        messages = await call_user(instance.reset, **select_arguments(instance.reset, values))
        return as_messages(messages, values["messages"], "reset")

    async def step(self, episode: str, reply: str) -> dict[str, Any]:
        return as_step(await call_user(self.instances[episode].step, reply))

    async def close(self, episode: str) -> None:
        instance = self.instances.pop(episode, None)
        if instance is not None and callable(members_of(type(instance)).get("close")):
            await call_user(instance.close)


class AgentCode:
    """A function that plays a whole episode, with the policy or a client of it and the values of the row."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.function, self.options = function, options

    def describe(self) -> dict[str, Any]:
        parameters = Parameters.of(self.function)
        needed = [name for name in parameters.required if name not in CLIENTS and name not in self.options]
        if not any(map(parameters.takes, CLIENTS)):
            raise NoSuchFunction(
                f"{self.function.__name__} takes none of {', '.join(CLIENTS)}, so it cannot ask the model for a reply"
            )
        check_options(self.function, self.options)
        return {"plays": "itself", "required": needed}

    async def play(self, episode: str, values: Values, url: str, key: str) -> float | None:
        is_async = inspect.iscoroutinefunction(self.function)
        names = [name for name in CLIENTS if name in inspect.signature(self.function).parameters]
        clients = {name: CLIENTS[name](url, key, is_async) for name in names}
        given = select_arguments(self.function, {**values, **self.options, **clients})
        reward = await call_user(self.function, **given)
        return None if reward is None else number_of(reward, "the reward that it returned")

    async def close(self, episode: str) -> None: ...


class AgentCommand:
    """A command that talks to OPENAI_BASE_URL: the row on its standard input, the reward in its last line, if any."""

    def __init__(self, specification: list[str], options: dict[str, Any]) -> None:
        self.command, self.options = specification, options
        self.running: dict[str, subprocess.Popen[str]] = {}

    def describe(self) -> dict[str, Any]:
        command = self.command[0] if self.command else ""
        if shutil.which(command) is None:
            function = f"; a function is named {command}:NAME" if command.endswith(".py") else ""
            raise NoSuchFunction(f"there is no command {command!r} that can be run{function}")
        return {"plays": "itself", "required": []}

    async def play(self, episode: str, values: Values, url: str, key: str) -> float | None:
        variables = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        process = self.running[episode] = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True
        )
        printed, _ = await asyncio.to_thread(process.communicate, json.dumps({**values, **self.options}, default=str))
        if process.returncode:
            raise ProgramEnded(f"{self.command[0]} ended with status {process.returncode}")
        with contextlib.suppress(ValueError):
            return number_of(float(printed.strip().rpartition("\n")[2]), "the reward in its last line")
        return None

    async def close(self, episode: str) -> None:
        if process := self.running.pop(episode, None):
            process.kill()


def load_code(specification: list[str], options: dict[str, Any]) -> EpisodeCode:
    """Load a class that takes turns, or a function that plays whole episodes."""
    if ":" not in specification[0] and not specification[0].endswith(PICKLED):
        raise NoSuchFunction("name a class or a function of a file or module, as file.py:Name or package.module:Name")
    found = load_function(specification[0], {})
    return StepCode(found, options) if inspect.isclass(found) else AgentCode(found, options)


# What agents are given

UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@cache
def plain_http() -> httpx.Client:
    """Return the one client of this process; making one takes longer than a request."""
    return httpx.Client(timeout=None, trust_env=False, limits=UNLIMITED)


@cache
def async_http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=UNLIMITED)


class OutOfTurns(Exception):
    """The episode may have no more replies; user code need not catch it."""


def request_of(messages: list[Message] | str, tools: list[Tool]) -> dict[str, Any]:
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"model": "policy", "messages": listed, **({"tools": tools} if tools else {})}


def message_of(response: httpx.Response) -> Message:
    found = response.json()
    if response.status_code != 200:
        raise OutOfTurns(found["error"]["message"])
    message: Message = found["choices"][0]["message"]
    return message


class AsyncRemotePolicy:
    """The policy as a function: `await policy(messages)` takes a list of messages or a text, and returns a text."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.headers = f"{url}/chat/completions", {"Authorization": f"Bearer {key}"}

    async def __call__(self, messages: list[Message] | str) -> str:
        return str((await self.message(messages))["content"] or "")

    async def message(self, messages: list[Message] | str, tools: list[Tool] | None = None) -> Message:
        """Return the whole message, with the tools that it calls."""
        request = request_of(messages, tools or [])
        return message_of(await async_http().post(self.url, json=request, headers=self.headers))


class RemotePolicy(AsyncRemotePolicy):
    """The same for functions that are not asynchronous."""

    def __call__(self, messages: list[Message] | str) -> str:  # type: ignore[override]
        return str(self.message(messages)["content"] or "")

    def message(self, messages: list[Message] | str, tools: list[Tool] | None = None) -> Message:  # type: ignore[override]
        request = request_of(messages, tools or [])
        return message_of(plain_http().post(self.url, json=request, headers=self.headers))


@cache
def openai_client(url: str, is_async: bool) -> Any:
    """Return the one client of this process; making one takes longer than a request."""
    from openai import AsyncOpenAI, OpenAI  # noqa: PLC0415  (a second to import; only some agents take it)

    return (AsyncOpenAI if is_async else OpenAI)(base_url=url, api_key="that of an episode", timeout=None)


CLIENTS: dict[str, Callable[[str, str, bool], Any]] = {  # parameters of a function that plays an episode
    "policy": lambda url, key, is_async: (AsyncRemotePolicy if is_async else RemotePolicy)(url, key),
    "client": lambda url, key, is_async: openai_client(url, is_async).with_options(api_key=key),
    "base_url": lambda url, key, is_async: url,
    "api_key": lambda url, key, is_async: key,
}


def members_of(kind: type) -> dict[str, Any]:
    """Return what a class has, with what it inherits."""
    return {name: value for one in reversed(kind.__mro__) for name, value in vars(one).items()}


def check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = Parameters.of(function)
    unknown = [name for name in options if not parameters.takes(name)]
    if unknown:
        known = ", ".join(name for name in parameters.names if name not in CLIENTS) or "none"
        raise NoSuchFunction(f"environment.options.{unknown[0]}: there is no such option; there are {known}")


def takes_reply(step: Callable[..., Any]) -> bool:
    try:
        inspect.signature(step).bind("self", "reply")
    except TypeError:
        return False
    return True


def as_messages(returned: Any, otherwise: list[Message], method: str = "step") -> list[Message]:
    """Return an environment's messages: text is the user's, None is `otherwise`."""
    if returned is None:
        return otherwise
    if isinstance(returned, str):
        return [{"role": "user", "content": returned}]
    if isinstance(returned, list) and all(
        isinstance(one, dict) and one.get("role") in TEMPLATE_ROLES for one in returned
    ):
        return returned
    raise WrongResult(
        f"`{method}` returned {returned!r:.80} of type {type(returned).__name__} as messages: return a text or a list "
        'of {"role": "user", "content": "..."}, with the roles ' + ", ".join(TEMPLATE_ROLES)
    )


def as_step(returned: Any) -> dict[str, Any]:
    """Return a step in full: a text continues the episode, a number ends it with that reward, a dict has all of it."""
    if isinstance(returned, str):
        returned = {"messages": returned}
    elif not isinstance(returned, dict):
        returned = {"reward": returned, "done": True}
    if returned.get("reward", 0.0) is None or isinstance(returned.get("reward"), tuple | list):
        raise WrongResult(f"`step` returned {returned['reward']!r:.80}: return {STEP}")
    unknown = sorted(map(str, set(returned) - {"messages", "reward", "done", "metrics"}))
    if unknown:
        raise WrongResult(f"`step` returned a dict with {', '.join(map(repr, unknown))}: return {STEP}")
    done, messages = bool(returned.get("done", False)), as_messages(returned.get("messages"), [])
    if not done and not messages:
        raise WrongResult(
            f"`step` returned {returned!r:.200}: without messages and without done=True nothing can follow"
        )
    metrics = returned.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise WrongResult(f"`step` returned the metrics {metrics!r:.80}: return a dict of numbers by name")
    return {
        "messages": messages,
        "reward": number_of(returned.get("reward", 0.0), "the reward that `step` returned"),
        "done": done,
        "metrics": {str(name): number_of(value, f"the metric {name!r} of `step`") for name, value in metrics.items()},
    }


def number_of(value: Any, what: str) -> float:
    number = finite_number(value)
    if number is None:
        raise WrongResult(f"{what} must be a finite number, got {value!r:.80} of type {type(value).__name__}")
    return number
