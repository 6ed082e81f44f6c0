"""Ask for the rewards of kept completions again, in the processes that protect a run from its rewards."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.replay.steps import TRUST, RecordedRun
from trueline.rewards.base import RewardFailure, short_cause
from trueline.rewards.combined import CombinedReward, kind_of
from trueline.rewards.functions import REWARDS
from trueline.runs.processes import open_rewards

CLOSE = 1e-6  # a reward is a number of its own precision, whichever precision the models have


def ask_again(run: RecordedRun, step: int) -> tuple[int, list[str]]:
    """Return how many rewards were asked again, and a line for each that differs or failed."""
    kept = run.open(step)
    config = RLConfig.parse(run.places(kept.config))
    check(run, config)
    rewards = {row.episode: row.task_reward for row in kept.samples.rows}
    if lost := [episode for episode in rewards if kept.calls[episode] is None]:
        raise ConfigError(f"step {step}: the call of episode {lost[0]} is not kept, because its prompt has pictures")
    with TemporaryDirectory() as logs:
        again = asyncio.run(ask(config, [kept.calls[episode] for episode in rewards], Path(logs)))
    lines = []
    for (episode, before), now in zip(rewards.items(), again, strict=True):
        place = f"step {step}, episode {episode}"
        if isinstance(now, str):
            lines.append(f"{place}: failed: {now}")
        elif abs(now - before) > CLOSE:
            lines.append(f"{place}: {before:g} in the run, {now:g} here")
    return len(rewards), lines


def check(run: RecordedRun, config: RLConfig) -> None:
    """Refuse rewards that cannot be asked again, or that would run code of somebody else."""
    parts = config.reward.named_parts()
    if config.environment.plays() or not parts:
        raise ConfigError("--rewards: the environment gave the rewards of this run, and no episode is played again")
    for part in parts.values():
        if kind_of(part) == "model":
            raise ConfigError(f"--rewards: {part.function} is a reward model: ask it with `trueline eval`")
        if not run.trusted and part.function not in REWARDS:
            raise ConfigError(f"reward.function={part.function} is code or a server that the archive names: {TRUST}")


async def ask(config: RLConfig, calls: list[dict[str, Any]], logs: Path) -> list[float | str]:
    opened = open_rewards(config.reward, [], {}, logs)
    try:
        return list(await asyncio.gather(*(reward_of(opened, call) for call in calls)))
    finally:
        await opened.stop()


async def reward_of(opened: CombinedReward, call: dict[str, Any]) -> float | str:
    try:
        return (await opened.score(call)).reward
    except RewardFailure as failure:
        return short_cause(str(failure))
