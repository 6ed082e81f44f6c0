"""Before anything starts: fill in what the machine and the model decide, refuse what cannot work, say what will be."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from trueline.algorithms.advantages import ADVANTAGES
from trueline.algorithms.lookup import lookup
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.base import ConfigError, Tree
from trueline.config.data import PromptDataConfig
from trueline.config.model import ModelConfig, RanksConfig
from trueline.config.rl import RLConfig
from trueline.data.chat import ChatFormat
from trueline.data.readers import read_prompts
from trueline.data.sources import open_source
from trueline.data.types import Prompt
from trueline.models.loading import ModelFacts, check_model, load_tokenizer
from trueline.rewards.pool import check_reward
from trueline.runtime.cluster import Machine, this_machine
from trueline.runtime.placement import Layout, check_devices

GIB = 2**30
PROCESS_BYTES = 0.5 * GIB  # of a process that has imported its libraries
FLOPS_PER_GPU, FLOPS_PER_CPU = 2e14, 2e10  # rough, for a first estimate of time
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True, slots=True)
class RLPlan:
    config: RLConfig  # resolved
    machine: Machine
    facts: ModelFacts
    layout: Layout
    prompts: list[Prompt]
    evaluation_prompts: list[Prompt]
    longest_prompt: int
    sizes: list[int]  # prompts of each dataset


def plan_rl(config: RLConfig) -> RLPlan:
    """Everything that can be known without loading a model, in the order of what is quickest to tell."""
    sources = [load_prompts(config.data, path, config.data.source_key()) for path in config.data.sources()]
    prompts = [prompt for source in sources for prompt in source]
    evaluation = load_prompts(config.data, config.evaluation.data, "evaluation.data") if config.evaluation.data else []
    check_reward(config.reward, list(prompts[0].columns), prompts[0].label is not None)
    check_names(config)
    check_installed("training.engine", config.training.engine, "torch")
    check_installed("rollout.engine", config.rollout.engine, "hf")
    facts = check_model(config.model)
    machine = this_machine()
    config = resolve(config, facts, machine)
    layout = layout_of(config)
    check_devices(layout, machine)
    check_shape(config, facts, machine)
    check_parallel(config.model, facts)
    longest = check_prompt_lengths(config, [*prompts, *evaluation])
    sizes = [len(source) for source in sources]
    plan = RLPlan(config, machine, facts, layout, prompts, evaluation[: config.evaluation.limit], longest, sizes)
    check_memory(plan)
    return plan


def check_names(config: RLConfig) -> None:
    """Names of functions are looked up once before the start, not first in a worker."""
    lookup(ADVANTAGES, config.algorithm.advantage, "algorithm.advantage")
    lookup(POLICY_LOSSES, config.algorithm.loss, "algorithm.loss")


def check_installed(key: str, engine: str, instead: str) -> None:
    """DeepSpeed and vLLM do not run on every system; what runs everywhere is named."""
    if engine in ("deepspeed", "vllm") and importlib.util.find_spec(engine) is None:
        raise ConfigError(f"{key}={engine}: {engine} is not installed here; install it or set {key}={instead}")


def load_prompts(config: PromptDataConfig, path: str, key: str) -> list[Prompt]:
    return read_prompts(open_source(path, key), config, path)


def resolve(config: RLConfig, facts: ModelFacts, machine: Machine) -> RLConfig:
    """Fill in every key that was left to the machine or the model."""
    dtype = resolve_dtype(config.model.dtype, config.training, machine)
    tokens = config.rollout.max_new_tokens or min(1024, facts.context // 2)
    ranks, engines, colocated = share_devices(config, machine)
    values: Tree = {
        "placement": "colocated" if colocated else "separate",
        "model": {"dtype": dtype, "path": resolve_path(config.model.path)},
        "training": {"ranks": ranks},
        "reference": {"ranks": config.reference.ranks or ranks},
        "rollout": {
            "engines": engines,
            "dtype": dtype if config.rollout.dtype == "auto" else config.rollout.dtype,
            "max_new_tokens": tokens,
            "max_prompt_tokens": config.rollout.max_prompt_tokens or min(4096, max(facts.context - tokens, 1)),
        },
    }
    return config.replaced(values)


def check_parallel(model: ModelConfig, facts: ModelFacts) -> None:
    width = model.tensor_parallel
    if facts.heads % width or facts.key_heads % width:
        raise ConfigError(
            f"model.tensor_parallel={width} does not divide the model's {facts.heads} heads and {facts.key_heads} "
            "key-value heads"
        )


def resolve_dtype(dtype: str, training: RanksConfig, machine: Machine) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if machine.gpus and training.engine == "deepspeed" else "float32"


def resolve_path(path: str) -> str:
    """Other processes may have another working folder and know no `~`; a hub name stays as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path and folder.is_dir() else path


