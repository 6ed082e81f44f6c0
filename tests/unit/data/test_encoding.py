import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS, calling
from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat
from trueline.data.encoding import (
    Encodings,
    encode_conversations,
    encode_pairs,
    encode_rated,
    encode_steps,
    mismatched_rows,
)
from trueline.data.formats import Conversation, Document, Pair, Rated, StepRated
from trueline.data.messages import Message
from trueline.data.types import Sample

CHATML = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
NONE = {"truncated": 0, "dropped": 0}


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(tokenizer, use_template=False)


@pytest.fixture
def templated(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHATML
    return ChatFormat(own, use_template=True)


def user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def bot(content: str) -> list[Message]:
    return [{"role": "assistant", "content": content}]


def texts(chat: ChatFormat, samples: list[Sample]) -> list[str]:
    return [chat.tokenizer.decode(sample.tokens) for sample in samples]


def learnt(chat: ChatFormat, samples: list[Sample]) -> list[str]:
    return [chat.tokenizer.decode(sample.tokens[sample.mask]) for sample in samples]


TALKS = [
    Conversation([*user("1+1="), *bot("2")], "f, line 1"),
    Conversation([*user("1+1="), *bot("2"), *user("+1="), *bot("3")], "f, line 2"),
]


def test_conversations_become_samples(chat: ChatFormat) -> None:
    encodings = encode_conversations(list(TALKS), chat, 20, "all", "error")
    assert texts(chat, encodings.samples) == ["1+1=2</s>", "1+1=2</s>", "1+1=\n2\n+1=3</s>"]
    assert learnt(chat, encodings.samples) == ["2</s>", "2</s>", "3</s>"]
    assert encodings.counts == {"rows": 2, **NONE}
    assert [(sample.tokens.dtype, sample.mask.dtype) for sample in encodings.samples] == [(torch.int64, torch.bool)] * 3


def test_messages_at_the_ends_that_are_not_learnt_are_counted(templated: ChatFormat) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    talks = [[asked, said], [asked, said, asked], [said, asked, said]]
    records = [Conversation(talk, f"f, line {number}") for number, talk in enumerate(talks, 1)]
    counts = encode_conversations(list(records), templated, 99, "all", "error").counts
    words = ("whose last message has no reply", "that begin with the assistant")
    assert counts == {"rows": 3, **NONE, **dict.fromkeys(words, 1)}


def test_only_last_turns(templated: ChatFormat) -> None:
    samples = encode_conversations(list(TALKS), templated, 99, "last", "error").samples
    assert learnt(templated, samples) == ["2</s>", "3</s>"]
    every = encode_conversations(list(TALKS), templated, 99, "all", "error").samples
    assert learnt(templated, every) == ["2</s>", "2</s>3</s>"]


def test_documents_are_learnt_but_for_their_first_token(chat: ChatFormat) -> None:
    encodings = encode_conversations([Document("abc", "f, line 1"), TALKS[0]], chat, 20, "all", "error")
    assert texts(chat, encodings.samples) == ["abc</s>", "1+1=2</s>"]
    assert learnt(chat, encodings.samples) == ["bc</s>", "2</s>"]


def test_a_record_without_a_turn_to_learn_is_refused_by_row(chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"f, line 3: no assistant message"):
        encode_conversations([Conversation(user("q"), "f, line 3")], chat, 20, "all", "error")


def test_what_the_template_refuses_is_named_by_row(templated: ChatFormat) -> None:
    templated.tokenizer.chat_template = "{{ raise_exception('turns must alternate') }}"
    with pytest.raises(ConfigError, match=r"^f, line 1: .*turns must alternate"):
        encode_conversations(list(TALKS), templated, 20, "all", "error")
    with pytest.raises(ConfigError, match=r"^f, line 7: .*turns must alternate"):
        encode_steps([StepRated(user("q"), ["a"], [1.0], "f, line 7")], templated, 20, "error", "\n")


# Too long


def encode_long(chat: ChatFormat, max_tokens: int, policy: Any) -> Encodings:
    """6, 6 and 12 tokens."""
    return encode_conversations(list(TALKS), chat, max_tokens, "all", policy)


def test_a_row_that_is_too_long_is_named(chat: ChatFormat) -> None:
    assert len(encode_long(chat, 12, "error").samples) == 3
    with pytest.raises(ConfigError, match=r"f, line 2 has 12 tokens, more than max_tokens=11: .*data\.too_long"):
        encode_long(chat, 11, "error")


def test_a_long_row_is_cut_on_the_right(chat: ChatFormat) -> None:
    encodings = encode_long(chat, 11, "truncate")
    assert learnt(chat, encodings.samples) == ["2</s>", "2</s>", "3"]
    assert encodings.counts == {"rows": 2, "truncated": 1, "dropped": 0}
    with pytest.raises(ConfigError, match=r"f, line 2: its first max_tokens=10 tokens contain none to learn"):
        encode_long(chat, 10, "truncate")


def test_a_long_row_is_dropped(chat: ChatFormat) -> None:
    encodings = encode_long(chat, 11, "drop")
    assert texts(chat, encodings.samples) == ["1+1=2</s>", "1+1=2</s>"]
    assert encodings.counts == {"rows": 2, "truncated": 0, "dropped": 1}
    with pytest.raises(ConfigError, match=r"dropped all 2 rows: raise max_tokens=3"):
        encode_long(chat, 3, "drop")


# Pairs


def pair(chosen: str, rejected: str, line: int = 1, margin: float = 0.0) -> Pair:
    return Pair(user("1+1="), bot(chosen), bot(rejected), margin, f"f, line {line}")


def test_chosen_and_rejected_stand_side_by_side(chat: ChatFormat) -> None:
    encodings = encode_pairs([pair("2", "3", margin=0.5), pair("two", "no", 2)], chat, 20, "error")
    assert texts(chat, encodings.samples) == ["1+1=2</s>", "1+1=3</s>", "1+1=two</s>", "1+1=no</s>"]
    assert learnt(chat, encodings.samples) == ["2</s>", "3</s>", "two</s>", "no</s>"]
    assert [sample.label for sample in encodings.samples] == [0.5, 0.5, 0.0, 0.0]
    assert encodings.counts == {"rows": 2, **NONE}


def test_answers_end_with_the_end_token(chat: ChatFormat, templated: ChatFormat) -> None:
    for format in (chat, templated):
        for sample in encode_pairs([pair("2", "3")], format, 99, "error").samples:
            assert sample.tokens[-1] == format.tokenizer.eos_token_id


def test_a_pair_goes_as_a_whole(chat: ChatFormat) -> None:
    encodings = encode_pairs([pair("2", "3333"), pair("2", "3", 2), pair("2222", "3333", 3)], chat, 6, "drop")
    assert texts(chat, encodings.samples) == ["1+1=2</s>", "1+1=3</s>"]
    assert encodings.counts == {"rows": 3, "truncated": 0, "dropped": 2}


def test_a_pair_that_differs_only_beyond_the_limit_teaches_nothing(chat: ChatFormat) -> None:
    assert encode_pairs([pair("223", "224")], chat, 7, "truncate").counts["truncated"] == 2
    with pytest.raises(ConfigError, match=r"f, line 1: chosen and rejected have the same tokens"):
        encode_pairs([pair("223", "224")], chat, 6, "truncate")


def test_a_pair_that_the_template_makes_equal_teaches_nothing(templated: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"f, line 1: chosen and rejected have the same tokens"):
        encode_pairs([pair("2", "2 ")], templated, 99, "error")
    encodings = encode_pairs([pair("2", "2 "), pair("2", "3")], templated, 99, "drop")
    assert encodings.counts == {"rows": 2, "truncated": 0, "dropped": 1}


def test_an_answer_of_several_turns_is_learnt_in_all_of_them(chat: ChatFormat, templated: ChatFormat) -> None:
    record = Pair(user("q"), [*bot("a"), *user("r"), *bot("b")], bot("c"), 0.0, "f, line 1")
    assert learnt(templated, encode_pairs([record], templated, 99, "error").samples) == ["a</s>b</s>", "c</s>"]
    with pytest.raises(ConfigError, match=r"f, line 1: a completion of 3 messages becomes 2 sequences"):
        encode_pairs([record], chat, 99, "error")


# Ratings


def companions(encodings: Encodings) -> list[Sample]:
    return [sample.companion for sample in encodings.samples if sample.companion is not None]


def rating(prompt: str, answer: str, desirable: bool = True, line: int = 1) -> Rated:
    return Rated(user(prompt), bot(answer), desirable, f"f, line {line}")


def test_ratings_become_labels_and_mismatched_samples(chat: ChatFormat) -> None:
    rows = [rating("p", "a"), rating("q", "b", False), rating("r", "c"), rating("s", "d"), rating("t", "e")]
    encodings = encode_rated(rows, chat, 9, "error", block=2)
    assert texts(chat, encodings.samples) == ["pa</s>", "qb</s>", "rc</s>", "sd</s>", "te</s>"]
    assert [sample.label for sample in encodings.samples] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert texts(chat, companions(encodings)) == ["pb</s>", "qa</s>", "rd</s>", "sc</s>", "td</s>"]
    assert learnt(chat, companions(encodings)) == ["b</s>", "a</s>", "d</s>", "c</s>", "d</s>"]
    assert encodings.counts == {"rows": 5, **NONE, "mismatched_truncated": 0}


@pytest.mark.parametrize(
    ("prompts", "block", "partners"),
    [
        ("abcdef", 3, [2, 0, 1, 5, 3, 4]),
        ("abcdef", 6, [5, 0, 1, 2, 3, 4]),
        ("abcdef", 99, [5, 0, 1, 2, 3, 4]),
        ("abcdef", 1, [5, 0, 1, 2, 3, 4]),
        ("aabbcc", 6, [5, 5, 1, 1, 3, 3]),
        ("aabbcc", 2, [5, 5, 1, 1, 3, 3]),
        ("aaab", 4, [3, 3, 3, 2]),
        ("baaa", 4, [3, 0, 0, 0]),
        ("abaa", 2, [1, 0, 1, 1]),
    ],
)
def test_a_partner_is_the_row_before_or_the_next_with_another_prompt(
    prompts: str, block: int, partners: list[int]
) -> None:
    rows = [rating(prompt, "x") for prompt in prompts]
    assert mismatched_rows(rows, block) == partners


@pytest.mark.parametrize("prompts", ["ab", "aab", "abaab", "abbbb", "bbbba", "aabbaabb"])
def test_the_nearest_other_prompt_before_a_row(prompts: str) -> None:
    def searched(row: int) -> int:
        places = [(row - steps) % len(prompts) for steps in range(len(prompts))]
        return next(place for place in places if prompts[place] != prompts[row])

    rows = [rating(prompt, "x") for prompt in prompts]
    assert mismatched_rows(rows, block=1) == [searched(row) for row in range(len(prompts))]


def test_prompts_that_are_all_the_same_are_refused(chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"f, line 1 to f, line 2: all 2 rows have the same prompt"):
        encode_rated([rating("p", "a"), rating("p", "b", False, line=2)], chat, 9, "error", block=2)


def test_dropped_ratings_take_no_part(chat: ChatFormat) -> None:
    rows = [rating("p", "a"), rating("q", "bbbb"), rating("r", "c", False)]
    encodings = encode_rated(rows, chat, 3, "drop", block=3)
    assert texts(chat, encodings.samples) == ["pa</s>", "rc</s>"]
    assert texts(chat, companions(encodings)) == ["pc</s>", "ra</s>"]
    assert encodings.counts == {"rows": 3, "truncated": 0, "dropped": 1, "mismatched_truncated": 0}


def test_a_foreign_answer_is_cut_where_no_row_is_too_long(chat: ChatFormat) -> None:
    encodings = encode_rated([rating("ppp", "a"), rating("q", "bbb", False)], chat, 5, "error", block=2)
    assert texts(chat, companions(encodings)) == ["pppbb", "qa</s>"]
    assert encodings.counts == {"rows": 2, **NONE, "mismatched_truncated": 1}


# Steps


STEPS = StepRated(user("q="), ["ab", "c"], [1.0, 0.25], "f, line 1")


@pytest.mark.parametrize(
    ("separator", "text", "mask", "labels"),
    [
        ("\n", "q=ab\nc\n", "0000101", [0, 0, 0, 0, 1, 0, 0.25]),
        ("", "q=abc", "00011", [0, 0, 0, 1, 0.25]),
        ("##", "q=ab##c##", "000001001", [0, 0, 0, 0, 0, 1, 0, 0, 0.25]),
    ],
)
def test_a_step_is_labelled_at_its_last_token(
    chat: ChatFormat, separator: str, text: str, mask: str, labels: list[float]
) -> None:
    (sample,) = encode_steps([STEPS], chat, 20, "error", separator).samples
    assert texts(chat, [sample]) == [text]
    assert sample.mask.tolist() == [flag == "1" for flag in mask]
    assert sample.step_labels.tolist() == labels
    assert sample.step_labels.dtype == torch.float32


def test_the_steps_follow_the_prompt_of_the_template(templated: ChatFormat) -> None:
    (sample,) = encode_steps([STEPS], templated, 99, "error", "\n").samples
    assert texts(templated, [sample]) == ["<s>user\nq=</s>\n<s>assistant\nab\nc\n"]


def test_steps_that_are_cut_keep_their_labels_aligned(chat: ChatFormat) -> None:
    encodings = encode_steps([STEPS], chat, 6, "truncate", "\n")
    (sample,) = encodings.samples
    assert sample.mask.tolist() == [False] * 4 + [True, False]
    assert sample.step_labels.tolist() == [0, 0, 0, 0, 1, 0]
    assert {what: count for what, count in encodings.counts.items() if count} == {"rows": 1, "truncated": 1}
    with pytest.raises(ConfigError, match=r"f, line 1: its first max_tokens=4 tokens"):
        encode_steps([STEPS], chat, 4, "truncate", "\n")
    short = StepRated(user("q"), ["a"], [0.0], "f, line 2")
    counts = encode_steps([STEPS, short], chat, 4, "drop", "\n").counts
    assert (counts["rows"], counts["truncated"], counts["dropped"]) == (2, 0, 1)


@pytest.mark.parametrize(
    "encode",
    [
        lambda chat: encode_pairs([pair("2", "3", 4)], chat, 5, "error"),
        lambda chat: encode_rated([rating("pppp", "a", line=4)], chat, 5, "error", block=1),
        lambda chat: encode_steps([StepRated(user("qqqq"), ["a"], [1.0], "f, line 4")], chat, 5, "error", "\n"),
    ],
)
def test_every_task_names_the_row_that_is_too_long(chat: ChatFormat, encode: Callable[[ChatFormat], Any]) -> None:
    with pytest.raises(ConfigError, match=r"f, line 4 has 6 tokens, more than max_tokens=5"):
        encode(chat)


# Tools


def test_every_task_shows_the_tools_of_a_row_and_learns_calls(templated: ChatFormat) -> None:
    """KTO's mismatched answers stand after the tools of the prompt that they are put to."""
    chat = templated
    chat.tokenizer.chat_template = TOOL_TEMPLATE
    asked, shown = TOOL_TALK[:1], "<tools>add;</s>\n<user>1+1=</s>\n<assistant>"
    one, two, other = [calling(a=1)], [calling(a=2)], bot("no")
    talks = encode_conversations([Conversation([*asked, *one], "f", TOOLS)], chat, 99, "all", "error")
    pairs = encode_pairs([Pair(asked, one, two, 0.0, "f", TOOLS)], chat, 99, "error")
    ratings = [Rated(asked, one, True, "f", TOOLS), Rated(user("q"), other, False, "f")]
    rated = encode_rated(ratings, chat, 99, "error", block=2)
    steps = encode_steps([StepRated(asked, ["ab"], [1.0], "f", TOOLS)], chat, 99, "error", "")
    first, second = '<call>add{"a": 1}</s>', '<call>add{"a": 2}</s>'
    assert texts(chat, talks.samples) == [shown + first]
    assert texts(chat, pairs.samples) == [shown + first, shown + second]
    assert learnt(chat, pairs.samples) == [first, second]
    assert texts(chat, rated.samples) == [shown + first, "<user>q</s>\n<assistant>no</s>"]
    assert texts(chat, companions(rated)) == [shown + "no</s>", "<user>q</s>\n<assistant>" + first]
    assert texts(chat, steps.samples) == [shown + "ab"]


def test_calls_that_cannot_be_shown_are_named_by_row(chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"^f, line 9: a message calls add"):
        encode_conversations([Conversation(TOOL_TALK, "f, line 9")], chat, 99, "all", "error")
