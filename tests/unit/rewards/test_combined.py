"""The weighted sum of several rewards, and who wins when some of them fail."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.rewards.base import Call, PolicyError, RewardFailure, RewardResult, RewardTimeout, RewardUnreachable
from trueline.rewards.combined import CombinedReward, kind_of


class Given:
    """A reward that is known, or an error; scoring it waits for `others` to have begun."""

    def __init__(self, result: float | Exception, others: asyncio.Barrier | None = None) -> None:
        self.result, self.others, self.stopped = result, others, False

    async def score(self, call: Call) -> float:
        if self.others is not None:
            await self.others.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def stop(self) -> None:
        self.stopped = True


def judged(*parts: tuple[str, float | Exception, dict[str, float]], policy_error: float = -1.0) -> RewardResult:
    rewards = {name: (Given(result), RewardPartConfig(**settings)) for name, result, settings in parts}
    return asyncio.run(CombinedReward(dict(rewards), policy_error).score({"reply": "a"}))


def test_weighted_sum_of_clipped_parts() -> None:
    verdict = judged(
        ("right", 1.0, {"weight": 2.0}),
        ("style", -7.0, {"weight": 0.5, "clip": 3.0}),
        ("short", 0.25, {"weight": -1.0, "clip": 3.0}),
    )
    assert verdict.reward == pytest.approx(2.0 * 1.0 + 0.5 * -3.0 - 0.25)
    assert verdict.parts == {"right": 1.0, "style": -3.0, "short": 0.25}
    assert verdict.policy_error == ""


def test_an_only_reward_keeps_its_weight_and_clip_and_none_is_zero() -> None:
    assert judged(("reward", 5.0, {"weight": 3.0, "clip": 2.0})) == RewardResult(6.0, {"reward": 2.0})
    verdict = judged()
    assert verdict == RewardResult(0.0) and isinstance(verdict.reward, float)


@pytest.mark.parametrize("kind", [RewardFailure, RewardTimeout, RewardUnreachable])
def test_a_failure_keeps_its_kind_and_gets_a_name(kind: type[RewardFailure]) -> None:
    with pytest.raises(RewardFailure, match=r"^style: it broke$") as failed:
        judged(("right", 1.0, {}), ("style", kind("it broke"), {}))
    assert type(failed.value) is kind
    with pytest.raises(kind, match=r"^it broke$"):
        judged(("reward", kind("it broke"), {}))


def test_the_answers_own_error_replaces_the_sum() -> None:
    assert judged(("right", 1.0, {}), ("code", PolicyError("it never ends"), {})) == RewardResult(
        -1.0, {"right": 1.0}, "code: it never ends"
    )
    assert judged(("reward", PolicyError("it never ends"), {}), policy_error=0.0) == RewardResult(
        0.0, {}, "it never ends"
    )
    assert judged(("reward", PolicyError(), {})).policy_error  # told from none even without a text


def test_a_failure_wins_over_the_answers_own_error() -> None:
    for order in (1, -1):
        parts = [("code", PolicyError("it never ends"), {}), ("style", RewardTimeout("too slow"), {})][::order]
        with pytest.raises(RewardTimeout, match="style: too slow"):
            judged(*parts)


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(KeyError, match="a mistake"):
        judged(("right", KeyError("a mistake"), {}), ("style", 1.0, {}))


def test_all_are_asked_at_once_and_all_are_stopped() -> None:
    async def meet() -> None:
        barrier = asyncio.Barrier(2)
        rewards = [Given(1.0, barrier), Given(2.0, barrier)]
        combined = CombinedReward({str(one.result): (one, RewardPartConfig()) for one in rewards}, 0.0)
        async with asyncio.timeout(5):
            assert (await combined.score({"reply": "a"})).reward == 3.0
        await combined.stop()
        assert all(one.stopped for one in rewards)

    asyncio.run(meet())


def test_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("judges", "math", "my model"):
        (tmp_path / folder).mkdir()
    kinds = {
        "http://127.0.0.1:8900/score": "scorer",
        "https://example.org/score": "scorer",
        "judge": "judge",
        "judges": "model",
        "my model": "model",
        str(tmp_path): "model",
        "math": "function",  # a built-in, whatever folders there are
        "file.py:reward": "function",
        "package.module:reward": "function",
        "missing/": "function",
        "": "function",
    }
    assert {function: kind_of(RewardPartConfig(function=function)) for function in kinds} == kinds


@pytest.mark.parametrize("key", ["weight", "clip", "policy_error"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_settings_are_finite_numbers(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: input should be (a finite number|greater than 0)"):
        RewardConfig.parse({key: value})


@pytest.mark.parametrize(
    "outer", [{"weight": 2.0}, {"clip": 1.0}, {"normalize": True}, {"pattern": "a"}, {"options": {"a": 1}}]
)
def test_what_parts_would_ignore_is_refused(outer: dict[str, Any]) -> None:
    parts = {"parts": {"a": {"function": "math"}}}
    assert RewardConfig.parse(RewardConfig.parse(parts).model_dump()).parts.keys() == {"a"}
    [name] = outer
    with pytest.raises(ConfigError, match=rf"{name} has no effect with parts=a.*reward.parts.a.{name}"):
        RewardConfig.parse(parts | outer)
