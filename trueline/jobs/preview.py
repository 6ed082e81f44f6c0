"""Prompts as engines will get them, and what rewards get beside a reply."""

import sys
from collections.abc import Iterator

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, SamplingConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Prompt, with_tools
from trueline.environments.opening import check_environment
from trueline.jobs.try_reward import columns_of
from trueline.models.loading import check_model, load_chat
from trueline.runs.preflight import chained, load_prompts, measured
from trueline.runs.rewards import check_rewards

PLAYED = "turns      an environment or agent may rewrite the first message; these are the rows that it gets"


def show_prompts(config: RunConfig, rows: int) -> int:
    """Show the first prompts of each dataset, after the checks of data, tools and rewards that a run makes."""
    config, taken = chained(config)
    assert isinstance(config, RLConfig | SamplingConfig)  # all other verbs learn rows
    sets = load_sets(config)
    firsts = [prompts[0] for prompts in sets.values()]
    found = check_environment(config.environment, *firsts, rewarded=bool(config.reward.named_parts()))
    played = bool(config.environment.kind())
    rewards = check_rewards(config.reward, [*sets.values()], config.data, required=False, played=played)
    check_model(config.model)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    lines = [*taken, *[PLAYED] * bool(config.environment.kind() and not config.environment.tools)]
    for path, prompts in sets.items():
        offered = [with_tools(prompt, found.tools) for prompt in prompts]
        longest = max(measured(offered, chat).lengths)
        lines.append(f"data       {len(offered)} prompts of {path}, longest {longest} tokens")
        lines += [line for prompt in offered[:rows] for line in describe_prompt(prompt, chat, config)]
    lines += ["", *remarks] if (remarks := chat.remarks()) else []  # of what was rendered
    sys.stdout.write(
        "\n".join([*lines, *rewards.lines, *(f"warning: {text}" for text in (*found.warnings, *rewards.warnings))])
        + "\n"
    )
    return 0


def load_sets(config: RLConfig | SamplingConfig) -> dict[str, list[Prompt]]:
    """Read the prompts that a run answers, by their paths."""
    if not isinstance(config, EvalConfig):
        key = config.data.source_key()
        return {path: load_prompts(config.data, path, key) for path in config.data.sources()}
    key, named = "evaluation.sets" if config.evaluation.sets else "evaluation.data", config.evaluation.named_sets()
    if not named:
        raise ConfigError("evaluation.data is empty: name prompts with --data, or several with evaluation.sets")
    return {path: load_prompts(config.data, path, key) for path in named.values()}


def describe_prompt(prompt: Prompt, chat: ChatFormat, config: RLConfig | SamplingConfig) -> Iterator[str]:
    tokens, limit = chat.prompt_tokens(prompt.messages, prompt.tools), config.rollout.max_prompt_tokens
    above = f", more than rollout.max_prompt_tokens={limit}" if limit and len(tokens) > limit else ""
    yield f"\nrow {prompt.id + 1}: {len(tokens)} tokens{above}"
    yield str(chat.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    yield from columns_of(prompt)
