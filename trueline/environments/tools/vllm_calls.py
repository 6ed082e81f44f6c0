"""The tool calls of a reply, found by one of vLLM's parsers: for models whose format is none of the built-in ones."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from trueline.data.messages import Tool
from trueline.environments.tools.calls import FORMATS, Parsed, call_of


def vllm_parser(name: str, tokenizer: Any, tools: Sequence[Tool] = ()) -> Callable[[str], Parsed]:
    """Return vLLM's parser of that name as a function; some formats need the tools to tell numbers from text."""
    known = ToolParserManager.list_registered()
    if name not in known:
        raise ValueError(
            f"the format of tool calls {name!r} is not known: give auto, {', '.join(FORMATS)}, or one of vLLM's: "
            f"{', '.join(known)}"
        )
    kind = ToolParserManager.get_tool_parser(name)
    request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
    make = partial(kind, tokenizer, cast(Any, request.tools))
    make()  # it says now if the tokenizer is not of its model

    def parse(text: str) -> Parsed:
        found = make().extract_tool_calls(text, request)  # by a new one, for it keeps state
        return read([call.function for call in found.tool_calls], (found.content or "").strip())

    return parse


def read(functions: list[Any], content: str) -> Parsed:
    """Return calls that vLLM has found; it hands on arguments that are no JSON too."""
    try:
        return Parsed(content, [call_of({"name": one.name, "arguments": one.arguments}) for one in functions])
    except json.JSONDecodeError as error:
        return Parsed(content, [], f"the arguments of a tool call are no JSON: {error.msg} at character {error.pos}")
    except ValueError as error:
        return Parsed(content, [], f"a tool call could not be read: {error}")
