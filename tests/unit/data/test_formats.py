import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.tool_calls import TOOL_TALK, TOOLS, calling
from trueline.config.base import ConfigError
from trueline.config.data import DataConfig
from trueline.data.formats import (
    Conversation,
    Document,
    Pair,
    Rated,
    StepRated,
    check_ratings,
    read_conversations,
    read_pairs,
    read_rated,
    read_steps,
)
from trueline.data.rows import Located

Row = dict[str, Any]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def bot(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


ASKED, ANSWERED = user("1+1="), bot("2")


def located(*rows: Row) -> list[Located]:
    return [Located(row, f"file.jsonl, line {number}") for number, row in enumerate(rows, 1)]


def conversations(*rows: Row, **settings: Any) -> tuple[list[Any], str]:
    return read_conversations(located(*rows), DataConfig(**settings))


def pairs(*rows: Row, **settings: Any) -> tuple[list[Pair], str]:
    return read_pairs(located(*rows), DataConfig(**settings))


def rated(*rows: Row, **settings: Any) -> tuple[list[Rated], str]:
    return read_rated(located(*rows), DataConfig(**settings))


def steps(*rows: Row, **settings: Any) -> tuple[list[StepRated], str]:
    return read_steps(located(*rows), DataConfig(**settings))


PLAIN: list[tuple[Callable[..., Any], Row]] = [  # one prompt, in the formats of every task
    (conversations, {"messages": [ASKED, ANSWERED]}),
    (conversations, {"instruction": "1+1=", "output": "2"}),
    (conversations, {"prompt": "1+1=", "completion": "2"}),
    (pairs, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
    (pairs, {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, bot("3")]}),
    (rated, {"prompt": "1+1=", "completion": "2", "label": True}),
    (rated, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
    (steps, {"prompt": "1+1=", "completions": ["2"], "labels": [True]}),
]


def refused(reader: Callable[..., Any], *rows: Row, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        reader(*rows, **settings)
    return str(caught.value)


# Which format it is


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [ASKED, ANSWERED]}, "messages (column messages)"),
        ({"prompt": "1+1=", "messages": [ASKED, ANSWERED]}, "messages (column messages)"),
        (
            {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
            "conversations (column conversations); roles: human as user, gpt as assistant",
        ),
        ({"conversations": [ASKED, ANSWERED]}, "conversations (column conversations)"),
        ({"instruction": "1+1=", "output": "2"}, "alpaca (columns instruction, output)"),
        ({"instruction": "1+1=", "input": "", "output": "2"}, "alpaca (columns instruction, input, output)"),
        ({"prompt": "1+1=", "completion": "2"}, "completion (columns prompt, completion)"),
        ({"question": "1+1=", "answer": "2"}, "completion (columns question, answer)"),
        ({"prompt": [ASKED], "response": [ANSWERED]}, "completion (columns prompt, response)"),
    ],
)
def test_the_columns_of_the_first_row_tell_the_format(row: Row, said: str) -> None:
    assert conversations(row) == ([Conversation([ASKED, ANSWERED], "file.jsonl, line 1")], said)


def test_plain_text_is_a_document() -> None:
    assert conversations({"text": "once"}) == ([Document("once", "file.jsonl, line 1")], "text (column text)")
    assert "data.system_prompt='be brief'" in refused(conversations, {"text": "once"}, system_prompt="be brief")


def test_named_columns_decide_before_usual_ones() -> None:
    row = {"messages": [user("a")], "prompt": "b", "answer": "c", "mine": "d", "talk": [ASKED, ANSWERED], "body": "e"}

    def read(**settings: Any) -> tuple[Any, str]:
        records, description = conversations(row, **settings)
        return records[0], description

    place, mine = "file.jsonl, line 1", "completion (columns prompt, mine)"
    assert read(completion_column="mine") == (Conversation([user("b"), bot("d")], place), mine)
    assert read(messages_column="talk") == (Conversation([ASKED, ANSWERED], place), "messages (column talk)")
    assert read(text_column="body") == (Document("e", place), "text (column body)")
    both = "completion (columns messages, answer)"
    assert read(prompt_column="messages") == (Conversation([user("a"), bot("c")], place), both)


