"""Plan a sampling job: fill in what the machine and the model decide, refuse what cannot work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from trueline.config.base import ConfigError, Tree
from trueline.config.model import resolve_path
from trueline.config.rl import ResolvedRollout
from trueline.config.sampling import EvalConfig, GenerateConfig, SamplingConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import make_order
from trueline.data.types import Prompt
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.monitoring.findings import Finding
from trueline.plan.findings import find, reproducible
from trueline.plan.inputs import (
    PromptSet,
    Reading,
    check_prompts,
    check_sight,
    fitting_prompts,
    held_out_prompts,
    measure,
    training_prompts,
)
from trueline.plan.resolve import (
    RoleModel,
    check_engines,
    check_rollout,
    contexts,
    own_gpus,
    resolve_dtype,
    resolve_rollout,
    reward_models,
    worker_count,
)
from trueline.plan.rewards import RewardCheck
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.groups import Numbered
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.runtime.placement import Layout, check_devices

Kind = TypeVar("Kind", bound=SamplingConfig)


@dataclass(frozen=True, slots=True)
class SamplingPlan(Generic[Kind]):
    config: Kind  # resolved
    rollout: ResolvedRollout
    machine: Machine
    facts: ModelFacts
    layout: Layout
    reward_roles: list[RoleModel]  # rewards that are models on this machine
    sets: dict[str, PromptSet]
    chat: ChatFormat
    rewards: RewardCheck
    total: int  # prompts to sample
    findings: list[Finding]

    def reading(self) -> Reading:
        prompts = [prompt for one in self.sets.values() for prompt in one.prompts]
        return Reading(self.facts, self.chat, prompts, [], self.rewards.trials)


def plan_generate(config: GenerateConfig) -> SamplingPlan[GenerateConfig]:
    if not config.has_reward() and (config.keep != "all" or config.pairs):
        asked, other = ("pairs=true", "pairs=false") if config.pairs else (f"keep={config.keep}", "keep=all")
        raise ConfigError(f"{asked} compares rewards: name one with --reward, or set {other}")
    sets = {path: list(prompts) for path, prompts in training_prompts(config.data).items()}
    plan = plan_sampling(config, sets, scored=config.has_reward())
    if config.pairs and config.environment.kind():
        check_pairs(plan.chat)
    if not (total := len(chosen_prompts(plan))):
        raise ConfigError(
            f"shard={config.shard} of shards={config.shards} has none of the {config.limit or plan.total} prompts: "
            "lower shards"
        )
    found = []
    if config.keep == "best" and config.samples == 1:
        what = "samples=1 leaves keep=best nothing to choose from, so every completion is kept"
        found.append(Finding("watch", "nothing_to_choose", what, "raise samples", "samples"))
    return replace(plan, total=total, findings=[*plan.findings, *found])


def check_pairs(chat: ChatFormat) -> None:
    """Refuse pairs of episodes that no trainer could read as one sequence each."""
    why = "there is no chat template" if not chat.templated else "the chat template rewrites earlier turns"
    if not chat.templated or chat.rewrites() == "all of them":
        raise ConfigError(
            f"pairs=true: dpo compares two sequences, and an episode of several turns is no single one, for {why}: set "
            "pairs=false, or data.chat_template to a Jinja file that only appends"
        )


def plan_eval(config: EvalConfig) -> SamplingPlan[EvalConfig]:
    if not config.evaluation.named_sets():
        raise ConfigError(
            "evaluation.data is empty: name prompts with --data, or several with evaluation.sets", key="evaluation.data"
        )
    return plan_sampling(config, held_out_prompts(config.data, config.evaluation), scored=True)


def plan_sampling(config: Kind, sets: Mapping[str, Sequence[Prompt]], *, scored: bool) -> SamplingPlan[Kind]:
    """Fill in and check what can be known without loading a model, the quickest checks first."""
    check_engines(config, "rollout")
    config = reproducible(config)
    sets, rewards = check_prompts(config, sets, required=scored and not config.environment.plays())
    quantized, machine = ROLLOUT_ENGINES[config.rollout.engine].quantized, machine_at_hand()
    facts = check_model(config.model, quantized=quantized)
    dtype = resolve_dtype(config.model.dtype, config.reward_model, machine)
    values: Tree = {"model": {"dtype": dtype, "path": resolve_path(config.model.path)}}
    config = config.with_keys(values)
    reward_roles = reward_models(config.reward, config.reward_model, config.model)
    engines = engine_count(config, reward_roles, machine)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    readers = {f"model.path={config.model.path}": facts.family}
    readers |= {f"{one.name} {one.model.path}": one.facts.family for one in reward_roles}
    config = config.with_keys(check_sight(config.environment, sets.values(), readers))
    sources = {name: measure(prompts, chat) for name, prompts in sets.items()}
    context = contexts(config.environment, config.rollout, facts, machine, dtype)[0]
    lengths = np.concatenate([np.asarray(one.lengths) for one in sources.values()])
    rollout = resolve_rollout(config.rollout, facts, lengths, engines, dtype, machine.gpus, context)
    rollout = rollout.with_keys({"workers": worker_count(config, reward_roles, machine)})
    config = config.with_keys({"rollout": rollout.model_dump()})
    placed = tuple(role.layout() for role in reward_roles)
    layout = Layout(0, engines, rollout.tensor_parallel, roles=placed, deterministic=config.deterministic)
    check_place(config, layout, reward_roles, machine)
    check_rollout(rollout, config.model, facts, machine)
    limit, too_long = rollout.max_prompt_tokens, config.data.too_long
    fitted = {name: fitting_prompts(source, limit, too_long) for name, source in sources.items()}
    total = sum(len(one.prompts) for one in fitted.values())
    findings = find(config, layout, machine, chat, rewards.warnings)
    return SamplingPlan(config, rollout, machine, facts, layout, reward_roles, fitted, chat, rewards, total, findings)


def engine_count(config: SamplingConfig, reward_roles: list[RoleModel], machine: Machine) -> int:
    """Return the configured number of engines; else one on a CPU, or all that fit on the GPUs left by reward models."""
    if config.runtime == "local" or not machine.gpus:
        return 1 if config.runtime == "local" else config.rollout.engines or 1
    return config.rollout.engines or max((machine.gpus - own_gpus(reward_roles)) // config.rollout.tensor_parallel, 1)


def check_place(config: SamplingConfig, layout: Layout, reward_roles: list[RoleModel], machine: Machine) -> None:
    """Check GPUs and memory; without a policy, a shared reward model shares the first engine's GPU."""
    own = tuple(one for one in layout.roles if not one.shared)
    check_devices(Layout(0, layout.engines, layout.tensor_parallel, roles=own), machine)
    width = 2 if config.model.dtype == "bfloat16" else 4
    shared = sum(role.facts.parameters * width for role in reward_roles if role.layout().shared)
    if not machine.gpus or not shared:
        return
    left = 0.95 - shared / machine.gpu_bytes
    if config.rollout.gpu_memory_utilization > left:
        raise ConfigError(
            f"a reward model of {shared / 2**30:.1f} GiB shares a GPU with an engine that takes "
            f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization} of it: lower that to "
            f"{max(left, 0):.2f} or less, or set reward_model.placement=separate"
        )


def chosen_prompts(plan: SamplingPlan[GenerateConfig]) -> list[Numbered]:
    """Return prompts and their places in the endless seeded order; without a limit, up to the end of its round."""
    config = plan.config
    prompts = [prompt for source in plan.sets.values() for prompt in source.prompts]
    sizes, weights = [len(source.prompts) for source in plan.sets.values()], list(config.data.sources().values())
    order = make_order(sizes, weights, config.seed, config.data.shuffle, config.skip)
    count = config.limit or len(prompts) - config.skip % len(prompts)
    drawn = [(order.position, prompts[next(order)]) for _ in range(count)]
    return [numbered for numbered in drawn if numbered[0] % config.shards == config.shard]
