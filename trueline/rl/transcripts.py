"""Which episodes of a step are written to transcripts.jsonl, and the texts and numbers of their tokens."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

from trueline.data.pictures import Picture, picture_file, thumbnail
from trueline.data.pieces import LONGEST, Pieces
from trueline.data.types import Sample, is_filled
from trueline.monitoring.transcripts import pack_numbers
from trueline.rollout.summary import Episode, role_of

PAIR = 2  # groups of a step: one whose rewards differ most, one by chance
HELD_OUT = 3  # completions of an evaluation


def group_count(wanted: int, group_size: int, step: int, last_step: int) -> int:
    """Return how many groups a step writes, so that `wanted` is the mean number of transcripts of a step.

    Where groups are too large for that, some steps write two groups and others none; the first and the last write.
    """
    if wanted // group_size >= PAIR or not wanted:
        return wanted // group_size
    share = wanted / (PAIR * group_size)
    due = math.ceil(step * share) > math.ceil((step - 1) * share)
    return PAIR if due or step == last_step else 0


def chosen_episodes(trajectories: Sequence[Episode], count: int, seed: list[int]) -> list[int]:
    """Choose so many groups of a step, and return the places of their episodes.

    The first group is the one whose rewards differ most; the others are drawn, by a seed that makes it repeatable.
    """
    groups: dict[int, list[int]] = {}
    for place, one in enumerate(trajectories):
        groups.setdefault(one.group, []).append(place)
    widest = max(groups.values(), key=lambda places: spread([trajectories[place] for place in places]))
    others = [places for places in groups.values() if places is not widest]
    drawn = np.random.default_rng(seed).permutation(len(others))
    return [place for places in [widest, *(others[at] for at in drawn)][:count] for place in places]


def spread(group: Sequence[Episode]) -> float:
    """Return the variance of a group's rewards."""
    rewards = [one.reward for one in group if one.reward is not None]
    mean = fmean(rewards or [0.0])
    return sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards), 1)


def held_out_count(samples: int) -> int:
    """Return how many completions of an evaluation are written: all of the first prompt, of more where it has few."""
    return math.ceil(HELD_OUT / samples) * samples


def name_pictures(transcript: dict[str, Any], pictures: Iterable[Picture], files: dict[str, bytes]) -> dict[str, Any]:
    """Return a transcript that names thumbnails of its pictures; their files are added to `files`."""
    small = [*map(thumbnail, pictures)]
    files |= {picture_file(one): one.data for one in small}
    return transcript | ({"images": [*map(picture_file, small)]} if small else {})


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
        **role_of(sample),
        "text": texts(sample, first, pieces),
        "sampled": [len(list(turn)) for _, turn in groupby(sample.mask[shown].tolist())],
        **{name: pack_numbers(values[shown].numpy()) for name, values in numbers(sample).items()},
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
