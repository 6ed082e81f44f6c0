import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.support.tool_calls import TOOL_TALK, TOOLS, calling
from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.data.prompts import read_prompts
from trueline.data.readers import renamed_roles
from trueline.data.rows import Located
from trueline.data.sources import open_source
from trueline.data.types import Prompt

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def located(*rows: dict[str, Any]) -> list[Located]:
    return [Located(row, f"file.jsonl, line {number}") for number, row in enumerate(rows, 1)]


def prompts(*rows: dict[str, Any], **settings: Any) -> list[Prompt]:
    return read_prompts(located(*rows), PromptDataConfig(**settings), "file.jsonl")


def refused(*rows: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prompts(*rows, **settings)
    return str(caught.value)


def test_text_becomes_one_message_of_the_user() -> None:
    first, second = prompts({"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2})
    assert first.messages == [{"role": "user", "content": "one"}]
    assert (first.id, second.id, second.label, second.source) == (0, 1, 2, "file.jsonl")
    assert second.columns == {"prompt": "two", "answer": 2}


def test_messages_keep_all_of_their_fields() -> None:
    more = {"name": "x", "reasoning_content": "hm", "weight": 0}
    messages = [{**message, **more} for message in CHAT]
    assert prompts({"messages": messages})[0].messages == messages


def test_a_system_prompt_comes_first() -> None:
    (prompt,) = prompts({"messages": CHAT}, system_prompt="be brief")
    assert prompt.messages == [{"role": "system", "content": "be brief"}, *CHAT]


def test_usual_columns_are_taken_in_their_order_and_named_ones_before_them() -> None:
    row = {"question": "q", "prompt": "p", "answer": "a", "solution": "s", "other": "o"}
    assert prompts(row)[0].messages[0]["content"] == "p"
    assert prompts(row)[0].label == "a"
    named = prompts(row, prompt_column="other", label_column="solution")[0]
    assert (named.messages[0]["content"], named.label) == ("o", "s")


def test_a_label_may_be_absent_from_the_data_as_a_whole() -> None:
    assert prompts({"prompt": "p"})[0].label is None


def test_a_named_column_that_does_not_exist_is_refused_with_those_that_do() -> None:
    message = refused({"text": "x", "kind": "y"}, prompt_column="txt")
    for part in ("data.prompt_column=txt", "file.jsonl, line 1", "text", "kind"):
        assert part in message


def test_data_without_a_usual_column_says_what_it_has() -> None:
    message = refused({"text": "x"})
    for part in ("file.jsonl", "prompt", "text", "data.prompt_column"):
        assert part in message


BROKEN: dict[str, list[Any]] = {  # column -> values that are no label, no text, or no messages to answer
    "answer": [None],
    "prompt": ["", "  ", 3, None, {"a": 1}],
    "messages": [
        [],
        ["text"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": " "}],
        [{"from": "narrator", "value": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    ],
}


@pytest.mark.parametrize(("column", "value"), [(column, value) for column in BROKEN for value in BROKEN[column]])
def test_a_broken_value_is_named_by_row_and_column(column: str, value: Any) -> None:
    good = {"messages": CHAT} if column == "messages" else {"prompt": "p", "answer": "1"}
    assert refused(good, {**good, column: value}).startswith(f"file.jsonl, line 2: column {column!r}")
    without = {name: kept for name, kept in good.items() if name != column}
    assert f"line 2: column {column!r} is missing" in refused(good, without)


def test_messages_may_be_spelled_as_sharegpt_does() -> None:
    row = {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "user", "value": "c"}]}
    assert prompts(row)[0].messages == CHAT


@pytest.mark.parametrize("key", ["role", "from"])
def test_roles_have_many_names_and_unknown_ones_are_refused_by_row(key: str) -> None:
    names = {"developer": "system", "Human": "user", "GPT": "assistant", "bot": "assistant", "function": "tool"}
    told = {"role": "content", "from": "value"}[key]
    rows = {"messages": [{key: name, told: "x"} for name in names]}
    assert [message["role"] for message in prompts(rows)[0].messages] == list(names.values())
    with pytest.raises(ConfigError, match=rf"line 2: .*message 1: unknown {key} 'alice': use one of human, user"):
        prompts({"messages": CHAT}, {"messages": [{key: "alice", told: "x"}]})


def test_renamed_roles_are_told() -> None:
    rows = [{"messages": [{"role": "Human"}, {"role": "assistant"}]}, {"messages": [{"from": "gpt"}], "id": [3]}]
    assert renamed_roles(rows) == "Human as user, gpt as assistant"
    assert renamed_roles([{"messages": CHAT, "documents": [{"from": "the web"}]}]) == ""


def test_messages_may_be_json_text_and_no_other() -> None:
    """As a CSV file has them; as Python prints lists, they would be a prompt that nobody means."""
    assert prompts({"prompt": json.dumps(CHAT)})[0].messages == CHAT
    with pytest.raises(ConfigError, match=r"column 'prompt' contains messages as text that is not JSON, .*json.dumps"):
        prompts({"prompt": str(CHAT)})
    listed = '["a", "b"]: which is longer?'
    assert prompts({"prompt": listed})[0].messages == [{"role": "user", "content": listed}]


# Tools


def test_a_call_needs_no_text() -> None:
    """It is empty then, for most templates add it to other text."""
    without = {name: value for name, value in TOOL_TALK[1].items() if name != "content"}
    for written in (without, {**without, "content": None}, {**without, "content": ""}):
        assert prompts({"messages": [TOOL_TALK[0], written, TOOL_TALK[2]]})[0].messages == TOOL_TALK[:3]
    spoken = {**without, "content": "I add."}
    assert prompts({"messages": [TOOL_TALK[0], spoken, TOOL_TALK[2]]})[0].messages[1] == spoken


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("written", "read"), [({"a": None}, {"a": None}), ('{"a": [1]}', {"a": [1]}), ("", {}), (None, {})]
)
def test_arguments_are_an_object_whichever_way_they_are_written(flat: bool, written: Any, read: Any) -> None:
    function, parsed = {"name": "add", "arguments": written}, {"name": "add", "arguments": read}
    call = function if flat else {"id": "7", "function": function}
    messages = [TOOL_TALK[0], {"role": "assistant", "tool_calls": [call]}, TOOL_TALK[2]]
    (found,) = prompts({"messages": messages})[0].messages[1]["tool_calls"]
    assert found == (parsed if flat else {"id": "7", "function": parsed})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (calling() | {"tool_calls": "add"}, "tool_calls must be a list, found 'add'"),
        (calling() | {"tool_calls": ["add"]}, "tool call 1: expected a function name"),
        (calling() | {"tool_calls": [{"function": {"arguments": {}}}]}, "tool call 1: expected a function name"),
        (calling() | {"tool_calls": [{"name": "add", "arguments": "[1]"}]}, "arguments must be an object"),
        (calling() | {"tool_calls": [{"name": "add", "arguments": "a=1"}]}, "found 'a=1'"),
        (calling() | {"tool_calls": [{"name": "add", "arguments": 3}]}, "arguments must be an object"),
        (calling() | {"tool_calls": []}, "its text is empty"),
        ({"role": "assistant", "tool_calls": []}, "expected role and content"),
        ({"role": "assistant", "content": "", "tool_calls": None}, "its text is empty"),
        ({"role": "user", "content": [{"type": "audio"}]}, "part 1 of its content has type 'audio'"),
        ({"role": "user", "content": [{"type": "text", "text": " "}]}, "its text is empty"),
        ({"role": "user", "content": [{"type": "text"}]}, "part 1 of its content"),
    ],
)
def test_what_is_no_call_or_no_text_is_refused_by_its_place(message: dict[str, Any], said: str) -> None:
    told = refused({"messages": CHAT}, {"messages": [CHAT[0], message, CHAT[2]]})
    assert told.startswith("file.jsonl, line 2: column 'messages', message 2")
    assert said in told


def test_text_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two", "image_url": None}]
    (message,) = prompts({"messages": [{"role": "user", "content": parts}]})[0].messages
    assert message == {"role": "user", "content": "one, two"}


def test_a_tool_may_have_nothing_to_say() -> None:
    said = [*TOOL_TALK[:2], {"role": "tool", "content": ""}]
    assert prompts({"messages": said})[0].messages == said
    shared = {"messages": [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}]}
    assert [message["role"] for message in prompts(shared)[0].messages] == ["user", "tool"]


