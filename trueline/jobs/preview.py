"""Prompts as engines will get them, and what rewards get besides a reply."""

import sys
from collections.abc import Iterator

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.pieces import render
from trueline.data.types import Prompt
from trueline.jobs.try_reward import columns_of
from trueline.models.loading import check_model, load_chat
from trueline.plan.describe import describe
from trueline.plan.inputs import check_prompts, held_out_prompts, measure, resolve_run_as_model, training_prompts
from trueline.plan.offline import plan_supervised

PLAYED = "turns      an environment or agent may rewrite the first message; these are the rows that it gets"


def show_prompts(config: RunConfig, rows: int) -> int:
    """Show the first prompts of each dataset, after the checks of data, tools and rewards that a run makes."""
    config, taken = resolve_run_as_model(config)
    assert isinstance(config, RLConfig | SamplingConfig)  # all other verbs learn rows
    if isinstance(config, EvalConfig):
        sets = held_out_prompts(config.data, config.evaluation)
    else:
        sets = training_prompts(config.data)
    if not sets:
        raise ConfigError("evaluation.data is empty: name prompts with --data, or several with evaluation.sets")
    sets, rewards = check_prompts(config, sets, required=False)
    rewards.close()
    check_model(config.model)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    lines = [*taken, *[PLAYED] * bool(config.environment.kind() and not config.environment.tools)]
    for prompts in sets.values():
        longest = max(measure(prompts, chat).lengths)
        lines.append(f"data       {len(prompts)} prompts of {prompts[0].source}, longest {longest} tokens")
        lines += [line for prompt in prompts[:rows] for line in describe_prompt(prompt, chat, config)]
    findings = [*chat.findings(), *rewards.warnings]  # of what was rendered
    remarks = [*rewards.lines, *(f"warning: {one.text()}" for one in findings)]
    lines += ["", *remarks] if remarks else []
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def describe_prompt(prompt: Prompt, chat: ChatFormat, config: RLConfig | SamplingConfig) -> Iterator[str]:
    tokens, limit = chat.prompt_tokens(prompt.messages, prompt.tools), config.rollout.max_prompt_tokens
    above = f", more than rollout.max_prompt_tokens={limit}" if limit and len(tokens) > limit else ""
    yield f"\nrow {prompt.id + 1}: {len(tokens)} tokens{above}"
    yield str(chat.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    yield from columns_of(prompt)


def show_rows(config: SupervisedConfig, rows: int) -> int:
    """Show the first rows as the model will see them, with what is learnt marked."""
    plan = plan_supervised(resolve_run_as_model(config)[0], here=False)
    train = plan.material.train
    sys.stdout.write(describe(plan) + "\n")
    for number, sample in enumerate(train.samples[: rows * train.task.samples_per_row]):
        row, part = divmod(number, train.task.samples_per_row)
        which = f" {('chosen', 'rejected')[part]}" if train.task.samples_per_row == 2 else ""
        sys.stdout.write(f"\nrow {row + 1}{which}: {render(sample, plan.chat.tokenizer, sys.stdout.isatty())}\n")
    return 0
