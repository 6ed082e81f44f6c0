"""A reward over HTTP, in the protocol that ScorerReward speaks: POST /score with a token, GET /health without."""

import asyncio
import hmac
import json
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.readers import parse_message, read_tools
from trueline.data.sources import Located
from trueline.rewards.base import Call, Reward, RewardFailure, RewardUnreachable

MAX_BYTES = 32 * 2**20  # of one request
LONGEST_LENGTH = 12  # digits of a Content-Length that is worth reading
PIECE_BYTES = 64 * 2**10
IDLE_SECONDS = 60  # that a connection may be silent in the middle of a request
WAITING_CONNECTIONS = 128


class Refusal(Exception):
    """A request that gets no rewards."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=WAITING_CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"host={host}, port={port}: cannot listen there ({error}): set port=0 or another") from None


class RewardServer(ThreadingHTTPServer):
    """A thread for each request; the reward itself lives in `loop`, where calls of all requests are gathered."""

    def __init__(
        self, listener: socket.socket, reward: Reward, loop: asyncio.AbstractEventLoop, *, token: str, name: str
    ) -> None:
        super().__init__(listener.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.reward, self.loop, self.token, self.name = reward, loop, token.encode(), name

    def score(self, calls: list[Any]) -> list[Any]:
        return asyncio.run_coroutine_threadsafe(score_all(self.reward, calls), self.loop).result()


async def serve_until(server: RewardServer, ended: "asyncio.Future[None]") -> None:
    """Answers until `ended` has a result, or an exception, which is raised."""
    threading.Thread(target=server.serve_forever, args=(0.1,), name="http", daemon=True).start()
    try:
        await ended
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await server.reward.stop()


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
    """What every reward may rely on: a reply, and messages and tools as the readers of datasets make them."""
    if not isinstance(call, dict) or not isinstance(call.get("reply"), str):
        raise RewardFailure(f'a call is an object with a text "reply", got {call!r:.200}')
    messages = call.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RewardFailure(f'"messages" is a list of {{"role": text, "content": text}}, got {messages!r:.200}')
    try:
        parsed = [parse_message(message, f'"messages", message {number}') for number, message in enumerate(messages)]
        return {**call, "messages": parsed, "tools": read_tools(Located(call, "the call"))}
    except ConfigError as error:
        raise RewardFailure(str(error)) from None


class Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = IDLE_SECONDS
    unread = 0  # bytes of the request's body

    def do_GET(self) -> None:
        health = {"status": "ok", "model": self.server.name}
        self._answer(*((200, health) if self.path == "/health" else (404, unknown(self.path))))

    def do_POST(self) -> None:
        try:
            self._answer(200, {"rewards": self.server.score(self._calls())})
        except Refusal as refusal:
            self._answer(refusal.status, {"error": str(refusal)})
        except (RewardUnreachable, CancelledError):
            self._answer(503, {"error": "the server is stopping"})
        except RuntimeError as error:  # the model, out of memory say
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})
        except (ConnectionError, TimeoutError):  # the client went away in the middle of its request
            self.close_connection = True

    def _calls(self) -> list[Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refusal(411, "a Content-Length is needed")
        if len(length) > LONGEST_LENGTH:
            raise Refusal(413, f"a Content-Length of {len(length)} digits: {MAX_BYTES} bytes are allowed")
        self.unread = int(length)
        if self.path != "/score":
            raise Refusal(404, unknown(self.path)["error"])
        sent = self.headers.get("Authorization", "").encode("latin-1")
        if not hmac.compare_digest(sent, b"Bearer " + self.server.token):
            raise Refusal(401, "the token is missing or wrong: send Authorization: Bearer TOKEN")
        if self.unread > MAX_BYTES:
            raise Refusal(413, f"{self.unread} bytes are more than {MAX_BYTES}: send fewer calls at a time")
        body, self.unread = self.rfile.read(self.unread), 0
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"not valid JSON: {error}") from None
        calls = request.get("calls") if isinstance(request, dict) else None
        if not isinstance(calls, list):
            raise Refusal(400, 'an object {"calls": [...]} is expected')
        return calls

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        with suppress(ConnectionError, TimeoutError):  # the client has gone
            self._skip_body()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def _skip_body(self) -> None:
        """A connection that is closed with bytes unread is reset, and the answer may be lost with it."""
        left = min(self.unread, 2 * MAX_BYTES)
        while left > 0 and (piece := self.rfile.read(min(left, PIECE_BYTES))):
            left -= len(piece)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing of a request is written anywhere."""


def unknown(path: str) -> dict[str, str]:
    return {"error": f"{path}: there are POST /score and GET /health"}
