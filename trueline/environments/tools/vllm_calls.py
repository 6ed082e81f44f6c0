"""The tool calls of a reply, found by one of vLLM's parsers."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager

from trueline.config.base import ConfigError
from trueline.data.messages import Tool
from trueline.environments.tools.calls import Parsed, call_of

FAULTS = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, SyntaxError)  # of vLLM's code

# They log a traceback for each call that cannot be read; the model gets the error, and an untrained one writes many.
for logger in ("vllm.tool_parsers", "vllm.parser"):
    logging.getLogger(logger).setLevel(logging.CRITICAL)


def parsers() -> list[str]:
    return list(ToolParserManager.list_registered())


def vllm_parser(name: str, tokenizer: Any) -> Callable[[str, Sequence[Tool]], Parsed]:
    """Return vLLM's parser of that name as a function; some formats need the tools to distinguish numbers from text."""
    if name not in parsers():
        raise ConfigError(f"this vLLM has no parser {name!r} of tool calls: it has {', '.join(parsers())}")
    cached: Any = get_cached_tokenizer(tokenizer)
    try:
        kind = ToolParserManager.get_tool_parser(name)
        kind(cached, None)
    except (ImportError, *FAULTS) as error:
        raise ConfigError(f"vLLM's parser {name!r} of tool calls refuses the model's tokenizer: {error}") from None

    def parse(text: str, tools: Sequence[Tool] = ()) -> Parsed:
        try:
            request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
            # A new one for each reply, because it has state; without a cache each would read the whole vocabulary.
            found = kind(cached, cast(Any, request.tools)).extract_tool_calls(text, request)
        except FAULTS as error:
            return Parsed(text.strip(), [], f"the tool call could not be read: {error}")
        return read_calls([call.function for call in found.tool_calls], (found.content or "").strip())

    return parse


def read_calls(functions: list[Any], content: str) -> Parsed:
    """Return calls that vLLM has found; it hands on arguments that are no JSON too."""
    try:
        return Parsed(content, [call_of({"name": one.name, "arguments": one.arguments}) for one in functions])
    except json.JSONDecodeError as error:
        return Parsed(content, [], f"the arguments of a tool call are no JSON: {error.msg} at character {error.pos}")
    except ValueError as error:
        return Parsed(content, [], f"a tool call could not be read: {error}")
