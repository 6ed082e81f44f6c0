"""The records that flow through training: Prompt -> Trajectory -> Sample -> Batch."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueline.data.messages import Message, Talk, Tool


class Outcome(StrEnum):
    """How an episode ended. Failures and what is left out carry no reward: neither is ever a fake zero."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    POLICY_ERROR = "policy_error"
    ENVIRONMENT_ERROR = "environment_error"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    INFRA_ERROR = "infra_error"
    LEFT_OUT = "left_out"

    @property
    def failed(self) -> bool:
        return self in FAILURES

    @property
    def scored(self) -> bool:
        return not self.failed and self is not Outcome.LEFT_OUT


FAILURES = frozenset({Outcome.ENVIRONMENT_ERROR, Outcome.REWARD_ERROR, Outcome.REWARD_TIMEOUT, Outcome.INFRA_ERROR})


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt to be completed: where it came from, and all that a reward may ask of it."""

    id: int  # from 0, as rewards and samples.jsonl have it
    messages: list[Message]
    label: Any = None
    source: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[Tool] = field(default_factory=list)  # that the model may call

    def place(self) -> str:
        """Name the row for a person, who counts from 1."""
        return f"row {self.id + 1} of {self.source}"


def with_tools(prompt: Prompt, tools: list[Tool]) -> Prompt:
    return replace(prompt, tools=[*prompt.tools, *tools]) if tools else prompt


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation of an episode, replies as they were sampled: what the policy was asked first, and the rest."""

    prompt: list[Message]
    completion: list[Message]  # from the first reply to the last
    tools: list[Tool] = field(default_factory=list)


INTERRUPTED = "interrupted"  # the finish reason of a part that goes on under other weights
UNTOLD = -1  # in place of an expert: no engine has told where this token went
NO_EXPERTS = np.zeros((0, 0, 0), np.int8)


def experts_of(told: np.ndarray, tokens: int) -> np.ndarray:
    """Return the experts of so many tokens, of which engines tell those they have computed: not the last one."""
    kind = np.int8 if told.max(initial=0) <= np.iinfo(np.int8).max else np.int16
    untold = np.full((tokens - len(told), *told.shape[1:]), UNTOLD, kind)
    return np.concatenate([told.astype(kind), untold])


