"""What a run will need: memory, time, and the plan in words."""

from trueline.rl.plan import RLPlan, tenants_of
from trueline.rl.recipe import describe_recipe
from trueline.runs.idle_keys import idle_keys
from trueline.runs.learning_rate import rate_warnings
from trueline.runs.memory import GIB, describe_passes, engine_bytes, tenant_bytes
from trueline.runtime.placement import crowding

FLOPS_PER_GPU, FLOPS_PER_CPU = 2e14, 2e10  # rough, for a first estimate of time


def memory_bytes(plan: RLPlan) -> dict[str, float]:
    """A first estimate of each process's memory; on GPUs of device memory."""
    device, again = "cuda" if plan.machine.gpus else "cpu", bool(plan.config.model.gradient_checkpointing)
    each = {one.name: tenant_bytes(one, one.ranks.tokens_per_pass(), again, device) for one in tenants_of(plan)}
    return each | {"engine": engine_bytes(plan.config.rollout, plan.facts, plan.layout, plan.machine)}


def seconds_per_step(plan: RLPlan) -> float:
    """With answers of full length: sampling, scoring by every model, and forward and backward passes."""
    config, machine = plan.config, plan.machine
    answers = config.groups_per_step * config.algorithm.group_size
    tokens = answers * (plan.longest_prompt + plan.rollout.max_new_tokens)
    work = (2 + 2 + 6 * config.epochs) * plan.facts.parameters
    for role in plan.roles:
        work += (2 + (6 * config.epochs if role.head == "value" else 0)) * role.facts.parameters
    speed = FLOPS_PER_GPU * machine.gpus if machine.gpus else FLOPS_PER_CPU * machine.cpus
    return tokens * work / speed


def describe_plan(plan: RLPlan) -> str:
    """Who gets what, the recipe, the batch arithmetic, and a first estimate of memory and time."""
    config, layout, machine = plan.config, plan.layout, plan.machine
    each = {name: f"{value / GIB:.1f} GiB" for name, value in memory_bytes(plan).items()}
    devices = f"{machine.gpus} GPUs" if machine.gpus else f"{machine.cpus} CPU cores"
    sharing = "share GPUs and take turns" if layout.colocated and machine.gpus else "run side by side"
    if config.runtime == "local":
        sharing = "live in this process"
    policy = f"{layout.policy_ranks} x {config.training.engine} rank, ZeRO {config.training.zero_stage}"
    engine = f"{layout.engines} x {config.rollout.engine}, tensor parallel {layout.tensor_parallel}"
    return "\n".join(
        [
            f"machine    {devices}, {machine.memory_bytes / GIB:.1f} GiB of memory free; models and engines {sharing}",
            f"model      {config.model.path}: {plan.facts.parameters / 1e6:.1f} M parameters, {config.model.dtype}",
            f"policy     {policy}, {describe_passes(config.training, config.model)}, about {each['policy']} each",
            *describe_roles(plan, each),
            f"engines    {engine}, about {each['engine']} each",
            describe_recipe(config),
            *describe_batches(plan),
            *(f"warning: {text}" for text in plan_warnings(plan)),
        ]
    )


def plan_warnings(plan: RLPlan) -> list[str]:
    """What will run, but hardly as it was meant."""
    config, critics = plan.config, [role for role in plan.roles if role.head == "value"]
    return [
        *crowding(plan.layout, plan.machine),
        *rate_warnings(plan.facts.parameters, "policy", config.model, config.training),
        *(
            warning
            for role in critics
            for warning in rate_warnings(role.facts.parameters, "critic", role.model, config.critic, "critic")
        ),
        *idle_keys(config),
    ]


def describe_roles(plan: RLPlan, each: dict[str, str]) -> list[str]:
    lines = [
        f"{role.name:<10} {role.world} x {role.ranks.engine} rank, {describe_passes(role.ranks, role.model)}, "
        f"about {each[role.name]} each" + ("" if role.model.path == plan.config.model.path else f": {role.model.path}")
        for role in plan.roles
    ]
    return lines or ["beside     no other model is needed"]


def describe_batches(plan: RLPlan) -> list[str]:
    config = plan.config
    answers, count = config.groups_per_step * config.algorithm.group_size, len(plan.prompts)
    held_out = sum(len(prompts) for prompts in plan.evaluation_sets.values())
    dropped = sum(source.dropped for source in plan.sources)
    return [
        f"data       {count} prompts, {held_out} held out"
        + (f", {dropped} too long and left out" if dropped else "")
        + f"; longest prompt {plan.longest_prompt} tokens, answers up to {config.rollout.max_new_tokens}",
        *plan.chat.remarks(),
        f"batch      {config.groups_per_step} prompts x {config.algorithm.group_size} answers = {answers} per step"
        f", {config.minibatches * config.epochs} optimizer steps of {answers // config.minibatches}",
        f"length     {config.steps} steps = {config.steps * config.groups_per_step / count:.2g} epochs"
        f"; roughly {seconds_per_step(plan):.2g} s of computation per step if answers have full length",
    ]
