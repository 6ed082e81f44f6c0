"""Tool calls as the chat template of each family writes them, read back by the format that the template chooses.

Covers `trueline.environments.tools.calls`.
"""

import time
from collections.abc import Sequence

import pytest

from tests.support.templates import families, template_of
from tests.support.written_calls import CALLS, FORMAT_OF, LOOK, WITHOUT, calls_of, chosen_of, written
from trueline.data.messages import Tool
from trueline.environments.tools import formats
from trueline.environments.tools.calls import Parsed, ToolCall
from trueline.environments.tools.formats import (
    FORMATS,
    CallFormat,
    Parser,
    choose_format,
    open_parser,
    recognise_format,
)

LOOPED = 100_000  # characters
LOST = 50  # characters: of the second call, where there are two
ADD = ToolCall("add", {"a": 1, "b": 2})
ARGUMENTS = '{"a": 1, "b": 2}'
CALL, SEPARATOR, CALL_END = (f"<\uff5ctool▁{part}\uff5c>" for part in ("call▁begin", "sep", "call▁end"))
CALLS_BEGIN = "<\uff5ctool▁calls▁begin\uff5c>"
ACTION = f'[{{"tool_call_id": "0", "tool_name": "add", "parameters": {ARGUMENTS}}}]'
VALUES = '<atem:parameter name="a">1</atem:parameter><atem:parameter name="b">2</atem:parameter>'
WHOLE_NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}


def read(name: str) -> Parser:
    return Parser(choose_format(name, None, vllm=False).form)


@pytest.mark.parametrize("family", FORMAT_OF)
def test_what_a_template_writes_is_read_back(family: str) -> None:
    chosen, tokenizer = chosen_of(family, vllm=False)
    assert chosen.form.name == FORMAT_OF[family]
    assert chosen.words() == f"{FORMAT_OF[family]} (our reader), by the chat template"
    parsed = open_parser(chosen, tokenizer)(written(family), LOOK)
    assert (parsed.calls, parsed.error) == (calls_of(family), "")
    assert parsed.content.replace("<think>", "").replace("</think>", "").strip() == ""


@pytest.mark.parametrize("family", FORMAT_OF)
def test_a_call_that_breaks_off_is_an_error(family: str) -> None:
    chosen, tokenizer = chosen_of(family, vllm=False)
    parser, text = open_parser(chosen, tokenizer), written(family)
    assert parser(text[:-LOST], LOOK).error
    assert parser("All is well.", LOOK).calls == [] and parser("All is well.", LOOK).error == ""


def test_every_other_template_is_of_no_known_format() -> None:
    sources = families()
    assert {name for name in sources if recognise_format(sources[name]) is not formats.UNKNOWN} == set(FORMAT_OF)
    assert set(WITHOUT) <= set(sources) - set(FORMAT_OF)
    chosen = choose_format("auto", template_of("phi3"), vllm=True)
    said = "hermes, mistral, llama, json tried in turn: the chat template is of no known format"
    assert (chosen.by_vllm, chosen.words()) == (False, said)


def test_a_format_is_chosen_by_name_engine_and_among_several_templates() -> None:
    named = {"default": template_of("llama3"), "tool_use": template_of("qwen3")}
    assert recognise_format(named).name == "hermes" and recognise_format(None) is formats.UNKNOWN
    by_vllm = choose_format("auto", template_of("qwen3_6"), vllm=True)
    assert by_vllm.words() == "qwen3_coder (vLLM's parser), by the chat template"
    assert choose_format("hermes", "", vllm=False).words() == "hermes (our reader), by environment.tool_format"
    assert choose_format("llama3_json", "", vllm=False).form.name == "llama"
    other = choose_format("jamba", "", vllm=False)
    assert (other.form, other.by_vllm) == (CallFormat("jamba", vllm="jamba"), True)


def test_names_that_this_table_knows_are_checked_without_vllm() -> None:
    for form in FORMATS:
        formats.check_format(form.name)
    formats.check_format("llama3_json")
    formats.check_format("auto")


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("cohere_command3", f"So.<|START_ACTION|>{ACTION}<|END_ACTION|>", "So."),
        ("phi4_mini_json", f'So. functools[{{"name": "add", "arguments": {ARGUMENTS}}}]', "So."),
        ("deepseek_v31", f"So.{CALLS_BEGIN}{CALL}add{SEPARATOR}{ARGUMENTS}{CALL_END}", "So."),
        ("openai", f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>", ""),
        ("openai", f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}", ""),
        ("lfm2", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>So.", "So."),
        ("olmo3", "So.<function_calls>\nadd(a=1, b=2)\n</function_calls>", "So."),
        ("gemma4", "So.<|tool_call>call:add{a:1,b:2}<tool_call|>", "So."),
        ("muse_glimmer", f' to=add<|message|>So.<atem:invoke name="add">{VALUES}</atem:invoke>', "So."),
    ],
)
def test_calls_beside_text(name: str, text: str, content: str) -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": WHOLE_NUMBERS}}
    parsed = read(name)(text, [add])
    assert (parsed.calls, parsed.content, parsed.error) == ([ADD], content, "")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("qwen3_coder", "<tool_call><function=add></tool_call>", "between <function=NAME> and </function>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a></function></tool_call>", "of 'add' is not between"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key></tool_call>", "an argument of 'add' is not between"),
        ("glm45", "<tool_call>{}</tool_call>", "name of a function"),
        ("deepseek_v3", "<\uff5ctool▁calls▁begin\uff5c>", "no <\uff5ctool▁call▁begin\uff5c> follows"),
        ("lfm2", "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>", "arguments have names: 'add(1, 2)'"),
        ("lfm2", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>", "could not be read"),
        ("lfm2", "<|tool_call_start|>[add(]<|tool_call_end|>", "does not match"),
        ("lfm2", f"<|tool_call_start|>{'-' * 100_000}1<|tool_call_end|>", "nested too deep"),
        ("lfm2", "<|tool_call_start|><|tool_call_end|>", "there is none"),
        ("gemma4", "<|tool_call>call:add{a:<tool_call|>", "Expecting value"),
        ("gemma4", "<|tool_call>add<tool_call|>", "Expecting value"),
        ("cohere_command3", "<|START_ACTION|>[3]<|END_ACTION|>", "no name"),
        ("openai", "<|channel|>commentary to=functions.add <|message|>{1<|call|>", "Expecting property"),
        ("openai", "<|channel|>commentary to=functions.add", "breaks off"),
        ("muse_glimmer", "<|message|><atem:invoke></atem:invoke>", "no name"),
        ("phi4_mini_json", "functools[", "Expecting value"),
    ],
)
def test_calls_that_cannot_be_read(name: str, text: str, reason: str) -> None:
    parsed = read(name)(text, [])
    assert parsed.calls == [] and reason in parsed.error