def test_a_format_can_be_asked_for() -> None:
    row = {"messages": [ASKED, ANSWERED], "text": "once"}
    assert conversations(row, format="text")[0] == [Document("once", "file.jsonl, line 1")]
    message = refused(conversations, row, format="alpaca")
    for part in ("file.jsonl, line 1", "instruction", "data.prompt_column"):
        assert part in message
    assert "data.format=steps does not suit this task: set auto or messages" in refused(
        conversations, row, format="steps"
    )


@pytest.mark.parametrize("reader", [conversations, pairs, rated, steps])
def test_columns_that_are_no_format_are_named_with_those_that_would_be(reader: Callable[..., Any]) -> None:
    message = refused(reader, {"sentence": "x", "kind": "y"})
    for part in ("file.jsonl, line 1", "sentence, kind", "no known format", "data.format"):
        assert part in message


def test_a_named_column_that_does_not_exist_is_refused() -> None:
    message = refused(conversations, {"prompt": "p", "answer": "a"}, completion_column="other")
    assert message.startswith("data.completion_column=other: file.jsonl, line 1 has no such column")
    assert "data.messages_column, data.text_column" in refused(
        conversations, {"a": "p", "b": "a"}, messages_column="a", text_column="b"
    )


@pytest.mark.parametrize(("reader", "row"), PLAIN)
def test_a_system_prompt_comes_first(reader: Callable[..., Any], row: Row) -> None:
    records, _ = reader(row, system_prompt="be brief")
    messages = records[0].messages if isinstance(records[0], Conversation) else records[0].prompt
    assert messages[:2] == [{"role": "system", "content": "be brief"}, ASKED]


# Conversations


@pytest.mark.parametrize("human", ["human", "user"])
@pytest.mark.parametrize("model", ["gpt", "assistant", "chatgpt", "bot", "model"])
def test_every_speaker_of_sharegpt_has_a_role(human: str, model: str) -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "brief"},
            {"from": human, "value": "1+1=", "weight": None},
            {"from": model, "value": "2", "role": None},
        ]
    }
    assert conversations(row)[0][0].messages == [{"role": "system", "content": "brief"}, ASKED, ANSWERED]


def test_an_input_stands_below_its_instruction() -> None:
    rows: list[Row] = [
        {"instruction": "Add.", "input": "1 and 1", "output": "2"},
        {"instruction": "Greet.", "input": None, "output": "Hi"},
    ]
    assert [record.messages[0]["content"] for record in conversations(*rows)[0]] == ["Add.\n\n1 and 1", "Greet."]
    assert "line 2: column 'input'" in refused(conversations, rows[0], {**rows[1], "input": 3})


BROKEN_CHATS = [
    ([], "has no messages"),
    ("text", "list of messages"),
    (["text"], "message 1"),
    ([ASKED, {"role": "assistant"}], "message 2"),
    ([ASKED, {"content": "2"}], "message 2"),
    ([ASKED, {"role": "assistant", "content": 3}], "message 2"),
    ([ASKED, bot(" \n")], "message 2: its text is empty"),
    ([{"from": "narrator", "value": "x"}], "unknown from 'narrator': use one of human"),
    ([ASKED], "no assistant message"),
    ([ANSWERED], "no assistant message after another one"),
    (None, "empty"),
]


@pytest.mark.parametrize(("value", "said"), BROKEN_CHATS)
def test_a_broken_conversation_is_named_by_row(value: Any, said: str) -> None:
    message = refused(conversations, {"messages": [ASKED, ANSWERED]}, {"messages": value})
    assert message.startswith("file.jsonl, line 2")
    assert said in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": " "}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "", "completion": "c"}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p"}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": [ASKED]}),
        ({"prompt": "p", "completion": "c"}, {"prompt": [ASKED, ANSWERED], "completion": "c"}),
        ({"instruction": "p", "output": "c"}, {"instruction": "p", "output": ""}),
        ({"instruction": "p", "output": "c"}, {"instruction": None, "output": "c"}),
        ({"text": "t"}, {"text": "\n"}),
        ({"text": "t"}, {"text": 3}),
    ],
)
def test_an_empty_or_missing_text_is_named_by_row(first: Row, second: Row) -> None:
    assert refused(conversations, first, second).startswith("file.jsonl, line 2: column")


