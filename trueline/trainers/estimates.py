"""What a run will need: memory, time, and the plan in words."""

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.models.loading import ModelFacts
from trueline.trainers.plan import RLPlan
from trueline.trainers.recipe import describe_recipe
from trueline.training.deepspeed_config import effective_stage

GIB = 2**30
PROCESS_BYTES = 0.5 * GIB  # of a process that has imported its libraries
FLOPS_PER_GPU, FLOPS_PER_CPU = 2e14, 2e10  # rough, for a first estimate of time


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def model_bytes(facts: ModelFacts, model: ModelConfig, ranks: RanksConfig, world: int, tokens: float) -> float:
    """Of one rank: weights and the activations of its largest pass; if trained, gradients and optimizer."""
    width, stage = bytes_of(model.dtype), effective_stage(ranks, model.dtype)
    share = facts.parameters / model.tensor_parallel
    weights = share * (0.5 if model.lora.quantize else width) / (world if stage == 3 else 1)
    if ranks.offload == "all":
        weights = 0.0
    if not isinstance(ranks, TrainingConfig):
        return weights
    trained = 0.0 if model.lora.rank else share  # adapters are small beside the model
    gradients = trained * 4 / (world if stage >= 2 else 1)  # summed in float32
    optimizer = trained * (8 + (4 if width == 2 else 0)) / (world if stage >= 1 else 1)
    if ranks.offload != "none":
        optimizer = 0.0
    return weights + gradients + optimizer + activation_bytes(facts, model, min(ranks.micro_batch_tokens, tokens))


def activation_bytes(facts: ModelFacts, model: ModelConfig, tokens: float) -> float:
    per_layer = 2 if model.gradient_checkpointing else 20
    logits = min(tokens, model.head_chunk_tokens or 1024) * facts.vocabulary * 4 * 3
    return tokens * facts.hidden_size * facts.layers * per_layer * bytes_of(model.dtype) + logits


def engine_bytes(plan: RLPlan) -> float:
    rollout, layout = plan.config.rollout, plan.layout
    if plan.machine.gpus:
        return rollout.gpu_memory_share * plan.machine.gpu_bytes
    weights = plan.facts.parameters * bytes_of(rollout.dtype) / layout.tensor_parallel
    return PROCESS_BYTES + layout.tensor_parallel * (PROCESS_BYTES + weights + rollout.cpu_cache_gib * GIB)


def memory_bytes(plan: RLPlan) -> dict[str, float]:
    """A first estimate of each process's memory; on GPUs of device memory."""
    config, layout = plan.config, plan.layout
    assert config.rollout.max_new_tokens
    base = 0.0 if plan.machine.gpus else PROCESS_BYTES
    answers = config.groups_per_step * config.algorithm.group_size / config.minibatches / layout.policy_ranks
    tokens = answers * (plan.longest_prompt + config.rollout.max_new_tokens)
    each = {"policy": base + model_bytes(plan.facts, config.model, config.training, layout.policy_ranks, tokens)}
    for role in plan.roles:
        each[role.name] = base + model_bytes(role.facts, role.model, role.ranks, role.world(), tokens)
    return each | {"engine": engine_bytes(plan)}


def check_memory(plan: RLPlan) -> None:
    """On a CPU, all processes together; on GPUs, one device's share."""
    each, layout, local = memory_bytes(plan), plan.layout, plan.config.runtime == "local"
    counts = {"policy": layout.policy_ranks, "engine": layout.engines} | {one.name: one.ranks for one in layout.beside}
    if plan.machine.gpus:
        on_one = ["policy", *(one.name for one in layout.beside if one.shared), *(["engine"] * layout.colocated)]
        needed, there, place = sum(each[name] for name in on_one), plan.machine.gpu_bytes, "on a GPU"
    else:
        needed = sum(each[name] * (1 if local else count) for name, count in counts.items())
        there, place = plan.machine.memory_bytes, "free here"
    if needed > there:
        parts = ", ".join(f"{count} x {name} {each[name] / GIB:.1f}" for name, count in counts.items())
        raise ConfigError(
            f"the run needs about {needed / GIB:.1f} GiB of memory ({parts}), {there / GIB:.1f} GiB are {place}: lower "
            "training.ranks, rollout.engines or training.micro_batch_tokens, raise training.zero_stage, or take a "
            "smaller model"
        )


def seconds_per_step(plan: RLPlan) -> float:
    """With answers of full length: sampling, scoring by every model, and forward and backward passes."""
    config, machine = plan.config, plan.machine
    assert config.rollout.max_new_tokens
    answers = config.groups_per_step * config.algorithm.group_size
    tokens = answers * (plan.longest_prompt + config.rollout.max_new_tokens)
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
            f"policy     {policy}, about {each['policy']} each",
            *describe_roles(plan, each),
            f"engines    {engine}, about {each['engine']} each",
            describe_recipe(config),
            *describe_batches(plan),
        ]
    )


def describe_roles(plan: RLPlan, each: dict[str, str]) -> list[str]:
    lines = [
        f"{role.name:<10} {role.world()} x {role.ranks.engine} rank, about {each[role.name]} each"
        + ("" if role.model.path == plan.config.model.path else f": {role.model.path}")
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
        f"batch      {config.groups_per_step} prompts x {config.algorithm.group_size} answers = {answers} per step"
        f", {config.minibatches * config.epochs} optimizer steps of {answers // config.minibatches}",
        f"length     {config.steps} steps = {config.steps * config.groups_per_step / count:.2g} epochs"
        f"; roughly {seconds_per_step(plan):.2g} s of computation per step if answers have full length",
    ]
