"""The formats of tool calls, how each is recognised in a chat template, and what reads it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.messages import Tool
from trueline.environments.tools import calls, markup
from trueline.environments.tools.calls import END_OF_THOUGHT, Parsed, ToolCall
from trueline.environments.tools.schemas import coerced_arguments

Parse = Callable[[str, Sequence[Tool]], Parsed]  # of a reply with its special tokens, and the tools it may call
Read = Callable[[str], Parsed]
THINK = ("<think>", END_OF_THOUGHT)  # which stay in the content: templates that know of them look there
CHANNELS = ("", "")  # where the reader itself tells what is thought
AUTO = "auto"
# Some of vLLM's parsers take time that grows with the square of a broken call's length: over 8 s for 20,000 characters
# of opened parameters (qwen3_coder, 0.32), in which no other episode goes on. The readers here go over a reply once.
LONGEST_FOR_VLLM = 4000  # characters


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write tool calls."""

    name: str
    signs: tuple[tuple[str, ...], ...] = ()  # a chat template is of this format if it holds all texts of one row
    begin: str = ""  # with what a call, or a list of them, begins
    end: str = ""
    vllm: str = ""  # vLLM's parser; none where vLLM has none that can be used
    own: Read | None = None
    thought: tuple[str, str] = THINK  # around what a model thinks before it answers


def tried_in_turn(text: str) -> Parsed:
    found = (read(text) for read in calls.FORMATS.values())
    return next((parsed for parsed in found if parsed.calls or parsed.error), Parsed(text.strip(), []))


UNKNOWN = Format("json", own=tried_in_turn)  # where a template is of no format below