def test_channels_are_told_apart() -> None:
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    parsed = read("openai")(f"{thought}<|channel|>final<|message|>It is 3.", [])
    assert (parsed.reasoning, parsed.content, parsed.text, parsed.calls) == ("Let me see.", "It is 3.", "It is 3.", [])
    parsed = read("openai")(f'{thought}<|channel|>commentary to=functions.add json<|message|>{{"a": 1, "b": 2}}', [])
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("Let me see.", "", [ADD])
    plain = read("openai")("3", [])
    assert (plain.content, plain.text, plain.reasoning) == ("3", "3", "")
    muse = read("muse_glimmer")(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>It is 3.", [])
    assert (muse.reasoning, muse.content, muse.calls) == ("Hm.", "It is 3.", [])


def test_what_is_thought_calls_nothing_and_goes_where_templates_look_for_it() -> None:
    call = "<|tool_call>call:add{a:1,b:2}<tool_call|>"
    parsed = read("gemma4")(f"<|channel>thought\n{call}?\n<channel|>3", [])
    assert (parsed.calls, parsed.content, parsed.text, parsed.reasoning) == ([], "3", "3", f"{call}?")
    parsed = read("mistral")("[THINK]So.[/THINK]3", [])
    assert (parsed.content, parsed.reasoning) == ("3", "So.")
    parsed = read("qwen3_coder")("<think>So.</think>3", [])
    assert (parsed.content, parsed.reasoning) == ("<think>So.</think>3", "")


def test_special_tokens_are_no_text() -> None:
    chosen, tokenizer = chosen_of("mistral_small", vllm=False)
    parser = open_parser(chosen, tokenizer)
    parsed = parser("It is[ARGS] 3", LOOK)
    assert (parsed.content, parsed.text) == ("It is 3", "It is 3")
    parsed = parser("So: [TOOL_CALLS]look_up[ARGS]{", LOOK)
    assert parsed.error and parsed.text == "So: look_up{"
    chosen, tokenizer = chosen_of("qwen3", vllm=False)
    assert open_parser(chosen, tokenizer)("<think>a</think>b<|im_start|>", LOOK).text == "<think>a</think>b"


def test_arguments_are_as_the_tool_wants_them_in_every_format() -> None:
    text = '<tool_call>{"name": "look_up", "arguments": {"count": "12", "digits": "12", "share": "x"}}</tool_call>'
    assert read("hermes")(text, LOOK).calls == [ToolCall("look_up", {"count": 12, "digits": "12", "share": "x"})]
    assert read("hermes")(text, []).calls == [ToolCall("look_up", {"count": "12", "digits": "12", "share": "x"})]
    assert CALLS[0].arguments["digits"] == "007"  # which is no number by what it is, and is none by the schema


def test_a_long_reply_is_read_here_and_a_short_one_by_vllm() -> None:
    asked: list[str] = []

    def find(text: str, tools: Sequence[Tool]) -> Parsed:
        asked.append(text)
        return Parsed("", [ADD])

    parser = Parser(choose_format("hermes", None, vllm=True).form, find)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert parser(call, []).calls == [ADD] and asked == [call]
    assert parser(call + " " * formats.LONGEST_FOR_VLLM, []).calls == [ADD] and asked == [call]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_looping_model_writes_is_read_in_no_time(form: CallFormat) -> None:
    """Time that grows with the square of the length would be minutes here."""
    begin = form.begin or "<|channel|>commentary to=functions.f<|message|>"
    pieces = ("<parameter=a>", "<arg_key>a</arg_key>", "<|message|>", "<|start|>", "f(a=", "[", ",a:", "-")
    start = time.process_time()
    for part in filter(None, (begin, form.end, *pieces)):
        text = part * (LOOPED // len(part))
        for reply in (text, f"{begin}{text}{form.end}", f"{begin}<function=f>{text}</function>{form.end}"):
            assert Parser(form)(reply, []).text == reply or form.thought == formats.CHANNELS
    assert time.process_time() - start < 60
