"""The arithmetic over the tokens of a step: rollout workers do it, on samples that they fetch from the object store.

Every function takes the chat format of its process first.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from trueline.algorithms.advantages import assign_advantages, reads_reward
from trueline.algorithms.entries import is_own
from trueline.algorithms.importance_sampling import mismatch_metrics
from trueline.algorithms.reward_shaping import sequence_kl, shape_rewards
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.data.chat import ChatFormat
from trueline.data.pieces import Pieces
from trueline.data.types import PICTURES, Sample, is_filled
from trueline.rl.lessons import Lessons
from trueline.rl.metrics import Metrics, describe_models, excerpt
from trueline.rl.transcripts import name_pictures, token_rows
from trueline.rollout.evaluation import PART
from trueline.rollout.summary import CALL, RANKS, STEP, SampledGroup, Transcript
from trueline.runtime.actors import Stored
from trueline.training.samples import Arrays, Fields, SampleBlock, SampleNumbers, StoredSamples

ALL_FIELDS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "token_rewards")
FILLED = ("advantages", "returns")  # by estimators

# Arrays of the object store cannot be written, and nothing here writes them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def stored_samples(
    groups: Sequence[SampledGroup], averages: Mapping[str, float] = MappingProxyType({})
) -> StoredSamples:
    """Return the samples of a step, one for each sequence of its episodes; their arrays stay where they are.

    `averages` are the moving averages of rewards by role, which are baselines where no completion is greedy.
    """
    rows: list[SampleNumbers] = []
    blocks: list[SampleBlock] = []
    episode = 0
    for group in groups:
        first = len(rows)
        for one in group:
            assert one.reward is not None, f"an episode with outcome {one.outcome} has no reward"
            parts = {name.removeprefix(PART): value for name, value in one.metrics.items() if name.startswith(PART)}
            for part in one.sequences:
                reward = one.role_rewards.get(part.role, one.reward)
                baseline = averages.get(part.role, 0.0) if one.baseline is None else one.baseline
                known = (part.length, part.sampled, one.group, episode, part.version, reward, baseline, one.truncated)
                rows.append(SampleNumbers(*known, kin=part.kin, observed=part.observed, parts=parts, role=part.role))
            episode += 1
        numbers, parcels = tuple(range(first, len(rows))), group.parcels
        blocks += [SampleBlock(RANKS, numbers, parcels.ranks), SampleBlock(STEP, numbers, parcels.step)]
        if group[0].has_experts:
            blocks.append(SampleBlock(("experts",), numbers, parcels.experts))
        if any(one.has_pictures for one in group):
            blocks.append(SampleBlock((PICTURES,), numbers, parcels.pictures))
    return StoredSamples(list(range(len(rows))), rows, Fields([row.length for row in rows], blocks))


def open_samples(stored: StoredSamples, places: Sequence[int] | None = None, *, copy: bool = False) -> list[Sample]:
    """Return samples with every known field, all or those at some places; user functions may change copies."""
    known = stored.fields.names()
    names = [name for name in (*ALL_FIELDS, *FILLED, "entropy", "squares") if name in known]
    found = []
    for at in range(len(stored)) if places is None else places:
        row = stored.rows[at]

        def field(name: str, at: int = at) -> torch.Tensor:
            tensor = torch.from_numpy(stored.part(name, at))
            return tensor.clone() if copy else tensor

        sample = Sample(field("tokens"), field("mask"), row.group, row.episode, row.version, row.task_reward)
        sample.reward, sample.baseline, sample.truncated = row.reward, row.baseline, row.truncated
        sample.filtered, sample.taught, sample.role = row.filtered, row.taught, row.role
        for name in names:
            setattr(sample, name, field(name))
        if "old_logprobs" in stored.fields.same:
            sample.old_logprobs = sample.rollout_logprobs
        found.append(sample)
    return found


@dataclass(frozen=True, slots=True)
class Assessment:
    rewards: list[float]  # of each sample, shaped
    filtered: list[bool]
    example: tuple[list[int], list[bool]]  # tokens and mask of an excerpt that engines can score


def assess(
    chat: ChatFormat, stored: StoredSamples, config: RLConfig, rollout: ResolvedRollout, kl_coefficient: float
) -> tuple[Assessment, Arrays]:
    """Shape rewards and assign advantages; return numbers of the samples, and arrays."""
    algorithm = config.algorithm
    samples, rewards = open_samples(stored, copy=is_own(algorithm.advantage)), config.reward.named_parts()
    for sample, row in zip(samples, stored.rows, strict=True):
        sample.parts = [(part.weight, row.parts.get(name, 0.0)) for name, part in rewards.items()]
    shape_rewards(samples, algorithm, rollout.max_new_tokens, kl_coefficient)
    if not reads_reward(algorithm):  # nothing but a teacher
        for sample in samples:
            sample.filtered |= not sample.taught
    assign_advantages(samples, algorithm)
    names = [name for name in FILLED if is_filled(samples[0], name)]
    arrays = {name: torch.cat([getattr(one, name) for one in samples]).float().numpy() for name in names}
    example = excerpt(samples[0], rollout.longest())
    shaped, filtered = [one.reward for one in samples], [one.filtered for one in samples]
    return Assessment(shaped, filtered, (example.tokens.tolist(), example.mask.tolist())), arrays


def mismatch(chat: ChatFormat, stored: StoredSamples) -> Metrics:
    return mismatch_metrics(open_samples(stored))


def describe_tokens(chat: ChatFormat, stored: StoredSamples, config: RLConfig) -> tuple[Metrics, float | None]:
    """Return what a step's tokens say of its models, and the mean KL of a sequence where there is a reference."""
    samples = open_samples(stored)
    return describe_models(samples, config), sequence_kl(samples) if config.algorithm.kl.coefficient else None


