"""The records that flow through training: Prompt -> Trajectory -> Sample -> Batch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueline.data.messages import Message, Talk, Tool
from trueline.data.pictures import Picture


class Outcome(StrEnum):
    """How an episode ended. Failed and left-out episodes have no reward; neither is ever scored as zero."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    POLICY_ERROR = "policy_error"
    ENVIRONMENT_ERROR = "environment_error"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    INFRA_ERROR = "infra_error"
    LEFT_OUT = "left_out"

    @property
    def is_failure(self) -> bool:
        return self in (Outcome.ENVIRONMENT_ERROR, Outcome.REWARD_ERROR, Outcome.REWARD_TIMEOUT, Outcome.INFRA_ERROR)

    @property
    def is_scored(self) -> bool:
        return not self.is_failure and self is not Outcome.LEFT_OUT


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt, its source, and all that rewards may use."""

    id: int  # from 0, as in samples.jsonl
    messages: list[Message]
    label: Any = None
    source: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[Tool] = field(default_factory=list)  # that the model may call
    pictures: tuple[Picture, ...] = field(default=(), repr=False)  # of the messages' image parts, in order

    def place(self) -> str:
        """Name the row for a person, counting from 1."""
        return f"row {self.id + 1} of {self.source}"


def with_tools(prompt: Prompt, tools: list[Tool]) -> Prompt:
    return replace(prompt, tools=[*prompt.tools, *tools]) if tools else prompt


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation of an episode, with replies as they were sampled."""

    prompt: list[Message]
    completion: list[Message]  # from the first reply to the last
    tools: list[Tool] = field(default_factory=list)
    role: str = ""


INTERRUPTED = "interrupted"  # the finish reason of a part that continues with other weights
NO_TARGET = -1  # in place of a token that a teacher finds likely
UNKNOWN_EXPERT = -1  # no engine has reported the experts of this token
NO_EXPERTS = np.zeros((0, 0, 0), np.int8)


def experts_of(reported: np.ndarray, tokens: int) -> np.ndarray:
    """Return the experts of all tokens; engines report only tokens they have computed, so not the last one."""
    kind = np.int8 if reported.max(initial=0) <= np.iinfo(np.int8).max else np.int16
    unknown = np.full((tokens - len(reported), *reported.shape[1:]), UNKNOWN_EXPERT, kind)
    return np.concatenate([reported.astype(kind), unknown])


