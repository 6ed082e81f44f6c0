"""Environments, tools and agents in the process that has loaded them: what hosts call for their episodes."""

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Any

import httpx

from trueline.data.messages import TEMPLATE_ROLES, Message, Tool
from trueline.environments.roles import declared_roles, rewards_by_role, take_role
from trueline.environments.tools.contents import shows_pictures, write_message
from trueline.environments.tools.toolbox import call_user
from trueline.monitoring.user_files import PICKLED
from trueline.usercode.failures import NoSuchFunction, ProgramEnded, WrongResult
from trueline.usercode.host import EpisodeCode
from trueline.usercode.loading import Parameters, finite_number, load_function, select_arguments

Values = dict[str, Any]  # what a row gives: prompt, messages, label and columns
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)
STEP = (
    "a text to continue, a number to end with that reward, or a dict such as "
    '{"messages": "...", "reward": 0.0, "done": False, "metrics": {}}'
)


class StepCode:
    """A class with `reset` and `step`, an instance for each episode."""

    def __init__(self, kind: type, options: dict[str, Any]) -> None:
        self.kind, self.options = kind, options
        self.instances: dict[str, Any] = {}
        self.roles: list[str] = []

    def describe(self) -> dict[str, Any]:
        has = members_of(self.kind)
        if missing := [name for name in ("reset", "step") if not callable(has.get(name))]:
            raise NoSuchFunction(f"{self.kind.__name__} has no method {missing[0]!r}: it needs `reset` and `step`")
        if unset := [name for name in Parameters.of(self.kind).required if name not in self.options]:
            raise NoSuchFunction(f"{self.kind.__name__} takes {unset[0]!r}: set it in environment.options")
        check_options(self.kind, self.options)
        self.roles = declared_roles(self.kind, has)
        given = ["reply", *["role"] * bool(self.roles)]
        try:
            if inspect.isfunction(has["step"]):
                inspect.signature(has["step"]).bind("self", *given)
        except TypeError:
            taken = f"{' and the '.join(given)}: write def step(self, {', '.join(given)})"
            raise NoSuchFunction(f"`step` of {self.kind.__name__} is given the {taken}") from None
        return {"plays": "steps", "required": Parameters.of(has["reset"]).required[1:], "roles": self.roles}

    async def reset(self, episode: str, values: Values) -> dict[str, Any]:
        """Return the first messages, the role that they are for, and all roles."""
        instance = self.instances[episode] = await asyncio.to_thread(self.kind, **self.options)
        found = await call_user(instance.reset, **select_arguments(instance.reset, values))
        role, messages = take_role(found, self.roles, "reset")
        if self.roles:
            messages = messages.get("messages")
        return {"role": role, "messages": as_messages(messages, values["messages"], "reset"), "roles": self.roles}

    async def step(self, episode: str, reply: str, role: str) -> dict[str, Any]:
        step = self.instances[episode].step
        return as_step(await (call_user(step, reply, role) if self.roles else call_user(step, reply)), self.roles)

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
            clients = f"{', '.join(CLIENTS)}, so it cannot ask the model for a reply"
            raise NoSuchFunction(f"{self.function.__name__} takes none of {clients}")
        check_options(self.function, self.options)
        return {"plays": "itself", "required": needed}

    async def play(self, episode: str, values: Values, url: str, key: str) -> float | None:
        is_async, named = inspect.iscoroutinefunction(self.function), inspect.signature(self.function).parameters
        clients = {name: make(url, key, is_async) for name, make in CLIENTS.items() if name in named}
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


@cache
def http_client(is_async: bool) -> Any:
    """Return the one client of this process; making one takes longer than a request."""
    return (httpx.AsyncClient if is_async else httpx.Client)(timeout=None, trust_env=False, limits=UNLIMITED)


class OutOfTurns(Exception):
    """The episode may have no more replies; user code need not catch it."""


class RemotePolicy:
    """The policy as a function, which takes a list of messages or a text, and returns a text; async code awaits it."""

    def __init__(self, url: str, key: str, is_async: bool) -> None:
        self.url, self.headers = f"{url}/chat/completions", {"Authorization": f"Bearer {key}"}
        self.is_async = is_async

    def __call__(self, messages: list[Message] | str) -> str | Awaitable[str]:
        return self._request(messages, None, lambda message: str(message["content"] or ""))

    def message(self, messages: list[Message] | str, tools: list[Tool] | None = None) -> Message | Awaitable[Message]:
        """Return the whole message, with the tools that it calls."""
        return self._request(messages, tools, lambda message: message)

    def _request(self, messages: list[Message] | str, tools: list[Tool] | None, read: Callable[[Message], Any]) -> Any:
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        listed = [write_message(message, "a message to the policy") for message in given]
        request = {"model": "policy", "messages": listed, **({"tools": tools} if tools else {})}
        post = partial(http_client(self.is_async).post, self.url, json=request, headers=self.headers)

        def read_response(response: httpx.Response) -> Any:
            found = response.json()
            if response.status_code != 200:
                raise OutOfTurns(found["error"]["message"])
            return read(found["choices"][0]["message"])

        async def read_later() -> Any:
            return read_response(await post())

        return read_later() if self.is_async else read_response(post())