def first_told(known: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Join what is known of some tokens and what is told later of these and more: tokens keep what they were drawn by.

    Another call computes a prompt again, perhaps under other weights.
    """
    if not len(known) or not len(more):  # an engine tells nothing of a part that ended before its first token
        return more if len(more) else known
    again = more[: len(known)]
    return np.concatenate([np.where(known == UNTOLD, again, known), more[len(again) :]])


@dataclass(slots=True, frozen=True, eq=False)
class Completion:
    """One sampled continuation, as the engine sampled it."""

    tokens: np.ndarray  # [T] int64
    logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, policy version of the weights that sampled each token
    finish_reason: str  # "stop", "length" or INTERRUPTED
    cached: int = 0  # tokens of its prompt that the engine had computed before
    experts: np.ndarray = field(default_factory=lambda: NO_EXPERTS)  # [P + T, layers, top_k], of its prompt's P too

    @classmethod
    def of(
        cls,
        tokens: list[int],
        logprobs: list[float],
        version: int,
        finish_reason: str,
        cached: int = 0,
        *,
        experts: np.ndarray = NO_EXPERTS,
    ) -> "Completion":
        arrays = np.array(tokens, np.int64), np.array(logprobs, np.float32), np.full(len(tokens), version, np.int32)
        return cls(*arrays, finish_reason, cached, experts)

    @classmethod
    def joined(cls, parts: list["Completion"]) -> "Completion":
        """Return parts that follow each other as one."""
        if len(parts) == 1:
            return parts[0]
        tokens, logprobs, versions = (
            np.concatenate(rows)
            for rows in zip(*((one.tokens, one.logprobs, one.versions) for one in parts), strict=True)
        )
        experts = reduce(first_told, (one.experts for one in parts))
        return cls(tokens, logprobs, versions, parts[-1].finish_reason, sum(one.cached for one in parts), experts)

    def cut(self, length: int) -> "Completion":
        """Return its first tokens, as one that ends there."""
        left = self.experts[: max(len(self.experts) - len(self.tokens) + length, 0)]
        arrays = self.tokens[:length], self.logprobs[:length], self.versions[:length]
        return Completion(*arrays, "stop", self.cached, left)


@dataclass(slots=True, eq=False)
class Trajectory:
    """One run of an environment. The arrays have one entry per token."""

    prompt: Prompt
    group: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))  # True on tokens that the policy sampled
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # -1 where it did not sample
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # of a turn, on its last token
    experts: np.ndarray = field(default_factory=lambda: NO_EXPERTS)  # [T, layers, top_k] where engines tell them
    reward: float | None = None  # the task reward: that of all turns
    baseline: float | None = None  # task reward of the greedy completion of the same prompt
    outcome: Outcome = Outcome.FINISHED
    truncated: bool = False  # a turn was cut off by the length limit
    cut_off: str = ""  # why it had no further turn, where a limit ended it
    limit: str = ""  # the key of the last limit that cut it off
    reply: str = ""  # the last one
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    dialogues: list[Dialogue] = field(default_factory=list)  # all that was said, whatever the policy was first asked
    branches: "list[Trajectory]" = field(default_factory=list)  # further sequences of the same episode: see `sequences`
    turns: list[Message] = field(default_factory=list)  # what was said after the opening, where it is more than a reply
    talk: Talk | None = None  # the same with its opening, as rewards are given it

    def sequences(self) -> "list[Trajectory]":
        """Return all that the policy sampled, in order: several sequences where a history was rewritten or forked."""
        return [one for one in (self, *self.branches) if one.mask.any()]

    def add_action(self, completion: Completion) -> None:
        self._add(completion.tokens, completion.logprobs, completion.versions)
        if len(completion.experts):
            if len(completion.experts) != len(self.tokens):
                raise ValueError(
                    f"an engine told the experts of {len(completion.experts)} tokens, and the sequence has "
                    f"{len(self.tokens)}: was it asked with other tokens than those that are recorded?"
                )
            self.experts = first_told(self.experts, completion.experts)

    def add_observation(self, tokens: list[int]) -> None:
        count = len(tokens)
        self._add(np.array(tokens, np.int64), np.zeros(count, np.float32), np.full(count, -1, np.int32))

    def _add(self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.versions = np.concatenate([self.versions, versions])
        self.mask = self.versions >= 0
        self.rewards = np.concatenate([self.rewards, np.zeros(len(tokens), np.float32)])

    def add_reward(self, reward: float, sequence: "Trajectory | None" = None) -> None:
        """Add the reward of the last turn, of a branch or of its own; only a sampled token can carry it."""
        earned = self if sequence is None else sequence
        earned.rewards[np.flatnonzero(earned.mask)[-1]] += reward
        self.reward = (self.reward or 0.0) + reward

    def sampled_versions(self) -> np.ndarray:
        return np.concatenate([one.versions[one.mask] for one in self.sequences()])

    def oldest_version(self) -> int:
        return int(self.sampled_versions().min())

    def sampled_tokens(self) -> int:
        return sum(int(one.mask.sum()) for one in (self, *self.branches))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor from the host to the device without waiting for what the device has to do before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def later() -> Any:
    """Declare a field that a later stage fills. Reading it before that raises AttributeError by its name."""
    return field(init=False, repr=False, compare=False)


@dataclass(slots=True)
class Sample:
    """One training sequence. A [T] field is aligned with `tokens`: index t speaks of token t."""

    tokens: Tensor  # [T] int64
    mask: Tensor  # [T] bool, True on tokens the loss applies to
    group: int = 0
    episode: int | None = None  # in the step, whose sequences share reward and weight; null: it is all of its own
    version: int = 0  # of the oldest sampled token
    task_reward: float = 0.0  # as judged
    reward: float = 0.0  # after shaping and KL; what estimators of whole completions look at
    baseline: float = 0.0  # task reward of the greedy completion of the same prompt
    truncated: bool = False
    filtered: bool = False  # in the group's baseline, but not in the loss
    label: float = 0.0  # of the whole sequence: a pair's margin, or 1 where a completion is desirable
    companion: "Sample | None" = field(default=None, repr=False)  # that a loss compares it with, e.g. KTO's mismatched
    weight: float = 0.0  # share in the loss of each masked token, or of the sequence; set over the whole minibatch
    experts: Tensor = later()  # [T, layers, top_k] that the engine sent each token to in each layer; UNTOLD: not known
    rollout_logprobs: Tensor = later()  # [T] as the rollout engine sampled
    old_logprobs: Tensor = later()  # [T] by the trainer, before the update
    ref_logprobs: Tensor = later()  # [T] by the reference model
    teacher_logprobs: Tensor = later()  # [T] by the teacher
    token_rewards: Tensor = later()  # [T] after shaping and KL; they sum to `reward`, or to what is left of it
    values: Tensor = later()  # [T] by the critic before the update, of the state that token t was drawn from
    returns: Tensor = later()  # [T] what the critic learns
    advantages: Tensor = later()  # [T]
    entropy: Tensor = later()  # [T] of the trainer's distribution, in the update
    step_labels: Tensor = later()  # [T] how good the step that ends at a masked token is, 0 to 1

    def length(self) -> int:
        return len(self.tokens)

    def sampled_tokens(self) -> int:
        return int(self.mask.sum())

    def whose(self) -> int:
        """Return what is the same for all sequences of an episode, and differs between episodes."""
        return ~id(self) if self.episode is None else self.episode


TOKEN_FIELDS = (  # that losses read
    "tokens",
    "mask",
    "experts",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
    "step_labels",
)


@dataclass(slots=True)
class Batch:
    """Samples end to end for one forward pass, without padding. It never leaves a worker."""

    tokens: Tensor  # [N]
    mask: Tensor  # [N] bool
    lengths: list[int]  # of the B sequences; they sum to N
    shares: Tensor  # [B] float32, weight of each sequence
    labels: Tensor  # [B] float32
    statistics: dict[str, float] = field(default_factory=dict)  # of the whole minibatch, from a loss's `prepare`
    host_mask: Tensor | None = None  # the mask, where it can be read without waiting for the device
    sizes: Tensor | None = None  # [B] int64, the lengths on the device
    experts: Tensor = later()  # [N, layers, top_k]
    rollout_logprobs: Tensor = later()  # [N]
    old_logprobs: Tensor = later()  # [N]
    ref_logprobs: Tensor = later()  # [N]
    advantages: Tensor = later()  # [N]
    values: Tensor = later()  # [N]
    returns: Tensor = later()  # [N]
    step_labels: Tensor = later()  # [N]

    def token_weights(self) -> Tensor:
        """Return the tokens' weights, [N] float32, zero where the mask is False."""
        return self.spread(self.shares) * self.mask

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each sequence's masked tokens, [N] -> [B]."""
        return torch.stack([part.sum() for part in (values * self.mask).split(self.lengths)])

    def counts(self) -> Tensor:
        """Count the masked tokens of each sequence, [B] float32."""
        return self.sums(torch.ones_like(self.mask, dtype=torch.float32))

    def spread(self, values: Tensor) -> Tensor:
        """Put each sequence's value on all of its tokens, [B] -> [N]."""
        return values.repeat_interleave(self.counted(), output_size=len(self.tokens))

    def last_of(self, values: Tensor) -> Tensor:
        """Take the value at each sequence's last token, [N] -> [B]."""
        return values[self.counted().cumsum(0) - 1]

    def counted(self) -> Tensor:
        if self.sizes is None:
            self.sizes = moved(torch.tensor(self.lengths), self.tokens.device)
        return self.sizes

    def learnt(self) -> Tensor:
        """Return the mask on the host."""
        return self.mask.cpu() if self.host_mask is None else self.host_mask


def filled_fields(sample: Sample) -> list[str]:
    """Return the token fields that have been filled so far."""
    return [name for name in TOKEN_FIELDS if is_filled(sample, name)]


def is_filled(record: Any, name: str) -> bool:
    try:
        object.__getattribute__(record, name)
    except AttributeError:
        return False
    return True


@dataclass(slots=True, frozen=True)
class PackedSamples:
    """Samples on their way to another process: one flat array per field, and the lengths to cut it by."""

    lengths: np.ndarray  # [B]
    weights: np.ndarray  # [B]
    labels: np.ndarray  # [B]
    arrays: dict[str, np.ndarray]  # [sum of lengths, ...] each


def pack_samples(samples: list[Sample], *, experts: bool = True) -> PackedSamples:
    """Pack all fields that are filled; experts only for who reads them, for they outweigh all else."""
    names = [name for name in filled_fields(samples[0]) if experts or name != "experts"]
    arrays = {name: torch.cat([getattr(sample, name) for sample in samples]).numpy() for name in names}
    lengths = np.array([sample.length() for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    return PackedSamples(lengths, weights, np.array([sample.label for sample in samples]), arrays)


def reported(metrics: dict[str, float], name: str) -> float | None:
    """Return a metric of an episode, or None; the one value that an episode reports is its mean as well."""
    return metrics.get(name, metrics.get(name.removesuffix("/mean")))


def to_samples(trajectory: Trajectory, episode: int | None = None) -> list[Sample]:
    """Return a sample for each sequence; what later ones earn is added where one ends, for they follow from it."""
    if trajectory.reward is None:
        raise ValueError(f"a trajectory that ended in {trajectory.outcome} has no reward and cannot be trained on")
    samples, later_rewards = [], 0.0
    for sequence in reversed(trajectory.sequences()):
        sample = sample_of(sequence, trajectory, episode)
        own = sample.token_rewards.sum().item()
        if later_rewards:
            sample.token_rewards = sample.token_rewards.clone()
            sample.token_rewards[sample.mask.nonzero()[-1]] += later_rewards
        samples.append(sample)
        later_rewards += own
    return samples[::-1]


def sample_of(sequence: Trajectory, trajectory: Trajectory, episode: int | None) -> Sample:
    assert trajectory.reward is not None
    sample = Sample(
        tokens=torch.from_numpy(sequence.tokens),
        mask=torch.from_numpy(sequence.mask),
        group=trajectory.group,
        episode=episode,
        version=sequence.oldest_version(),
        task_reward=trajectory.reward,
        reward=trajectory.reward,
        baseline=trajectory.baseline or 0.0,
        truncated=trajectory.truncated,
    )
    sample.rollout_logprobs = torch.from_numpy(sequence.logprobs)
    sample.token_rewards = torch.from_numpy(sequence.rewards)
    if len(sequence.experts):
        sample.experts = torch.from_numpy(experts_of(sequence.experts, len(sequence.tokens)))
    return sample


@dataclass(slots=True)
class ModelOutput:
    """What a model says of a batch, aligned with its tokens; each kind of head fills its own fields."""

    logprobs: Tensor = later()  # [N] of token t given those before it; zero where the mask is False
    entropy: Tensor = later()  # [N] of the distribution that token t was drawn from
    variance: Tensor = later()  # [N] of log p under it
    divergence: Tensor = later()  # [N] between teacher and student at the distribution of token t
    scores: Tensor = later()  # [N, K] of a scoring head, from the hidden state at token t
    values: Tensor = later()  # [N] of a critic, of the state that token t was drawn from
    expert_counts: Tensor = later()  # [N, E] how many layers send token t to each expert
    router_probs: Tensor = later()  # [N, E] probabilities of the routers, summed over layers
    agreed: Tensor = later()  # [N] how many of the experts that its own routers choose the engine chose too
    told: Tensor = later()  # [N] how many the engine has told


@dataclass(slots=True)
class LossOutput:
    """A loss before averaging, and numbers to report that are averaged (or maximised) alongside.

    All tensors are [N], one value per token; or, with `per_sequence`, [B].
    """

    values: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    per_sequence: bool = False
