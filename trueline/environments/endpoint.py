"""An endpoint with OpenAI's chat completions on this machine, through which agents reach the policy."""

import asyncio
import hashlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trueline.config.base import ConfigError
from trueline.data.messages import Tool
from trueline.data.template import TEMPLATE_ARGUMENTS
from trueline.environments import chat_completions
from trueline.environments.base import OutOfBudget, Policy, Structure
from trueline.environments.chat_completions import CompletionRequest, Decode, RequestError
from trueline.environments.tools.calls import Spelling
from trueline.environments.tools.formats import Parse
from trueline.usercode.http_server import QuietServer, as_json, open_port, parse_json, read_request

HOST = "127.0.0.1"
KEPT_SECONDS = 60  # that a response is kept for a client that lost it and sends its request again
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients: 0 where a request is not sent again
UNKNOWN_KEY = "the key is missing or wrong, or its episode is over: send that of an open one"
CODES = {401: "invalid_api_key", 404: "not_found"}
DEFINITIONS = "#/$defs/"  # where a schema keeps what it refers to
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Structures:
    """The structures that engines can enforce in replies."""

    spelling: Spelling | None  # of calls; None: in a format that is no JSON
    problem: Callable[[Structure], str]  # why they would refuse one, or empty

    def of(self, schema: Schema | None, forced: list[Tool]) -> Structure:
        """Return the structure of JSON by a schema, or of a call to one of these tools."""
        if schema is not None:
            return Structure(json.dumps(schema))
        assert self.spelling is not None
        return Structure(json.dumps(call_schema(forced, self.spelling)), self.spelling.begin, self.spelling.end)


def call_schema(tools: list[Tool], spelling: Spelling) -> Schema:
    """Return the schema of a call to one of the tools; definitions of theirs move to the top level."""
    calls: list[Schema] = []
    definitions: Schema = {}
    for at, tool in enumerate(tools):
        function, own = tool["function"], f"{DEFINITIONS}{at}."
        text = json.dumps(function.get("parameters") or {"type": "object"})
        parameters = json.loads(text.replace(f'"{DEFINITIONS}', f'"{own}'))
        definitions |= {f"{at}.{name}": value for name, value in parameters.pop("$defs", {}).items()}
        fields = {"name": {"const": function["name"]}, spelling.arguments: parameters}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})


@dataclass(eq=False, slots=True)
class EndpointResponse:
    request: bytes  # the digest of the request's body
    task: asyncio.Task[Response]
    kept_until: float = math.inf

    def keep(self, task: asyncio.Task[Response]) -> None:
        self.kept_until = time.monotonic() + KEPT_SECONDS


class EpisodeSession:
    """One episode: a client with its key talks to its policy."""

    def __init__(self, policy: Policy, parse: Parse, seats: "dict[bytes, EpisodeSession]") -> None:
        self.policy, self.parse, self.seats = policy, parse, seats
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.waiting = 0  # requests in progress
        self.quiet_since = time.monotonic()  # when there was last none
        self.overridden: Counter[str] = Counter()  # requests whose value was not obeyed, by parameter
        self.structured = 0  # replies that had to follow a structure
        self.failure: BaseException | None = None  # of the engine, for the episode to raise
        self.exhausted = ""  # why a request got no turns or tokens
        self.responses: list[EndpointResponse] = []  # in progress and recent
        seats[fingerprint(f"Bearer {self.key}")] = self

    def close(self) -> None:
        """Refuse the key from now on, and sample no further."""
        self.seats.pop(fingerprint(f"Bearer {self.key}"), None)
        for response in self.responses:
            response.task.cancel()
        self.responses = []

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.quiet_since = time.monotonic()

    def quiet(self) -> float | None:
        """Return when the last request ended, or None while the agent waits for the policy."""
        return None if self.waiting else self.quiet_since

    def find_response(
        self, body: bytes, again: bool, respond: Callable[[], Coroutine[Any, Any, Response]]
    ) -> "asyncio.Task[Response]":
        """Return the response that is kept for a request sent again, or start one, which outlives its client."""
        digest, now = hashlib.sha256(body).digest(), time.monotonic()
        self.responses = [one for one in self.responses if now < one.kept_until]
        if (response := next((one for one in self.responses if again and one.request == digest), None)) is not None:
            self.responses.remove(response)  # of several to the same request, others get it last
        else:
            response = EndpointResponse(digest, asyncio.create_task(respond()))
            response.task.add_done_callback(response.keep)
        self.responses.append(response)
        return response.task

    async def wait_for(self, task: asyncio.Task[Response]) -> Response:
        await asyncio.wait([task])
        if task.cancelled():
            return error_response("the episode is over: send nothing more", code="episode_over")
        if (error := task.exception()) is None:
            return task.result()
        self.failure = self.failure or error
        # Not a 5xx, which clients send again by default: the episode has failed and would only fail once more.
        message = f"the policy's engine failed and the episode with it, do not retry: {type(error).__name__}: {error}"
        return error_response(message, kind="server_error", code="engine_failure")