@cache
def openai_client(url: str, is_async: bool) -> Any:
    """Return the one client of this process; making one takes longer than a request."""
    from openai import AsyncOpenAI, OpenAI  # noqa: PLC0415  (a second to import; only some agents take it)

    return (AsyncOpenAI if is_async else OpenAI)(base_url=url, api_key="that of an episode", timeout=None)


CLIENTS: dict[str, Callable[[str, str, bool], Any]] = {  # parameters of a function that plays an episode
    "policy": RemotePolicy,
    "client": lambda url, key, is_async: openai_client(url, is_async).with_options(api_key=key),
    "base_url": lambda url, key, is_async: url,
    "api_key": lambda url, key, is_async: key,
}


def end_with(process: subprocess.Popen[Any]) -> None:
    """End this process as soon as another one ends that its episodes need; the run then starts both again."""
    status = process.wait()
    sys.stderr.write(f"{shlex.join(process.args)} ended with status {status}\n")  # type: ignore[arg-type]
    sys.stderr.flush()
    os._exit(1)


def members_of(kind: type) -> dict[str, Any]:
    """Return what a class has, with what it inherits."""
    return {name: value for one in reversed(kind.__mro__) for name, value in vars(one).items()}


def check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = Parameters.of(function)
    if unknown := [name for name in options if not parameters.takes(name)]:
        known = ", ".join(name for name in parameters.names if name not in CLIENTS) or "none"
        raise NoSuchFunction(f"environment.options.{unknown[0]}: there is no such option; there are {known}")


def as_messages(returned: Any, otherwise: list[Message], method: str = "step") -> list[Message]:
    """Return an environment's messages: text and images are the user's, None is `otherwise`."""
    if returned is None:
        return otherwise
    if isinstance(returned, str) or shows_pictures(returned):
        returned = [{"role": "user", "content": returned}]
    is_list = isinstance(returned, list)
    if is_list and all(isinstance(one, dict) and one.get("role") in TEMPLATE_ROLES for one in returned):
        return [write_message(message, f"what `{method}` returned") for message in returned]
    kind, roles = type(returned).__name__, ", ".join(TEMPLATE_ROLES)
    shape = f'a text or a list of {{"role": "user", "content": "..."}}, with the roles {roles}'
    raise WrongResult(f"`{method}` returned {returned!r:.80} of type {kind} as messages: return {shape}")


def as_step(returned: Any, roles: Sequence[str] = ()) -> dict[str, Any]:
    """Return a step in full: text or images continue, a number ends it with that reward, a dict has all of it.

    The reward of a step is one of each role; without roles, of the role "".
    """
    role, returned = take_role(returned, list(roles), "step")
    if isinstance(returned, str) or shows_pictures(returned):
        returned = {"messages": returned}
    elif not isinstance(returned, dict):
        returned = {"reward": returned, "done": True}
    rewards = {"": returned.get("reward", 0.0)}
    if roles:
        rewards = rewards_by_role(rewards[""], list(roles), done=bool(returned.get("done")))
    elif rewards[""] is None or isinstance(rewards[""], tuple | list | dict):
        raise WrongResult(f"`step` returned {returned['reward']!r:.80}: return {STEP}")
    if unknown := sorted(map(str, set(returned) - {"messages", "reward", "done", "metrics"})):
        raise WrongResult(f"`step` returned a dict with {', '.join(map(repr, unknown))}: return {STEP}")
    done, messages = bool(returned.get("done", False)), as_messages(returned.get("messages"), [])
    if not done and not messages:
        problem = "without messages and without done=True nothing can follow"
        raise WrongResult(f"`step` returned {returned!r:.200}: {problem}")
    metrics = returned.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise WrongResult(f"`step` returned the metrics {metrics!r:.80}: return a dict of numbers by name")
    return {
        "role": role,
        "messages": messages,
        "reward": {role: number_of(value, "the reward that `step` returned") for role, value in rewards.items()},
        "done": done,
        "metrics": {str(name): number_of(value, f"the metric {name!r} of `step`") for name, value in metrics.items()},
    }


def number_of(value: Any, what: str) -> float:
    if (number := finite_number(value)) is None:
        raise WrongResult(f"{what} must be a finite number, got {value!r:.80} of type {type(value).__name__}")
    return number