# The first that fits is taken: the texts of one format may stand in the template of another.
FORMATS = (
    Format("qwen3_coder", (("<function=",),), calls.OPEN, calls.CLOSE, "qwen3_coder", markup.tagged),
    Format("glm45", (("<arg_key>",),), calls.OPEN, calls.CLOSE, "glm45", markup.with_keys),
    Format("deepseek_v3", ((markup.CALLS, "```json"),), markup.CALL, markup.CALL_END, "deepseek_v3", markup.deepseek),
    Format("deepseek_v31", ((markup.CALLS,),), markup.CALL, markup.CALL_END, "deepseek_v31", markup.deepseek),
    Format(
        "gemma4",
        ((f"{markup.GEMMA_CALL}call:",),),
        markup.GEMMA_CALL,
        markup.GEMMA_END,
        "gemma4",
        markup.gemma4,
        ("<|channel>thought", "<channel|>"),
    ),
    # vLLM's parser of it downloads a vocabulary.
    Format("openai", (("<|channel|>", "to=", "functions."),), own=markup.harmony, thought=CHANNELS),
    Format(
        "lfm2",
        ((markup.LFM_CALLS,), ("<|tool_list_start|>",)),
        markup.LFM_CALLS,
        markup.LFM_END,
        "lfm2",
        markup.lfm2,
    ),
    Format("olmo3", ((markup.OLMO_CALLS,),), markup.OLMO_CALLS, markup.OLMO_END, "olmo3", markup.olmo3),
    Format(
        "cohere_command3",
        ((markup.ACTION,),),
        markup.ACTION,
        markup.ACTION_END,
        "cohere_command3",
        markup.cohere,
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Format("phi4_mini_json", (("<|tool|>",), (markup.FUNCTOOLS,)), "functools[", "", "phi4_mini_json", markup.phi4),
    Format("mistral", ((calls.TOOL_CALLS,),), calls.TOOL_CALLS, "", "mistral", calls.mistral, ("[THINK]", "[/THINK]")),
    # vLLM's parser of it (0.32) takes digits for a number where the tool wants text.
    Format("muse_glimmer", (("<atem:invoke",),), own=markup.muse, thought=CHANNELS),
    Format("hermes", ((calls.OPEN,),), calls.OPEN, calls.CLOSE, "hermes", calls.hermes),
    Format(
        "llama",
        (("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
        calls.PYTHON_TAG,
        "",
        "llama3_json",
        calls.llama,
    ),
    Format("json", own=calls.plain_json),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The format of a run, by what it was chosen, and whether vLLM reads it."""

    form: Format
    by: str
    by_vllm: bool

    def words(self) -> str:
        if self.form is UNKNOWN:
            return f"{', '.join(calls.FORMATS)} tried in turn: {self.by}"
        reader = "vLLM's parser" if self.by_vllm else "our reader"
        return f"{self.form.name} ({reader}), {self.by}"


def chosen_format(name: str, template: Any, *, vllm: bool) -> Chosen:
    """Choose by name, or by the chat template; `vllm` tells whether vLLM samples, and its parsers are at hand."""
    if name == AUTO:
        form = recognised(template)
        by = "the chat template is of no known format" if form is UNKNOWN else "by the chat template"
    else:
        form = next((one for one in FORMATS if name in (one.name, one.vllm)), Format(name, vllm=name))
        by = "by environment.tool_format"
    return Chosen(form, by, bool(form.vllm) and (vllm or form.own is None))


def recognised(template: Any) -> Format:
    """Return the format of a chat template, which may be several by their names."""
    source = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    return next((one for one in FORMATS if any(all(text in source for text in row) for row in one.signs)), UNKNOWN)


@dataclass(frozen=True, slots=True)
class Parser:
    """Finds the calls of replies in one format, and gives them arguments of the types that tools want."""

    form: Format
    find: Parse | None = None  # vLLM's parser
    special: re.Pattern[str] = field(default_factory=lambda: re.compile(r"(?!)"))  # tokens that are no text
    remark: str = ""  # why vLLM's parser, which was chosen, is not used

    def __call__(self, text: str, tools: Sequence[Tool]) -> Parsed:
        thought, answer = self._parted(text)
        parsed = self._found(answer, tools)
        spoken = thought if self.form.thought == THINK else ""
        in_channels = self.form.thought == CHANNELS and not parsed.error
        text = self._bare(parsed.content if in_channels else f"{spoken}{answer}")
        return Parsed(
            content=(self._bare(f"{spoken}{parsed.content}") if parsed.calls or parsed.error else text).strip(),
            calls=[coerced_call(call, tools) for call in parsed.calls],
            error=parsed.error,
            reasoning=parsed.reasoning or ("" if spoken else self._thought(thought)),
            text=text,
        )

    def _parted(self, text: str) -> tuple[str, str]:
        """Return what a model thinks aloud before it answers, which calls nothing, and its answer."""
        end = self.form.thought[1]
        thought, found, answer = text.rpartition(end) if end else ("", "", text)
        return thought + found, answer

    def _thought(self, text: str) -> str:
        begin, end = self.form.thought
        return self._bare(text.removesuffix(end).strip().removeprefix(begin)).strip()

    def _bare(self, text: str) -> str:
        return self.special.sub("", text)

    def _found(self, answer: str, tools: Sequence[Tool]) -> Parsed:
        """Ask vLLM's parser, and the reader here where that sees fewer calls than are begun: it tells why not."""
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


def coerced_call(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    tool = next((one for one in tools if one["function"]["name"] == call.name), None)
    return ToolCall(call.name, coerced_arguments(call.arguments, tool))


def open_parser(chosen: Chosen, tokenizer: Any) -> Parser:
    """Make the parser of a run; where vLLM's does not go with the tokenizer, the reader here takes its place."""
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
    """Refuse a name that neither this table nor vLLM knows; only for others is vLLM imported."""
    if name in names() or any(name == form.vllm for form in FORMATS):
        return
    known = vllm_calls().parsers()
    if name not in known:
        raise ConfigError(
            f"environment.tool_format={name} is not known: give one of {', '.join(names())}, or one of vLLM's: "
            f"{', '.join(one for one in known if one not in names())}"
        )


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
    """Return what matches the tokens that are no text; the marks of a thought stay, as readers of it know them."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted(texts - set(THINK), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
