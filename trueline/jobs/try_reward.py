"""Score a few rows with a reward, without a model, and show what the reward gets and returns."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.sampling import GenerateConfig
from trueline.data.types import Prompt
from trueline.environments.single_turn import reward_call
from trueline.plan.inputs import training_prompts
from trueline.plan.rewards import RewardCheck, check_rewards
from trueline.rewards.base import RewardFailure, RewardResult, short_cause
from trueline.rewards.combined import CombinedReward, kind_of
from trueline.runs.processes import open_rewards

COMPLETIONS = ("completion", "response", "output", "chosen")  # columns whose text can serve as a reply
SHOWN = 300  # characters


def show_trial(config: GenerateConfig, reply: str | None, rows: int) -> int:
    """Show every row's call and verdict; return 1 where a reward could not be had."""
    for part in config.reward.named_parts().values():
        if kind_of(part) == "model":
            raise ConfigError(
                f"reward.function={part.function} is a reward model, which must be loaded: ask it with `trueline eval`"
            )
    sources = [*training_prompts(config.data).values()]
    prompts = [one for source in sources for one in source[:rows]]
    found = check_rewards(config.reward, sources, config.data, probe=False)
    replies = [(reply, "--reply") if reply is not None else reply_of(prompt) for prompt in prompts]
    verdicts = asyncio.run(ask(config, prompts, [text for text, _ in replies], found))
    for prompt, (text, source), verdict in zip(prompts, replies, verdicts, strict=True):
        sys.stdout.write("\n".join(describe(prompt, text, source, verdict)) + "\n\n")
    short = [f"rows       {one[0].source} has only {len(one)} of {rows} rows" for one in sources if len(one) < rows]
    sys.stdout.write(
        "".join(f"{line}\n" for line in (*short, *found.lines, *(f"warning: {one.text()}" for one in found.warnings)))
    )
    return int(any(isinstance(verdict, RewardFailure) for verdict in verdicts))


def reply_of(prompt: Prompt) -> tuple[str, str]:
    """Return a text in place of the model's reply, and where it comes from."""
    if prompt.label is not None:
        return str(prompt.label), "the row's label"
    named = [column for column in COMPLETIONS if isinstance(prompt.columns.get(column), str)]
    return (prompt.columns[named[0]], f"column {named[0]}") if named else ("", "empty: give one with --reply")


async def ask(
    config: GenerateConfig, prompts: list[Prompt], replies: list[str], checked: RewardCheck
) -> list[RewardResult | RewardFailure]:
    with tempfile.TemporaryDirectory() as logs:
        rewards = open_rewards(config.reward, [], {}, Path(logs), checked)
        calls = [reward_call(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        try:
            return list(await asyncio.gather(*(verdict_of(rewards, call) for call in calls)))
        finally:
            await rewards.stop()


async def verdict_of(rewards: CombinedReward, call: dict[str, Any]) -> RewardResult | RewardFailure:
    try:
        return await rewards.score(call)
    except RewardFailure as failure:
        return failure


def describe(prompt: Prompt, reply: str, source: str, verdict: RewardResult | RewardFailure) -> list[str]:
    call = reward_call(prompt, reply)
    return [
        f"row {prompt.id + 1} of {prompt.source}",
        f"  prompt   {shorten(call['prompt'])}",
        f"  reply    {shorten(reply)} ({source})",
        *columns_of(prompt),
        f"  reward   {describe_result(verdict)}",
    ]


def columns_of(prompt: Prompt) -> list[str]:
    """Describe what rewards get of a row by name, besides prompt and reply."""
    others = {name: value for name, value in prompt.columns.items() if name not in ("messages", "prompt", "label")}
    labels = {"label": prompt.label} if prompt.label is not None else {}
    return [f"  {name:<8} {shorten(value)}" for name, value in (labels | others).items()]


def describe_result(verdict: RewardResult | RewardFailure) -> str:
    """Put a verdict into one line; of a traceback, its last words and the function's line."""
    if isinstance(verdict, RewardFailure):
        return f"none: {short_cause(str(verdict))}"
    parts = ", ".join(f"{name} {value:g}" for name, value in verdict.parts.items()) if len(verdict.parts) > 1 else ""
    notes = [f"reward.policy_error: {verdict.policy_error}"] * bool(verdict.policy_error) + [parts] * bool(parts)
    return f"{verdict.reward:g}" + "".join(f" ({note})" for note in notes)


def shorten(value: Any) -> str:
    """Show a value as JSON in one line, which tells texts from numbers."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
