"""Plan a sampling job before it starts: fill in what the machine and the model decide, refuse what cannot work."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from trueline.config.base import ConfigError, Tree
from trueline.config.rl import ResolvedRollout
from trueline.config.sampling import EvalConfig, GenerateConfig, SamplingConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import make_order
from trueline.data.types import Prompt, with_tools
from trueline.environments.opening import check_environment, describe_environment
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.groups import Numbered
from trueline.runs.engines import check_engines
from trueline.runs.preflight import (
    PromptSet,
    Reading,
    check_rollout,
    contexts,
    fitting_prompts,
    load_prompts,
    measured,
    resolve_dtype,
    resolve_path,
    resolved_rollout,
)
from trueline.runs.rewards import RewardCheck, check_rewards
from trueline.runs.roles import RoleModel, own_gpus, reward_models
from trueline.runs.summary import engines_line, machine_line, model_line, prompts_line
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

    def reading(self) -> Reading:
        prompts = [prompt for one in self.sets.values() for prompt in one.prompts]
        return Reading(self.facts, self.chat, prompts, [], self.rewards.trials)

    def prompts(self) -> int:
        return sum(len(one.prompts) for one in self.sets.values())


def plan_generate(config: GenerateConfig) -> SamplingPlan[GenerateConfig]:
    if not config.scored() and (config.keep != "all" or config.pairs):
        asked, other = ("pairs=true", "pairs=false") if config.pairs else (f"keep={config.keep}", "keep=all")
        raise ConfigError(f"{asked} compares rewards: name one with --reward, or set {other}")
    sources = {path: load_prompts(config.data, path, config.data.source_key()) for path in config.data.sources()}
    plan = plan_sampling(config, sources, scored=config.scored())
    if config.pairs and config.environment.kind():
        check_pairs(plan.chat)
    if not chosen_prompts(plan):
        raise ConfigError(
            f"shard={config.shard} of shards={config.shards} has none of the {config.limit or plan.prompts()} prompts: "
            "lower shards"
        )
    return plan


def check_pairs(chat: ChatFormat) -> None:
    """Refuse pairs of episodes that no trainer could read as one sequence each."""
    why = "there is no chat template" if not chat.templated else "the chat template rewrites earlier turns"
    if not chat.templated or chat.rewrites() == "all of them":
        raise ConfigError(
            f"pairs=true: dpo compares two sequences, and an episode of several turns is no single one, for {why}: set "
            "pairs=false, or data.chat_template to a Jinja file that only appends"
        )


def plan_eval(config: EvalConfig) -> SamplingPlan[EvalConfig]:
    evaluation = config.evaluation
    if not evaluation.named_sets():
        raise ConfigError("evaluation.data is empty: name prompts with --eval-data, or several with evaluation.sets")
    key = "evaluation.sets" if evaluation.sets else "evaluation.data"
    sets = {name: load_prompts(config.data, path, key) for name, path in evaluation.named_sets().items()}
    return plan_sampling(config, {name: prompts[: evaluation.limit] for name, prompts in sets.items()}, scored=True)


def plan_sampling(config: Kind, sets: dict[str, list[Prompt]], *, scored: bool) -> SamplingPlan[Kind]:
    """Fill in and check all that can be known without loading a model, in the order of what is quickest to tell."""
    check_engines(config, "rollout")
    firsts = [prompts[0] for prompts in sets.values()]
    examples = {(tuple(first.columns), type(first.label)): first for first in firsts}.values()
    found = check_environment(config.environment, *examples, rewarded=bool(config.reward.named_parts()))
    sets = {name: [with_tools(prompt, found.tools) for prompt in prompts] for name, prompts in sets.items()}
    required = scored and not config.environment.plays()
    played = bool(config.environment.kind())
    rewards = check_rewards(config.reward, [*sets.values()], config.data, required=required, played=played)
    rewards = replace(rewards, warnings=[*found.warnings, *rewards.warnings])
    quantized, machine = ROLLOUT_ENGINES[config.rollout.engine].quantized, machine_at_hand()
    facts = check_model(config.model, quantized=quantized)
    dtype = resolve_dtype(config.model.dtype, config.reward_model, machine)
    values: Tree = {"model": {"dtype": dtype, "path": resolve_path(config.model.path)}}
    config = config.replaced(values)
    reward_roles = reward_models(config.reward, config.reward_model, config.model)
    engines = engine_count(config, reward_roles, machine)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    sources = {name: measured(prompts, chat) for name, prompts in sets.items()}
    context = contexts(config.environment, config.rollout, facts, machine, dtype)[0]
    rollout = resolved_rollout(config.rollout, facts, [*sources.values()], engines, dtype, machine.gpus, context)
    config = config.replaced({"rollout": rollout.model_dump()})
    layout = Layout(0, engines, rollout.tensor_parallel, roles=tuple(role.layout() for role in reward_roles))
    check_place(config, layout, reward_roles, machine)
    check_rollout(rollout, config.model, facts, machine)
    limit, too_long = rollout.max_prompt_tokens, config.data.too_long
    fitted = {name: fitting_prompts(source, limit, too_long) for name, source in sources.items()}
    return SamplingPlan(config, rollout, machine, facts, layout, reward_roles, fitted, chat, rewards)


def engine_count(config: SamplingConfig, reward_roles: list[RoleModel], machine: Machine) -> int:
    """Return as many engines as were asked for; else one on a CPU, or all that fit on GPUs that reward models leave."""
    if config.runtime == "local" or not machine.gpus:
        return 1 if config.runtime == "local" else config.rollout.engines or 1
    return config.rollout.engines or max((machine.gpus - own_gpus(reward_roles)) // config.rollout.tensor_parallel, 1)


def check_place(config: SamplingConfig, layout: Layout, reward_roles: list[RoleModel], machine: Machine) -> None:
    """Check GPUs and memory; without a policy to sit beside, a shared reward model sits beside the first engine."""
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


def describe(plan: SamplingPlan[Kind], work: str) -> str:
    rewards = ", ".join(part.function for part in plan.config.reward.named_parts().values())
    return "\n".join(
        [
            machine_line(plan.machine),
            model_line(plan.config.model.path, plan.facts, plan.rollout.dtype),
            engines_line(plan.rollout),
            f"reward     {rewards or ('of the environment' if plan.config.scored() else 'none')}",
            *plan.rewards.lines,
            *describe_environment(plan.config.environment, plan.chat, plan.rollout.longest(), plan.rollout.engine),
            prompts_line(plan.sets.values(), plan.rollout),
            *plan.chat.remarks(),
            f"work       {work}",
            *(f"warning: {text}" for text in plan.rewards.warnings),
        ]
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
