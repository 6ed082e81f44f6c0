"""What a plan is made from besides its keys: data, model, machine, rewards and environment, each read once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from trueline.algorithms.advantages import reads_reward
from trueline.config.base import Config, ConfigError, read_tree
from trueline.config.data import PromptDataConfig
from trueline.config.reward import RewardConfig
from trueline.config.rl import EvaluationConfig, RLConfig
from trueline.config.run import CheckpointConfig, RunConfig
from trueline.config.sampling import SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.encoding import naming
from trueline.data.readers import read_prompts
from trueline.data.sources import open_source, stored_data
from trueline.data.types import Prompt, with_tools
from trueline.environments.opening import check_environment
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.rewards import RewardCheck, Trial, check_rewards
from trueline.rewards.combined import kind_of
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.training.checkpoints import MANIFEST, Checkpoints

Kind = TypeVar("Kind", bound=Config)
Name = TypeVar("Name")
Paths = dict[tuple[str, ...], Any]  # by the parts of their keys
MODEL_KEYS = ("model.path", "critic.path", "teacher.path", "distill.teacher")  # and rewards that are models
UNTRAINED = ("generate", "eval")  # verbs whose runs hold no model


@dataclass(frozen=True, slots=True)
class Measured:
    """The prompts of a dataset, and how many tokens each has."""

    prompts: list[Prompt]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that fit, how many did not, and how many tokens the longest has."""

    prompts: list[Prompt]
    dropped: int
    longest: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a plan has read of model and data, for checks that read nothing again."""

    facts: ModelFacts
    chat: ChatFormat
    rows: list[Any]  # prompts, or the records of an offline task
    held_out: list[Any]
    trials: dict[str, Trial] = field(default_factory=dict)  # calls of reward functions, by their names


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a run of reinforcement learning is planned for: as found here, or as assumed."""

    facts: ModelFacts
    machine: Machine
    trained: list[Measured]  # one for each dataset
    tested: dict[str, Measured]
    chat: ChatFormat
    rewards: RewardCheck


def look_around(config: RLConfig) -> PlanInputs:
    trained = {("train", path): prompts for path, prompts in training_prompts(config.data).items()}
    tested = {("test", name): some for name, some in held_out_prompts(config.data, config.evaluation).items()}
    required = reads_reward(config.algorithm) and not config.has_reward()
    prompts, rewards = check_prompts(config, {**trained, **tested}, required=required)
    facts, machine = check_model(config.model), machine_at_hand()
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    measured = {place: measure(some, chat) for place, some in prompts.items()}
    sources = [measured[place] for place in trained]
    return PlanInputs(facts, machine, sources, {name: measured[place, name] for place, name in tested}, chat, rewards)


def load_prompts(data: PromptDataConfig, path: str, key: str) -> list[Prompt]:
    return read_prompts(open_source(path, key), data, path)


def training_prompts(data: PromptDataConfig) -> dict[str, list[Prompt]]:
    return {path: load_prompts(data, path, data.source_key()) for path in data.sources()}


def held_out_prompts(data: PromptDataConfig, evaluation: EvaluationConfig) -> dict[str, list[Prompt]]:
    """Read the prompts of an evaluation by the names of their sets, as many of each as its limit allows."""
    key = "evaluation.sets" if evaluation.sets else "evaluation.data"
    sets = evaluation.named_sets().items()
    return {name: load_prompts(data, path, key)[: evaluation.limit] for name, path in sets}


def check_prompts(
    config: RLConfig | SamplingConfig, sets: Mapping[Name, list[Prompt]], *, required: bool
) -> tuple[dict[Name, list[Prompt]], RewardCheck]:
    """Try environment and rewards on the first prompts; return all prompts with their tools, and what was found."""
    firsts = {(tuple(some[0].columns), type(some[0].label)): some[0] for some in sets.values()}
    found = check_environment(config.environment, *firsts.values(), rewarded=bool(config.reward.named_parts()))
    offered = {name: [with_tools(prompt, found.tools) for prompt in prompts] for name, prompts in sets.items()}
    played = bool(config.environment.kind())
    rewards = check_rewards(config.reward, [*offered.values()], config.data, required=required, played=played)
    return offered, replace(rewards, warnings=[*found.warnings, *rewards.warnings])


