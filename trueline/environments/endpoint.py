"""The policy behind OpenAI's chat completions on this machine, where agents written elsewhere play their episodes."""

import asyncio
import hashlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trueline.config.base import ConfigError
from trueline.environments.base import OutOfBudget, Policy, Reply, Structure
from trueline.environments.chat_completions import (
    Asked,
    Decode,
    Refused,
    completion_content,
    events,
    read_asked,
    reply_message,
)
from trueline.environments.structures import Structures
from trueline.environments.tools.formats import Parse
from trueline.rewards.server import QuietServer, as_json, open_port, parse_json, read_request

HOST = "127.0.0.1"
KEPT_SECONDS = 60  # that an answer is kept for a client that asks again because it has not got it
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients: 0 where a request is not sent again
UNKNOWN_KEY = "the key is missing or wrong, or its episode is over: send that of an open one"
CODES = {401: "invalid_api_key", 404: "not_found"}


@dataclass(eq=False, slots=True)
class Answer:
    """The answer to a request, under way or given."""

    question: bytes  # the digest of the request's body
    task: asyncio.Task[Response]
    kept_until: float = math.inf

    def given(self, task: asyncio.Task[Response]) -> None:
        self.kept_until = time.monotonic() + KEPT_SECONDS

    def is_kept(self) -> bool:
        return time.monotonic() < self.kept_until


class Seat:
    """One episode: whoever has its key talks to its policy."""

    def __init__(self, policy: Policy, parse: Parse, seats: "dict[bytes, Seat]") -> None:
        self.policy, self.parse, self.seats = policy, parse, seats
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.waiting = 0  # requests under way
        self.quiet_since = time.monotonic()  # when there was last none
        self.overridden: Counter[str] = Counter()  # requests that asked for what they did not get, by parameter
        self.structured = 0  # replies that were held to a structure
        self.failure: BaseException | None = None  # of the engine; for whoever waits for the episode
        self.exhausted = ""  # why a request was refused for want of turns or tokens
        self.answers: list[Answer] = []  # under way and recent
        seats[fingerprint(f"Bearer {self.key}")] = self

    def close(self) -> None:
        """Refuse the key from now on, and sample no further."""
        self.seats.pop(fingerprint(f"Bearer {self.key}"), None)
        for answer in self.answers:
            answer.task.cancel()
        self.answers = []

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.quiet_since = time.monotonic()

    def quiet(self) -> float | None:
        """Return since when the agent has asked for nothing, or None while it waits for the policy."""
        return None if self.waiting else self.quiet_since

    def begun(self, body: bytes) -> Answer | None:
        """Return an answer to the same request, or None; of several, it is then the last that another would get."""
        question = hashlib.sha256(body).digest()
        found = next((answer for answer in self.answers if answer.question == question and answer.is_kept()), None)
        if found:
            self.answers.remove(found)
            self.answers.append(found)
        return found

    def begin(self, body: bytes, work: Coroutine[Any, Any, Response]) -> Answer:
        """Answer in a task of its own, which goes on when the client that asked is gone."""
        answer = Answer(hashlib.sha256(body).digest(), asyncio.create_task(work))
        answer.task.add_done_callback(answer.given)
        self.answers = [*filter(Answer.is_kept, self.answers), answer]
        return answer

    async def response(self, task: asyncio.Task[Response]) -> Response:
        await asyncio.wait([task])
        if task.cancelled():
            return error_response("the episode is over: send nothing more", code="episode_over")
        error = task.exception()
        if error is None:
            return task.result()
        self.failure = self.failure or error
        # Not a 5xx, which clients send again by default: the episode has failed and would only fail once more.
        said = f"the policy's engine failed and the episode with it, do not retry: {type(error).__name__}: {error}"
        return error_response(said, kind="server_error", code="engine_failure")


