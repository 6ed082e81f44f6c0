"""The child process that environments, tools and agents run in: one JSON object a line in, one a line out.

Many episodes at a time: what is asynchronous shares its loop, all else has a thread. It starts without torch;
`python -m trueline.environments.process KIND MEMORY_GIB THREADS`, and what to load is its first line.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Protocol

from trueline.algorithms.user_functions import NoSuchFunction, load_function
from trueline.data.messages import TEMPLATE_ROLES, Message
from trueline.environments.remote_policy import AsyncRemotePolicy, RemotePolicy
from trueline.environments.tools.calls import ToolMistake
from trueline.environments.tools.toolbox import Toolbox, contained
from trueline.monitoring.user_files import PICKLED
from trueline.rewards.base import PolicyError
from trueline.rewards.linux import die_with_parent
from trueline.rewards.process import checked, describe, explain, filled, limit_memory

Values = dict[str, Any]  # what a row gives: prompt, messages, label and columns
STEP = (
    "a text to go on, a number to end with that reward, or a dict such as "
    '{"messages": "...", "reward": 0.0, "done": False, "metrics": {}}'
)


class ProgramEnded(RuntimeError):
    """An agent's program ended in a failure of its own."""


class UnfitResult(TypeError):
    """What user code returned cannot be used; the message says what it has to return."""


class Stage(Protocol):
    """What a kind of user code can be asked; `episode` tells whose state is meant."""

    def describe(self) -> dict[str, Any]: ...

    async def close(self, episode: str) -> None: ...


