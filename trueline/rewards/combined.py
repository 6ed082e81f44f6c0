"""Several rewards as one: each clipped, then their weighted sum; and a row for each kind of reward."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.monitoring.beats import WORK
from trueline.rewards.base import Call, PolicyError, Reward, RewardFailure, Verdict
from trueline.rewards.functions import REWARDS
from trueline.rewards.model import check_reward_model
from trueline.rewards.pool import FunctionReward, Probe, check_function
from trueline.rewards.process import CONVERSATIONAL, Takes
from trueline.rewards.remote import JudgeReward, ScorerReward, check_judge, check_scorer


class CombinedReward:
    def __init__(
        self, parts: dict[str, tuple[Reward, RewardPartConfig]], policy_error: float, processes: int = 1
    ) -> None:
        self.parts, self.policy_error = parts, policy_error
        self.places = {name: REWARD_KINDS[kind_of(part)].place(part, processes) for name, (_, part) in parts.items()}

    async def verdict(self, call: Call) -> Verdict:
        """Return the weighted sum, or raise any reward's failure; without one, the completion's own error decides."""
        scored = await asyncio.gather(*(self._score(name, call) for name in self.parts), return_exceptions=True)
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

    async def _score(self, name: str, call: Call) -> float:
        with WORK.doing("reward", name, self.places[name]):
            return await self.parts[name][0].score(call)

    def _named(self, name: str, error: BaseException) -> BaseException:
        """Return the same kind of error; among several rewards it says which one failed."""
        if len(self.parts) == 1 or not isinstance(error, RewardFailure | PolicyError):
            return error
        named = type(error)(f"{name}: {error}")
        named.__cause__ = error
        return named

    async def stop(self) -> None:
        await asyncio.gather(*(reward.stop() for reward, _ in self.parts.values()))


def clipped(value: float, bound: float | None) -> float:
    return value if bound is None else max(-bound, min(bound, value))


@dataclass(frozen=True, slots=True)
class RewardKind:
    """How a kind of reward is recognised, checked before the start and opened."""

    fits: Callable[[RewardPartConfig], bool]
    # Of examples of calls, by their data; a function's is given a probe, and returns its parameters.
    check: Callable[[RewardPartConfig, RewardConfig, dict[str, Call], Probe | None], Takes | None]
    open: Callable[[RewardPartConfig, RewardConfig, Path, Callable[[], Reward]], Reward]  # its log; a model's reward
    # Where calls wait, in words; of functions, in how many processes.
    place: Callable[[RewardPartConfig, int], str] = lambda part, _: part.function


def shared_names(examples: dict[str, Call]) -> set[str]:
    """Return the names that have a value in all examples."""
    given = [
        {name for name, value in call.items() if name != "label" or value is not None} for call in examples.values()
    ]
    return set.intersection(*given) - {CONVERSATIONAL}


def kind_of(part: RewardPartConfig) -> str:
    return next(name for name, kind in REWARD_KINDS.items() if kind.fits(part))


def is_model(part: RewardPartConfig) -> bool:
    """Tell whether a reward is a model's folder; a built-in wins over a folder that happens to bear its name."""
    return bool(part.function) and part.function not in REWARDS and Path(part.function).expanduser().is_dir()


REWARD_KINDS = {  # the first that fits
    "scorer": RewardKind(
        lambda part: part.function.startswith(("http://", "https://")),
        lambda part, config, *_: check_scorer(part, probe=config.probe),
        lambda part, config, *_: ScorerReward(part.function, part, config.timeout_seconds, batch=config.batch),
        lambda part, _: f"{part.function}, which takes {part.remote.concurrency} at a time",
    ),
    "judge": RewardKind(
        lambda part: part.function == "judge",
        lambda part, config, examples, _: check_judge(part, shared_names(examples), probe=config.probe),
        lambda part, config, *_: JudgeReward(part, config.timeout_seconds),
        lambda part, _: f"{part.judge.url}, which takes {part.remote.concurrency} at a time",
    ),
    "model": RewardKind(is_model, lambda part, *_: check_reward_model(part), lambda *given: given[-1]()),
    "function": RewardKind(
        lambda _: True,
        check_function,
        lambda *given: FunctionReward(*given[:3]),
        lambda part, processes: f"{part.function}, in {processes} processes",
    ),
}