def measure(prompts: list[Prompt], chat: ChatFormat) -> Measured:
    return Measured(prompts, chat.prompt_lengths([prompt_text(prompt, chat) for prompt in prompts]))


def prompt_text(prompt: Prompt, chat: ChatFormat) -> str:
    with naming(prompt.place()):
        chat.check_tools(prompt.messages, prompt.tools, column="tools" in prompt.columns)
        chat.check_rounds(prompt.tools)
        return chat.prompt_text(prompt.messages, prompt.tools)


def fitting_prompts(source: Measured, limit: int, too_long: str) -> PromptSet:
    """Keep prompts within the limit; a longer one is refused by its place, or dropped and counted."""
    kept, longest = [], 0
    for prompt, length in zip(source.prompts, source.lengths, strict=True):
        if 0 < length <= limit:
            kept.append(prompt)
            longest = max(longest, length)
        elif too_long == "error" or length == 0:
            raise ConfigError(
                f"{prompt.place()} has {length} tokens; 1 to rollout.max_prompt_tokens={limit} "
                "are allowed: change the row or the limit, or set data.too_long=drop",
                key="rollout.max_prompt_tokens",
            )
    if not kept:
        raise ConfigError(
            f"all {len(source.prompts)} prompts of {source.prompts[0].source} have more than "
            f"rollout.max_prompt_tokens={limit} tokens: raise the limit",
            key="rollout.max_prompt_tokens",
        )
    return PromptSet(kept, len(source.prompts) - len(kept), longest)


# Runs and saved datasets in place of models and data


def resolve_run_as_model(config: Kind) -> tuple[Kind, list[str]]:
    """Replace each run or saved dataset that a key names by its model or data; return a line about each as well."""
    leaves = {key.path: key.default for key in config.leaves()}
    models: Paths = {tuple(key.split(".")): leaves.get(key) for key in MODEL_KEYS}
    rewards = dict(config).get("reward")
    if isinstance(rewards, RewardConfig):
        named = {name: part.function for name, part in rewards.named_parts().items() if kind_of(part) == "model"}
        models |= {("reward", *["parts", name] * bool(rewards.parts), "function"): named[name] for name in named}
    data: Paths = {tuple(key.split(".")): leaves.get(key) for key in ("data.path", "evaluation.data")}
    data |= {("evaluation", "sets", name): path for name, path in (leaves.get("evaluation.sets") or {}).items()}
    task = config.task if isinstance(config, SupervisedConfig) else "prompts"
    runs = config.folder if isinstance(config, RunConfig) else ""
    lines = []
    for place, path in {**models, **data}.items():
        key = ".".join(place)
        found = (run_model(path, key) if place in models else stored_data(path, key, task, runs)) if path else None
        if found:
            tree: Any = found[0]
            config = config.with_keys(reduce(lambda inner, name: {name: inner}, reversed(place), tree))
            lines.append(found[1])
    return config, lines


def run_model(path: str, key: str) -> tuple[str, str] | None:
    """Return the model of a checkpoint or run, and a line about it; None where the folder is neither."""
    folder, named = Path(path).expanduser().resolve(), f"{key}={path}"
    run, model = RunFolder(folder), folder / "model"
    if (folder / MANIFEST).is_file():
        return str(model), f"taken      {named}: this checkpoint's model ({model})"
    if not run.config.is_file() or not run.verb():
        return None
    if run.verb() in UNTRAINED:
        raise ConfigError(f"{named} is a run of {run.verb()}, which trains no model: name one that trains, or a model")
    asked, trained = CheckpointConfig.parse(read_tree(run.config).get("checkpoint", {})), run.training_folder()
    checkpoints = Checkpoints(trained, asked)
    best, newest = checkpoints.best(), checkpoints.newest()
    if newest is None and not asked.save:
        raise ConfigError(f"{named} is a run of {run.verb()} that saved nothing (checkpoint.save=false): name another")
    if newest is None:
        raise ConfigError(
            f"{named} is a run of {run.verb()} without a checkpoint yet: continue it (trueline {run.verb()} --resume "
            f"--name {folder.name}), or name another run or model folder"
        )
    which = f"{newest.name}, the newest checkpoint" + (f" of {trained.parent.name}" if trained != folder else "")
    if best:
        newest, which = best[0], f"{best[0].name}, the best checkpoint by {asked.metric}"
    return str(newest / "model"), f"taken      {named}: {which} ({newest / 'model'})"