def join_experts(known: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Join known experts with a later report of the same tokens and more; the first report of a token counts."""
    if not len(known) or not len(more):  # an engine reports nothing of a part that ended before its first token
        return more if len(more) else known
    again = more[: len(known)]
    return np.concatenate([np.where(known == UNKNOWN_EXPERT, again, known), more[len(again) :]])


@dataclass(slots=True, frozen=True, eq=False)
class Completion:
    """One completion as the engine sampled it."""

    tokens: np.ndarray  # [T] int64
    logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, policy version of the weights that sampled each token
    finish_reason: str  # "stop", "length" or INTERRUPTED
    cached: int = 0  # prompt tokens in the engine's cache
    experts: np.ndarray = field(default_factory=lambda: NO_EXPERTS)  # [P + T, layers, top_k], with the P prompt tokens

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
    def join(cls, parts: list["Completion"]) -> "Completion":
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((one.tokens, one.logprobs, one.versions) for one in parts), strict=True)
        tokens, logprobs, versions = map(np.concatenate, columns)
        experts = reduce(join_experts, (one.experts for one in parts))
        return cls(tokens, logprobs, versions, parts[-1].finish_reason, sum(one.cached for one in parts), experts)

    def shorten(self, length: int) -> "Completion":
        """Return its first tokens as a completion that stopped there."""
        left = self.experts[: max(len(self.experts) - len(self.tokens) + length, 0)]
        arrays = self.tokens[:length], self.logprobs[:length], self.versions[:length]
        return Completion(*arrays, "stop", self.cached, left)


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, log-probs and versions


def observed_columns(tokens: Sequence[int]) -> Columns:
    return np.array(tokens, np.int64), np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)


@dataclass(slots=True, eq=False)
class Trajectory:
    """One episode. The arrays have one entry per token."""

    prompt: Prompt
    group: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))  # True on sampled tokens
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # -1 on tokens that were not sampled
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # of turns, on their last tokens
    experts: np.ndarray = field(default_factory=lambda: NO_EXPERTS)  # [T, layers, top_k] if engines report them
    role: str = ""  # in which the policy speaks in this sequence, where an episode has several
    reward: float | None = None  # the task reward, over all turns; of several roles, that of the first
    role_rewards: dict[str, float] = field(default_factory=dict)  # of each role, if there are several
    baseline: float | None = None  # task reward of the greedy completion of the same prompt
    outcome: Outcome = Outcome.FINISHED
    truncated: bool = False  # a length limit cut a turn off
    cut_off: str = ""  # which limit prevented further turns
    limit: str = ""  # the key of the last limit that cut it off
    reply: str = ""  # the last one
    error: str = ""
    failed_reward: str = ""  # the name of the reward that failed
    metrics: dict[str, float] = field(default_factory=dict)
    dialogues: list[Dialogue] = field(default_factory=list)  # every conversation of the episode
    branches: "list[Trajectory]" = field(default_factory=list)  # further sequences of the same episode
    turns: list[Message] = field(default_factory=list)  # after the opening, if more than one reply
    pictures: tuple[Picture, ...] = field(default=(), repr=False)  # that image tokens of this sequence stand for
    talk: Talk | None = None  # the same with the opening, as rewards get it

    def sequences(self) -> "list[Trajectory]":
        """Return all sampled sequences in order; a rewritten or forked history makes several."""
        return [one for one in (self, *self.branches) if one.mask.any()]

    def add_action(self, completion: Completion, observed: Sequence[int] = ()) -> None:
        """Add a completion behind tokens that were not sampled."""
        self._add(observed_columns(observed), (completion.tokens, completion.logprobs, completion.versions))
        if len(completion.experts) not in (0, len(self.tokens)):
            raise ValueError(
                f"the engine reported experts of {len(completion.experts)} tokens, but the sequence has "
                f"{len(self.tokens)}: its request had other tokens than those recorded"
            )
        self.experts = join_experts(self.experts, completion.experts)

    def add_observation(self, tokens: Sequence[int]) -> None:
        self._add(observed_columns(tokens))

    def _add(self, *stretches: Columns) -> None:
        before, (tokens, logprobs, versions) = len(self.tokens), zip(*stretches, strict=True)
        self.tokens = np.concatenate([self.tokens, *tokens])
        self.logprobs = np.concatenate([self.logprobs, *logprobs])
        self.versions = np.concatenate([self.versions, *versions])
        self.mask = np.concatenate([self.mask, self.versions[before:] >= 0])
        self.rewards = np.concatenate([self.rewards, np.zeros(len(self.tokens) - before, np.float32)])

    def add_reward(self, reward: float, sequence: "Trajectory | None" = None) -> None:
        """Add the reward of the last turn of this or another sequence, on its last sampled token."""
        (self if sequence is None else sequence).put_reward(reward)
        self.reward = (self.reward or 0.0) + reward

    def put_reward(self, reward: float) -> None:
        """Add to the reward of the last sampled token."""
        self.rewards[np.flatnonzero(self.mask)[-1]] += reward

    def sampled_versions(self) -> np.ndarray:
        return np.concatenate([one.versions[one.mask] for one in self.sequences()])

    def oldest_version(self) -> int:
        return int(self.sampled_versions().min())

    def sampled_tokens(self) -> int:
        return sum(int(one.mask.sum()) for one in (self, *self.branches))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to the device without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def later() -> Any:
    """Declare a field that a later stage fills; reading it before raises AttributeError."""
    return field(init=False, repr=False, compare=False)


Whose = tuple[int, str]  # what the sequences of one episode and role share


@dataclass(slots=True)
class Sample:
    """One training sequence. Fields [T] are aligned with `tokens`."""

    tokens: Tensor  # [T] int64
    mask: Tensor  # [T] bool, True on tokens the loss applies to
    group: int = 0
    episode: int | None = None  # in the step; None: this is its only sequence
    version: int = 0  # of the oldest sampled token
    task_reward: float = 0.0  # before shaping
    reward: float = 0.0  # after shaping and KL, for estimators of whole completions
    parts: list[tuple[float, float]] = field(default_factory=list)  # weight and value of each reward in `task_reward`
    baseline: float = 0.0  # task reward of the greedy completion, if there is one, else the role's moving average
    truncated: bool = False
    filtered: bool = False  # counts in the group's baseline, but not in the loss
    taught: bool = True  # False: its teacher has nothing to say
    label: float = 0.0  # of the sequence: a pair's margin, or 1 if a completion is desirable
    role: str = ""  # in its episode, whose sequences of one role share reward and weight
    companion: "Sample | None" = field(default=None, repr=False)  # for KTO: the same prompt, another completion
    weight: float = 0.0  # of each masked token, or of the sequence, in the minibatch's loss
    pictures: tuple[Picture, ...] = field(default=(), repr=False)  # that its image tokens stand for
    experts: Tensor = later()  # [T, layers, top_k] chosen by the engine, or UNKNOWN_EXPERT
    rollout_logprobs: Tensor = later()  # [T] as the rollout engine sampled
    old_logprobs: Tensor = later()  # [T] by the trainer, before the update
    ref_logprobs: Tensor = later()  # [T] by the reference model
    teacher_logprobs: Tensor = later()  # [T] by the teacher
    target_ids: Tensor = later()  # [T, K] the teacher's likeliest tokens
    target_logprobs: Tensor = later()  # [T, K + 1] by the teacher: of these, and of all others together
    token_rewards: Tensor = later()  # [T] after shaping and KL; they sum to `reward` or its rest
    values: Tensor = later()  # [T] by the critic before the update, of the state before token t
    returns: Tensor = later()  # [T] targets of the critic
    advantages: Tensor = later()  # [T]
    entropy: Tensor = later()  # [T] of the trainer's distribution, in the update or before it
    squares: Tensor = later()  # [T] sum of p^2 over it, before the update
    step_labels: Tensor = later()  # [T] label, 0 to 1, of the step that ends at a masked token

    def length(self) -> int:
        return len(self.tokens)

    def sampled_tokens(self) -> int:
        return int(self.mask.sum())

    def observed_tokens(self) -> int:
        return int(answered_places(self.mask).sum())

    def whose(self) -> Whose:
        return ~id(self) if self.episode is None else self.episode, self.role


def answered_places(mask: Tensor) -> Tensor:
    """Tell which tokens [T] of a sequence an environment has answered: behind the first masked one, and not masked."""
    return (mask.cumsum(0) > 0) & ~mask


class Kin(NamedTuple):
    """The family of a sample: samples that begin with the same tokens."""

    family: int = 0
    prefix: int = 0  # how many tokens it has in common with one of its family; of that one, all


class Repeat(NamedTuple):
    """A sequence of a batch that begins like another one."""

    at: int
    of: int
    tokens: int


PICTURES = "pictures"  # the field of a sequence's pictures, which are no array
LOGPROBS = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
TARGETS = ("target_ids", "target_logprobs")
TOKEN_FIELDS = ("tokens", "mask", "experts", *LOGPROBS, *TARGETS, "advantages", "values", "returns", "step_labels")


@dataclass(slots=True)
class Batch:
    """The samples of one forward pass, concatenated. It never leaves a worker."""

    tokens: Tensor  # [N]
    mask: Tensor  # [N] bool
    lengths: list[int]  # of the B sequences; they sum to N
    shares: Tensor  # [B] float32, weight of each sequence
    labels: Tensor  # [B] float32
    statistics: dict[str, float] = field(default_factory=dict)  # of the whole minibatch, from a loss's `prepare`
    host_mask: Tensor | None = None  # the mask on the host, read without waiting for the device
    observed: Tensor | None = None  # [N] bool, tokens of an environment whose log-probs the loss reads as well
    sizes: Tensor | None = None  # [B] int64, the lengths on the device
    repeats: list[Repeat] = field(default_factory=list)  # tokens to be computed once; `of` stands before its own `at`
    pictures: list[tuple[Picture, ...]] = field(default_factory=list)  # of each sequence, if any has one
    experts: Tensor = later()  # [N, layers, top_k]
    rollout_logprobs: Tensor = later()  # [N]
    old_logprobs: Tensor = later()  # [N]
    ref_logprobs: Tensor = later()  # [N]
    target_ids: Tensor = later()  # [N, K]
    target_logprobs: Tensor = later()  # [N, K + 1]
    advantages: Tensor = later()  # [N]
    values: Tensor = later()  # [N]
    returns: Tensor = later()  # [N]
    step_labels: Tensor = later()  # [N]

    def token_weights(self) -> Tensor:
        """Return token weights, [N] float32, zero outside the mask."""
        return self.spread(self.shares) * self.mask

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each sequence's masked tokens, [N] -> [B]."""
        return torch.stack([part.sum() for part in (values * self.mask).split(self.lengths)])

    def counts(self) -> Tensor:
        """Count the masked tokens of each sequence, [B] float32."""
        return self.sums(torch.ones_like(self.mask, dtype=torch.float32))

    def spread(self, values: Tensor) -> Tensor:
        """Repeat each sequence's value on all its tokens, [B] -> [N]."""
        return values.repeat_interleave(self.device_lengths(), output_size=len(self.tokens))

    def last_of(self, values: Tensor) -> Tensor:
        """Take the value at each sequence's last token, [N] -> [B]."""
        return values[self.device_lengths().cumsum(0) - 1]

    def device_lengths(self) -> Tensor:
        if self.sizes is None:
            self.sizes = to_device(torch.tensor(self.lengths), self.tokens.device)
        return self.sizes

    def mask_on_host(self) -> Tensor:
        return self.mask.cpu() if self.host_mask is None else self.host_mask

    def mask_bytes(self) -> bytes:
        """Return the mask as models take it: FSDP2 would move a tensor to the device, DeepSpeed compares by `!=`."""
        return self.mask_on_host().numpy().tobytes()

    def observe(self) -> None:
        """Let models compute the log-probs of tokens that an environment has answered, too."""
        mask = self.mask_on_host()
        answered = torch.cat([answered_places(part) for part in mask.split(self.lengths)])
        self.host_mask, self.observed = mask | answered, to_device(answered, self.tokens.device)


def is_filled(record: Any, name: str) -> bool:
    return hasattr(record, name)


RUBRIC = "rubric/"  # metrics of an episode whose reward has a rubric
ROW_ITEM = f"{RUBRIC}row_item/"  # of items that a row has for itself: in transcripts, for means would mix rows


def episode_metric(metrics: dict[str, float], name: str) -> float | None:
    """Return a metric of an episode, or None; a single value is its own mean."""
    return metrics.get(name, metrics.get(name.removesuffix("/mean")))


def to_samples(trajectory: Trajectory, episode: int | None = None) -> list[Sample]:
    """Return a sample per sequence; rewards of a role's later sequences are added to the end of its earlier ones."""
    if trajectory.reward is None:
        raise ValueError(f"a trajectory with outcome {trajectory.outcome} has no reward, so it cannot be trained on")
    samples, later_rewards = [], defaultdict[str, float](float)
    for sequence in reversed(trajectory.sequences()):
        role = sequence.role
        reward = trajectory.role_rewards.get(role, trajectory.reward)
        sample = Sample(
            tokens=torch.from_numpy(sequence.tokens),
            mask=torch.from_numpy(sequence.mask),
            group=trajectory.group,
            episode=episode,
            role=role,
            version=sequence.oldest_version(),
            task_reward=reward,
            reward=reward,
            baseline=trajectory.baseline or 0.0,
            truncated=trajectory.truncated,
            pictures=sequence.pictures,
        )
        sample.rollout_logprobs = torch.from_numpy(sequence.logprobs)
        sample.token_rewards = torch.from_numpy(sequence.rewards)
        if len(sequence.experts):
            sample.experts = torch.from_numpy(experts_of(sequence.experts, len(sequence.tokens)))
        own = sample.token_rewards.sum().item()
        if later_rewards[role]:
            sample.token_rewards = sample.token_rewards.clone()
            sample.token_rewards[sample.mask.nonzero()[-1]] += later_rewards[role]
        samples.append(sample)
        later_rewards[role] += own
    return samples[::-1]


@dataclass(slots=True)
class ModelOutput:
    """The outputs of a model for a batch, aligned with its tokens; each kind of head fills its own fields."""

    logprobs: Tensor = later()  # [N] of token t given those before it; zero outside the mask and `observed`
    entropy: Tensor = later()  # [N] of the distribution of token t
    variance: Tensor = later()  # [N] of log p under it
    squares: Tensor = later()  # [N] sum of p^2 over it
    divergence: Tensor = later()  # [N] between teacher and student for token t
    target_ids: Tensor = later()  # [N, K] the likeliest tokens, or those of the batch; NO_TARGET outside the mask
    target_logprobs: Tensor = later()  # [N, K + 1] of these, and of all others together
    scores: Tensor = later()  # [N, K] of a scoring head, from the hidden state at token t
    values: Tensor = later()  # [N] of a critic, of the state before token t
    expert_counts: Tensor = later()  # [N, E] number of layers that send token t to each expert
    router_probs: Tensor = later()  # [N, E] probabilities of the routers, summed over layers
    agreed: Tensor = later()  # [N] number of experts that routers and engine both chose
    reported: Tensor = later()  # [N] number of experts that the engine reported


@dataclass(slots=True)
class LossOutput:
    """A loss before averaging, and metrics averaged (or maximised) with it: [N], or [B] with `per_sequence`."""

    values: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    per_sequence: bool = False
    added: Tensor | None = None  # a part of the loss that has its own average
    totals: dict[str, Tensor] = field(default_factory=dict)  # metrics that passes and ranks add up
