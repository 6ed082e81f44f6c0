"""A reward over HTTP, in the protocol that ScorerReward speaks: POST /score with a token, GET /health without."""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from trueline.config.base import ConfigError
from trueline.data.readers import parse_message, read_tools
from trueline.data.sources import Located
from trueline.rewards.base import Call, Reward, RewardFailure, RewardUnreachable

MAX_BYTES = 32 * 2**20  # of one request
IDLE_SECONDS = 60  # that a connection may be silent in the middle of a request, and between two
STOP_SECONDS = 5  # that the rest of a request is waited for when the server stops
SETTINGS: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off"}  # the same whatever else is installed
SETTINGS |= {"log_config": None, "log_level": "error", "access_log": False}  # nothing of a request is written anywhere
SETTINGS |= {"timeout_keep_alive": IDLE_SECONDS, "timeout_graceful_shutdown": STOP_SECONDS}
Handler = Callable[[Request, Exception], Awaitable[Response]]


def open_port(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = str(error).partition(" (while")[0]  # what follows is the address once more
        raise ConfigError(
            f"host={host}, port={port}: cannot listen there ({why}): choose a host that is an address of this machine, "
            "and a port that is free, or 0 for any"
        ) from None


class QuietServer(uvicorn.Server):
    """A server within a process that has work of its own; `unknown` answers where there is no route."""

    def __init__(self, routes: list[Route], *, unknown: Handler, refused: Handler) -> None:
        app = Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown, HTTPException: refused})
        app.router.redirect_slashes = False
        super().__init__(uvicorn.Config(app, **SETTINGS))

    def capture_signals(self) -> Any:
        """Leave signals to the process around it."""
        return nullcontext()


class RewardServer(QuietServer):
    """A server that gathers the calls of all requests in `reward`, whose failure of the kind `fatal` ends it."""

    def __init__(self, reward: Reward, *, token: str, name: str, fatal: type[RuntimeError]) -> None:
        self.reward, self.token, self.name, self.fatal = reward, token.encode(), name, fatal
        self.failure: RuntimeError | None = None
        routes = [Route("/score", self._score, methods=["POST"]), Route("/health", self._health)]
        super().__init__(routes, unknown=unknown, refused=refused)

    async def answer(self, listener: socket.socket) -> None:
        """Serve until `end`, and raise the failure that it was given."""
        await self.serve([listener])
        if self.failure:
            raise self.failure

    def end(self, failure: RuntimeError | None = None) -> None:
        self.failure, self.should_exit = self.failure or failure, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.reward.stop()  # first, so that those who wait are answered
        await super().shutdown(sockets)

    async def _health(self, request: Request) -> Response:
        return as_json(200, {"status": "ok", "model": self.name})

    async def _score(self, request: Request) -> Response:
        try:
            calls = await read_calls(request, self.token)
            return as_json(200, {"rewards": await score_all(self.reward, calls)})
        except (RewardUnreachable, asyncio.CancelledError):
            return as_json(503, {"error": "the server is stopping"})
        except RuntimeError as error:  # the model, out of memory say
            if isinstance(error, self.fatal):
                self.end(error)
            return as_json(500, {"error": f"{type(error).__name__}: {error}"})


async def score_all(reward: Reward, calls: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*(score_one(reward, call) for call in calls)))


async def score_one(reward: Reward, call: Any) -> float | dict[str, str]:
    try:
        return await reward.score(checked(call))
    except RewardUnreachable:
        raise  # no fault of this call: the whole request is to be tried again
    except RewardFailure as error:
        return {"error": str(error)}


def checked(call: Any) -> Call:
    """Return a call that rewards may rely on: a reply, and messages and tools as the readers of datasets make them."""
    if not isinstance(call, dict) or not isinstance(call.get("reply"), str):
        raise RewardFailure(f'a call is an object with a text "reply", got {call!r:.200}')
    messages = call.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RewardFailure(f'"messages" is a list of {{"role": text, "content": text}}, got {messages!r:.200}')
    try:
        parsed = [parse_message(message, f'"messages", message {number}') for number, message in enumerate(messages, 1)]
        return {**call, "messages": parsed, "tools": read_tools(Located(call, "the call"))}
    except ConfigError as error:
        raise RewardFailure(str(error)) from None


async def read_calls(request: Request, token: bytes) -> list[Any]:
    known = hmac.compare_digest(request.headers.get("authorization", "").encode("latin-1"), b"Bearer " + token)
    content = parse_json(await read_request(request, known=known))
    calls = content.get("calls") if isinstance(content, dict) else None
    if not isinstance(calls, list):
        raise HTTPException(400, 'an object {"calls": [...]} is expected')
    return calls


async def read_request(request: Request, *, known: bool) -> bytes:
    """Return the body of a request, or refuse one that is too large or whose sender is not known."""
    headers = request.headers
    sized = "content-length" in headers and "transfer-encoding" not in headers  # else in chunks
    if sized and int(headers["content-length"]) > MAX_BYTES:
        raise too_large()
    body = await read_body(request, keep=known)
    if not known:
        raise HTTPException(401, "the token is missing or wrong: send Authorization: Bearer TOKEN")
    return body


def too_large() -> HTTPException:
    return HTTPException(413, f"a request of more than {MAX_BYTES} bytes: send less at a time")


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"not valid JSON: {error}") from None


async def read_body(request: Request, *, keep: bool) -> bytes:
    """Read a body that is not too large, also where it is not kept: a connection closed with bytes unread is reset."""
    body, size, now = bytearray(), 0, asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(IDLE_SECONDS) as silence:
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BYTES:
                    raise too_large()
                body += piece if keep else b""
                silence.reschedule(now() + IDLE_SECONDS)
    except (ClientDisconnect, TimeoutError):
        raise HTTPException(408, f"the request broke off, or nothing came for {IDLE_SECONDS} seconds") from None
    return bytes(body)


async def unknown(request: Request, error: Exception) -> Response:
    return as_json(404, {"error": f"{request.url.path}: there are POST /score and GET /health"})


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_json(error.status_code, {"error": error.detail})


def as_json(status: int, content: dict[str, Any]) -> Response:
    """Make a response that, unlike Starlette's own, takes texts with half a character, which errors may quote."""
    return Response(json.dumps(content), status, media_type="application/json")
