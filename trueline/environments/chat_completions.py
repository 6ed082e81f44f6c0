"""OpenAI's chat completions: requests are checked, and the policy's replies become responses."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.messages import Message, Tool
from trueline.data.readers import parse_calls, read_content
from trueline.data.types import Completion
from trueline.environments.base import Reply, as_said
from trueline.environments.tools.calls import as_message
from trueline.environments.tools.formats import Parse

Content = dict[str, Any]  # of a body in JSON
Decode = Callable[[list[int]], str]
# Roles of a request, and what chat templates call them.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KNOWN = {  # parameters that are obeyed, refused or, those of the last row, unrelated to sampling
    *("messages", "tools", "tool_choice", "response_format", "n", "logprobs", "stop", "stream", "stream_options"),
    *("chat_template_kwargs", "functions"),
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
}
NEUTRAL = {  # values that ask for nothing; any other, of any parameter not named here, is not obeyed
    **{"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
    **{"top_logprobs": 0, "parallel_tool_calls": True, "modalities": ["text"]},
}
MOST_REPLIES = 128  # to one request
PIECE = 64  # characters of a chunk
LEAST_LOGPROB = -9999.0  # OpenAI's, for JSON knows no infinity


class RequestError(ValueError):
    """A request that cannot be served; `param` is the part of it that is at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def require(is_right: Any, what: str, value: Any, param: str | None = None) -> Any:
    """Return a value that is what it must be, and refuse another."""
    if not is_right:
        raise RequestError(f"{what}, found {value!r:.80}", param)
    return value


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that has been checked."""

    messages: list[Message]
    tools: list[Tool]
    forced: list[Tool]  # one of which it has to call
    schema: Content | None  # of the JSON that it has to be
    model: str
    replies: int
    stop: list[str]
    logprobs: bool
    stream: bool
    stream_usage: bool
    template_arguments: Content  # of the chat template, beside those of the run
    overridden: list[str]  # parameters that are not obeyed


def read_completion_request(content: Any, model: str) -> CompletionRequest:
    """Check a request and take what can be obeyed from it; `model` is its default."""
    require(isinstance(content, dict), "the body must be an object", content)
    given = {name: value for name, value in content.items() if value is not None}
    try:  # half characters, which JSON can write and no tokenizer takes
        json.dumps(given, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"the body holds half a character, or is nested too deep: {error}; replace it") from None
    if functions := given.get("functions"):  # an agent relies on them, so that they must not be ignored
        raise RequestError(f"functions={functions!r:.80} is not obeyed: use tools, which replace it", "functions")
    options, tools = read_typed(given, "stream_options", dict, {}), offered_tools(given)
    n = given.get("n", 1)
    is_count = type(n) is int and 1 <= n <= MOST_REPLIES
    return CompletionRequest(
        messages=read_messages(given.get("messages")),
        tools=tools,
        forced=forced_tools(given.get("tool_choice"), tools),
        schema=read_format(given.get("response_format", {"type": "text"}), tools),
        model=str(given.get("model", model)),
        replies=require(is_count, f"n must be a whole number from 1 to {MOST_REPLIES}", n, "n"),
        stop=read_stop(given.get("stop", [])),
        logprobs=read_typed(given, "logprobs", bool, False),
        stream=read_typed(given, "stream", bool, False),
        stream_usage=read_typed(options, "include_usage", bool, False),
        template_arguments=read_typed(given, "chat_template_kwargs", dict, {}),
        overridden=[name for name, value in given.items() if name not in KNOWN and value != NEUTRAL.get(name)],
    )


def read_typed(given: Content, name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    return require(isinstance(value, kind), f"{name} must be of type {kind.__name__}", value, name)


def read_stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    are_texts = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    require(are_texts, "stop must be a text or a list of texts", value, "stop")
    return texts


def read_messages(value: Any) -> list[Message]:
    """Read messages as the readers of datasets do, but allow an empty text, as a reply may be."""
    is_list, messages, shape = isinstance(value, list) and value, [], "text, null or a list of text and image parts"
    require(is_list, "messages must be a list of at least one message", value, "messages")
    for at, entry in enumerate(value):
        where = f"messages[{at}]"
        require(isinstance(entry, dict), f"{where} must be an object", entry, "messages")
        fields = {name: value for name, value in entry.items() if value not in (None, [])}
        try:
            role, content = fields.pop("role", None), read_content(fields.pop("content", ""), where)
            is_known = isinstance(role, str) and role in ROLES
            require(is_known, f"{where}: role must be one of {', '.join(ROLES)}", role, "messages")
            require(isinstance(content, str | list), f"{where}: content must be {shape}", content, "messages")
            calls = parse_calls(fields.pop("tool_calls", None), where)
        except ConfigError as error:
            raise RequestError(str(error), "messages") from None
        messages.append({"role": ROLES[role], "content": content, **fields, **({"tool_calls": calls} if calls else {})})
    return messages


def offered_tools(given: Content) -> list[Tool]:
    """Return the tools that the policy may call; it does not see others."""
    tools = read_typed(given, "tools", list, [])
    shape = '{"type": "function", "function": {"name": text, ...}}'
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        right = isinstance(function, dict) and isinstance(function.get("name"), str)
        require(right, f"tools[{at}] must be of the form {shape}", tool, "tools")
    return [] if given.get("tool_choice") == "none" else tools


def forced_tools(choice: Any, tools: list[Tool]) -> list[Tool]:
    """Return the tools of which the reply has to call one: by tool_choice all, or one by its name, or none."""
    if choice in (None, "auto", "none"):
        return []
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not (forced := [tool for tool in tools if choice == "required" or tool["function"]["name"] == name]):
        known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        choices = f"auto, none, required or one of the tools ({known})"
        raise RequestError(f"tool_choice={choice!r:.80}: use {choices}", "tool_choice")
    return forced


def read_format(value: Any, tools: list[Tool]) -> Content | None:
    """Return the schema of the JSON that the reply has to be, or None where it is free."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    about = value.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    schema = about.get("schema") if isinstance(about, dict) else None
    right = kind in ("json_object", "json_schema") and isinstance(schema, dict)
    shape = '{"type": "json_schema", "json_schema": {"schema": {...}}}'
    require(right, f"response_format must be text, json_object or {shape}", value, "response_format")
    if tools:
        why = "for JSON of that format calls no tool: leave out one of them, or set tool_choice=none"
        raise RequestError(f"response_format and tools exclude each other, {why}", "response_format")
    return schema


