"""What rollout asks of a reward."""

from typing import Any, Protocol


class RewardFailure(RuntimeError):
    """A reward could not be had. It is never turned into a number."""


class RewardTimeout(RewardFailure):
    """The reward function took longer than reward.timeout_seconds and was killed."""


class Reward(Protocol):
    async def score(self, call: dict[str, Any]) -> float:
        """`call` holds reply, prompt, messages, label and the row's columns; raises RewardFailure."""
