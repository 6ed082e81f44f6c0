"""Several rewards as one: each clipped, then their weighted sum."""

import asyncio
from pathlib import Path
from typing import Literal

from trueline.config.reward import RewardPartConfig
from trueline.rewards.base import Call, PolicyError, Reward, RewardFailure, Verdict
from trueline.rewards.functions import REWARDS


def kind_of(part: RewardPartConfig) -> Literal["function", "model", "scorer", "judge"]:
    if part.function.startswith(("http://", "https://")):
        return "scorer"
    if part.function == "judge":
        return "judge"
    # A built-in wins over a folder that happens to bear its name.
    is_model = part.function and part.function not in REWARDS and Path(part.function).expanduser().is_dir()
    return "model" if is_model else "function"


class CombinedReward:
    def __init__(self, parts: dict[str, tuple[Reward, RewardPartConfig]], policy_error: float) -> None:
        self.parts, self.policy_error = parts, policy_error

    async def judge(self, call: Call) -> Verdict:
        """A failure of one reward is a failure of all; without one, the answer's own error decides."""
        scored = await asyncio.gather(
            *(reward.score(call) for reward, _ in self.parts.values()), return_exceptions=True
        )
        results = dict(zip(self.parts, scored, strict=True))
        for name, result in results.items():
            if isinstance(result, BaseException) and not isinstance(result, PolicyError):
                raise self._named(name, result)
        values = {
            name: clipped(result, self.parts[name][1].clip)
            for name, result in results.items()
            if not isinstance(result, BaseException)
        }
        errors = [str(self._named(name, result)) for name, result in results.items() if isinstance(result, PolicyError)]
        if errors:
            return Verdict(self.policy_error, values, errors[0] or PolicyError.__name__)
        return Verdict(sum((self.parts[name][1].weight * value for name, value in values.items()), 0.0), values)

    def _named(self, name: str, error: BaseException) -> BaseException:
        """The same kind of error; among several rewards it says which one failed."""
        if len(self.parts) == 1 or not isinstance(error, RewardFailure | PolicyError):
            return error
        named = type(error)(f"{name}: {error}")
        named.__cause__ = error
        return named

    async def stop(self) -> None:
        await asyncio.gather(*(reward.stop() for reward, _ in self.parts.values()))


def clipped(value: float, bound: float | None) -> float:
    return value if bound is None else max(-bound, min(bound, value))
