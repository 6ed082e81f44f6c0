"""What a plan is made from besides its keys: data, model, machine, rewards and environment, each read once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trueline.algorithms.advantages import has_teacher, needs, reads_reward
from trueline.config.algorithm import WHOLE_VOCABULARY
from trueline.config.base import Config, ConfigError, Tree, read_tree
from trueline.config.data import PromptDataConfig
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardConfig
from trueline.config.rl import EvaluationConfig, ResolvedRollout, RLConfig
from trueline.config.run import CheckpointConfig, RunConfig
from trueline.config.sampling import GenerateConfig, SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import CONTENT, digest_rows
from trueline.data.prompts import (
    UNKNOWN,
    LazyPrompts,
    LengthLimit,
    is_fitting,
    offer_tools,
    prompt_lengths,
    read_prompts,
    refused_rows,
    sample_of,
)
from trueline.data.rows import content_digest
from trueline.data.sources import open_source, stored_data
from trueline.data.types import Prompt
from trueline.environments.opening import check_environment
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.models.vision import VISION_FAMILIES, blindness
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.rewards import RewardCheck, Trial, check_rewards
from trueline.plan.survey import known_lengths
from trueline.rewards.combined import kind_of
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.training.checkpoints import MANIFEST, Checkpoints

Kind = TypeVar("Kind", bound=Config)
Name = TypeVar("Name")
Paths = dict[tuple[str, ...], Any]  # by the parts of their keys
MODEL_KEYS = ("model.path", "critic.path", "teacher.path", "distill.teacher")  # and rewards that are models
KEPT = "checkpoint.model"
MANY = 8  # pictures of a prompt in a large dataset, of which only a sample is known
UNTRAINED = ("generate", "eval")  # verbs whose runs hold no model


@dataclass(frozen=True, slots=True)
class Measured:
    """The prompts of a dataset, and how many tokens each has; of a large dataset, each of its sample."""

    prompts: Sequence[Prompt]
    lengths: Sequence[int] | np.ndarray
    chat: ChatFormat | None = None  # measures prompts that are drawn later


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that fit, how many did not, and how many tokens the longest has."""

    prompts: Sequence[Prompt]  # of a large dataset all, which are dropped as they are drawn
    dropped: int
    longest: int
    sampled: int | None = None  # of how many prompts this is said, if not of all

    def digest(self, like: str = CONTENT) -> str:
        """Return the digest of the rows that fit, or of the files of a large dataset if an earlier one is `like` it."""
        if not isinstance(self.prompts, LazyPrompts):
            return digest_rows(content_of(prompt) for prompt in self.prompts)
        found = content_digest(self.prompts.rows) if like.startswith(CONTENT) else ""
        return CONTENT + found if found else digest_rows(located.row for located in self.prompts.rows)


def content_of(prompt: Prompt) -> dict[str, Any]:
    """Return all that the digest of a prompt depends on: with pictures, their content."""
    if not prompt.pictures:
        return prompt.columns
    seen = [sha256(picture.data).hexdigest() for picture in prompt.pictures]
    return {**prompt.columns, "messages": prompt.messages, "pictures": seen}


