"""OpenEnv: environments behind a server, where each episode has a session over a WebSocket. Only JSON travels."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from trueline.data.messages import Message, content_of
from trueline.environments.hosted import StepCode, end_with
from trueline.usercode.failures import NoSuchFunction

HOST = "127.0.0.1"
START_SECONDS, CLOSE_SECONDS = 60.0, 5.0
LARGEST_MESSAGE = 2**25  # bytes
APPLICATION = re.compile(r"[A-Za-z_][\w.]*(:\w+)?")  # a package of an environment, or the application of its server
OWN_FIELDS = {"done", "reward", "metadata"}  # of every action or observation
NOT_FOR_RESET = {"prompt", "messages", "label", "tools", "images"}


class OpenEnvFailure(RuntimeError):
    """A server did not do what was asked of it."""


class BadAction(Exception):
    """The server takes no such action."""


@dataclass(frozen=True, slots=True)
class EnvServer:
    address: str
    action_field: str  # of actions that have one text; the others are JSON


class OpenEnv:
    """An episode: a session of its own with the server."""

    def __init__(self, server: EnvServer, action: str = "", observation: str = "", rewards: bool = True) -> None:
        self.server, self.observation, self.rewards = server, observation, rewards
        self.action = action or server.action_field
        self.is_rewarded = False
        self.mistakes = 0
        self.session: Any = None

    async def reset(self, prompt: str, messages: list[Message], **row: Any) -> list[Message]:
        """Begin the task of the row, whose columns are the parameters of the server's `reset`."""
        from websockets.asyncio.client import connect  # noqa: PLC0415  (an extra)

        given = {name: value for name, value in row.items() if name not in NOT_FOR_RESET}
        # All episodes of a group must begin alike, or they would be compared by their luck.
        seed = zlib.crc32(json.dumps([messages, given], sort_keys=True, default=str).encode())
        url = f"ws{self.server.address.removeprefix('http')}/ws"
        try:
            self.session = await connect(url, max_size=LARGEST_MESSAGE, proxy=None)
        except (OSError, TimeoutError) as error:
            raise OpenEnvFailure(f"no session with {self.server.address}: {error}") from None
        found = await self._request("reset", {"seed": seed, **given})
        if found["done"]:
            raise OpenEnvFailure(f"the server at {self.server.address} ended the episode in `reset`")
        text = self._text(found["observation"])
        return [*messages[:-1], {**messages[-1], "content": f"{content_of(messages[-1])}\n\n{text}"}]

    async def step(self, reply: str) -> dict[str, Any]:
        try:
            found = await self._request("step", self._action(reply))
        except BadAction as error:
            self.mistakes += 1
            return {"messages": f"error: {error}", "metrics": {"mistakes": self.mistakes}}
        self.is_rewarded |= found["reward"] is not None
        if found["done"] and self.rewards and not self.is_rewarded:
            remedy = "set environment.options.rewards=false if --reward scores the episode"
            raise OpenEnvFailure(f"the server at {self.server.address} gave the episode no reward: {remedy}")
        return {
            "messages": self._text(found["observation"]),
            "reward": float(found["reward"] or 0.0) if self.rewards else 0.0,
            "done": found["done"],
            "metrics": {"mistakes": self.mistakes},
        }

    def _action(self, reply: str) -> dict[str, Any]:
        if self.action:
            return {self.action: reply}
        with suppress(ValueError):
            if isinstance(action := json.loads(reply), dict):
                return action
        raise BadAction("reply with an action as one JSON object")

    def _text(self, observation: dict[str, Any]) -> str:
        """Return the named or only field, or all fields as JSON."""
        fields = {name: value for name, value in observation.items() if name not in OWN_FIELDS}
        if self.observation and self.observation not in fields:
            known = ", ".join(fields)
            raise OpenEnvFailure(f"environment.options.observation={self.observation}: observations have {known}")
        name = self.observation or (next(iter(fields)) if len(fields) == 1 else "")
        shown = fields[name] if name else fields
        return shown if isinstance(shown, str) else json.dumps(shown)

    async def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415  (an extra)

        place = f"the server at {self.server.address}"
        try:
            with suppress(ConnectionClosed):  # the server may have left a reason
                await self.session.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(await self.session.recv())
        except (ConnectionClosed, OSError, ValueError) as error:
            raise OpenEnvFailure(f"{place} did not reply to `{kind}`: {error}") from None
        match answer:
            case {"type": "observation", "data": {"observation": dict() as observation, **rest}}:
                return {"observation": observation, "reward": rest.get("reward"), "done": bool(rest.get("done"))}
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", **rest}} if kind == "step":
                raise BadAction(describe_problems(rest) or "this is no action of the environment")
            case {"type": "error", "data": {"code": "CAPACITY_REACHED", **rest}}:
                remedy = "raise its max_concurrent_envs, or lower environment.processes and episodes_per_process"
                raise OpenEnvFailure(f"{place} has no room for another session: {rest.get('message')}: {remedy}")
            case {"type": "error", "data": {"message": message, **rest}}:
                raise OpenEnvFailure(f"{place} failed in `{kind}`: {message} ({rest.get('code')})")
        raise OpenEnvFailure(f"{place} replied to `{kind}` with {json.dumps(answer)[:200]}, which is no observation")

    async def close(self) -> None:
        """End the session, and wait until the server has given back what it held."""
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415  (an extra)

        if self.session is not None:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.session.send('{"type": "close"}')
                    await self.session.wait_closed()
            await self.session.close()


