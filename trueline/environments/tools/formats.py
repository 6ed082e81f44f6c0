"""The formats of tool calls, how each is recognised in a chat template, and what reads it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.messages import Tool
from trueline.environments.tools import calls
from trueline.environments.tools.calls import END_OF_THOUGHT, Parsed, Read, ToolCall
from trueline.environments.tools.schemas import coerce_arguments

Parse = Callable[[str, Sequence[Tool]], Parsed]  # of a reply with its special tokens, and the tools it may call
THINK = ("<think>", END_OF_THOUGHT)  # they stay in the content, where templates that know them look
CHANNELS = ("", "")  # the reader itself separates the thought
AUTO = "auto"
# Some of vLLM's parsers take time that grows with the square of a broken call's length: over 8 s for 20,000 characters
# of opened parameters (qwen3_coder, 0.32), while all other episodes wait. The readers here pass over a reply once.
LONGEST_FOR_VLLM = 4000  # characters


@dataclass(frozen=True, slots=True)
class CallFormat:
    name: str
    signs: tuple[tuple[str, ...], ...] = ()  # a chat template is of this format if it holds all texts of one row
    begin: str = ""  # with what a call, or a list of them, begins
    end: str = ""
    vllm: str = ""  # vLLM's parser; none where vLLM has none that can be used
    own: Read | None = None
    thought: tuple[str, str] = THINK  # marks around a model's thought


def try_formats(text: str) -> Parsed:
    found = (read(text) for read in calls.FORMATS.values())
    return next((parsed for parsed in found if parsed.calls or parsed.error), Parsed(text.strip(), []))


def marked_format(
    name: str, marks: tuple[str, str], read: calls.ReadCalls, *signs: str, thought: tuple[str, str] = THINK
) -> CallFormat:
    """Return a format of calls between two marks that vLLM has a parser for, by the same name."""
    own = calls.find_marked_calls(*marks, read, calls.REMEDIES[name])
    return CallFormat(name, tuple((sign,) for sign in signs or marks[:1]), *marks, name, own, thought)


UNKNOWN = CallFormat("json", own=try_formats)  # for templates of no format below
DEEPSEEK, ACTION = (calls.CALL, calls.CALL_END), ("<|START_ACTION|>", "<|END_ACTION|>")
LFM, GEMMA_THOUGHT = ("<|tool_call_start|>", "<|tool_call_end|>"), ("<|channel>thought", "<channel|>")
LLAMA_SIGNS = (("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"'))

# The first that fits is taken: templates of one format may contain the texts of another.
FORMATS = (
    marked_format("qwen3_coder", calls.TAGS, calls.read_tagged, "<function="),
    marked_format("glm45", calls.TAGS, calls.read_with_keys, "<arg_key>"),
    CallFormat("deepseek_v3", ((calls.CALLS, "```json"),), *DEEPSEEK, "deepseek_v3", calls.deepseek),
    CallFormat("deepseek_v31", ((calls.CALLS,),), *DEEPSEEK, "deepseek_v31", calls.deepseek),
    marked_format("gemma4", calls.GEMMA, calls.read_gemma, "<|tool_call>call:", thought=GEMMA_THOUGHT),
    # vLLM's parser of it downloads a vocabulary.
    CallFormat("openai", (("<|channel|>", "to=", "functions."),), own=calls.harmony, thought=CHANNELS),
    marked_format("lfm2", LFM, calls.pythonic, LFM[0], "<|tool_list_start|>"),
    marked_format("olmo3", ("<function_calls>", "</function_calls>"), calls.pythonic),
    marked_format("cohere_command3", ACTION, calls.read_cohere, thought=("<|START_THINKING|>", "<|END_THINKING|>")),
    CallFormat("phi4_mini_json", (("<|tool|>",), (calls.FUNCTOOLS,)), "functools[", "", "phi4_mini_json", calls.phi4),
    CallFormat(
        "mistral", ((calls.TOOL_CALLS,),), calls.TOOL_CALLS, "", "mistral", calls.mistral, ("[THINK]", "[/THINK]")
    ),
    # vLLM's parser of it (0.32) takes digits for a number where the tool wants text.
    CallFormat("muse_glimmer", (("<atem:invoke",),), own=calls.muse, thought=CHANNELS),
    CallFormat("hermes", (calls.TAGS[:1],), *calls.TAGS, "hermes", calls.FORMATS["hermes"]),
    CallFormat("llama", LLAMA_SIGNS, calls.PYTHON_TAG, "", "llama3_json", calls.llama),
    CallFormat("json", own=calls.plain_json),
)


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """The format of a run, by what it was chosen, and whether vLLM reads it."""

    form: CallFormat
    by: str
    by_vllm: bool

    def words(self) -> str:
        if self.form is UNKNOWN:
            return f"{', '.join(calls.FORMATS)} tried in turn: {self.by}"
        reader = "vLLM's parser" if self.by_vllm else "our reader"
        return f"{self.form.name} ({reader}), {self.by}"


def choose_format(name: str, template: Any, *, vllm: bool) -> ChosenFormat:
    """Choose by name, or by the chat template; `vllm`: vLLM samples, and its parsers can be imported."""
    if name == AUTO:
        form = recognise_format(template)
        by = "the chat template is of no known format" if form is UNKNOWN else "by the chat template"
    else:
        form = next((one for one in FORMATS if name in (one.name, one.vllm)), CallFormat(name, vllm=name))
        by = "by environment.tool_format"
    return ChosenFormat(form, by, bool(form.vllm) and (vllm or form.own is None))


def recognise_format(template: Any) -> CallFormat:
    """Return the format of a chat template, which may be several by their names."""
    source = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    return next((one for one in FORMATS if any(all(text in source for text in row) for row in one.signs)), UNKNOWN)


@dataclass(frozen=True, slots=True)
class Parser:
    """Finds the calls of replies in one format, and gives them arguments of the types that tools want."""

    form: CallFormat
    find: Parse | None = None  # vLLM's parser
    special: re.Pattern[str] = re.compile(r"(?!)")  # tokens that are no text
    remark: str = ""  # why vLLM's parser, which was chosen, is not used

    def __call__(self, text: str, tools: Sequence[Tool]) -> Parsed:
        begin, end = self.form.thought
        thought, closed, answer = text.rpartition(end) if end else ("", "", text)  # a thought calls nothing
        parsed = self._find_calls(answer, tools)
        spoken = f"{thought}{closed}" if self.form.thought == THINK else ""
        in_channels = self.form.thought == CHANNELS and not parsed.error
        remove_special = partial(self.special.sub, "") if self.special.search(text) else str
        text = remove_special(parsed.content if in_channels else f"{spoken}{answer}")
        content = remove_special(f"{spoken}{parsed.content}") if parsed.calls or parsed.error else text
        unspoken = "" if spoken else remove_special(thought.strip().removeprefix(begin)).strip()
        found = []
        for call in parsed.calls:
            tool = next((one for one in tools if one["function"]["name"] == call.name), None)
            found.append(ToolCall(call.name, coerce_arguments(call.arguments, tool)))
        return Parsed(content.strip(), found, parsed.error, parsed.reasoning or unspoken, text)

    def _find_calls(self, answer: str, tools: Sequence[Tool]) -> Parsed:
        """Use vLLM's parser; if it finds fewer calls than begin, use the reader here, which says why."""
        own, begin, end = self.form.own, self.form.begin, self.form.end
        if self.find is None or (own is not None and len(answer) > LONGEST_FOR_VLLM):
            assert own is not None
            return own(answer)
        parsed = self.find(answer, tools)
        begun = answer.count(begin) if begin else 0
        if parsed.calls and len(parsed.calls) >= begun and (not end or answer.count(end) >= begun):
            return parsed
        second = own(answer) if own else Parsed("", [])
        if second.calls or second.error:
            return second
        error = f"a tool call could not be read: {begin} begins none that is closed and well-formed" if begun else ""
        return replace(parsed, calls=[], error=parsed.error or error)


