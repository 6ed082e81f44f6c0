"""The weighted sum of clipped rewards, and the kinds of rewards."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.monitoring.heartbeat import WORK
from trueline.rewards.base import Call, Graded, PolicyError, Reward, RewardFailure, RewardResult
from trueline.rewards.function_reward import FunctionReward, LoadedFunction, Probe, check_function
from trueline.rewards.functions import REWARDS
from trueline.rewards.model import check_reward_model
from trueline.rewards.remote import JudgeReward, ScorerReward, check_judge, check_scorer
from trueline.rewards.rubric import SUFFIXES, RubricReward, check_rubric
from trueline.rewards.scoring import CONVERSATIONAL


class CombinedReward:
    def __init__(
        self, parts: dict[str, tuple[Reward, RewardPartConfig]], policy_error: float, processes: int = 1
    ) -> None:
        self.parts, self.policy_error = parts, policy_error
        self.places = {name: REWARD_KINDS[kind_of(part)].place(part, processes) for name, (_, part) in parts.items()}

    async def score(self, call: Call) -> RewardResult:
        """Return the weighted sum, or raise any reward's failure; without one, the completion's own error decides."""
        results = await asyncio.gather(*(self._score_part(name, call) for name in self.parts), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if failures := [error for error in errors if not isinstance(error, PolicyError)]:
            raise failures[0]
        named = zip(self.parts, results, strict=True)
        graded = {name: result for name, result in named if not isinstance(result, BaseException)}
        values = {name: one.reward for name, one in graded.items()}
        metrics = {
            f"{metric}/{name}" if len(self.parts) > 1 else metric: value
            for name, one in graded.items()
            for metric, value in one.metrics.items()
        }
        if errors:
            return RewardResult(self.policy_error, values, str(errors[0]) or PolicyError.__name__, metrics)
        total = sum((self.parts[name][1].weight * value for name, value in values.items()), 0.0)
        return RewardResult(total, values, metrics=metrics)

    async def _score_part(self, name: str, call: Call) -> Graded:
        """Return a clipped reward; among several rewards, errors name the one that failed."""
        reward, part = self.parts[name]
        try:
            with WORK.doing("reward", name, self.places[name]):
                scored = await reward.score(call)
        except (RewardFailure, PolicyError) as error:
            named = type(error)(f"{name}: {error}" if len(self.parts) > 1 else str(error))
            if isinstance(named, RewardFailure):
                named.part = name
            raise named from error
        value, metrics = (scored.reward, scored.metrics) if isinstance(scored, Graded) else (scored, {})
        return Graded(value if part.clip is None else max(-part.clip, min(part.clip, value)), metrics)

    async def stop(self) -> None:
        await asyncio.gather(*(reward.stop() for reward, _ in self.parts.values()))


@dataclass(frozen=True, slots=True)
class RewardKind:
    """How a kind of reward is recognised, checked before the start and opened."""

    fits: Callable[[RewardPartConfig], bool]
    # With examples of calls by their data, and a probe unless none is wanted; returns a function's process, or lines.
    check: Callable[[RewardPartConfig, RewardConfig, dict[str, Call], Probe | None], LoadedFunction | list[str] | None]
    # With its log, what its check returned, and what makes the reward of a model.
    open: Callable[[RewardPartConfig, RewardConfig, Path, LoadedFunction | None, Callable[[], Reward]], Reward]
    # Where calls wait; of functions, in how many processes.
    place: Callable[[RewardPartConfig, int], str] = lambda part, _: part.function


def shared_names(examples: dict[str, Call]) -> set[str]:
    """Return the names that have a value in all examples."""
    given = [{name for name in call if name != "label" or call[name] is not None} for call in examples.values()]
    return set.intersection(*given) - {CONVERSATIONAL}


def kind_of(part: RewardPartConfig) -> str:
    return next(name for name, kind in REWARD_KINDS.items() if kind.fits(part))


def is_model(part: RewardPartConfig) -> bool:
    """Return whether a reward is a model's folder; a built-in wins over a folder of the same name."""
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
    "rubric": RewardKind(
        lambda part: part.function.endswith(SUFFIXES),
        lambda part, config, examples, asked: check_rubric(part, config, examples, shared_names(examples), asked),
        lambda part, config, *_: RubricReward(part, config.timeout_seconds),
        lambda part, _: f"{part.judge.url}, which takes {part.remote.concurrency} at a time",
    ),
    "function": RewardKind(
        lambda _: True,
        check_function,
        lambda *given: FunctionReward(*given[:4]),
        lambda part, processes: f"{part.function}, in {processes} processes",
    ),
}
