"""Tokens as text: single ones, and samples with their learned parts marked."""

import copy
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.data.chat import ChatFormat
from trueline.data.encoding import encode_conversations
from trueline.data.formats import Conversation
from trueline.data.pieces import LONGEST, Pieces, render
from trueline.data.types import Sample
from trueline.demo.material import make_tokenizer


@pytest.fixture
def pieces() -> Pieces:
    return Pieces(make_tokenizer())  # a token is a byte


def test_a_character_stands_at_the_last_of_its_tokens(pieces: Pieces) -> None:
    tokens = pieces.tokenizer("aé\U0001f389b")["input_ids"]
    assert pieces.of(tokens) == ["a", "", "é", "", "", "", "\U0001f389", "b"]


def test_joined_they_are_the_text_also_of_bytes_that_are_none(pieces: Pieces) -> None:
    chance = random.Random(0)
    for _ in range(300):
        tokens = [chance.randrange(3, 259) for _ in range(40)]
        assert "".join(pieces.of(tokens)) == pieces.tokenizer.decode(tokens)


def test_what_never_becomes_a_character_is_not_waited_for(pieces: Pieces) -> None:
    (half, _) = pieces.tokenizer("é")["input_ids"]
    found = pieces.of([half] * (2 * LONGEST))
    assert found.count("") == 2 * (LONGEST - 2) and len("".join(found)) == 2 * LONGEST
    assert pieces.of([half]) == ["\ufffd"] and pieces.of([]) == []


def test_a_half_that_nothing_completes_keeps_its_place(pieces: Pieces) -> None:
    (half, _) = pieces.tokenizer("é")["input_ids"]
    assert pieces.of([half, *pieces.tokenizer("ab")["input_ids"]]) == ["\ufffd", "a", "b"]
    assert pieces.of([half, pieces.tokenizer.eos_token_id]) == ["\ufffd", "</s>"]


def test_special_tokens_are_shown(pieces: Pieces) -> None:
    assert pieces.of([*pieces.tokenizer("ab")["input_ids"], pieces.tokenizer.eos_token_id]) == ["a", "b", "</s>"]


def test_spaces_of_word_pieces_stay() -> None:
    """Decoders of this kind leave out the space that a text begins with."""
    vocabulary = {word: at for at, word in enumerate(["<unk>", "\u2581a", "\u2581the", "\u2581cat", "s"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.decode([2, 3, 4]) == "the cats"
    assert Pieces(fast).of([2, 3, 4]) == [" the", " cat", "s"]


MESSAGES = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+1="},
    {"role": "assistant", "content": "3 ✓"},
]


def test_learned_stretches_are_bracketed(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatFormat(tokenizer, use_template=False)
    samples = encode_conversations([Conversation(MESSAGES, "")], chat, 64, "all", "error").samples
    assert [render(sample, tokenizer, color=False) for sample in samples] == [
        "6 tokens, 2 learned\n1+1=⟦2</s>⟧",
        "16 tokens, 6 learned\n1+1=\n2\n+1=⟦3 ✓</s>⟧",
    ]


def test_learned_stretches_are_colored(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = torch.tensor(tokenizer("abcd")["input_ids"])
    sample = Sample(tokens, torch.tensor([False, True, False, True]))
    assert render(sample, tokenizer, color=True) == ("4 tokens, 2 learned\na\x1b[7;32mb\x1b[0mc\x1b[7;32md\x1b[0m")


def test_a_sample_without_anything_learned_is_plain(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = Sample(torch.tensor(tokenizer("ab")["input_ids"]), torch.tensor([False, False]))
    assert render(sample, tokenizer, color=False) == "2 tokens, 0 learned\nab"


def test_calls_and_tools_are_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TOOL_TEMPLATE
    talk = Conversation(TOOL_TALK[:2], "", TOOLS)
    (sample,) = encode_conversations([talk], ChatFormat(own, True), 99, "all", "error").samples
    assert '<tools>add;</s>\n<user>1+1=</s>\n<assistant>⟦<call>add{"a": 1, "b": 1}</s>⟧' in render(sample, own, False)
