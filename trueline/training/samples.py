"""Samples by reference: their arrays stay in the object store, and each rank fetches those that it trains on."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueline.algorithms.advantages import has_teacher, needs
from trueline.config.algorithm import WHOLE_VOCABULARY
from trueline.config.model import reads_experts
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.data.batching import find_families
from trueline.data.pictures import Picture
from trueline.data.types import NO_TARGET, PICTURES, TOKEN_FIELDS, Kin, Sample, Whose
from trueline.models.loading import ModelFacts
from trueline.runtime.actors import Stored

Arrays = dict[str, np.ndarray]  # [sum of lengths, ...] each
IDS, MASK, NUMBER = 4, 1, 4  # bytes of a token: its id, whether it was sampled, and any number of it
TEXT = 4  # bytes of a token in transcripts, which most tokens do not take
EXPERTS = 8  # of a token in a layer, one byte each; few mixtures choose more


@dataclass(slots=True)
class SampleNumbers:
    """A sample as the controller knows it: everything but its tokens."""

    length: int
    sampled: int  # tokens that the policy sampled
    group: int
    episode: int  # in the step
    version: int  # of the oldest sampled token
    task_reward: float
    baseline: float
    truncated: bool
    reward: float = 0.0  # after shaping and KL
    filtered: bool = False  # not in the loss
    taught: bool = True
    label: float = 0.0
    weight: float = 0.0
    kin: Kin = Kin()  # its family is a number within the group
    observed: int = 0  # tokens that the environment answered
    parts: dict[str, float] = field(default_factory=dict)  # each reward, by name; without one that the policy made fail
    role: str = ""

    def sampled_tokens(self) -> int:
        return self.sampled

    def observed_tokens(self) -> int:
        return self.observed

    def whose(self) -> Whose:
        return self.episode, self.role


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Arrays of some samples, one after the other in the object store."""

    names: tuple[str, ...]
    samples: tuple[int, ...]  # their numbers in the step
    arrays: Stored[Any]  # Arrays, or the pictures of each
    lengths: tuple[int, ...] = ()  # of sequences that end like these samples, if the arrays are of such


@dataclass(slots=True)
class Fields:
    """Where each field of a step's samples lies; of two blocks with the same field, the later one counts."""

    lengths: list[int]  # of every sample of the step, by which blocks are divided
    blocks: list[SampleBlock]
    same: dict[str, str] = field(default_factory=dict)  # fields that are another one, e.g. old log-probs
    found: dict[str, dict[int, Any]] = field(default_factory=dict)  # what this process has fetched

    def __reduce__(self) -> tuple[object, ...]:
        return Fields, (self.lengths, self.blocks, self.same)

    def names(self) -> set[str]:
        return {*self.same, *(name for block in self.blocks for name in block.names)}

    def part(self, name: str, number: int) -> Any:
        """Return a field of one sample; its block is fetched the first time."""
        name = self.same.get(name, name)
        if number not in self.found.get(name, ()):
            block = next(one for one in reversed(self.blocks) if name in one.names and number in one.samples)
            self._open(block)
        return self.found[name][number]

    def pictures(self, number: int) -> tuple[Picture, ...]:
        shown = any(PICTURES in block.names and number in block.samples for block in self.blocks)
        return self.part(PICTURES, number) if shown else ()

    def _open(self, block: SampleBlock) -> None:
        lengths = block.lengths or [self.lengths[number] for number in block.samples]
        later = self.blocks[next(at for at, one in enumerate(self.blocks) if one is block) + 1 :]
        for name, array in block.arrays.fetch().items():
            parts = array if name == PICTURES else np.split(array, np.cumsum(lengths)[:-1])
            newer = {number for one in later if name in one.names for number in one.samples}
            self.found.setdefault(name, {}).update(
                (number, part if name == PICTURES else last_rows(part, self.lengths[number]))
                for number, part in zip(block.samples, parts, strict=True)
                if number not in newer
            )

    def add(self, block: SampleBlock) -> None:
        self.blocks.append(block)
        for name in block.names:
            self.same.pop(name, None)
            self.found.pop(name, None)

    def only(self, numbers: set[int], names: Sequence[str]) -> "Fields":
        """Return where these fields of these samples lie: every reference costs time to send."""
        kept = [one for one in self.blocks if not (set(names).isdisjoint(one.names) or numbers.isdisjoint(one.samples))]
        return Fields(self.lengths, kept, self.same)


def last_rows(array: np.ndarray, count: int) -> np.ndarray:
    """Return so many rows from the end, behind NO_TARGET where there are fewer."""
    missing = max(count - len(array), 0)
    if not missing:
        return array[len(array) - count :]
    return np.concatenate([np.full((missing, *array.shape[1:]), NO_TARGET, array.dtype), array])


