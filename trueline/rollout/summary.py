"""What leaves a rollout worker: numbers of each episode for the controller, arrays for ranks, texts for transcripts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from trueline.data.batching import find_families
from trueline.data.messages import content_of
from trueline.data.pictures import Picture, bare
from trueline.data.types import (
    PICTURES,
    Dialogue,
    Kin,
    Outcome,
    Sample,
    Trajectory,
    answered_places,
    is_filled,
    to_samples,
)
from trueline.environments.single_turn import reward_call
from trueline.runtime.actors import Stored

Arrays = dict[str, np.ndarray]
Transcript = dict[str, object]
CALL = "call"  # of an episode's reward, beside its transcript
REPEATED = 8  # tokens of a run that hardly occurs twice by chance
RANKS, STEP = ("tokens", "mask", "rollout_logprobs"), ("token_rewards",)  # fields for ranks, and for the step's worker


class Episode(Protocol):
    """What the controller reads of an episode."""

    group: int
    reward: float | None
    role_rewards: dict[str, float]
    outcome: Outcome
    truncated: bool
    cut_off: str
    limit: str
    error: str
    failed_reward: str
    metrics: dict[str, float]

    def sampled_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SequenceSummary:
    """One sampled sequence of an episode."""

    length: int
    sampled: int  # tokens
    version: int  # of the oldest sampled token
    observed: int = 0  # tokens that the environment answered
    kin: Kin = Kin()
    role: str = ""


@dataclass(slots=True)
class EpisodeSummary:
    """An episode without its tokens and texts."""

    group: int
    source: str
    reward: float | None
    baseline: float | None
    outcome: Outcome
    truncated: bool
    cut_off: str
    limit: str
    error: str
    failed_reward: str
    metrics: dict[str, float]
    sampled: int  # tokens
    sequences: list[SequenceSummary]  # that can be trained on
    newest: int = 0  # version of a sampled token
    version_sum: int = 0  # over sampled tokens
    repeated_share: float = 0.0
    has_experts: bool = False  # engines have reported them
    has_pictures: bool = False  # some of its sequences
    call: dict[str, Any] = field(default_factory=dict)  # of the reward, where the episode failed
    role_rewards: dict[str, float] = field(default_factory=dict)  # in the same order in all episodes

    def sampled_tokens(self) -> int:
        return self.sampled

    def oldest_version(self) -> int:
        return min(one.version for one in self.sequences)


@dataclass(frozen=True, slots=True)
class Parcels:
    """Where the rest of a group lies: arrays of its trainable sequences, and texts of the episodes with a reward."""

    ranks: Stored[Arrays]
    step: Stored[Arrays]
    experts: Stored[Arrays]  # empty where engines report none
    transcripts: Stored[list[Transcript]]
    pictures: Stored[dict[str, list[tuple[Picture, ...]]]]  # of each sequence; empty where there are none


class SampledGroup(list[EpisodeSummary]):
    """The episodes of a group; a rollout worker has kept the rest."""

    def __init__(self, episodes: Iterable[EpisodeSummary], parcels: Parcels) -> None:
        super().__init__(episodes)
        self.parcels = parcels

    def with_rewards(self) -> "SampledGroup":
        return SampledGroup((one for one in self if one.outcome.is_scored), self.parcels)


def summarise_group(group: Sequence[Trajectory]) -> list[EpisodeSummary]:
    """Summarise the episodes of a group, and note which of their sequences begin alike."""
    found = [summarise(one) for one in group]
    kin = iter(find_families([part.tokens for one in group if one.outcome.is_scored for part in one.sequences()]))
    for one in found:
        one.sequences = [replace(part, kin=next(kin)) for part in one.sequences]
    return found


def summarise(trajectory: Trajectory) -> EpisodeSummary:
    scored = trajectory.outcome.is_scored
    sequences = trajectory.sequences() if scored else []
    versions = np.concatenate([one.versions[one.mask] for one in sequences]) if sequences else np.zeros(0, np.int32)
    return EpisodeSummary(
        trajectory.group,
        trajectory.prompt.source,
        trajectory.reward,
        trajectory.baseline,
        trajectory.outcome,
        trajectory.truncated,
        trajectory.cut_off,
        trajectory.limit,
        trajectory.error,
        trajectory.failed_reward,
        trajectory.metrics,
        trajectory.sampled_tokens(),
        [summarise_sequence(one) for one in sequences],
        int(versions.max(initial=0)),
        int(versions.sum(dtype=np.int64)),
        repeated_share(sequences) if sequences else 0.0,
        bool(sequences) and len(sequences[0].experts) > 0,
        any(one.pictures for one in sequences),
        reward_call(trajectory.prompt, trajectory.reply, trajectory.talk) if trajectory.outcome.is_failure else {},
        trajectory.role_rewards,
    )


def summarise_sequence(one: Trajectory) -> SequenceSummary:
    answered = answered_places(torch.from_numpy(one.mask))
    sizes = len(one.tokens), int(one.mask.sum()), one.oldest_version(), int(answered.sum())
    return SequenceSummary(*sizes, role=one.role)


def repeated_share(sequences: Sequence[Trajectory]) -> float:
    """Return the share of an episode's runs of sampled tokens that stood in it before."""
    sampled = np.concatenate([one.tokens[one.mask] for one in sequences]).astype(np.uint64)
    count = len(sampled) - REPEATED + 1
    if count < 2:
        return 0.0
    runs = np.zeros(count, np.uint64)  # a hash of each, which may wrap around
    for place in range(REPEATED):
        runs = runs * np.uint64(1_000_003) + sampled[place : place + count]
    runs.sort()  # `np.unique` takes several times as long
    return float((runs[1:] == runs[:-1]).sum() / count)


