"""Texts of single tokens: joined they are the text, whatever a tokenizer makes of characters and spaces."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trueline.data.pieces import LONGEST, Pieces
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