@dataclass(slots=True)
class StoredSamples:
    """Some samples of a step, as the controller and rollout workers know them."""

    numbers: list[int]  # in the step
    rows: list[SampleNumbers]
    fields: Fields  # of all samples of the step

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, name: str, at: int) -> np.ndarray:
        return self.fields.part(name, self.numbers[at])

    def add(self, block: SampleBlock) -> None:
        """Add fields that a later stage has computed; they replace those of the same name."""
        self.fields.add(block)

    def subset(self, places: Iterable[int]) -> "StoredSamples":
        chosen = list(places)
        return StoredSamples([self.numbers[at] for at in chosen], [self.rows[at] for at in chosen], self.fields)

    def for_rank(self, places: Iterable[int], *, experts: bool, shares: bool = False) -> "RankSamples":
        """Return what a rank needs to read the samples at these places."""
        names = [PICTURES, *(name for name in TOKEN_FIELDS if experts or name != "experts")]
        return RankSamples(
            np.array(self.numbers),
            np.array([row.length for row in self.rows]),
            np.array([row.weight for row in self.rows]),
            np.array([row.label for row in self.rows]),
            self.fields.only({self.numbers[at] for at in places}, names),
            shares,
        )


@dataclass(frozen=True, slots=True)
class RankSamples:
    """All samples of a minibatch in numbers, and where those of one rank lie."""

    numbers: np.ndarray  # [B], in the step
    lengths: np.ndarray  # [B]
    weights: np.ndarray  # [B]
    labels: np.ndarray  # [B]
    fields: Fields
    shares_prefixes: bool = False

    def names(self) -> list[str]:
        """Return the fields that losses read."""
        known = self.fields.names()
        return [name for name in TOKEN_FIELDS if name in known]

    def part(self, name: str, at: int) -> np.ndarray:
        found: np.ndarray = self.fields.part(name, int(self.numbers[at]))
        return found

    def pictures_of(self, at: int) -> tuple[Picture, ...]:
        return self.fields.pictures(int(self.numbers[at]))


Samples = Sequence[Sample] | StoredSamples


def lengths_of(samples: Samples) -> list[int]:
    rows = samples.rows if isinstance(samples, StoredSamples) else samples
    return [row.length if isinstance(row, SampleNumbers) else row.length() for row in rows]


def has_pictures(samples: Samples) -> bool:
    if isinstance(samples, StoredSamples):
        return PICTURES in samples.fields.names()
    return any(sample.pictures for sample in samples)


def families_of(samples: Samples) -> list[Kin]:
    """Return which samples begin alike; of those by reference, the rollout worker has compared a group's."""
    if isinstance(samples, StoredSamples):
        numbers: dict[tuple[int, int], int] = {}
        keys = [(row.group, row.kin.family) for row in samples.rows]
        families = [numbers.setdefault(key, len(numbers)) for key in keys]
        return [Kin(family, row.kin.prefix) for family, row in zip(families, samples.rows, strict=True)]
    return find_families([sample.tokens.numpy() for sample in samples])


def sampled_token_bytes(config: RLConfig, facts: ModelFacts) -> int:
    """Return the bytes of a token that waits to be trained: with log-prob, reward, text and experts."""
    experts = EXPERTS * facts.layers if reads_experts(config.training) else 0
    return IDS + MASK + 2 * NUMBER + TEXT + experts


def trained_token_bytes(config: RLConfig) -> int:
    """Return the bytes that models and advantages add to a token of the step in training."""
    algorithm, wanted = config.algorithm, needs(config.algorithm)
    added = {
        "advantages": 1,
        "old_logprobs": int(algorithm.old_logprobs == "recompute"),
        "ref_logprobs": int(algorithm.needs_reference()),
        "teacher_logprobs": int(has_teacher(algorithm)),
        "targets": 2 * (algorithm.distillation.top_k or WHOLE_VOCABULARY) + 1
        if algorithm.distillation.coefficient
        else 0,
        "the teacher's tokens": int(algorithm.distillation.reads_more()),
        "values and returns": 2 * ("critic" in wanted),
        "entropy": int(config.monitoring.tokens or algorithm.needs_entropy()),
        "squares": int("squares" in wanted),
    }
    return NUMBER * sum(added.values())


def sample_bytes(config: RLConfig, rollout: ResolvedRollout, facts: ModelFacts) -> int:
    """Estimate the bytes of all samples at a time: those of each step under way, and what training adds to one."""
    tokens = config.prompts_per_step * config.algorithm.group_size * rollout.longest()
    steps = math.ceil(1 + rollout.extra_share())
    return tokens * (steps * sampled_token_bytes(config, facts) + trained_token_bytes(config))