async def called(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a plain function in a thread, and await what is asynchronous."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **named)
    returned = await asyncio.to_thread(contained, partial(function, *args), named)
    return await returned if inspect.isawaitable(returned) else returned


class Games:
    """A class with `reset` and `step`, an instance for each episode."""

    def __init__(self, made: type, options: dict[str, Any]) -> None:
        self.made, self.options = made, options
        self.playing: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        has = vars_of(self.made)
        missing = [name for name in ("reset", "step") if not callable(has.get(name))]
        if missing:
            raise NoSuchFunction(f"{self.made.__name__} has no method {missing[0]!r}: it takes `reset` and `step`")
        unset = [name for name in required(self.made) if name not in self.options]
        if unset:
            raise NoSuchFunction(f"{self.made.__name__} takes {unset[0]!r}: set it in environment.options")
        check_options(self.made, self.options)
        if inspect.isfunction(has["step"]) and not takes_reply(has["step"]):
            raise NoSuchFunction(f"`step` of {self.made.__name__} is given the reply: write def step(self, reply)")
        return {"plays": "steps", "required": required(has["reset"])[1:]}

    async def reset(self, episode: str, values: Values) -> list[Message]:
        game = self.playing[episode] = await asyncio.to_thread(self.made, **self.options)
        return as_messages(await called(game.reset, **filled(game.reset, values)), values["messages"], "reset")

    async def step(self, episode: str, reply: str) -> dict[str, Any]:
        return as_step(await called(self.playing[episode].step, reply))

    async def close(self, episode: str) -> None:
        game = self.playing.pop(episode, None)
        if game is not None and callable(vars_of(type(game)).get("close")):
            await called(game.close)


class Runs:
    """A function that plays a whole episode: it is given the policy, or a client of it, beside what the row has."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.function, self.options = function, options

    def describe(self) -> dict[str, Any]:
        needed = [name for name in required(self.function) if name not in CLIENTS and name not in self.options]
        takes = describe(self.function)
        if not takes["any"] and CLIENTS.keys().isdisjoint(takes["all"]):
            raise NoSuchFunction(
                f"{self.function.__name__} takes none of {', '.join(CLIENTS)}, so it cannot ask the model for a reply"
            )
        check_options(self.function, self.options)
        return {"plays": "itself", "required": needed}

    async def play(self, episode: str, values: Values, url: str, key: str) -> float | None:
        clients = {name: make for name, make in CLIENTS.items() if name in inspect.signature(self.function).parameters}
        asynchronous = inspect.iscoroutinefunction(self.function)
        made = {name: make(url, key, asynchronous) for name, make in clients.items()}
        reward = await called(self.function, **filled(self.function, {**values, **self.options, **made}))
        return None if reward is None else number_of(reward, "the reward that it returned")

    async def close(self, episode: str) -> None: ...


class Programs:
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
        said, _ = await asyncio.to_thread(process.communicate, json.dumps({**values, **self.options}, default=str))
        if process.returncode:
            raise ProgramEnded(f"{self.command[0]} ended with status {process.returncode} (see the log)")
        last = said.strip().rpartition("\n")[2]
        with contextlib.suppress(ValueError):
            return checked(float(last))
        return None

    async def close(self, episode: str) -> None:
        if process := self.running.pop(episode, None):
            process.kill()


class Tools:
    def __init__(self, specification: list[str], options: dict[str, Any]) -> None:
        self.box = Toolbox(specification, options)

    def describe(self) -> dict[str, Any]:
        return {"plays": "tools", "schemas": self.box.schemas(), "required": []}

    async def call(self, episode: str, name: str, arguments: dict[str, Any]) -> str:
        return await self.box.call(episode, name, arguments)

    async def close(self, episode: str) -> None:
        await self.box.close(episode)


def loaded(specification: list[str], options: dict[str, Any]) -> Stage:
    """Load a class that takes turns, or a function that plays whole episodes."""
    if ":" not in specification[0] and not specification[0].endswith(PICKLED):
        raise NoSuchFunction("name a class or a function of a file or module, as file.py:Name or package.module:Name")
    found = load_function(specification[0], {})
    return Games(found, options) if inspect.isclass(found) else Runs(found, options)


STAGES: dict[str, Callable[[list[str], dict[str, Any]], Stage]] = {
    "function": loaded,
    "program": Programs,
    "tools": Tools,
}


@cache
def openai_client(url: str, asynchronous: bool) -> Any:
    """Return the one client of this process: to make one takes longer than to ask."""
    from openai import AsyncOpenAI, OpenAI  # noqa: PLC0415  (a second to import; only some agents take it)

    return (AsyncOpenAI if asynchronous else OpenAI)(base_url=url, api_key="that of an episode", timeout=None)


CLIENTS: dict[str, Callable[[str, str, bool], Any]] = {  # parameters of a function that plays an episode
    "policy": lambda url, key, asynchronous: (AsyncRemotePolicy if asynchronous else RemotePolicy)(url, key),
    "client": lambda url, key, asynchronous: openai_client(url, asynchronous).with_options(api_key=key),
    "base_url": lambda url, key, asynchronous: url,
    "api_key": lambda url, key, asynchronous: key,
}


def vars_of(kind: type) -> dict[str, Any]:
    """Return what a class and those that it is made from have."""
    return {name: value for one in reversed(kind.__mro__) for name, value in vars(one).items()}


def required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]


def check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    takes = describe(function)
    unknown = [name for name in options if name not in takes["all"] and not takes["any"]]
    if unknown:
        known = ", ".join(name for name in takes["all"] if name not in CLIENTS) or "none"
        raise NoSuchFunction(f"environment.options.{unknown[0]}: it takes no such option; it takes {known}")


def takes_reply(step: Callable[..., Any]) -> bool:
    try:
        inspect.signature(step).bind("self", "reply")
    except TypeError:
        return False
    return True


def as_messages(said: Any, otherwise: list[Message], method: str = "step") -> list[Message]:
    """Return what an environment says as messages: text is the user's, nothing is `otherwise`."""
    if said is None:
        return otherwise
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if isinstance(said, list) and all(isinstance(one, dict) and one.get("role") in TEMPLATE_ROLES for one in said):
        return said
    raise UnfitResult(
        f"`{method}` returned {said!r:.80} of type {type(said).__name__} as messages: return a text or a list of "
        '{"role": "user", "content": "..."}, with the roles ' + ", ".join(TEMPLATE_ROLES)
    )


def as_step(said: Any) -> dict[str, Any]:
    """Return a step in full: a text goes on, a number is the reward of the end, and a dict names all of it."""
    if isinstance(said, str):
        said = {"messages": said}
    elif not isinstance(said, dict):
        said = {"reward": said, "done": True}
    if said.get("reward", 0.0) is None or isinstance(said.get("reward"), tuple | list):
        raise UnfitResult(f"`step` returned {said['reward']!r:.80}: return {STEP}")
    unknown = sorted(map(str, set(said) - {"messages", "reward", "done", "metrics"}))
    if unknown:
        raise UnfitResult(f"`step` returned a dict with {', '.join(map(repr, unknown))}: return {STEP}")
    done, messages = bool(said.get("done", False)), as_messages(said.get("messages"), [])
    if not done and not messages:
        raise UnfitResult(f"`step` returned {said!r:.200}: without messages and without done=True nothing can follow")
    metrics = said.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise UnfitResult(f"`step` returned the metrics {metrics!r:.80}: return a dict of numbers by name")
    return {
        "messages": messages,
        "reward": number_of(said.get("reward", 0.0), "the reward that `step` returned"),
        "done": done,
        "metrics": {str(name): number_of(value, f"the metric {name!r} of `step`") for name, value in metrics.items()},
    }


def number_of(value: Any, what: str) -> float:
    try:
        return checked(value)
    except TypeError:
        raise UnfitResult(f"{what} must be a finite number, got {value!r:.80} of type {type(value).__name__}") from None


def started_threads(count: int) -> ThreadPoolExecutor:
    """Return threads that run already, so that their stacks are no part of the memory that is limited later."""
    threads, together = ThreadPoolExecutor(count), threading.Barrier(count + 1)
    for _ in range(count):
        threads.submit(together.wait)
    together.wait()
    return threads


class Server:
    """Answers requests as they come; each says first that it has begun, so that those are known that may stop all."""

    def __init__(self, kind: str, memory_gib: float, threads: int) -> None:
        self.kind, self.memory_gib, self.threads = kind, memory_gib, threads
        self.stage: Stage
        self.tasks: set[asyncio.Task[None]] = set()
        self.requests, self.answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")

    def reply(self, message: dict[str, Any]) -> None:
        self.answers.write(json.dumps(message, default=str) + "\n")
        self.answers.flush()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(started_threads(self.threads))
        reader = ThreadPoolExecutor(1)
        while line := await loop.run_in_executor(reader, self.requests.readline):
            task = asyncio.create_task(self.answer(json.loads(line)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def answer(self, request: dict[str, Any]) -> None:
        number = request["id"]
        self.reply({"id": number, "begun": True})
        try:
            self.reply({"id": number, "result": await self.work(request)})
        except (ToolMistake, PolicyError) as mistake:
            self.reply({"id": number, "mistake": str(mistake)})
        except (NoSuchFunction, ProgramEnded) as error:
            self.reply({"id": number, "error": str(error)})
        except UnfitResult as error:
            self.reply({"id": number, "error": str(error), "unfit": True})
        except BaseException as error:  # noqa: BLE001  (the boundary where user code runs; sys.exit too)
            self.reply({"id": number, **self.blamed(request, error)})

    def blamed(self, request: dict[str, Any], error: BaseException) -> dict[str, str]:
        """Return what a user's tool raised for the model, with its traceback in the log; all else for the run."""
        users = self.stage.box.users if request["method"] == "call" and isinstance(self.stage, Tools) else ()
        if request.get("arguments", {}).get("name") not in users:
            return {"error": explain(error)}
        traceback.print_exception(error)
        return {"raised": "".join(traceback.format_exception_only(error)).strip()}

    async def work(self, request: dict[str, Any]) -> Any:
        given = request.get("arguments", {})
        if request["method"] == "open":
            self.stage = await asyncio.to_thread(STAGES[self.kind], given["specification"], given["options"])
            limit_memory(self.memory_gib)
            return self.stage.describe()
        method: Callable[..., Awaitable[Any]] = vars_of(type(self.stage))[request["method"]]
        return await method(self.stage, request["episode"], **given)


def main(kind: str, memory_gib: float, threads: int) -> None:
    server = Server(kind, memory_gib, threads)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for stream in (server.requests, server.answers):
        os.register_at_fork(after_in_child=stream.close)
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    try:
        asyncio.run(server.serve())
    except KeyboardInterrupt:
        traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
