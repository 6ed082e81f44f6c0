"""The tool calls of a reply, in the formats that models are trained on."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trueline.data.messages import Message

END_OF_THOUGHT = "</think>"
PYTHON_TAG, TOOL_CALLS, OPEN, CLOSE = "<|python_tag|>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>"
REMEDY = 'give one JSON object, {"name": "...", "arguments": {...}}'
BEGUN = re.compile(
    r'[\[\s]*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(arguments|parameters)"\s*:'
)
FENCE = re.compile(r"^[ \t]*```(?:json)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
LONGEST_QUOTE = 200  # characters


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str  # the text outside of calls
    calls: list[ToolCall]
    error: str = ""  # why a call that was begun could not be read
    reasoning: str = ""  # of models that think in a part of the reply that is marked by special tokens
    text: str = field(default="", compare=False)  # the whole reply without it, calls as written


ReadCalls = Callable[[str], list[ToolCall]]
UNREADABLE = "unreadable_call"  # the function that a call which cannot be read calls in the conversation


def as_message(parsed: Parsed, ids: Callable[[], str]) -> Message:
    """Return the assistant's message in OpenAI's form. If a call cannot be read, one call represents all."""
    calls = [ToolCall(UNREADABLE, {})] if parsed.error else parsed.calls
    message: Message = {"role": "assistant", "content": (parsed.text if parsed.error else parsed.content) or None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": ids(), "type": "function", "function": {"name": call.name, "arguments": as_json(call.arguments)}}
            for call in calls
        ]
    return message


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Formats


def find_marked_calls(
    begin: str, end: str, read: ReadCalls | None = None, remedy: str = REMEDY
) -> Callable[[str], Parsed]:
    """Return a reader of calls between two marks, any number of them between text."""
    return lambda text: collect_calls(*split_between(text, begin, end), read=read, remedy=remedy)


def mistral(text: str) -> Parsed:
    """`[TOOL_CALLS] [{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for every call."""
    content, *bodies = text.split(TOOL_CALLS)
    return collect_calls(content, bodies, read=decode_named)


def llama(text: str) -> Parsed:
    """`{"name": ..., "parameters": {...}}`, several of them between semicolons, often behind a tag."""
    content, tag, body = text.rpartition(PYTHON_TAG)
    if tag or is_call(body):
        return collect_calls(content, [body])
    return Parsed(text.strip(), [])


def plain_json(text: str) -> Parsed:
    """An object with a name and arguments as the whole reply, or in its only fenced block."""
    fences = list(FENCE.finditer(text))
    body = fences[0][1] if len(fences) == 1 else text
    content = text.replace(fences[0][0], "") if len(fences) == 1 else ""
    if is_call(body):
        return collect_calls(content, [body])
    return Parsed(text.strip(), [])


FORMATS: dict[str, Callable[[str], Parsed]] = {
    "hermes": find_marked_calls(OPEN, CLOSE),
    "mistral": mistral,
    "llama": llama,
    "json": plain_json,
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a format writes one call: texts around its JSON, and where that has the arguments."""

    begin: str = ""
    end: str = ""
    arguments: str = "arguments"


SPELLINGS = {
    "hermes": Spelling(f"{OPEN}\n", f"\n{CLOSE}"),
    "llama": Spelling(arguments="parameters"),
    "json": Spelling(),
}


def is_call(text: str) -> bool:
    """Return whether a text is a call, even one that breaks off, and no other JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return BEGUN.match(text) is not None
    objects = value if isinstance(value, list) and value else [value]
    return all(isinstance(one, dict) and "name" in one and {"arguments", "parameters"} & set(one) for one in objects)


# Calls


def split_between(text: str, begin: str, end: str) -> tuple[str, list[str], str]:
    """Return the text outside of two markers, the texts between them, and what is wrong where one is not closed."""
    content, *pieces = text.split(begin)
    parts = [piece.partition(end) for piece in pieces]
    unclosed = "" if all(closed for _, closed, _ in parts) else f"a {begin} is not closed by {end}"
    content += "".join(after for _, _, after in parts)
    return content, [body for body, closed, _ in parts if closed], unclosed


def collect_calls(
    content: str, bodies: list[str], error: str = "", *, read: ReadCalls | None = None, remedy: str = REMEDY
) -> Parsed:
    """Return the calls that can be read, and why the last other one cannot."""
    calls: list[ToolCall] = []
    for body in bodies:
        try:
            calls += (read or decode_calls)(body)
        except (ValueError, RecursionError) as fault:
            error = f"the tool call could not be read: {fault}; {remedy}"
    return Parsed(content.strip(), calls, error)


def decode_calls(text: str) -> list[ToolCall]:
    """Return the calls of JSON objects with semicolons or nothing between them, or of a list of objects."""
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest or not calls:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {error.pos} of {rest!r:.{LONGEST_QUOTE}}") from None
        calls += [call_of(one) for one in (value if isinstance(value, list) and value else [value])]
        rest = rest[end:].lstrip("; \t\r\n")
    return calls


def decode_named(text: str) -> list[ToolCall]:
    named = NAMED.fullmatch(text.rstrip())
    return decode_calls(f'{{"name": {as_json(named[1])}, "arguments": {named[2]}}}') if named else decode_calls(text)


def call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError(f"it has no name: {as_json(value):.{LONGEST_QUOTE}}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']!r} are no object: {as_json(arguments):.{LONGEST_QUOTE}}")
    as_json([value["name"], arguments]).encode()  # half a character, which JSON can write, is a ValueError here
    return ToolCall(value["name"], arguments)
