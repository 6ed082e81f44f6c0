"""Tokens as a person reads them: the text of each one, and a sample with its learned parts marked."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trueline.data.types import Sample

UNKNOWN = "\ufffd"  # what decoders return for a part of a character
LONGEST = 16  # most tokens that are tried as one character


class Pieces:
    """The text of single tokens; joined, they are the text, also if a character has several tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Decoders treat the first token of a text specially, so one comes before those that are decoded.
        self.before: list[int] = list(tokenizer("a", add_special_tokens=False)["input_ids"])[:1]
        self.skipped = len(self._decode([]))
        self.known: dict[int, str] = {}

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; a character in several tokens is at the last of them."""
        found: list[str] = []
        waiting: list[int] = []  # without text so far
        for place, token in enumerate(tokens):
            waiting.append(token)
            text = self._text(waiting)
            if text.endswith(UNKNOWN) and len(waiting) < LONGEST and place < len(tokens) - 1:
                found.append("")
                continue
            alone = self._text(waiting[:-1]) if len(waiting) > 1 else ""
            if alone and text == alone + self._text([token]):  # the tokens before are not part of a character
                found[-1], text = alone, self._text([token])
            found.append(text)
            waiting = []
        return found

    def _text(self, tokens: list[int]) -> str:
        if len(tokens) > 1:
            return self._decode(tokens)[self.skipped :]
        if tokens[0] not in self.known:
            self.known[tokens[0]] = self._decode(tokens)[self.skipped :]
        return self.known[tokens[0]]

    def _decode(self, tokens: list[int]) -> str:
        given = [*self.before, *tokens]
        return str(self.tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False))


COLORED = ("\x1b[7;32m", "\x1b[0m")  # reversed, green
BRACKETED = ("⟦", "⟧")


def render(sample: Sample, tokenizer: Any, color: bool) -> str:
    """Return a sample's text with its learned parts marked."""
    tokens, mask = sample.tokens.tolist(), sample.mask.tolist()
    opening, closing = COLORED if color else BRACKETED
    parts: list[str] = []
    end, before = 0, ""
    for learned, stretch in groupby(mask):
        end += len(list(stretch))
        # Decoded alone, a part may lose its leading space.
        text = str(tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        added, before = text[len(before) :], text
        parts.append(f"{opening}{added}{closing}" if learned else added)
    return f"{len(tokens)} tokens, {sum(mask)} learned\n{''.join(parts)}"