def share_devices(config: RLConfig, machine: Machine) -> tuple[int, int, bool]:
    """Ranks, engines, and whether they share GPUs. With two or more GPUs each side gets about half."""
    width = config.rollout.tensor_parallel
    if config.runtime == "local":
        return 1, 1, False
    if not machine.gpus:
        return config.training.ranks or 1, config.rollout.engines or 1, config.placement == "colocated"
    wanted = (config.training.ranks or 1) + (config.rollout.engines or 1) * width
    colocated = config.placement == "colocated" or (config.placement == "auto" and wanted > machine.gpus)
    if colocated:
        return config.training.ranks or machine.gpus, config.rollout.engines or max(machine.gpus // width, 1), True
    engines = config.rollout.engines or max((machine.gpus - (config.training.ranks or machine.gpus // 2)) // width, 1)
    return config.training.ranks or max(machine.gpus - engines * width, 1), engines, False


def layout_of(config: RLConfig) -> Layout:
    assert config.training.ranks and config.reference.ranks and config.rollout.engines
    return Layout(
        policy_ranks=config.training.ranks,
        # A policy with adapters is its own reference without them.
        reference_ranks=config.reference.ranks if config.algorithm.kl.coefficient and not config.model.lora.rank else 0,
        engines=config.rollout.engines,
        tensor_parallel=config.rollout.tensor_parallel,
        colocated=config.placement == "colocated",
    )


def check_shape(config: RLConfig, facts: ModelFacts, machine: Machine) -> None:
    rollout = config.rollout
    assert rollout.max_new_tokens and rollout.max_prompt_tokens
    if rollout.max_new_tokens + rollout.max_prompt_tokens > facts.context:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens} "
            f"exceed the model's context of {facts.context} tokens: lower one of them"
        )
    if rollout.engine == "vllm" and not machine.gpus and facts.head_size not in VLLM_CPU_HEAD_SIZES:
        raise ConfigError(
            f"model.path={config.model.path}: its attention heads have size {facts.head_size}; vLLM on a CPU runs "
            f"{', '.join(map(str, VLLM_CPU_HEAD_SIZES))}: set rollout.engine=hf or choose another model"
        )
    if facts.heads % rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel={rollout.tensor_parallel} does not divide the model's {facts.heads} heads"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    for section, ranks in (("training", config.training), ("reference", config.reference)):
        if longest > ranks.micro_batch_tokens * config.model.ring:
            raise ConfigError(
                f"one sequence may have {longest} tokens (rollout.max_prompt_tokens + rollout.max_new_tokens), more "
                f"than {section}.micro_batch_tokens={ranks.micro_batch_tokens}: raise it, or lower one of the two"
            )


def check_prompt_lengths(config: RLConfig, prompts: list[Prompt]) -> int:
    """The longest prompt in tokens; one above the limit is refused by its place."""
    chat = ChatFormat(load_tokenizer(config.model), config.data.chat_template == "auto")
    limit = config.rollout.max_prompt_tokens
    assert limit
    longest = 0
    for prompt in prompts:
        length = len(chat.prompt_tokens(prompt.messages))
        if length == 0 or length > limit:
            raise ConfigError(
                f"prompt {prompt.id} of {prompt.source} has {length} tokens; 1 to "
                f"rollout.max_prompt_tokens={limit} are allowed: change the row or the limit"
            )
        longest = max(longest, length)
    return longest


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def trained_bytes(plan: RLPlan) -> float:
    """Weights, gradients and optimizer of one policy rank, and the activations of its largest pass."""
    config, facts = plan.config, plan.facts
    width, ranks, stage = bytes_of(config.model.dtype), plan.layout.policy_ranks, config.training.zero_stage
    master = 4 if width == 2 else 0
    weights = facts.parameters * width / (ranks if stage == 3 else 1)
    gradients = facts.parameters * width / (ranks if stage >= 2 else 1)
    optimizer = facts.parameters * (8 + master) / (ranks if stage >= 1 else 1)
    return weights + gradients + optimizer + activation_bytes(config.training, plan)


def activation_bytes(ranks: RanksConfig, plan: RLPlan) -> float:
    config, facts = plan.config, plan.facts
    assert config.rollout.max_new_tokens
    answers = config.groups_per_step * config.algorithm.group_size / config.minibatches / plan.layout.policy_ranks
    tokens = min(ranks.micro_batch_tokens, answers * (plan.longest_prompt + config.rollout.max_new_tokens))
    per_layer = 2 if config.model.gradient_checkpointing else 20
    logits = min(tokens, config.model.head_chunk_tokens or 1024) * facts.vocabulary * 4 * 3
    return tokens * facts.hidden_size * facts.layers * per_layer * bytes_of(config.model.dtype) + logits


def memory_bytes(plan: RLPlan) -> dict[str, float]:
    """A first estimate of each process's memory; on GPUs of device memory."""
    config, facts, layout = plan.config, plan.facts, plan.layout
    base = 0.0 if plan.machine.gpus else PROCESS_BYTES
    weights = facts.parameters * bytes_of(config.rollout.dtype)
    if plan.machine.gpus:
        engine = config.rollout.gpu_memory_share * plan.machine.gpu_bytes
    else:
        engine = base + layout.tensor_parallel * (
            base + weights / layout.tensor_parallel + config.rollout.cpu_cache_gib * GIB
        )
    return {
        "policy rank": base + trained_bytes(plan),
        "reference rank": base + facts.parameters * bytes_of(config.model.dtype),
        "engine": engine,
    }


def check_memory(plan: RLPlan) -> None:
    """On a CPU, all processes together; on GPUs, one device's share."""
    each, layout = memory_bytes(plan), plan.layout
    counts = {"policy rank": layout.policy_ranks, "reference rank": layout.reference_ranks, "engine": layout.engines}
    if plan.machine.gpus:
        shared = each["policy rank"] + (each["reference rank"] if layout.reference_ranks else 0)
        needed, there, place = shared + (each["engine"] if layout.colocated else 0), plan.machine.gpu_bytes, "on a GPU"
    elif plan.config.runtime == "local":
        needed, there, place = sum(each.values()), plan.machine.memory_bytes, "free here"
    else:
        needed = sum(each[kind] * count for kind, count in counts.items())
        there, place = plan.machine.memory_bytes, "free here"
    if needed > there:
        parts = ", ".join(f"{count} x {kind} {each[kind] / GIB:.1f}" for kind, count in counts.items() if count)
        raise ConfigError(
            f"the run needs about {needed / GIB:.1f} GiB of memory ({parts}), {there / GIB:.1f} GiB are {place}: lower "
            "training.ranks, rollout.engines or training.micro_batch_tokens, raise training.zero_stage, or take a "
            "smaller model"
        )


def seconds_per_step(plan: RLPlan) -> float:
    """With answers of full length: sampling, scoring by two models, and a forward and backward pass."""
    config, machine = plan.config, plan.machine
    assert config.rollout.max_new_tokens
    answers = config.groups_per_step * config.algorithm.group_size
    tokens = answers * (plan.longest_prompt + config.rollout.max_new_tokens)
    passes = 2 + 2 + (2 if plan.layout.reference_ranks else 0) + 6 * config.epochs
    speed = FLOPS_PER_GPU * machine.gpus if machine.gpus else FLOPS_PER_CPU * machine.cpus
    return tokens * passes * plan.facts.parameters / speed


def describe_plan(plan: RLPlan) -> str:
    """Who gets what, the batch arithmetic, and a first estimate of memory and time."""
    config, layout, machine = plan.config, plan.layout, plan.machine
    each = {kind: f"{value / GIB:.1f} GiB" for kind, value in memory_bytes(plan).items()}
    devices = f"{machine.gpus} GPUs" if machine.gpus else f"{machine.cpus} CPU cores"
    sharing = "share GPUs and take turns" if layout.colocated and machine.gpus else "run side by side"
    if config.runtime == "local":
        sharing = "live in this process"
    answers = config.groups_per_step * config.algorithm.group_size
    reference = (
        f"{layout.reference_ranks} x {config.reference.engine} rank, about {each['reference rank']} each"
        if layout.reference_ranks
        else "none (algorithm.kl.coefficient is 0)"
    )
    policy = f"{layout.policy_ranks} x {config.training.engine} rank, ZeRO {config.training.zero_stage}"
    engine = f"{layout.engines} x {config.rollout.engine}, tensor parallel {layout.tensor_parallel}"
    return "\n".join(
        [
            f"machine    {devices}, {machine.memory_bytes / GIB:.1f} GiB of memory free; models and engines {sharing}",
            f"model      {config.model.path}: {plan.facts.parameters / 1e6:.1f} M parameters, {config.model.dtype}",
            f"policy     {policy}, about {each['policy rank']} each",
            f"reference  {reference}",
            f"engines    {engine}, about {each['engine']} each",
            f"data       {len(plan.prompts)} prompts, {len(plan.evaluation_prompts)} held out; "
            f"longest prompt {plan.longest_prompt} tokens, answers up to {config.rollout.max_new_tokens}",
            f"batch      {config.groups_per_step} prompts x {config.algorithm.group_size} answers = {answers} per step"
            f", {config.minibatches * config.epochs} optimizer steps of {answers // config.minibatches}",
            f"length     {config.steps} steps = {config.steps * config.groups_per_step / len(plan.prompts):.2g} epochs"
            f"; roughly {seconds_per_step(plan):.2g} s of computation per step if answers have full length",
        ]
    )