def write_transcripts(
    chat: ChatFormat,
    stored: StoredSamples,
    episodes: Sequence[tuple[int, Stored[list[Transcript]], int]],
    with_tokens: bool,
    lessons: Lessons | None = None,
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the transcripts of episodes: each by its number, where its group's texts lie, and its place there.

    The second result has the files of the pictures that they name. The first that a teacher has read shows its prompt.
    """
    pieces, files = Pieces(chat.tokenizer) if with_tokens else None, dict[str, bytes]()
    rows: list[dict[str, Any]] = []
    for number, texts, at in episodes:
        own = [place for place, one in enumerate(stored.rows) if one.episode == number]
        shown = max((stored.fields.pictures(stored.numbers[place]) for place in own), key=len, default=())
        row = name_pictures({name: text for name, text in texts.fetch()[at].items() if name != CALL}, shown, files)
        if lessons is not None and not any("teacher_prompt" in earlier for earlier in rows):
            row |= lessons.prompt(chat, own)
        if pieces is not None:
            row["tokens"] = token_rows(open_samples(stored, own), pieces)
        rows.append(row)
    return rows, files


def add_assessment(stored: StoredSamples, found: Assessment, arrays: Stored[Arrays], *, critic: bool) -> None:
    """Record what `assess` has found."""
    for row, reward, filtered in zip(stored.rows, found.rewards, found.filtered, strict=True):
        row.reward, row.filtered = reward, filtered
    names = FILLED if critic else FILLED[:1]
    stored.add(SampleBlock(names, tuple(stored.numbers), arrays))


def freely_drawn(groups: list[SampledGroup]) -> bool:
    """Tell whether no reply was held to a format while it was sampled, which changes the odds of tokens."""
    return not any("agent/structured" in episode.metrics for group in groups for episode in group)


def places_by_episode(samples: StoredSamples) -> dict[int, list[int]]:
    """Return the places of each episode's samples."""
    places: dict[int, list[int]] = {}
    for at, row in enumerate(samples.rows):
        places.setdefault(row.episode, []).append(at)
    return places
