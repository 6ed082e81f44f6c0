"""Calls in every format, calls that cannot be read, and text that is none."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from trueline.environments.tools.calls import FORMATS, Parsed, ToolCall, as_message, parse_reply

ADD = ToolCall("add", {"a": 1, "b": 2})
NOW = ToolCall("now", {})
ADD_TEXT = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD_LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
NOW_TEXT = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ADD_TEXT}\n</tool_call>", "", [ADD]),
        (
            "hermes",
            f"I add.\n<tool_call>{ADD_TEXT}</tool_call>\n<tool_call>{NOW_TEXT}</tool_call>",
            "I add.",
            [ADD, NOW],
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call> Wait.', "Wait.", [NOW]),
        ("hermes", f"<think>{NOW_TEXT} or <tool_call>?</think><tool_call>{ADD_TEXT}</tool_call>", None, [ADD]),
        ("llama", ADD_LLAMA, "", [ADD]),
        ("llama", f"<|python_tag|>{ADD_LLAMA}; {NOW_TEXT}", "", [ADD, NOW]),
        ("llama", f"Let me see.<|python_tag|>{ADD_LLAMA}", "Let me see.", [ADD]),
        ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama", f"{ADD_LLAMA};{NOW_TEXT}", "", [ADD, NOW]),
        ("mistral", f"[TOOL_CALLS] [{ADD_TEXT}, {NOW_TEXT}]", "", [ADD, NOW]),
        ("mistral", 'So:[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[ARGS]{}', "So:", [ADD, NOW]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]Ab1[ARGS]{"a": 1, "b": 2}', "", [ADD]),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2}', "", [ADD]),
        ("json", ADD_TEXT, "", [ADD]),
        ("json", ADD_LLAMA, "", [ADD]),
        ("json", f"[{ADD_TEXT}, {NOW_TEXT}]", "", [ADD, NOW]),
        ("json", f"I call:\n```json\n{ADD_TEXT}\n```\nWait.", "I call:\n\nWait.", [ADD]),
        ("json", '{"arguments": "{\\"a\\": 1, \\"b\\": 2}", "name": "add"}', "", [ADD]),
    ],
)
def test_calls_are_found_by_the_name_of_the_format_and_without(
    form: str, text: str, content: str | None, calls: list[ToolCall]
) -> None:
    for parsed in (parse_reply(text, form), parse_reply(text)):
        assert (parsed.calls, parsed.error) == (calls, "")
        assert content is None or parsed.content == content


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("hermes", f"<tool_call>{ADD_TEXT}", "not closed"),
        ("hermes", "<tool_call></tool_call>", "Expecting value"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "character 37"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "'add' are no object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>', "Extra data"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "recursion"),
        ("llama", '<|python_tag|>print("a")', "Expecting value"),
        ("llama", '<|python_tag|>{"parameters": {}}', "no name"),
        ("llama", '{"name": "add", "parameters": {"a": 1', "Expecting"),
        ("llama", '{"name": "add", "parameters": 3}', "no object"),
        ("llama", f"{ADD_LLAMA}; and so on", "Expecting value"),
        ("mistral", "[TOOL_CALLS]", "Expecting value"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"', "Expecting"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{1}", "Expecting property name"),
        ("mistral", "[TOOL_CALLS]add[ARGS]", "Expecting value"),
        ("mistral", "[TOOL_CALLS] [3]", "no name"),
        ("json", '```json\n{"name": "add", "arguments": {"a": 1}\n```', "Expecting"),
        ("json", '{"name": "add", "arguments": null}', "no object"),
        ("json", '{"name": "", "arguments": {}}', "no name"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_to_the_model(form: str, text: str, reason: str) -> None:
    for parsed in (parse_reply(text, form), parse_reply(text)):
        assert reason in parsed.error
        assert parsed.calls in ([], [ADD])


def test_calls_beside_one_that_cannot_be_read_are_kept() -> None:
    parsed = parse_reply(f"<tool_call>{ADD_TEXT}</tool_call><tool_call>{{</tool_call><tool_call>{NOW_TEXT}</tool_call>")
    assert parsed.calls == [ADD, NOW]
    assert parsed.error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The sum is 3.",
        " 3 ",
        "null",
        "[]",
        "{}",
        "[1, 2]",
        '{"name": "Ann", "age": 3}',
        '{"arguments": ["for", "against"]}',
        '```json\n{"name": "Ann"}\n```',
        f"```json\n{ADD_TEXT}\n```\nor\n```json\n{NOW_TEXT}\n```",
        f"You could call {ADD_TEXT}.",
        '{"name": "Ann", ',
        "```python\nprint(1)\n```",
        "[" * 100_000,
        f"<think><tool_call>{ADD_TEXT}</tool_call> would do.</think> 3",
    ],
)
def test_other_text_calls_nothing(text: str) -> None:
    assert parse_reply(text) == Parsed(text.strip(), [])
    for form in FORMATS:
        assert parse_reply(text, form) == Parsed(text.strip(), [])


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml' is not known here: give auto, hermes, mistral, llama, json"):
        parse_reply("", "xml")


def test_the_message_of_a_reply() -> None:
    ids = map(str, itertools.count())
    message = as_message(Parsed("", [ToolCall("say", {"text": "ä"}), NOW]), lambda: next(ids))
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "0", "type": "function", "function": {"name": "say", "arguments": '{"text": "ä"}'}},
            {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert as_message(Parsed("3", []), str) == {"role": "assistant", "content": "3"}


def test_calls_are_read_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'mcp'}"
    program = f"import sys, trueline.environments.tools.toolbox; sys.exit(len({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_parsers_of_vllm(tokenizer: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm")
    from trueline.environments.tools.vllm_calls import vllm_parser

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}]
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in ADD.arguments.items())
    xml = f"<tool_call>\n<function=add>\n{values}</function>\n</tool_call>"
    assert vllm_parser("qwen3_coder", tokenizer, tools)(f"I add.\n{xml}") == Parsed("I add.", [ADD])
    assert vllm_parser("pythonic", tokenizer)("[add(a=1, b=2), now()]") == Parsed("", [ADD, NOW])
    assert vllm_parser("hermes", tokenizer)("The sum is 3.") == Parsed("The sum is 3.", [])
    with pytest.raises(ValueError, match=r"'none' is not known: give auto, hermes, .*vLLM's: .*pythonic"):
        vllm_parser("none", tokenizer)
    with pytest.raises(RuntimeError, match="token"):
        vllm_parser("llama3_json", tokenizer)


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_that_vllm_hands_on_unread(arguments: str) -> None:
    pytest.importorskip("vllm")
    from trueline.environments.tools.vllm_calls import read

    parsed = read([SimpleNamespace(name="add", arguments=arguments)], "so")
    assert (parsed.content, parsed.calls) == ("so", [])
    assert parsed.error