def open_parser(chosen: ChosenFormat, tokenizer: Any) -> Parser:
    """Make the parser of a run; if vLLM's does not fit the tokenizer, the reader here replaces it."""
    parser = Parser(chosen.form, special=special_tokens(tokenizer))
    if not chosen.by_vllm:
        return parser
    try:
        return replace(parser, find=vllm_calls().vllm_parser(chosen.form.vllm, tokenizer))
    except ConfigError as error:
        if chosen.form.own is None:
            raise ConfigError(f"environment.tool_format: {error}; or give one of {', '.join(names())}") from None
        return replace(parser, remark=f"tool calls {chosen.form.name} (our reader): {error}")


def check_format(name: str) -> None:
    """Refuse a name that neither this table nor vLLM has; vLLM is imported only for other names."""
    if name in names() or any(name == form.vllm for form in FORMATS):
        return
    known = vllm_calls().parsers()
    if name not in known:
        others = f"{', '.join(names())}, or one of vLLM's: {', '.join(one for one in known if one not in names())}"
        raise ConfigError(f"environment.tool_format={name} is not known: give one of {others}")


def vllm_calls() -> ModuleType:
    """Return the module of vLLM's parsers; where vLLM is missing, ConfigError."""
    try:
        from trueline.environments.tools import vllm_calls  # noqa: PLC0415  (vLLM takes seconds)
    except ImportError as error:
        raise ConfigError(f"vLLM's parsers of tool calls need vLLM, which cannot be imported ({error})") from None
    return vllm_calls


def names() -> list[str]:
    return [AUTO, *(form.name for form in FORMATS)]


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the tokens that are no text; marks of a thought stay, because readers know them."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(texts - set(THINK), key=len, reverse=True))) or r"(?!)")