def completion_content(request: CompletionRequest, replies: list[Reply], decode: Decode) -> Content:
    sampled = sum(len(reply.completion.tokens) for reply in replies)
    prompt = replies[0].prompt_tokens  # that of all, counted once
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {
                "index": index,
                "message": reply.message,
                "finish_reason": finish_reason(reply),
                "logprobs": logprobs_content(reply.completion, decode) if request.logprobs else None,
            }
            for index, reply in enumerate(replies)
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def finish_reason(reply: Reply) -> str:
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return "length" if reply.completion.finish_reason == "length" else "stop"


def reply_message(text: str, parse: Parse, tools: list[Tool]) -> Message:
    """Return a reply as the agent gets it and sends it back; where it may call tools, with its calls parsed."""
    parsed = parse(text, tools)
    if tools and parsed.calls:
        return as_message(replace(parsed, error=""), lambda: new_id("call_"))
    return as_said(parsed.text) | ({"reasoning_content": parsed.reasoning} if parsed.reasoning else {})


def logprobs_content(completion: Completion, decode: Decode) -> Content:
    """Return the log-probs of all sampled tokens, the one that ends the reply included."""
    tokens = completion.tokens.tolist()
    texts = {token: decode([token]) for token in set(tokens)}
    content = []
    for token, logprob in zip(tokens, completion.logprobs.tolist(), strict=True):
        is_part = "\N{REPLACEMENT CHARACTER}" in texts[token]  # of a character, whose bytes the text does not show
        known = None if is_part else list(texts[token].encode())
        logprob = max(logprob, LEAST_LOGPROB)
        content.append({"token": texts[token], "logprob": logprob, "bytes": known, "top_logprobs": []})
    return {"content": content, "refusal": None}


def server_events(completion: Content, *, with_usage: bool) -> str:
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[Content] = []
    for choice in completion["choices"]:
        last = {name: choice[name] for name in ("index", "logprobs", "finish_reason")}
        others = last | {"logprobs": None, "finish_reason": None}
        parts = [*(others | {"delta": delta} for delta in deltas(choice["message"])), last | {"delta": {}}]
        chunks += [head | {"choices": [part]} for part in parts]
    if with_usage:
        chunks.append(head | {"choices": [], "usage": completion["usage"]})
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])


def deltas(message: Message) -> Iterator[Content]:
    yield {"role": "assistant", "content": ""}
    if reasoning := message.get("reasoning_content"):
        yield {"reasoning_content": reasoning}
    text = message["content"] or ""
    yield from ({"content": text[start : start + PIECE]} for start in range(0, len(text), PIECE))
    for index, call in enumerate(message.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **call}]}


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
