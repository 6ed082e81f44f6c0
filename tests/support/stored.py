"""Samples by reference, made from samples of a test."""

import torch

from trueline.data.types import Sample, is_filled
from trueline.rl.step import ALL_FIELDS
from trueline.runtime.actors import Stored
from trueline.training.samples import Fields, SampleBlock, SampleNumbers, StoredSamples, families_of


def store_samples(samples: list[Sample]) -> StoredSamples:
    """In one block, each an episode of its own unless it says so."""
    rows = [
        SampleNumbers(
            one.length(),
            one.sampled_tokens(),
            one.group,
            number if one.episode is None else one.episode,
            one.version,
            one.task_reward,
            one.baseline,
            one.truncated,
            reward=one.reward,
            filtered=one.filtered,
            taught=one.taught,
            label=one.label,
            weight=one.weight,
            kin=kin,
            observed=one.observed_tokens(),
            role=one.role,
        )
        for number, (one, kin) in enumerate(zip(samples, families_of(samples), strict=True))
    ]
    names = ["tokens", "mask", *(name for name in ALL_FIELDS if is_filled(samples[0], name))]
    names += [name for name in ("advantages", "returns") if is_filled(samples[0], name)]
    arrays = {name: torch.cat([getattr(one, name) for one in samples]).numpy() for name in names}
    numbers = list(range(len(rows)))
    block = SampleBlock(tuple(names), tuple(numbers), Stored(arrays))
    return StoredSamples(numbers, rows, Fields([row.length for row in rows], [block]))
