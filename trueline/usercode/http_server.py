"""An HTTP server within a process that has other work, and the reading of requests within limits."""

import asyncio
import json
import os
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

MAX_BYTES = 32 * 2**20  # of one request
IDLE_SECONDS = 60  # that a connection may be silent in the middle of a request, and between two
STOP_SECONDS = 5  # that the rest of a request is waited for when the server stops
SETTINGS: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off"}  # the same whatever else is installed
SETTINGS |= {"log_config": None, "log_level": "error", "access_log": False}  # nothing of a request is written anywhere
SETTINGS |= {"timeout_keep_alive": IDLE_SECONDS, "timeout_graceful_shutdown": STOP_SECONDS}
Handler = Callable[[Request, Exception], Awaitable[Response]]


def open_port(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 takes any free one."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        why = str(error)
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
            why = os.strerror(error.errno or 0)  # its text repeats the address
        remedy = "choose a host that is an address of this machine, and a port that is free, or 0 for any"
        raise ConfigError(f"host={host}, port={port}: cannot listen there ({why}): {remedy}") from None


class QuietServer(uvicorn.Server):
    """A server within a process that has work of its own; `unknown` answers where there is no route."""

    def __init__(self, routes: list[Route], *, unknown: Handler, refused: Handler) -> None:
        app = Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown, HTTPException: refused})
        app.router.redirect_slashes = False
        super().__init__(uvicorn.Config(app, **SETTINGS))

    def capture_signals(self) -> Any:
        """Leave signals to the process around it."""
        return nullcontext()


async def read_request(request: Request, *, known: bool) -> bytes:
    """Return the body of a request, or refuse one that is too large or whose sender is not known.

    A body that is not kept is read too: a connection closed with bytes unread is reset.
    """
    headers, body, size, now = request.headers, bytearray(), 0, asyncio.get_running_loop().time
    too_large = HTTPException(413, f"a request of more than {MAX_BYTES} bytes: send less at a time")
    sized = "content-length" in headers and "transfer-encoding" not in headers  # else in chunks
    if sized and int(headers["content-length"]) > MAX_BYTES:
        raise too_large
    try:
        async with asyncio.timeout(IDLE_SECONDS) as silence:
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BYTES:
                    raise too_large
                body += piece if known else b""
                silence.reschedule(now() + IDLE_SECONDS)
    except (ClientDisconnect, TimeoutError):
        raise HTTPException(408, f"the request broke off, or nothing came for {IDLE_SECONDS} seconds") from None
    if not known:
        raise HTTPException(401, "the token is missing or wrong: send Authorization: Bearer TOKEN")
    return bytes(body)


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"not valid JSON: {error}") from None


def as_json(status: int, content: dict[str, Any]) -> Response:
    """Make a response that, unlike Starlette's own, takes texts with half a character, which errors may quote."""
    return Response(json.dumps(content), status, media_type="application/json")
