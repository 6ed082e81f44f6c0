"""A reward over HTTP, in the protocol that ScorerReward speaks: POST /score with a token, GET /health without."""

import asyncio
import hmac
import socket
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trueline.config.base import ConfigError
from trueline.data.readers import parse_message, read_tools
from trueline.data.rows import Located
from trueline.rewards.base import Call, Graded, Reward, RewardFailure, RewardUnreachable
from trueline.usercode.http_server import QuietServer, as_json, parse_json, read_request


class RewardServer(QuietServer):
    """A server that batches the calls of all requests in `reward`; a failure of the kind `fatal` ends it."""

    def __init__(self, reward: Reward, *, token: str, name: str, fatal: type[RuntimeError]) -> None:
        self.reward, self.token, self.name, self.fatal = reward, token.encode(), name, fatal
        self.failure: RuntimeError | None = None
        routes = [Route("/score", self._score, methods=["POST"]), Route("/health", self._health)]
        super().__init__(routes, unknown=reply_unknown, refused=refuse)

    async def answer(self, listener: socket.socket) -> None:
        """Serve until `end`, and raise its failure."""
        await self.serve([listener])
        if self.failure:
            raise self.failure

    def end(self, failure: RuntimeError | None = None) -> None:
        self.failure, self.should_exit = self.failure or failure, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.reward.stop()  # first, so that pending requests get a response
        await super().shutdown(sockets)

    async def _health(self, request: Request) -> Response:
        return as_json(200, {"status": "ok", "model": self.name})

    async def _score(self, request: Request) -> Response:
        try:
            given = request.headers.get("authorization", "").encode("latin-1")
            is_known = hmac.compare_digest(given, b"Bearer " + self.token)
            content = parse_json(await read_request(request, known=is_known))
            calls = content.get("calls") if isinstance(content, dict) else None
            if not isinstance(calls, list):
                raise HTTPException(400, 'an object {"calls": [...]} is expected')
            return as_json(200, {"rewards": await asyncio.gather(*(score_one(self.reward, call) for call in calls))})
        except (RewardUnreachable, asyncio.CancelledError):
            return as_json(503, {"error": "the server is stopping"})
        except RuntimeError as error:  # the model, out of memory say
            if isinstance(error, self.fatal):
                self.end(error)
            return as_json(500, {"error": f"{type(error).__name__}: {error}"})


async def score_one(reward: Reward, call: Any) -> float | dict[str, str]:
    try:
        scored = await reward.score(check_call(call))
        return scored.reward if isinstance(scored, Graded) else scored
    except RewardUnreachable:
        raise  # no fault of this call: the whole request is to be tried again
    except RewardFailure as error:
        return {"error": str(error)}


def check_call(call: Any) -> Call:
    """Return a checked call: a reply, and messages and tools as the readers of datasets make them."""
    if not isinstance(call, dict) or not isinstance(call.get("reply"), str):
        raise RewardFailure(f'a call is an object with a text "reply", got {call!r:.200}')
    messages = call.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RewardFailure(f'"messages" is a list of {{"role": text, "content": text}}, got {messages!r:.200}')
    try:
        numbered = enumerate(messages, 1)
        parsed = [parse_message(one, f'"messages", message {number}', pictures=True) for number, one in numbered]
        return {**call, "messages": parsed, "tools": read_tools(Located(call, "the call"))}
    except ConfigError as error:
        raise RewardFailure(str(error)) from None


async def reply_unknown(request: Request, error: Exception) -> Response:
    return as_json(404, {"error": f"{request.url.path}: there are POST /score and GET /health"})


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_json(error.status_code, {"error": error.detail})
