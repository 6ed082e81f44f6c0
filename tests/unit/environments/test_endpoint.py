"""The policy behind OpenAI's protocol, asked by OpenAI's own client."""

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.tool_calls import TOOLS
from trueline.config.base import ConfigError
from trueline.data.messages import Message, Tool
from trueline.data.types import Completion
from trueline.environments.base import OutOfBudget, Policy, Reply, Structure, as_said
from trueline.environments.chat_completions import deltas, reply_message
from trueline.environments.endpoint import EpisodeSession, PolicyEndpoint, Structures, call_schema
from trueline.environments.tools.calls import SPELLINGS
from trueline.environments.tools.formats import UNKNOWN, Parser, choose_format
from trueline.usercode.http_server import MAX_BYTES

Result = TypeVar("Result")
Say = Callable[[list[Message]], str]
PATIENCE = 600  # seconds, on a busy machine too
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'
CALLING = f"Let me see.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
WHOLE, PART = 7, 8  # tokens that are a character, and a part of one


class Scripted(Policy):
    """A policy that says what a function makes of the messages, in a token per word, all with the same log-prob."""

    def __init__(self, say: Say, finish_reason: str = "stop") -> None:
        self.say, self.finish_reason = say, finish_reason
        self.asked: list[list[Message]] = []
        self.tools: list[Sequence[Tool]] = []
        self.stops: list[Sequence[str]] = []
        self.structures: list[Structure | None] = []
        self.arguments: list[dict[str, Any] | None] = []
        self.said: list[str] = []
        self.cancelled = 0  # requests that were ended before it said anything
        self.free = asyncio.Event()
        self.free.set()

    async def replies(
        self,
        count: int,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Callable[[str], Message] = as_said,
        stop: Sequence[str] = (),
        structure: Structure | None = None,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[Reply]:
        self.asked.append(messages)
        self.arguments.append(template_arguments)
        if template_arguments == {"unknown": 1}:
            raise ConfigError("the template reads no such name", key="data.chat_template_kwargs")
        self.stops.append(stop)
        self.tools.append(tools)
        self.structures.append(structure)
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [self.one(messages, worded) for _ in range(count)]

    def one(self, messages: list[Message], worded: Callable[[str], Message]) -> Reply:
        text = self.say(messages)
        self.said.append(text)
        count = len(text.split())
        completion = Completion.of([WHOLE] * count, [-0.5] * count, 0, self.finish_reason)
        return Reply(text, worded(text), completion, prompt_tokens=10 * len(messages))


class Host:
    """An endpoint on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.http = openai.DefaultHttpxClient(trust_env=False, verify=False)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.endpoint = PolicyEndpoint(model="my model", decode=lambda tokens: {WHOLE: "é", PART: "\ufffd"}[tokens[0]])
        self.run(self.endpoint.start)

    def run(self, work: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(PATIENCE)

    def here(self, work: Callable[[], Result]) -> Result:
        async def worked() -> Result:
            return work()

        return self.run(worked)

    def open(self, policy: Scripted) -> EpisodeSession:
        return self.here(lambda: self.endpoint.open(policy, Parser(UNKNOWN)))

    def close(self) -> None:
        self.run(self.endpoint.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE)
        self.loop.close()

    def client(self, key: str, **settings: Any) -> OpenAI:
        return OpenAI(base_url=self.endpoint.url, api_key=key, http_client=self.http, **settings)

    def post(self, seat: EpisodeSession, content: Any) -> Any:
        body = content if isinstance(content, str | bytes) else json.dumps(content)
        headers = {"Authorization": f"Bearer {seat.key}"}
        return self.http.post(f"{self.endpoint.url}/chat/completions", content=body, headers=headers)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    one = Host()
    yield one
    one.close()
    one.http.close()


def repeating(messages: list[Message]) -> str:
    return f"you said {messages[-1]['content']}"


def calling(messages: list[Message]) -> str:
    return CALLING if messages[-1]["role"] != "tool" else f"it is {messages[-1]['content']}"


def fails_with(error: BaseException) -> Say:
    def say(messages: list[Message]) -> str:
        raise error

    return say


def at_table(host: Host, say: Say = repeating, **settings: Any) -> tuple[Scripted, EpisodeSession, OpenAI]:
    policy = Scripted(say, **settings)
    seat = host.open(policy)
    return policy, seat, host.client(seat.key)


def ask(client: OpenAI, messages: list[Any] = HELLO, **settings: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **settings)


def test_a_plain_reply(host: Host) -> None:
    policy, seat, client = at_table(host)
    answer = ask(client)
    assert answer.choices[0].message.content == "you said hello" and answer.choices[0].message.tool_calls is None
    assert (answer.choices[0].finish_reason, answer.choices[0].logprobs) == ("stop", None)
    assert (answer.object, answer.model) == ("chat.completion", "any") and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 3, 13)
    assert policy.asked == [HELLO] and policy.tools == [[]]
    assert (seat.waiting, seat.failure, seat.overridden) == (0, None, Counter())


def test_arguments_of_the_chat_template_are_handed_on(host: Host) -> None:
    policy, seat, client = at_table(host)
    ask(client)
    ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert policy.arguments == [{}, {"enable_thinking": False}] and seat.overridden == Counter()
    for wrong, reason in (({"unknown": 1}, "reads no such name"), ([1], "must be of type dict")):
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            ask(client, extra_body={"chat_template_kwargs": wrong})
        assert caught.value.param == "chat_template_kwargs"


def test_a_reply_that_was_cut_off(host: Host) -> None:
    _, _, client = at_table(host, finish_reason="length")
    assert ask(client).choices[0].finish_reason == "length"


def test_messages_arrive_as_chat_templates_know_them(host: Host) -> None:
    policy, _, client = at_table(host)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    silent = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": []}
    user = {"role": "user", "content": parts, "name": "me"}
    ask(client, [{"role": "developer", "content": "be kind"}, silent, user])
    assert policy.asked[0] == [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "one two", "name": "me"},
    ]


def test_tools_there_and_back(host: Host) -> None:
    policy, _, client = at_table(host, calling)
    choice = ask(client, tools=TOOLS, tool_choice="auto").choices[0]
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, len(calls)) == ("tool_calls", "Let me see.", 2)
    assert calls[0].function.name == "add" and json.loads(calls[0].function.arguments) == {"a": 1, "b": "é"}
    assert calls[0].id != calls[1].id and policy.tools == [TOOLS]

    results = [{"role": "tool", "content": "2", "tool_call_id": call.id} for call in calls]
    answer = ask(client, [*HELLO, choice.message.model_dump(), *results], tools=TOOLS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("it is 2", "stop")
    own = policy.asked[1][1]
    assert (own["content"], own["tool_calls"][1]["id"]) == ("Let me see.", calls[1].id)
    assert own["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": "é"}}
    assert policy.asked[1][2:] == results


def test_calls_are_found_only_where_tools_were_offered(host: Host) -> None:
    policy, _, client = at_table(host, calling)
    assert ask(client).choices[0].message.content == CALLING
    assert ask(client, tools=TOOLS, tool_choice="none").choices[0].message.content == CALLING
    assert policy.tools == [[], []]
    _, _, client = at_table(host, lambda messages: f"<tool_call>{CALL}</tool_call>")
    assert ask(client, tools=TOOLS).choices[0].message.content is None


def test_a_call_that_cannot_be_read_is_the_reply(host: Host) -> None:
    broken = "<tool_call>{nothing</tool_call>"
    _, _, client = at_table(host, lambda messages: broken)
    choice = ask(client, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (broken, None, "stop")


def test_arguments_are_of_the_types_that_the_agents_tools_want(host: Host) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "1", "b": "2", "c": "[1]"}}</tool_call>'
    _, _, client = at_table(host, lambda messages: text)
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["array", "null"]}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    (call,) = ask(client, tools=[tool]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": "2", "c": [1]}


def test_what_is_thought_in_a_channel_is_told_beside_the_reply() -> None:
    parse = Parser(choose_format("openai", None, vllm=False).form)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
    for tools in ([], TOOLS):
        message = reply_message(text, parse, tools)
        assert message == {"role": "assistant", "content": "It is 3.", "reasoning_content": "Hm."}
    assert {"reasoning_content": "Hm."} in list(deltas(message))


def test_several_replies_to_one_request(host: Host) -> None:
    words = iter(["a", "b b", "c c c"])
    policy, _, client = at_table(host, lambda messages: next(words))
    answer = ask(client, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "a"), (1, "b b"), (2, "c c c")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, len(policy.asked)) == (10, 6, 1)


def test_logprobs_of_the_sampled_tokens(host: Host) -> None:
    _, _, client = at_table(host)
    tokens = ask(client, logprobs=True).choices[0].logprobs.content
    assert [(one.token, one.logprob, one.bytes) for one in tokens] == [("é", -0.5, list("é".encode()))] * 3


def test_a_part_of_a_character_has_no_bytes(host: Host) -> None:
    class Parts(Scripted):
        def one(self, *asked: Any) -> Reply:
            return Reply("é", as_said("é"), Completion.of([PART, PART], [0.0, -float("inf")], 0, "stop"), 1)

    tokens = ask(host.client(host.open(Parts(repeating)).key), logprobs=True).choices[0].logprobs.content
    assert [(one.bytes, one.logprob) for one in tokens] == [(None, 0.0), (None, -9999.0)]


def test_a_stream_of_text(host: Host) -> None:
    long = "wörd " * 100
    _, _, client = at_table(host, lambda messages: long)
    chunks = list(ask(client, stream=True, n=2, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 200
    for index in range(2):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == index]
        assert "".join(part.delta.content or "" for part in parts) == long and len(parts) > 5
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_a_stream_of_calls_and_logprobs_as_the_client_puts_them_together(host: Host) -> None:
    _, seat, client = at_table(host, calling)
    tools: list[Any] = TOOLS
    with client.chat.completions.stream(model="any", messages=HELLO, tools=tools, logprobs=True) as stream:
        choice = stream.get_final_completion().choices[0]
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert calls and [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": "é"}] * 2
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == len(CALLING.split())
    assert not seat.overridden


def test_one_model(host: Host) -> None:
    _, seat, client = at_table(host)
    assert [model.to_dict() for model in client.models.list()] == [
        {"id": "my model", "object": "model", "created": 0, "owned_by": "trueline"}
    ]
    assert host.post(seat, {"messages": HELLO}).json()["model"] == "my model"


def test_a_wrong_key_is_refused(host: Host) -> None:
    policy, _, _ = at_table(host)
    client = host.client("sk-other")
    for work in (client.models.list, lambda: ask(client)):
        with pytest.raises(openai.AuthenticationError) as caught:
            work()
        assert caught.value.code == "invalid_api_key"
    for header in (b"", b"Bearer", b"Bearer \xff"):
        url = f"{host.endpoint.url}/models"
        assert host.http.get(url, headers={"Authorization": header}).status_code == 401
    assert not policy.asked


def test_a_closed_seat_is_refused(host: Host) -> None:
    policy, seat, client = at_table(host)
    other = at_table(host)[2]
    ask(client)
    host.here(seat.close)
    host.here(seat.close)
    with pytest.raises(openai.AuthenticationError):
        ask(client)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert len(policy.asked) == 1 and ask(other).choices


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


JSON = {"type": "json_object"}
REQUIRED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}


def held_up(host: Host, count: int = 1) -> tuple[Scripted, EpisodeSession, list[Future[Any]]]:
    """Ask for so many replies that do not come, and return once all requests wait for the policy."""
    policy, seat, client = at_table(host)
    host.here(policy.free.clear)
    threads = ThreadPoolExecutor(count)
    answers = [threads.submit(ask, client.with_options(max_retries=0), user=str(at)) for at in range(count)]
    while len(policy.asked) < count:
        time.sleep(0.01)
    return policy, seat, answers


def episode_over(answers: list[Future[Any]]) -> list[bool]:
    errors = [one.exception(PATIENCE) for one in answers]
    assert all(isinstance(one, openai.BadRequestError) and "the episode is over" in str(one) for one in errors)
    return [one.code == "episode_over" for one in errors]


def test_stopping_ends_requests_under_way_of_all_seats() -> None:
    host = Host()
    tables = [held_up(host, 2), held_up(host, 1)]
    host.close()
    for policy, seat, answers in tables:
        assert episode_over(answers) == [True] * len(answers)
        assert (policy.cancelled, policy.said, seat.waiting, seat.responses) == (len(answers), [], 0, [])
        assert seat.failure is None
    assert host.endpoint.seats == {} and host.endpoint.serving.done()
    host.http.close()


def test_closing_one_seat_leaves_the_others_alone(host: Host) -> None:
    (policy, seat, answers), (other, other_seat, others) = held_up(host, 2), held_up(host)
    host.here(seat.close)
    assert episode_over(answers) == [True, True] and (policy.cancelled, policy.said, seat.failure) == (2, [], None)
    assert not others[0].done() and (other.cancelled, other_seat.waiting) == (0, 1)
    host.here(other.free.set)
    assert others[0].result(PATIENCE).choices[0].message.content == "you said hello"


def test_closing_ends_a_request_whose_client_is_gone(host: Host) -> None:
    policy, seat, client = at_table(host)
    host.here(policy.free.clear)
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.1, max_retries=0))

    async def close() -> None:
        while not policy.asked:
            await asyncio.sleep(0.01)
        tasks = [answer.task for answer in seat.responses]
        seat.close()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True]

    host.run(close)
    assert (policy.cancelled, policy.said) == (1, [])


def test_the_key_of_an_ended_episode_gets_no_answer_that_was_kept(host: Host) -> None:
    policy, seat, client = at_table(host)
    again = {"x-stainless-retry-count": "1"}
    ask(client)
    assert len(seat.responses) == 1 and ask(client, extra_headers=again).choices
    host.here(seat.close)
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(client, extra_headers=again)
    assert caught.value.code == "invalid_api_key" and (seat.responses, len(policy.said)) == ([], 1)


def test_a_request_that_arrives_while_its_episode_ends_is_refused(host: Host) -> None:
    policy, seat, _ = at_table(host)
    body = json.dumps({"messages": HELLO}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {seat.key}\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(host.endpoint.url).port or 0)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        while not seat.waiting:
            time.sleep(0.01)
        host.here(seat.close)
        connection.sendall(body[5:])
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
    assert not policy.asked and seat.responses == []


def test_keys_are_long_their_own_and_known_by_their_digest_alone(host: Host) -> None:
    (policy, seat, client), (other, other_seat, _) = at_table(host), at_table(host)
    assert seat.key != other_seat.key and all(len(one.key) >= 46 and one.key[:3] == "sk-" for one in (seat, other_seat))
    ask(client)
    assert (len(policy.asked), len(other.asked)) == (1, 0)
    known = hashlib.sha256(f"Bearer {seat.key}".encode()).digest()
    assert host.endpoint.seats[known] is seat and seat.key not in repr(host.endpoint.seats)
    url = f"{host.endpoint.url}/models"
    assert host.http.get(url, headers={"Authorization": f"Bearer {seat.key}"}).status_code == 200
    for header in (seat.key, f"Bearer {seat.key}x", f"Bearer {seat.key[:-1]}", f"Basic {seat.key}"):
        assert host.http.get(url, headers={"Authorization": header}).status_code == 401


CALLS_ADD = {
    "type": "object",
    "properties": {"name": {"const": "add"}, "arguments": {"type": "object"}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def holding(host: Host, monkeypatch: pytest.MonkeyPatch, form: str, problem: str = "") -> None:
    """Give the endpoint engines that can hold replies to structures."""
    monkeypatch.setattr(host.endpoint, "structures", Structures(SPELLINGS.get(form), lambda structure: problem))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_required_is_held_to_the_tools(host: Host, monkeypatch: pytest.MonkeyPatch, choice: Any) -> None:
    holding(host, monkeypatch, "hermes")
    policy, seat, client = at_table(host, calling)
    other: Any = {"type": "function", "function": {"name": "other"}}
    tools = [*TOOLS, other] if choice != "required" else TOOLS
    assert ask(client, tools=tools, tool_choice=choice).choices[0].finish_reason == "tool_calls"
    (structure,) = policy.structures
    assert structure is not None and json.loads(structure.schema) == {"anyOf": [CALLS_ADD]}
    assert (structure.begin, structure.end) == ("<tool_call>\n", "\n</tool_call>")
    assert policy.tools == [tools] and (seat.structured, seat.overridden) == (1, Counter())


def test_a_call_that_cannot_be_forced_is_left_to_the_policy_and_counted(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smolagents asks so by default: whether engines cannot, or the format of calls is no JSON."""
    policy, seat, client = at_table(host, calling)
    assert ask(client, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    holding(host, monkeypatch, "mistral")
    assert ask(client, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    assert policy.structures == [None, None] and policy.tools == [TOOLS, TOOLS]
    assert (seat.overridden, seat.structured) == ({"tool_choice": 2}, 0)


def test_a_reply_is_held_to_the_response_format(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    holding(host, monkeypatch, "mistral")
    policy, seat, client = at_table(host)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    ask(client, response_format=shape, n=2)
    ask(client, response_format={"type": "json_object"}, tools=TOOLS, tool_choice="none")
    ask(client, response_format={"type": "text"}, tools=TOOLS)
    assert policy.structures == [Structure(json.dumps(schema)), Structure('{"type": "object"}'), None]
    assert (seat.overridden, seat.structured) == (Counter(), 3)


def test_a_schema_that_engines_refuse_is_refused_before_sampling(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    holding(host, monkeypatch, "json", "no such type")
    policy, seat, client = at_table(host)
    for asked, param in (({"response_format": JSON}, "response_format"), (REQUIRED, "tools")):
        with pytest.raises(openai.BadRequestError, match="cannot enforce: no such type") as caught:
            ask(client, **asked)
        assert caught.value.param == param
    assert not policy.asked and seat.failure is None


def test_definitions_of_tools_stay_apart() -> None:
    def tool(name: str, kind: str) -> Any:
        parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    schema = call_schema([tool("a", "integer"), tool("b", "string")], SPELLINGS["llama"])
    assert schema["$defs"] == {"0.X": {"type": "integer"}, "1.X": {"type": "string"}}
    places = [call["properties"]["parameters"]["properties"]["x"]["$ref"] for call in schema["anyOf"]]
    assert places == ["#/$defs/0.X", "#/$defs/1.X"]


USER = {"role": "user", "content": "hello"}
NAMELESS = {"role": "assistant", "tool_calls": [{}]}
SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ([], None, "must be an object"),
        ("{nothing", None, "not valid JSON"),
        ("[" * 100_000, None, "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "half a character"),
        ({}, "messages", "at least one message, found None"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "at least one message"),
        ({"messages": ["hello"]}, "messages", r"messages\[0\] must be an object"),
        ({"messages": [USER, {"content": "hello"}]}, "messages", r"messages\[1\]: role must be one of"),
        ({"messages": [USER | {"role": "narrator"}]}, "messages", "found 'narrator'"),
        ({"messages": [USER | {"role": ["user"]}]}, "messages", "role must be one of"),
        ({"messages": [USER | {"content": 5}]}, "messages", "must be text, null or a list of text and image"),
        ({"messages": [USER | {"content": [SOUND]}]}, "messages", r"messages\[0\]: part 1 .*'input_audio', not text"),
        ({"messages": [NAMELESS]}, "messages", "tool call 1: expected a function name"),
        ({"messages": [USER], "tools": {}}, "tools", "must be of type list"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "tools", r"tools\[0\] must be of the form"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice", r"one of the tools \(none\)"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": named("other")}, "tool_choice", r"the tools \(add\)"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": "always"}, "tool_choice", "use auto, none, required"),
        ({"messages": [USER], "response_format": "json"}, "response_format", "must be text, json_object or"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format", "must be text, json_obj"),
        ({"messages": [USER], "tools": TOOLS, "response_format": JSON}, "response_format", "leave out one of them"),
        ({"messages": [USER], "response_format": JSON}, "response_format", "set rollout.engine=vllm"),
        ({"messages": [USER], "functions": [{"name": "add"}]}, "functions", "use tools"),
        ({"messages": [USER], "stop": [""]}, "stop", "a text or a list of texts"),
        ({"messages": [USER], "n": 0}, "n", "from 1 to 128, found 0"),
        ({"messages": [USER], "n": True}, "n", "whole number"),
        ({"messages": [USER], "n": 10**9}, "n", "from 1 to 128"),
        ({"messages": [USER], "logprobs": 5}, "logprobs", "must be of type bool"),
        ({"messages": [USER], "stream": "yes"}, "stream", "must be of type bool"),
        ({"messages": [USER], "stream_options": True}, "stream_options", "must be of type dict"),
    ],
)
def test_wrong_bodies_are_refused(host: Host, body: Any, param: str | None, said: str) -> None:
    policy, seat, _ = at_table(host)
    answer = host.post(seat, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    with pytest.raises(ValueError, match=said):
        raise ValueError(error["message"])
    assert not policy.asked and seat.failure is None and not seat.overridden
    host.here(seat.close)


def test_everything_else_is_not_found(host: Host) -> None:
    _, _, client = at_table(host)
    with pytest.raises(openai.NotFoundError, match="there are POST /v1/chat/completions"):
        client.responses.create(model="any", input="hello")
    wrong = (("GET", "/chat/completions"), ("POST", "/models"), ("GET", "/"), ("GET", "/chat/completions/"))
    for method, path in wrong:
        answer = host.http.request(method, host.endpoint.url + path)
        assert answer.status_code == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_request_too_large_is_refused(host: Host) -> None:
    policy, seat, _ = at_table(host)
    answer = host.post(seat, b" " * (MAX_BYTES + 1))
    assert answer.status_code == 413 and "more than" in answer.json()["error"]["message"]
    assert not policy.asked


def test_requests_in_chunks_are_read_within_the_bound(host: Host) -> None:
    policy, seat, _ = at_table(host)
    body = json.dumps({"messages": HELLO}).encode()
    headers = {"Authorization": f"Bearer {seat.key}"}
    url = f"{host.endpoint.url}/chat/completions"
    answer = host.http.post(url, content=iter([body[:10], body[10:]]), headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == "you said hello" and policy.asked == [HELLO]
    large = host.http.post(url, content=iter([b" " * 2**20] * (MAX_BYTES // 2**20 + 1)), headers=headers)
    assert large.status_code == 413 and "more than" in large.json()["error"]["message"]
    assert host.http.post(url, content=iter([body])).status_code == 401 and len(policy.asked) == 1


def test_what_is_not_obeyed_is_counted(host: Host) -> None:
    policy, seat, client = at_table(host)
    ask(client, temperature=1, top_p=1.0, presence_penalty=0, frequency_penalty=0, logit_bias={}, stop=[], user="me")
    ask(client, response_format={"type": "text"}, parallel_tool_calls=True, seed=None, max_tokens=None)
    assert not seat.overridden
    ask(client, temperature=0, max_tokens=5, max_completion_tokens=5, seed=0, extra_body={"top_k": 3})
    ask(client, temperature=0.7, top_logprobs=2, logprobs=True)
    once = dict.fromkeys(("max_tokens", "max_completion_tokens", "seed", "top_k", "top_logprobs"), 1)
    assert seat.overridden == {"temperature": 2, **once}
    assert len(policy.said) == 4


def test_an_episode_without_budget_is_told_so(host: Host) -> None:
    policy, seat, client = at_table(host, fails_with(OutOfBudget("all 4 turns are taken")))
    with pytest.raises(openai.BadRequestError, match="all 4 turns are taken") as caught:
        ask(client, n=2)
    assert caught.value.code == "context_length_exceeded"
    assert len(policy.asked) == 1 and seat.failure is None


def test_a_conversation_that_the_template_refuses_is_the_agents_fault(host: Host) -> None:
    _, seat, client = at_table(host, fails_with(ConfigError("the chat template refuses user, user")))
    with pytest.raises(openai.BadRequestError, match="refuses user, user"):
        ask(client)
    assert seat.failure is None


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("out of memory")])
def test_a_failure_of_the_engine_is_kept_and_not_retried(host: Host, error: Exception) -> None:
    policy, seat, client = at_table(host, fails_with(error))
    with pytest.raises(openai.BadRequestError, match=r"do not retry: .*out of memory") as caught:
        ask(client)
    assert (caught.value.code, caught.value.type) == ("engine_failure", "server_error")
    assert seat.failure is error and len(policy.asked) == 1 and seat.waiting == 0


def test_a_client_that_gave_up_gets_what_was_sampled_when_it_asks_again(host: Host) -> None:
    policy, seat, client = at_table(host)
    host.here(policy.free.clear)

    async def free() -> None:
        while seat.waiting < 2:
            await asyncio.sleep(0.01)
        policy.free.set()

    freeing = asyncio.run_coroutine_threadsafe(free(), host.loop)
    answer = ask(client.with_options(timeout=0.3, max_retries=50))
    freeing.result(PATIENCE)
    assert answer.choices[0].message.content == "you said hello" and policy.said == ["you said hello"]


def test_a_client_that_is_gone_breaks_nothing(host: Host) -> None:
    policy, seat, client = at_table(host)
    host.here(policy.free.clear)
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.1, max_retries=0))

    async def done() -> None:
        policy.free.set()
        while seat.waiting:
            await asyncio.sleep(0.01)

    before = seat.quiet_since
    host.run(done)
    assert policy.said == ["you said hello"] and seat.quiet_since > before
    assert ask(client).choices and len(policy.said) == 2


def test_only_a_retry_of_the_same_request_is_answered_without_sampling(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = iter("abcdefgh")
    policy, seat, client = at_table(host, lambda messages: next(words))
    again = {"x-stainless-retry-count": "1"}

    def said(**settings: Any) -> str:
        return str(ask(client, **settings).choices[0].message.content)

    assert said() == "a"
    assert said() == "b"
    assert [said(extra_headers=again) for _ in range(3)] == ["a", "b", "a"]
    assert said(extra_headers=again, user="another") == "c"
    assert ask(host.client(at_table(host)[1].key), extra_headers=again).choices[0].message.content == "you said hello"
    monkeypatch.setattr("trueline.environments.endpoint.KEPT_SECONDS", 0)
    assert said(user="late") == "d"
    assert said(user="late", extra_headers=again) == "e"
    assert len(seat.responses) == 4 and len(policy.said) == 5


def test_requests_at_once_of_two_seats(host: Host) -> None:
    """All wait until all are there, and each gets its own."""
    counts = {"a": 200, "b": 20}
    seats = {name: at_table(host, lambda messages, name=name: name + messages[-1]["content"])[:2] for name in counts}
    for policy, _ in seats.values():
        host.here(policy.free.clear)

    async def free() -> None:
        for name, (policy, seat) in seats.items():
            while len(policy.asked) < counts[name]:
                await asyncio.sleep(0.01)
            assert seat.waiting == counts[name]
        for policy, _ in seats.values():
            policy.free.set()

    async def ask_one(client: AsyncOpenAI, text: str) -> str:
        messages: list[Any] = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model="any", messages=messages)
        return str(answer.choices[0].message.content)

    async def ask_all() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
        settings: dict[str, Any] = {"http_client": http, "timeout": PATIENCE}
        async with AsyncOpenAI(base_url=host.endpoint.url, api_key="none", **settings) as client:
            clients = {name: client.with_options(api_key=seat.key) for name, (_, seat) in seats.items()}
            requests = [ask_one(clients[name], str(at)) for name in counts for at in range(counts[name])]
            return await asyncio.gather(*requests)

    freeing = asyncio.run_coroutine_threadsafe(free(), host.loop)
    assert asyncio.run(ask_all()) == [f"{name}{at}" for name in counts for at in range(counts[name])]
    freeing.result(PATIENCE)
    assert [seat.waiting for _, seat in seats.values()] == [0, 0]


def test_nothing_of_a_request_is_written(host: Host, capfd: pytest.CaptureFixture[str]) -> None:
    _, seat, client = at_table(host, fails_with(RuntimeError("lost")))
    with pytest.raises(openai.BadRequestError):
        ask(client)
    host.post(seat, "{nothing")
    assert capfd.readouterr() == ("", "")


def test_stopping_ends_all_seats() -> None:
    host = Host()
    _, seat, client = at_table(host)
    assert ask(client).choices
    host.close()
    assert not host.endpoint.seats
    with pytest.raises(openai.APIConnectionError):
        ask(host.client(seat.key, max_retries=0))
    host.http.close()