# Pairs


PAIR = Pair([ASKED], [ANSWERED], [bot("3")], 0.0, "file.jsonl, line 1")
LONG = [user("hi"), bot("yes?"), ASKED]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"question": "1+1=", "chosen": "2", "rejected": [bot("3")]},
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [bot("3")]},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, bot("3")]},
        {"prompt": "1+1=", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, bot("3")], "messages": [ASKED, ANSWERED]},
        {"chosen": "\n\nHuman: 1+1=\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1=\n\nAssistant: 3"},
        {
            "chosen": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}],
            "rejected": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "3"}],
        },
    ],
)
def test_every_way_to_write_a_pair_gives_the_same(row: Row) -> None:
    columns = ", ".join(column for column in row if column != "messages")
    found, described = pairs(row)
    assert found == [PAIR] and described.startswith(f"preference (columns {columns})")


def test_whole_conversations_are_split_where_they_part() -> None:
    row = {"chosen": [*LONG, ANSWERED], "rejected": [*LONG, bot("3")]}
    assert pairs(row)[0] == [Pair(LONG, [ANSWERED], [bot("3")], 0.0, "file.jsonl, line 1")]
    earlier = {"chosen": [*LONG, ANSWERED], "rejected": [LONG[0], bot("what?")]}
    (pair,), _ = pairs(earlier)
    assert (pair.prompt, pair.chosen, pair.rejected) == (LONG[:1], [*LONG[1:], ANSWERED], [bot("what?")])


def test_the_columns_of_a_pair_can_be_named() -> None:
    row = {"prompt": "x", "asked": "1+1=", "good": "2", "bad": "3"}
    found = pairs(row, prompt_column="asked", chosen_column="good", rejected_column="bad")
    assert found == ([PAIR], "preference (columns asked, good, bad)")


def test_margins_are_numbers() -> None:
    rows = located(
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "gap": 1.5},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "gap": "2"},
    )
    assert [pair.margin for pair in read_pairs(rows, DataConfig(), "gap")[0]] == [1.5, 2.0]
    with pytest.raises(ConfigError, match=r"reward_model\.margin_column=none: file\.jsonl, line 1 has no such column"):
        read_pairs(rows, DataConfig(), "none")


@pytest.mark.parametrize("gap", ["wide", None, True, float("nan"), [1]])
def test_a_margin_that_is_no_number_is_named_by_row(gap: Any) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "gap": gap}
    with pytest.raises(ConfigError, match=r"line 2: column 'gap'"):
        read_pairs(located({**row, "gap": 1}, row), DataConfig(), "gap")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chosen": "3"}, "chosen and rejected are the same, '3'"),
        ({"chosen": ""}, "column 'chosen' must be non-empty text"),
        ({"rejected": None}, "column 'rejected' is empty"),
        ({"rejected": []}, "column 'rejected' has no messages"),
        ({"prompt": " "}, "column 'prompt'"),
        ({"chosen": [user("other"), ANSWERED], "rejected": [user("other"), bot("3")]}, "do not contain the prompt"),
        ({"chosen": [ASKED, ANSWERED], "rejected": [ASKED]}, "column 'rejected': a completion must begin and end"),
        ({"chosen": [ASKED, ANSWERED], "rejected": [ASKED, user("3")]}, "found user after the prompt"),
        ({"chosen": [ANSWERED, user("more")]}, "found assistant, user after the prompt"),
    ],
)
def test_a_pair_that_teaches_nothing_is_named_by_row(change: Row, said: str) -> None:
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    message = refused(pairs, good, {**good, **change})
    assert message.startswith("file.jsonl, line 2")
    assert said in message


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "2", "rejected": "3"}, "data.prompt_column"),
        ({"chosen": [ANSWERED], "rejected": [bot("3")]}, "there is no prompt"),
        ({"chosen": [user("a"), ANSWERED], "rejected": [user("b"), ANSWERED]}, "there is no prompt"),
        ({"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: 3"}, "its text is empty"),
    ],
)
def test_a_pair_without_a_prompt_or_an_answer_is_refused(row: Row, said: str) -> None:
    assert re.search(rf"file\.jsonl, line 1.*{said}", refused(pairs, row))


# Ratings


