"""What a run would do with a few rows: prompts as engines get them, rows as they are learned, and calls of rewards."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, GenerateConfig, SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.pictures import Picture, count_tokens
from trueline.data.pieces import render
from trueline.data.types import Prompt
from trueline.environments.single_turn import reward_call
from trueline.models.loading import check_model, load_chat
from trueline.plan.describe import describe
from trueline.plan.inputs import check_prompts, held_out_prompts, measure, resolve_run_as_model, training_prompts
from trueline.plan.offline import plan_supervised
from trueline.plan.rewards import RewardCheck, check_rewards
from trueline.rewards.base import RewardFailure, RewardResult, short_cause
from trueline.rewards.combined import CombinedReward, kind_of
from trueline.runs.processes import open_rewards

COMPLETIONS = ("completion", "response", "output", "chosen")  # columns whose text can serve as a reply
SHOWN = 300  # characters
Verdict = RewardResult | RewardFailure
PLAYED = "turns      an environment or agent may rewrite the first message; these are the rows that it gets"


def show_prompts(config: RunConfig, rows: int) -> int:
    """Show the first prompts of each dataset, after the checks of data, tools and rewards that a run makes."""
    config, taken = resolve_run_as_model(config)
    assert isinstance(config, RLConfig | SamplingConfig)  # all other verbs learn rows
    data = config.data
    sets = held_out_prompts(data, config.evaluation) if isinstance(config, EvalConfig) else training_prompts(data)
    if not sets:
        raise ConfigError("evaluation.data is empty: name prompts with --data, or several with evaluation.sets")
    sets, rewards = check_prompts(config, sets, required=False)
    rewards.close()
    check_model(config.model)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    lines = [*taken, *[PLAYED] * bool(config.environment.kind() and not config.environment.tools)]
    for prompts in sets.values():
        lengths = measure(prompts, chat).lengths
        some = f" of {len(lengths)} sampled" if len(lengths) < len(prompts) else ""
        lines.append(f"data       {len(prompts)} prompts of {prompts[0].source}, longest{some} {max(lengths)} tokens")
        for prompt in prompts[:rows]:
            opened, limit = chat.begin(prompt.messages, prompt.tools, prompt.pictures), config.rollout.max_prompt_tokens
            tokens = opened.tokens
            above = f", more than rollout.max_prompt_tokens={limit}" if limit and len(tokens) > limit else ""
            text = chat.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            lines += [f"\nrow {prompt.id + 1}: {len(tokens)} tokens{above}", str(text), *columns_of(prompt)]
            lines += pictures_of(prompt.pictures, chat)
    findings = [*chat.findings(), *rewards.warnings]  # of what was rendered
    if remarks := [*rewards.lines, *(f"warning: {one.text()}" for one in findings)]:
        lines += ["", *remarks]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def show_rows(config: SupervisedConfig, rows: int) -> int:
    """Show the first rows as the model will see them, with what is learned marked."""
    plan = plan_supervised(resolve_run_as_model(config)[0], here=False)
    train = plan.material.train
    sys.stdout.write(describe(plan) + "\n")
    for number, sample in enumerate(train.samples[: rows * train.task.samples_per_row]):
        row, part = divmod(number, train.task.samples_per_row)
        which = f" {('chosen', 'rejected')[part]}" if train.task.samples_per_row == 2 else ""
        shown = [render(sample, plan.chat.tokenizer, sys.stdout.isatty()), *pictures_of(sample.pictures, plan.chat)]
        sys.stdout.write(f"\nrow {row + 1}{which}: " + "\n".join(shown) + "\n")
    return 0


def show_trial(config: GenerateConfig, reply: str | None, rows: int) -> int:
    """Show every row's call and verdict; return 1 where a reward could not be had."""
    for part in config.reward.named_parts().values():
        if kind_of(part) == "model":
            why = "is a reward model, which must be loaded: ask it with `trueline eval`"
            raise ConfigError(f"reward.function={part.function} {why}")
    sources = [*training_prompts(config.data).values()]
    prompts = [one for source in sources for one in source[:rows]]
    found = check_rewards(config.reward, sources, config.data, probe=False)
    replies = [(reply, "--reply") if reply is not None else reply_of(prompt) for prompt in prompts]
    verdicts = asyncio.run(ask(config, prompts, [text for text, _ in replies], found))
    for prompt, (text, source), verdict in zip(prompts, replies, verdicts, strict=True):
        asked = f"row {prompt.id + 1} of {prompt.source}\n  prompt   {shorten(reward_call(prompt, text)['prompt'])}"
        lines = [asked, f"  reply    {shorten(text)} ({source})", *columns_of(prompt)]
        sys.stdout.write("\n".join([*lines, f"  reward   {describe_result(verdict)}"]) + "\n\n")
    short = [f"rows       {one[0].source} has only {len(one)} of {rows} rows" for one in sources if len(one) < rows]
    lines = [*short, *found.lines, *(f"warning: {one.text()}" for one in found.warnings)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(any(isinstance(verdict, RewardFailure) for verdict in verdicts))


def reply_of(prompt: Prompt) -> tuple[str, str]:
    """Return a text in place of the model's reply, and where it comes from."""
    if prompt.label is not None:
        return str(prompt.label), "the row's label"
    named = [column for column in COMPLETIONS if isinstance(prompt.columns.get(column), str)]
    return (prompt.columns[named[0]], f"column {named[0]}") if named else ("", "empty: give one with --reply")


async def ask(config: GenerateConfig, prompts: list[Prompt], replies: list[str], checked: RewardCheck) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as logs:
        rewards = open_rewards(config.reward, [], {}, Path(logs), checked)
        calls = [reward_call(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        try:
            return list(await asyncio.gather(*(verdict_of(rewards, call) for call in calls)))
        finally:
            await rewards.stop()


async def verdict_of(rewards: CombinedReward, call: dict[str, Any]) -> Verdict:
    try:
        return await rewards.score(call)
    except RewardFailure as failure:
        return failure


def columns_of(prompt: Prompt) -> list[str]:
    """Describe what rewards get of a row by name, besides prompt and reply."""
    others = {name: value for name, value in prompt.columns.items() if name not in ("messages", "prompt", "label")}
    labels = {"label": prompt.label} if prompt.label is not None else {}
    return [f"  {name:<8} {shorten(value)}" for name, value in (labels | others).items()]


def pictures_of(pictures: Sequence[Picture], chat: ChatFormat) -> list[str]:
    """Describe the pictures of a row in one line, if it has any."""
    if not pictures or chat.vision is None:
        return []
    each = [f"{one.width} x {one.height} ({count_tokens(chat.vision, one)} tokens)" for one in pictures]
    return [f"  pictures {', '.join(each)}"]


def describe_result(verdict: Verdict) -> str:
    """Put a verdict into one line; of a traceback, its last words and the function's line."""
    if isinstance(verdict, RewardFailure):
        return f"none: {short_cause(str(verdict))}"
    shown = (verdict.parts if len(verdict.parts) > 1 else {}) | verdict.metrics
    parts = ", ".join(f"{name} {value:g}" for name, value in shown.items())
    notes = [f"reward.policy_error: {verdict.policy_error}"] * bool(verdict.policy_error) + [parts] * bool(parts)
    return f"{verdict.reward:g}" + "".join(f" ({note})" for note in notes)


def shorten(value: Any) -> str:
    """Show a value as JSON in one line, which tells texts from numbers."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
