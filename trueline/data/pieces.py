"""Texts of single tokens that make up the text when they are joined, also where a character takes several tokens."""

from collections.abc import Sequence
from typing import Any

UNKNOWN = "\ufffd"  # what decoders write for half a character
LONGEST = 16  # tokens that are tried as one character; what is none by then is not text


class Pieces:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Decoders treat the first token of a text in ways of their own: none of those asked for comes first.
        self.before: list[int] = list(tokenizer("a", add_special_tokens=False)["input_ids"])[:1]
        self.skipped = len(self._decoded([]))
        self.known: dict[int, str] = {}

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; that of a character in several tokens stands at the last of them."""
        found: list[str] = []
        waiting: list[int] = []  # that have no text yet
        for place, token in enumerate(tokens):
            waiting.append(token)
            text = self._text(waiting)
            if text.endswith(UNKNOWN) and len(waiting) < LONGEST and place < len(tokens) - 1:
                found.append("")
                continue
            alone = self._text(waiting[:-1]) if len(waiting) > 1 else ""
            if alone and text == alone + self._text([token]):  # what came before was no part of a character
                found[-1], text = alone, self._text([token])
            found.append(text)
            waiting = []
        return found

    def _text(self, tokens: list[int]) -> str:
        if len(tokens) > 1:
            return self._decoded(tokens)[self.skipped :]
        if tokens[0] not in self.known:
            self.known[tokens[0]] = self._decoded(tokens)[self.skipped :]
        return self.known[tokens[0]]

    def _decoded(self, tokens: list[int]) -> str:
        given = [*self.before, *tokens]
        return str(self.tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False))