class PolicyEndpoint:
    """A server on the running event loop, with a seat for each episode. `decode` turns tokens into text."""

    def __init__(self, *, model: str, decode: Decode, structures: Structures | None = None) -> None:
        self.model, self.decode, self.structures = model, decode, structures  # None where engines can enforce none
        self.seats: dict[bytes, EpisodeSession] = {}  # by fingerprint, for the time of a look-up reveals no key then
        self.url: str
        self.serving: asyncio.Task[None]
        completions = Route("/v1/chat/completions", self._completions, methods=["POST"])
        models = Route("/v1/models", self._models, methods=["GET"])
        self.server = QuietServer([completions, models], unknown=refuse, refused=refuse)

    async def start(self) -> None:
        listener = open_port(HOST, 0)
        self.url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
        self.serving = asyncio.create_task(self.server.serve([listener]))

    async def stop(self) -> None:
        for seat in list(self.seats.values()):
            seat.close()
        self.server.should_exit = True
        await self.serving

    def open(self, policy: Policy, parse: Parse) -> EpisodeSession:
        """Give an episode its seat; it has to be closed."""
        return EpisodeSession(policy, parse, self.seats)

    def _seat(self, request: Request) -> EpisodeSession | None:
        return self.seats.get(fingerprint(request.headers.get("authorization", "")))

    async def _models(self, request: Request) -> Response:
        if self._seat(request) is None:
            raise HTTPException(401, UNKNOWN_KEY)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trueline"}
        return as_json(200, {"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        seat = self._seat(request)
        with seat.in_progress() if seat else nullcontext():
            body = await read_request(request, known=seat is not None)
            if seat is None or self._seat(request) is None:  # closed while it was read
                raise HTTPException(401, UNKNOWN_KEY)
            content, again = parse_json(body), request.headers.get(RETRY_HEADER, "0") != "0"
            return await seat.wait_for(seat.find_response(body, again, partial(self._respond, seat, content)))

    async def _respond(self, seat: EpisodeSession, content: Any) -> Response:
        try:
            request = chat_completions.read_completion_request(content, self.model)
            structure = await self._structure(seat, request)
            seat.overridden.update(request.overridden)
            worded = partial(chat_completions.reply_message, parse=seat.parse, tools=request.tools)
            conversation, arguments = (request.messages, request.tools, worded), request.template_arguments
            replies = await seat.policy.replies(request.replies, *conversation, request.stop, structure, arguments)
            seat.structured += len(replies) if structure else 0
            completion = chat_completions.completion_content(request, replies, self.decode)
            if not request.stream:
                return as_json(200, completion)
            events = chat_completions.server_events(completion, with_usage=request.stream_usage)
            return Response(events, media_type="text/event-stream")
        except RequestError as error:
            return error_response(str(error), param=error.param)
        except OutOfBudget as error:
            seat.exhausted = str(error)
            return error_response(str(error), param="messages", code="context_length_exceeded")
        except ConfigError as error:  # the chat template refuses the conversation, or an argument
            param = "chat_template_kwargs" if error.key == TEMPLATE_ARGUMENTS else "messages"
            return error_response(str(error), param=param)

    async def _structure(self, seat: EpisodeSession, request: CompletionRequest) -> Structure | None:
        """Return the structure that the reply must follow. Calls that cannot be forced are counted."""
        if request.schema is None and not request.forced:
            return None
        if request.schema is None and (self.structures is None or self.structures.spelling is None):
            seat.overridden["tool_choice"] += 1
            return None
        param = "tools" if request.schema is None else "response_format"
        if self.structures is None:
            raise RequestError("this run's engine enforces no format: leave it out, or set rollout.engine=vllm", param)
        structure = self.structures.of(request.schema, request.forced)
        if problem := await asyncio.to_thread(self.structures.problem, structure):
            raise RequestError(f"{param} has a schema that the engine cannot enforce: {problem}", param)
        return structure


def fingerprint(authorization: str) -> bytes:
    return hashlib.sha256(authorization.encode()).digest()


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, message = error.status_code, error.detail
    if status in (404, 405):
        status, message = 404, f"{request.url.path}: there are POST /v1/chat/completions and GET /v1/models"
    return error_response(message, status=status, code=CODES.get(status))


def error_response(
    message: str, *, status: int = 400, kind: str = "invalid_request_error", **at: str | None
) -> Response:
    """Return an error in OpenAI's form; `at` may give the `param` that is at fault, and a `code`."""
    return as_json(status, {"error": {"message": message, "type": kind, "param": None, "code": None, **at}})
