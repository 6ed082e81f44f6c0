"""Calls in every format, calls that cannot be read, and text that is none."""

import itertools
import subprocess
import sys

import pytest

from trueline.environments.tools.calls import FORMATS, Parsed, ToolCall, as_message
from trueline.environments.tools.formats import Parser, choose_format

ADD = ToolCall("add", {"a": 1, "b": 2})
NOW = ToolCall("now", {})
ADD_TEXT = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD_LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
NOW_TEXT = '{"name": "now", "arguments": {}}'


def parse_reply(text: str, form: str = "auto") -> Parsed:
    return Parser(choose_format(form, None, vllm=False).form)(text, [])


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
    thought = as_message(Parsed("3", [], reasoning="1 and 2"), str)
    assert thought == {"role": "assistant", "content": "3", "reasoning_content": "1 and 2"}


def test_one_call_stands_for_those_beside_one_that_cannot_be_read() -> None:
    text = f"So: <tool_call>{ADD_TEXT}</tool_call><tool_call>{{</tool_call>"
    message = as_message(parse_reply(text, "hermes"), lambda: "call00001")
    function = {"name": "unreadable_call", "arguments": "{}"}
    made = {"id": "call00001", "type": "function", "function": function}
    assert message == {"role": "assistant", "content": text, "tool_calls": [made]}


def test_calls_are_read_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'mcp'}"
    program = f"import sys, trueline.environments.tools.toolbox; sys.exit(len({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