@dataclass(frozen=True, slots=True)
class Reading:
    """What a plan has read of model and data, for checks that read nothing again."""

    facts: ModelFacts
    chat: ChatFormat
    rows: Sequence[Any]  # prompts, or the records of an offline task; of a large dataset, a sample
    held_out: list[Any]
    trials: dict[str, Trial] = field(default_factory=dict)  # calls of reward functions, by their names
    total: int | None = None  # rows, if these are a sample


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a run of reinforcement learning is planned for: as found here, or as assumed."""

    facts: ModelFacts
    machine: Machine
    trained: list[Measured]  # one for each dataset
    tested: dict[str, Measured]
    chat: ChatFormat
    rewards: RewardCheck

    def check_lessons(self, config: RLConfig, rollout: ResolvedRollout) -> int:
        """Refuse what no teacher can read or answer; return the longest sequence that a model reads."""
        prompts = [prompt for one in self.trained for prompt in sample_of(one.prompts)]
        longest, section = config.longest_read(rollout, self.facts.context), config.teacher
        for refusal in refused_lessons(config, self.facts, prompts, longest):
            raise ConfigError(refusal)
        for prompt in prompts if section.paths and prompts[0].columns else ():
            if (name := str(prompt.columns.get(section.column))) not in section.paths:
                known = ", ".join(section.paths)
                raise ConfigError(f"{prompt.place()}: {section.column}={name} is none of teacher.paths ({known})")
        return longest


def refused_lessons(config: RLConfig, facts: ModelFacts, prompts: Sequence[Prompt], longest: int) -> list[str]:
    """Return why a teacher cannot work as its keys say."""
    algorithm, asked = config.algorithm, config.algorithm.distillation
    if not has_teacher(algorithm):
        return []
    by, column = f"algorithm.distillation.context={asked.context}", asked.column or asked.context
    in_rows = asked.context in ("demonstration", "solution")
    size, largest, top_k = facts.vocabulary, WHOLE_VOCABULARY, "algorithm.distillation.top_k"
    compared = asked.coefficient > 0
    shown = next((prompt.place() for prompt in prompts if prompt.pictures and asked.reads_more()), "")
    problems = {
        f"{top_k}=null: {config.model.path} has {size} tokens, more than the {largest} that are compared as a whole: "
        f"set {top_k}, e.g. 100": compared and asked.top_k is None and size > largest,
        f"{top_k}={asked.top_k} is more than the {size} tokens there are: lower it": compared
        and (asked.top_k or 0) > size,
        "algorithm.distillation.teacher=average: set training.ema_decay, e.g. 0.99": asked.teacher == "average"
        and not config.training.ema_decay,
        f"{by}: no row has the column {column}: set algorithm.distillation.column": in_rows
        and not any(column in prompt.columns or not prompt.columns for prompt in prompts),
        f"{by} shows rewarded replies of a group: set a reward, and algorithm.group_size to 2 or more (got "
        f"{algorithm.group_size})": asked.context == "feedback"
        and not (config.has_reward() and algorithm.group_size > 1),
        f"{shown} has pictures, which a teacher with {by} does not see: set context=none": bool(shown),
        f"algorithm.distillation.max_prompt_tokens={asked.max_prompt_tokens}: with a completion, that is more than the "
        f"model's context of {facts.context} tokens: lower it": asked.reads_more() and longest > facts.context,
    }
    return [problem for problem, holds in problems.items() if holds]


def look_around(config: RLConfig) -> PlanInputs:
    trained = {("train", path): prompts for path, prompts in training_prompts(config.data).items()}
    tested = {("test", name): some for name, some in held_out_prompts(config.data, config.evaluation).items()}
    required = reads_reward(config.algorithm) and not config.has_reward()
    prompts, rewards = check_prompts(config, {**trained, **tested}, required=required)
    facts, machine = check_model(config.model), machine_at_hand()
    check_kept(config.checkpoint, config.model, facts)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    check_sight(config.environment, prompts.values(), {f"model.path={config.model.path}": facts.family})
    measured = {place: measure(some, chat) for place, some in prompts.items()}
    sources = [measured[place] for place in trained]
    return PlanInputs(facts, machine, sources, {name: measured[place, name] for place, name in tested}, chat, rewards)


def check_kept(checkpoint: CheckpointConfig, model: ModelConfig, facts: ModelFacts) -> None:
    """Refuse checkpoints that would lack the frozen weights of a vision-language model."""
    if checkpoint.model == "last" and facts.family in VISION_FAMILIES and model.train_vision != "all":
        why = f"model.path={model.path} has a frozen vision tower: set checkpoint.model=every"
        raise ConfigError(f"checkpoint.model=last keeps only what is trained until the end, but {why}", key=KEPT)


def check_sight(played: EnvironmentConfig, sets: Iterable[Sequence[Prompt]], readers: Mapping[str, str]) -> Tree:
    """Refuse prompts with pictures that a model, by name and family, does not read; return keys that allow no more."""
    shown = next((prompt for some in sets for prompt in sample_of(some) if prompt.pictures), None)
    unseeing = [f"{name} {blindness(family)}" for name, family in readers.items() if blindness(family)]
    if shown is not None and unseeing:
        raise ConfigError(blind(shown.place(), unseeing[0]))
    return {"environment": {"max_images": 0}} if unseeing and played.kind() else {}


def blind(place: str, why: str) -> str:
    families = ", ".join(VISION_FAMILIES)
    remedy = f"remove them, or name a model of a family that trains on pictures ({families})"
    return f"{place} has pictures, but {why}: {remedy}"


def most_pictures(sets: Iterable[Sequence[Prompt]], chat: ChatFormat, played: EnvironmentConfig) -> int:
    """Return how many pictures a sequence may have, with those of later turns; 0 for a model that reads none."""
    if chat.vision is None:
        return 0
    found = [len(prompt.pictures) for some in sets for prompt in sample_of(some)]
    own = max(1, *found, MANY if any(isinstance(some, LazyPrompts) for some in sets) else 0)
    return own + (played.max_images if played.kind() else 0)


def load_prompts(data: PromptDataConfig, path: str, key: str) -> Sequence[Prompt]:
    return read_prompts(open_source(path, key), data, path)


def training_prompts(data: PromptDataConfig) -> dict[str, Sequence[Prompt]]:
    return {path: load_prompts(data, path, data.source_key()) for path in data.sources()}


def held_out_prompts(data: PromptDataConfig, evaluation: EvaluationConfig) -> dict[str, Sequence[Prompt]]:
    """Read the prompts of an evaluation by the names of their sets, as many of each as its limit allows."""
    key = "evaluation.sets" if evaluation.sets else "evaluation.data"
    sets = evaluation.named_sets().items()
    return {name: load_prompts(data, path, key)[: evaluation.limit] for name, path in sets}


def check_prompts(
    config: RLConfig | SamplingConfig, sets: Mapping[Name, Sequence[Prompt]], *, required: bool
) -> tuple[dict[Name, Sequence[Prompt]], RewardCheck]:
    """Try environment and rewards on the first prompts; return all prompts with their tools, and what was found."""
    firsts = {(tuple(some[0].columns), type(some[0].label)): some[0] for some in sets.values()}
    found = check_environment(config.environment, *firsts.values(), rewarded=bool(config.reward.named_parts()))
    roles = check_roles(config, found.roles)
    offered = {name: offer_tools(prompts, found.tools) for name, prompts in sets.items()}
    played = bool(config.environment.kind())
    rewards = check_rewards(config.reward, [*offered.values()], config.data, required=required, played=played)
    return offered, replace(rewards, lines=[*roles, *rewards.lines], warnings=[*found.warnings, *rewards.warnings])


def check_roles(config: RLConfig | SamplingConfig, roles: list[str]) -> list[str]:
    """Refuse what cannot tell the roles of an environment apart, and describe them."""
    if not roles:
        return []
    played = f"environment.function={config.environment.function} has the roles {', '.join(roles)}"
    if config.reward.named_parts():
        raise ConfigError(f"{played}, and rewards each of them itself: leave out --reward", key="reward.function")
    if isinstance(config, GenerateConfig):
        raise ConfigError(f"{played}, and completions are kept by one reward: use `trueline eval` or train by RL")
    if isinstance(config, RLConfig) and "greedy" in needs(config.algorithm):
        remedy = "which has no baseline of each role: use moving_average, group_norm or another"
        raise ConfigError(f"{played}, but algorithm.advantage={config.algorithm.advantage}, {remedy}")
    return [
        f"roles      {', '.join(roles)}: each has its own conversation, reward and baseline; reward/mean is that of "
        f"{roles[0]}"
    ]


def measure(prompts: Sequence[Prompt], chat: ChatFormat) -> Measured:
    """Measure all prompts; of a large dataset a sample, unless earlier runs have measured them all."""
    known = known_lengths(prompts, chat) if isinstance(prompts, LazyPrompts) else None
    if known is not None and not (known == UNKNOWN).any():
        return Measured(prompts, known, chat)
    return Measured(prompts, prompt_lengths(sample_of(prompts), chat), chat)


def fitting_prompts(source: Measured, limit: int, too_long: str) -> PromptSet:
    """Keep prompts within the limit; a longer one is refused by its place, or dropped and counted."""
    prompts, lengths = source.prompts, np.asarray(source.lengths)
    within = lengths[(lengths > 0) & (lengths <= limit)]
    sampled = None
    if isinstance(prompts, LazyPrompts):
        sampled = len(lengths) if len(lengths) < len(prompts) else None
        prompts = with_limit(prompts, source, limit, too_long)
    else:
        checked = zip(prompts, lengths, strict=True)
        prompts = [prompt for prompt, length in checked if is_fitting(prompt, int(length), limit, too_long)]
    if not len(within):
        raise ConfigError(
            f"all {len(lengths)} {'sampled ' * bool(sampled)}prompts of {source.prompts[0].source} have more than "
            f"rollout.max_prompt_tokens={limit} tokens: raise the limit",
            key="rollout.max_prompt_tokens",
        )
    return PromptSet(prompts, len(lengths) - len(within), int(within.max()), sampled)


def with_limit(prompts: LazyPrompts, source: Measured, limit: int, too_long: str) -> LazyPrompts:
    """Return prompts that are measured when they are drawn, after those that were measured before."""
    assert source.chat is not None
    lengths, every = np.asarray(source.lengths), len(source.lengths) == len(prompts)
    drawn = replace(prompts, limit=LengthLimit(source.chat, limit, too_long, lengths if every else None))
    for at in refused_rows(lengths, limit, too_long)[:1]:
        drawn.at(int(at) if every else prompts.sample[at].id)  # and say why
    return drawn


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
