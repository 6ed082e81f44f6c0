"""Texts and numbers of the tokens of a transcript."""

from itertools import groupby
from typing import Any

from torch import Tensor

from trueline.data.pieces import LONGEST, Pieces
from trueline.data.transcripts import packed
from trueline.data.types import Sample, is_filled

MOST_TOKENS = 512  # of a sequence, from the first that was sampled


def token_rows(samples: list[Sample], pieces: Pieces) -> list[dict[str, Any]]:
    """Return a row for each sequence of an episode."""
    return [token_row(sample, pieces) for sample in samples]


def token_row(sample: Sample, pieces: Pieces) -> dict[str, Any]:
    """Return texts and numbers of a sequence's tokens behind its prompt, and who wrote them.

    `sampled` counts: so many tokens of the policy, so many that were inserted, and so on.
    """
    first = int(sample.mask.nonzero()[0])
    shown = slice(first, first + MOST_TOKENS)
    left_out = sample.length() - first - MOST_TOKENS
    return {
        "text": texts(sample, first, pieces),
        "sampled": [len(list(turn)) for _, turn in groupby(sample.mask[shown].tolist())],
        **{name: packed(values[shown].numpy()) for name, values in numbers(sample).items()},
        **({"left_out": left_out} if left_out > 0 else {}),
    }


def texts(sample: Sample, first: int, pieces: Pieces) -> list[str]:
    """Return the text of each token; the policy and others never share a character."""
    ahead = slice(first, first + MOST_TOKENS + LONGEST)  # what is cut off may end a character
    marked = zip(sample.tokens[ahead].tolist(), sample.mask[ahead].tolist(), strict=True)
    turns = [[token for token, _ in turn] for _, turn in groupby(marked, key=lambda one: one[1])]
    return [text for turn in turns for text in pieces.of(turn)][:MOST_TOKENS]


def numbers(sample: Sample) -> dict[str, Tensor]:
    """Return what is known of each token, [T] each."""
    known = {"logprob": sample.rollout_logprobs, "advantage": sample.advantages}
    if sample.old_logprobs is not sample.rollout_logprobs:  # the trainer has looked for itself
        known["log_ratio"] = sample.old_logprobs - sample.rollout_logprobs
    if is_filled(sample, "entropy"):
        known["entropy"] = sample.entropy
    return known
