"""A sample as a person can read it: its text, and which stretches are learnt."""

from itertools import groupby
from typing import Any

from trueline.data.types import Sample

COLORED = ("\x1b[7;32m", "\x1b[0m")  # reversed, green
BRACKETED = ("⟦", "⟧")


def render(sample: Sample, tokenizer: Any, color: bool) -> str:
    tokens, mask = sample.tokens.tolist(), sample.mask.tolist()
    opening, closing = COLORED if color else BRACKETED
    parts: list[str] = []
    end, before = 0, ""
    for learnt, stretch in groupby(mask):
        end += len(list(stretch))
        # Cut out of the whole text: a stretch that is decoded alone may lose the space in front of it.
        text = str(tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        added, before = text[len(before) :], text
        parts.append(f"{opening}{added}{closing}" if learnt else added)
    return f"{len(tokens)} tokens, {sum(mask)} learnt\n{''.join(parts)}"
