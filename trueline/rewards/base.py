"""What rollout asks of a reward."""

from dataclasses import dataclass, field
from typing import Any, Protocol

Call = dict[str, Any]  # reply, prompt, messages, label and the columns of the row


class RewardFailure(RuntimeError):
    """A reward could not be had. It is never turned into a number."""


class RewardTimeout(RewardFailure):
    """The reward took longer than reward.timeout_seconds."""


class RewardUnreachable(RewardFailure):
    """A scorer or judge could not be reached: the network's or the server's fault, not the answer's."""


class PolicyError(Exception):
    """For reward functions to raise: the answer itself is at fault. It gets reward.policy_error, which counts."""


class Reward(Protocol):
    async def score(self, call: Call) -> float:
        """Raises PolicyError, or RewardFailure and its kinds."""

    async def stop(self) -> None:
        """Give back processes and connections."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The task reward of one answer and what it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # each reward by its name, before its weight
    policy_error: str = ""  # why the answer got reward.policy_error instead