def pack_group(group: Sequence[Trajectory]) -> tuple[Arrays, Arrays, Arrays]:
    """Return the arrays of a group's trainable sequences: for ranks, for the step's worker, and experts, if any."""
    samples = [sample for one in group if one.outcome.is_scored for sample in to_samples(one)]
    if not samples:
        return {}, {}, {}
    ranks = join_fields(samples, RANKS)
    ranks["tokens"] = ranks["tokens"].astype(np.int32)
    experts = join_fields(samples, ("experts",)) if is_filled(samples[0], "experts") else {}
    return ranks, join_fields(samples, STEP), experts


def pack_pictures(group: Sequence[Trajectory]) -> dict[str, list[tuple[Picture, ...]]]:
    """Return the pictures of a group's trainable sequences; those that several show are sent once."""
    found = [part.pictures for one in group if one.outcome.is_scored for part in one.sequences()]
    return {PICTURES: found} if any(found) else {}


def join_fields(samples: Sequence[Sample], names: Sequence[str]) -> Arrays:
    return {name: torch.cat([getattr(sample, name) for sample in samples]).numpy() for name in names}


def role_of(named: Dialogue | Sample) -> dict[str, str]:
    """Return the role of a conversation or sequence, as it is written."""
    return {"role": named.role} if named.role else {}


def transcript(trajectory: Trajectory, purpose: str) -> Transcript:
    several = trajectory.dialogues if len(trajectory.dialogues) > 1 or trajectory.role else []
    conversations = [
        {"number": number, **role_of(one), "prompt": bare(one.prompt), "turns": bare(one.completion)}
        for number, one in enumerate(several, start=1)
    ]
    return {
        "purpose": purpose,
        "group": trajectory.group,
        "prompt": content_of(trajectory.prompt.messages[-1]),
        "reply": trajectory.reply,
        "label": trajectory.prompt.label,
        "source": trajectory.prompt.source,
        "reward": trajectory.reward,
        "outcome": str(trajectory.outcome),
        **({"cut_off": trajectory.cut_off} if trajectory.cut_off else {}),
        **({"turns": trajectory.turns} if trajectory.turns else {}),
        **({"conversations": conversations} if conversations else {}),
        **trajectory.metrics,
    }


def repeated_call(trajectory: Trajectory) -> dict[str, Any] | None:
    """Return what asks for an episode's reward again; pictures would make it large."""
    prompt = trajectory.prompt
    return None if prompt.pictures else reward_call(prompt, trajectory.reply, trajectory.talk)
