from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.data.readers import read_prompts
from trueline.data.sources import Located
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


def test_messages_are_kept_and_other_keys_of_theirs_left_out() -> None:
    row = {"messages": [{**message, "name": "x"} for message in CHAT]}
    assert prompts(row)[0].messages == CHAT


def test_a_system_prompt_comes_first() -> None:
    assert prompts({"messages": CHAT}, system_prompt="be brief")[0].messages == [
        {"role": "system", "content": "be brief"},
        *CHAT,
    ]


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


@pytest.mark.parametrize("second", [{"prompt": "p"}, {"prompt": "p", "answer": None}])
def test_a_row_without_its_label_is_named_by_row_and_column(second: dict[str, Any]) -> None:
    message = refused({"prompt": "p", "answer": "1"}, second)
    assert "file.jsonl, line 2" in message
    assert "'answer'" in message


@pytest.mark.parametrize("value", ["", "  ", 3, None, {"a": 1}])
def test_a_prompt_that_is_no_text_is_named_by_row_and_column(value: Any) -> None:
    message = refused({"prompt": "p"}, {"prompt": value})
    assert "file.jsonl, line 2" in message
    assert "'prompt'" in message


@pytest.mark.parametrize(
    "value",
    [
        [],
        ["text"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": " "}],
        [{"from": "narrator", "value": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    ],
)
def test_messages_that_cannot_be_answered_are_named_by_row_and_column(value: Any) -> None:
    message = refused({"messages": CHAT}, {"messages": value})
    assert "file.jsonl, line 2" in message
    assert "'messages'" in message


def test_messages_may_be_spelled_as_sharegpt_does() -> None:
    row = {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "user", "value": "c"}]}
    assert prompts(row)[0].messages == CHAT


def test_roles_that_no_table_knows_are_kept() -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "tool", "content": "y"}]
    assert prompts({"messages": messages})[0].messages == messages
