"""What a plan is made for besides its keys: data, model, machine, rewards and environment."""

from dataclasses import dataclass, replace

from trueline.algorithms.needs import reads_reward
from trueline.config.rl import RLConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import with_tools
from trueline.environments.opening import check_environment
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.runs.preflight import Measured, load_prompts, measured
from trueline.runs.rewards import RewardCheck, check_rewards
from trueline.runtime.cluster import Machine, machine_at_hand


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan is made for besides its keys: as read and found here, or as assumed."""

    facts: ModelFacts
    machine: Machine
    trained: list[Measured]  # one for each dataset
    tested: dict[str, Measured]
    chat: ChatFormat
    rewards: RewardCheck


def look_around(config: RLConfig) -> Surroundings:
    sources = [load_prompts(config.data, path, config.data.source_key()) for path in config.data.sources()]
    key = "evaluation.sets" if config.evaluation.sets else "evaluation.data"
    held_out = {name: load_prompts(config.data, path, key) for name, path in config.evaluation.named_sets().items()}
    firsts = [prompts[0] for prompts in (*sources, *held_out.values())]
    found = check_environment(config.environment, *firsts, rewarded=bool(config.reward.named_parts()))
    sources = [[with_tools(prompt, found.tools) for prompt in source] for source in sources]
    held_out = {name: [with_tools(prompt, found.tools) for prompt in prompts] for name, prompts in held_out.items()}
    required = reads_reward(config.algorithm) and not config.judged()
    played = bool(config.environment.kind())
    asked = [*sources, *held_out.values()]
    rewards = check_rewards(config.reward, asked, config.data, required=required, played=played)
    rewards = replace(rewards, warnings=[*found.warnings, *rewards.warnings])
    facts = check_model(config.model)
    machine = machine_at_hand()
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    trained = [measured(source, chat) for source in sources]
    tested = {name: measured(prompts[: config.evaluation.limit], chat) for name, prompts in held_out.items()}
    return Surroundings(facts, machine, trained, tested, chat, rewards)
