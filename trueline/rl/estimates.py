"""Estimate the memory and the time that a run will need, and put its plan into words."""

from trueline.config.model import ModelConfig, TrainingConfig
from trueline.environments.opening import describe_environment
from trueline.models.routing import KEY
from trueline.monitoring.timing import duration
from trueline.rl.adapters import adapter_lines
from trueline.rl.plan import RLPlan, tenants_of
from trueline.rl.recipe import describe_recipe
from trueline.runs.learning_rate import rate_line, rate_warnings
from trueline.runs.memory import GIB, engine_bytes, tenant_bytes
from trueline.runs.summary import (
    engines_line,
    machine_line,
    model_line,
    node_lines,
    prompts_line,
    ranks_line,
    warning_lines,
)

FLOPS_PER_GPU, FLOPS_PER_CPU = 2e14, 2e10  # rough, for a first estimate of time


def memory_bytes(plan: RLPlan) -> dict[str, float]:
    """Estimate the bytes of one process of each model and of one engine; on GPUs, of device memory."""
    device, again = "cuda" if plan.machine.gpus else "cpu", bool(plan.config.model.gradient_checkpointing)
    each = {one.name: tenant_bytes(one, one.ranks.tokens_per_pass(), again, device) for one in tenants_of(plan)}
    return each | {"engine": engine_bytes(plan.config.rollout, plan.facts, plan.machine)}


def seconds_per_step(plan: RLPlan) -> float:
    """Estimate the seconds of sampling, scoring by every model and training, with completions of full length."""
    config, machine = plan.config, plan.machine
    completions = config.prompts_per_step * config.algorithm.group_size
    tokens = completions * (plan.longest_prompt + plan.rollout.max_new_tokens)
    work = (2 + 2 + 6 * config.epochs) * plan.facts.parameters
    for role in plan.roles:
        work += (2 + (6 * config.epochs if role.head == "value" else 0)) * role.facts.parameters
    speed = FLOPS_PER_GPU * machine.gpus if machine.gpus else FLOPS_PER_CPU * machine.cpus
    return tokens * work / speed


def describe_plan(plan: RLPlan) -> str:
    """Describe who gets what, the recipe, the batch arithmetic, and a first estimate of memory and time."""
    config, layout, model = plan.config, plan.layout, plan.config.model
    each = {name: f", about {value / GIB:.1f} GiB each" for name, value in memory_bytes(plan).items()}
    sharing = (
        f"share GPUs and {'take turns' if layout.in_turns else 'work at once'}"
        if plan.shares_gpus()
        else "run side by side"
    )
    unsuited = [said for one in rates(plan) for said in rate_warnings(*one)]
    if config.runtime == "local":
        sharing = "live in this process"
    return "\n".join(
        [
            f"{machine_line(plan.machine)}; models and engines {sharing}",
            model_line(model.path, plan.facts, model.dtype, model.lora.rank),
            ranks_line("policy", layout.policy_ranks, config.training, model) + each["policy"],
            *describe_roles(plan, each),
            *adapter_lines(config, plan.facts, plan.machine.gpus),
            engines_line(plan.rollout) + each["engine"],
            *routing_lines(plan),
            *(rate_line(*one) for one in rates(plan)),
            *node_lines(layout, plan.machine),
            *plan.forecast.lines(),
            describe_recipe(config),
            *describe_batches(plan),
            *plan.rewards.lines,
            *warning_lines(config, layout, plan.machine, [*unsuited, *plan.rewards.warnings]),
        ]
    )


def rates(plan: RLPlan) -> list[tuple[int, str, ModelConfig, TrainingConfig, str]]:
    """Return each trained model with its rate, as judged by its size and kind."""
    config, critics = plan.config, [role for role in plan.roles if role.head == "value"]
    return [
        (plan.facts.parameters, "policy", config.model, config.training, "training"),
        *((one.facts.parameters, "critic", one.model, config.critic, "critic") for one in critics),
    ]


def describe_roles(plan: RLPlan, each: dict[str, str]) -> list[str]:
    lines = [
        ranks_line(role.name, role.world, role.ranks, role.model)
        + each[role.name]
        + ("" if role.model.path == plan.config.model.path else f": {role.model.path}")
        for role in plan.roles
    ]
    return lines or ["beside     no other model is needed"]


def routing_lines(plan: RLPlan) -> list[str]:
    """Say of a mixture who chooses the experts of a token."""
    chosen = plan.config.training.replay_routing
    if not plan.facts.experts:
        return []
    words = {
        False: f"engine and trainer choose experts by themselves ({KEY}=false)",
        True: f"the trainer sends tokens to the experts that the engine chose ({KEY}=true)",
        "measure": f"engine and trainer choose experts by themselves and are compared ({KEY}=measure)",
    }
    return [f"routing    {words[chosen]}"]


def describe_batches(plan: RLPlan) -> list[str]:
    config = plan.config
    completions, count = config.prompts_per_step * config.algorithm.group_size, len(plan.prompts)
    return [
        prompts_line(plan.sources, plan.rollout, sum(len(prompts) for prompts in plan.evaluation_sets.values())),
        *plan.chat.remarks(),
        *describe_environment(config.environment, plan.chat, plan.rollout.longest(), plan.rollout.engine),
        f"batch      {config.prompts_per_step} prompts x {config.algorithm.group_size} answers = {completions} per step"
        f", {config.minibatches * config.epochs} optimizer steps of {completions // config.minibatches}",
        f"length     {config.steps} steps = {config.steps * config.prompts_per_step / count:.2g} epochs"
        f"; roughly {duration(seconds_per_step(plan))} of computation per step if answers have full length",
    ]