def describe_problems(about: dict[Any, Any]) -> str:
    """Return what pydantic found wrong with an action."""
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in about.get("errors", []))


class OpenEnvCode(StepCode):
    """Episodes on a server, which is found at an address or port, or started from an environment's package."""

    def __init__(self, specification: list[str], options: dict[str, Any]) -> None:
        self.target, self.python = specification[0].removeprefix("openenv:"), [*specification[1:], sys.executable][0]
        super().__init__(OpenEnv, options)

    def describe(self) -> dict[str, Any]:
        try:
            import websockets  # noqa: F401, PLC0415  (an extra)
        except ImportError:
            raise NoSuchFunction("it needs its package: pip install 'trueline[openenv]'") from None
        if "server" in self.options:
            raise NoSuchFunction("environment.options.server: name the server in environment.function=openenv:URL")
        self.options = {**self.options, "server": self._find()}
        return super().describe()

    def _find(self) -> EnvServer:
        if self.target.isdigit():
            return read_server(f"http://{HOST}:{self.target}")
        if self.target.startswith(("http://", "https://")):
            parts = urlsplit(self.target)
            if parts.username or parts.password or parts.query:
                raise NoSuchFunction("the address has a user, password or query, which would be printed: leave it out")
            return read_server(self.target.rstrip("/"))
        if not APPLICATION.fullmatch(self.target):
            forms = "openenv:PACKAGE, openenv:MODULE:APP, openenv:PORT or openenv:http://HOST:PORT"
            raise NoSuchFunction(f"{self.target!r} is no environment of OpenEnv: write {forms}")
        return start_server(self.target, self.python)


def start_server(target: str, python: str) -> EnvServer:
    """Start the server of an environment's package, on loopback only; it ends with this process."""
    application = target if ":" in target else f"{target}.server.app:app"
    with socket.create_server((HOST, 0)) as listener:
        port, number = listener.getsockname()[1], listener.fileno()
        command = [python, "-m", "uvicorn", application, "--fd", str(number), "--log-level", "warning"]
        try:
            process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)
        except OSError as error:
            raise NoSuchFunction(f"environment.python={python} cannot be started: {error}") from None
    try:
        server = read_server(f"http://{HOST}:{port}")
    except NoSuchFunction as failure:
        process.kill()
        remedy = "name the Python that has the environment's package as environment.python"
        raise NoSuchFunction(f"`{' '.join(command[:4])}` does not serve it: {failure}; {remedy}") from None
    threading.Thread(target=end_with, args=[process], daemon=True).start()
    return server


def read_server(address: str) -> EnvServer:
    """Ask a server what its actions are."""
    try:
        schema = httpx.get(f"{address}/schema", trust_env=False, timeout=START_SECONDS).raise_for_status().json()
        properties, required = schema["action"]["properties"], schema["action"].get("required", [])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise NoSuchFunction(f"no server of OpenEnv answers at {address}/schema ({why}): start it first") from None
    fields = [name for name in properties if name not in OWN_FIELDS]
    needed = [name for name in fields if name in required] or fields
    is_text = len(needed) == 1 and properties[needed[0]].get("type") == "string"
    return EnvServer(address, needed[0] if is_text else "")