@pytest.mark.parametrize("column", [TOOLS, json.dumps(TOOLS)])
def test_the_tools_of_a_row_are_read(column: Any) -> None:
    first, second = prompts({"prompt": "a", "tools": column}, {"prompt": "b", "tools": None})
    assert (first.tools, second.tools) == (TOOLS, [])


@pytest.mark.parametrize("column", ["hammer", [1], {"name": "add"}, "{}"])
def test_a_column_of_other_tools_is_refused(column: Any) -> None:
    told = refused({"prompt": "a"}, {"prompt": "b", "tools": column})
    assert told.startswith("file.jsonl, line 2: column 'tools' must be a list of tool schemas")


def test_nulls_that_parquet_fills_in_are_no_fields(tmp_path: Path) -> None:
    """Arrow gives every message a list of calls, every call all arguments, and every tool all properties."""
    other = {"type": "function", "function": {"name": "halve", "parameters": {"properties": {"x": {"type": "number"}}}}}
    rows = [
        {"messages": TOOL_TALK[:3], "tools": TOOLS},
        {"messages": [TOOL_TALK[0], calling("halve", x=[None, 4]), TOOL_TALK[2]], "tools": [*TOOLS, other]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    stored = open_source(str(tmp_path / "rows.parquet"), "data.path")
    assert stored[0].row["messages"][0]["tool_calls"] is None
    found = read_prompts(stored, PromptDataConfig(), "rows.parquet")
    assert [(prompt.messages, prompt.tools) for prompt in found] == [(row["messages"], row["tools"]) for row in rows]
