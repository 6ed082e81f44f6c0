"""What vLLM knows of replies: its parsers of tool calls, and structures (a JSON schema, or one between two texts)."""

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from trueline.config.base import ConfigError
from trueline.data.messages import Tool
from trueline.environments.base import Structure
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


BACKEND: Final = "xgrammar"  # an engine of vLLM keeps the first backend that a request names
KEPT = 1000  # checked structures


def vllm_structure(structure: Structure | None) -> StructuredOutputsParams | None:
    if structure is None:
        return None
    if not structure.begin:
        return StructuredOutputsParams(json=structure.schema)
    content = {"type": "json_schema", "json_schema": json.loads(structure.schema)}
    form = {"type": "tag", "begin": structure.begin, "content": content, "end": structure.end}
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


@lru_cache(KEPT)
def check_structure(structure: Structure) -> str:
    """Return why vLLM would refuse a structure; empty if it would not."""
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=vllm_structure(structure)))
    except (VLLMValidationError, ValueError, RecursionError) as error:  # of vLLM 0.26, ValueError alone
        return str(error)
    return ""