@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), (1.0, 0.0), ("true", "false"), (" True", "FALSE"), ("1", "0")]
)
def test_a_rating_is_a_truth(good: Any, bad: Any) -> None:
    rows = [{"prompt": "1+1=", "completion": "2", "label": good}, {"prompt": "1+1=", "completion": "3", "label": bad}]
    records, description = rated(*rows)
    assert records[0] == Rated([ASKED], [ANSWERED], True, "file.jsonl, line 1")
    assert records[1:] == [Rated([ASKED], [bot("3")], False, "file.jsonl, line 2")]
    assert description == "rated (columns prompt, completion, label)"


@pytest.mark.parametrize("label", [2, -1, 0.5, "yes", "", None, [True]])
def test_anything_else_is_refused_by_row(label: Any) -> None:
    row = {"prompt": "1+1=", "completion": "2", "label": True}
    assert refused(rated, row, {**row, "label": label}).startswith("file.jsonl, line 2: column 'label'")


def test_a_pair_is_one_good_and_one_bad_answer() -> None:
    records, description = rated({"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    assert records == [
        Rated([ASKED], [ANSWERED], True, "file.jsonl, line 1"),
        Rated([ASKED], [bot("3")], False, "file.jsonl, line 1"),
    ]
    assert description == "preference (columns prompt, chosen, rejected)"


@pytest.mark.parametrize(("label", "missing"), [(True, "false"), (False, "true")])
def test_ratings_of_one_kind_are_refused_as_a_whole(label: bool, missing: str) -> None:
    records, _ = rated(*[{"prompt": "p", "completion": "c", "thumb": label}] * 3, rating_column="thumb")
    with pytest.raises(ConfigError) as error:
        check_ratings(records)
    message = str(error.value)
    for part in ("file.jsonl, line 1 to file.jsonl, line 3", "all 3 labels", f"label {missing}"):
        assert part in message


def test_the_kinds_may_come_from_different_files() -> None:
    good, _ = rated({"prompt": "p", "completion": "c", "label": True})
    bad, _ = rated({"prompt": "p", "completion": "c", "label": False})
    check_ratings(good + bad)


# Steps


def test_steps_have_labels() -> None:
    row = {"prompt": "1+1=", "completions": ["one and one", "2"], "labels": [True, 0.25]}
    records, description = steps(row)
    assert records == [StepRated([ASKED], ["one and one", "2"], [1.0, 0.25], "file.jsonl, line 1")]
    assert description == "steps (columns prompt, completions, labels)"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [True]}, "2 steps have 1 labels"),
        ({"labels": [True, 2]}, "label 2 must be"),
        ({"labels": [True, float("nan")]}, "label 2 must be"),
        ({"labels": [True, None]}, "label 2 must be"),
        ({"labels": ["true", True]}, "label 1 must be"),
        ({"labels": True}, "column 'labels' must be a non-empty list"),
        ({"completions": []}, "column 'completions' must be a non-empty list"),
        ({"completions": ["a", " "]}, "step 2 must be non-empty text"),
        ({"completions": ["a", 3]}, "step 2 must be non-empty text"),
        ({"prompt": ""}, "column 'prompt'"),
    ],
)
def test_broken_steps_are_named_by_row(change: Row, said: str) -> None:
    good = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}
    message = refused(steps, good, {**good, **change})
    assert message.startswith("file.jsonl, line 2: ")
    assert said in message


# Tools


@pytest.mark.parametrize(("reader", "row"), PLAIN)
def test_the_tools_of_a_row_go_with_its_records(reader: Callable[..., Any], row: Row) -> None:
    records, _ = reader({**row, "tools": TOOLS})
    assert [record.tools for record in records] == [TOOLS] * len(records)


def test_answers_may_be_calls() -> None:
    (talk,), _ = conversations({"messages": TOOL_TALK})
    assert talk.messages == TOOL_TALK
    (pair,), _ = pairs({"prompt": "1+1=", "chosen": [calling(a=1)], "rejected": [calling(a=2)]})
    assert (pair.chosen, pair.rejected) == ([calling(a=1)], [calling(a=2)])
    same = {"prompt": "1+1=", "chosen": [calling(a=1)], "rejected": [calling(a=1)]}
    assert "chosen and rejected are the same" in refused(pairs, same)