class Endpoint:
    """A server on the running event loop, with a seat for each episode. `decode` turns tokens into text.

    `structures` is what replies can be held to, None where engines cannot.
    """

    def __init__(self, *, model: str, decode: Decode, structures: Structures | None = None) -> None:
        self.model, self.decode, self.structures = model, decode, structures
        self.seats: dict[bytes, Seat] = {}  # by fingerprint, so that the time of a look-up tells nothing of a key
        self.url: str
        self.serving: asyncio.Task[None]
        routes = [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        self.server = QuietServer(routes, unknown=unknown, refused=refused)

    async def start(self) -> None:
        listener = open_port(HOST, 0)
        self.url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
        self.serving = asyncio.create_task(self.server.serve([listener]))

    async def stop(self) -> None:
        for seat in list(self.seats.values()):
            seat.close()
        self.server.should_exit = True
        await self.serving

    def open(self, policy: Policy, parse: Parse) -> Seat:
        """Give an episode its seat; it has to be closed."""
        return Seat(policy, parse, self.seats)

    def _seat(self, request: Request) -> Seat | None:
        return self.seats.get(fingerprint(request.headers.get("authorization", "")))

    async def _models(self, request: Request) -> Response:
        if self._seat(request) is None:
            raise HTTPException(401, UNKNOWN_KEY)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trueline"}
        return as_json(200, {"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        seat = self._seat(request)
        with seat.under_way() if seat else nullcontext():
            body = await read_request(request, known=seat is not None)
            if seat is None or self._seat(request) is None:  # closed while it was read
                raise HTTPException(401, UNKNOWN_KEY)
            content, again = parse_json(body), request.headers.get(RETRY_HEADER, "0") != "0"
            answer = (again and seat.begun(body)) or seat.begin(body, self._answer(seat, content))
            return await seat.response(answer.task)

    async def _answer(self, seat: Seat, content: Any) -> Response:
        try:
            asked = read_asked(content, self.model)
            structure = await self._structure(seat, asked)
            seat.overridden.update(asked.overridden)
            replies = await sample(seat.policy, asked, seat.parse, structure)
            seat.structured += len(replies) if structure else 0
            return self._told(asked, replies)
        except Refused as error:
            return error_response(str(error), param=error.param)
        except OutOfBudget as error:
            seat.exhausted = str(error)
            return error_response(str(error), param="messages", code="context_length_exceeded")
        except ConfigError as error:  # the chat template refuses the conversation, or an argument
            named = [name for name in ("chat_template_kwargs", "messages") if name in str(error)]
            return error_response(str(error), param=[*named, "messages"][0])

    async def _structure(self, seat: Seat, asked: Asked) -> Structure | None:
        """Return what the reply has to be held to. Calls that cannot be forced are left to the policy, and counted."""
        if asked.schema is None and not asked.forced:
            return None
        if asked.schema is None and (self.structures is None or self.structures.spelling is None):
            seat.overridden["tool_choice"] += 1
            return None
        param = "tools" if asked.schema is None else "response_format"
        if self.structures is None:
            raise Refused(
                "this run's engine holds no reply to a format: leave it out, or set rollout.engine=vllm", param
            )
        structure = self.structures.of(asked.schema, asked.forced)
        if problem := await asyncio.to_thread(self.structures.problem, structure):
            raise Refused(f"{param} has a schema that replies cannot be held to: {problem}", param)
        return structure

    def _told(self, asked: Asked, replies: list[Reply]) -> Response:
        completion = completion_content(asked, replies, self.decode)
        if not asked.stream:
            return as_json(200, completion)
        return Response(events(completion, with_usage=asked.stream_usage), media_type="text/event-stream")


async def sample(policy: Policy, asked: Asked, parse: Parse, structure: Structure | None) -> list[Reply]:
    worded = partial(reply_message, parse=parse, tools=asked.tools)
    return await policy.replies(
        asked.replies, asked.messages, asked.tools, worded, asked.stop, structure, asked.template_arguments
    )


def fingerprint(authorization: str) -> bytes:
    return hashlib.sha256(authorization.encode()).digest()


async def unknown(request: Request, error: Exception) -> Response:
    said = f"{request.url.path}: there are POST /v1/chat/completions and GET /v1/models"
    return error_response(said, status=404, code=CODES[404])


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.detail, status=error.status_code, code=CODES.get(error.status_code))


def error_response(
    message: str,
    *,
    status: int = 400,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Response:
    return as_json(status, {"error": {"message": message, "type": kind, "param": param, "code": code}})
