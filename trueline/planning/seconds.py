"""Expected seconds of each phase of a step, by a model of the hardware: full answers, and nothing overlaps."""

import math

from trueline.config.model import TrainingConfig
from trueline.config.rl import OWN_GPU
from trueline.models.loading import ModelFacts
from trueline.planning.hardware import (
    GLOO_RATE,
    HOST_RATE,
    IPC_RATE,
    READING,
    SYNC_SECONDS,
    TOKEN_SECONDS,
    Devices,
)
from trueline.rl.plan import RLPlan, tenants_of
from trueline.rl.recipe import fresh_old_logprobs
from trueline.runs.memory import Tenant, adapter_elements, bytes_of
from trueline.training.engines import TRAIN_ENGINES


def forward_flops(facts: ModelFacts, tokens: float, length: float) -> float:
    """Count a forward pass: two for each parameter and token, and attention to half of a sequence's tokens."""
    return tokens * (2 * facts.parameters + 2 * facts.layers * facts.heads * facts.head_size * length)


def train_seconds(one: Tenant, tokens: float, length: float, updates: int, devices: Devices) -> float:
    """Estimate `updates` of a model, which see so many tokens in all."""
    work = 3 - bool(one.model.lora.rank) + bool(one.model.gradient_checkpointing)  # in forward passes
    computed = work * forward_flops(one.facts, tokens, length) / (one.world * devices.flops())
    gathered = 2 * (stage_of(one) == 3) + (not one.model.lora.rank)  # weights for each direction, and gradients
    moved = 16 * one.facts.parameters / one.world if one.ranks.offload == "moments" else 0
    return computed + gathered * exchange_seconds(one, tokens, devices) + updates * moved / HOST_RATE


def score_seconds(one: Tenant, tokens: float, length: float, devices: Devices) -> float:
    computed = forward_flops(one.facts, tokens, length) / (one.world * devices.flops())
    return computed + (exchange_seconds(one, tokens, devices) if stage_of(one) == 3 else 0)


def exchange_seconds(one: Tenant, tokens: float, devices: Devices) -> float:
    """Estimate what ranks need to exchange tensors of all weights once in every pass."""
    if one.world == 1:
        return 0.0
    width = one.model.tensor_parallel
    passes = math.ceil(tokens * width / one.world / one.ranks.tokens_per_pass())
    nbytes = bytes_of(one.model.dtype) * one.facts.parameters / width
    return passes * nbytes / devices.exchange_rate(one.world)


def stage_of(one: Tenant) -> int:
    return TRAIN_ENGINES[one.ranks.engine].stage(one.ranks, one.model.dtype)


def rollout_seconds(plan: RLPlan, devices: Devices) -> float:
    """Estimate sampling: for each token an engine reads its weights and the cache of all sequences under way."""
    facts, rollout, engine = plan.facts, plan.rollout, plan.forecast.room.engine
    completions = math.ceil(plan.config.prompts_per_step * plan.config.algorithm.group_size / rollout.engines)
    cache = plan.cache_bytes() or OWN_GPU * plan.machine.gpu_bytes - engine.fixed
    at_once = min(completions, rollout.max_sequences, max(int(cache / engine.sequence), 1))
    weights = facts.parameters * bytes_of(rollout.dtype) / rollout.tensor_parallel
    seen = (plan.longest_prompt + rollout.max_new_tokens / 2) / rollout.longest()
    read = (weights + at_once * engine.sequence * seen) / (READING * devices.device.memory_rate)
    speed = rollout.tensor_parallel * devices.flops()
    computed = forward_flops(facts, at_once, rollout.longest() / 2) / speed
    prompts = forward_flops(facts, completions * plan.longest_prompt, plan.longest_prompt) / speed
    turns = completions / at_once  # a sequence that ends makes room for the next
    return prompts + turns * rollout.max_new_tokens * (TOKEN_SECONDS + max(read, computed))


def sync_bytes(plan: RLPlan) -> float:
    """Return what every engine is sent: all weights, or adapters of all matrices in all layers."""
    facts, lora, width = plan.facts, plan.config.model.lora, bytes_of(plan.rollout.dtype)
    return width * (lora.rank * adapter_elements(facts) if lora.apart() else facts.parameters)


def sync_seconds(plan: RLPlan, devices: Devices) -> float:
    policy = tenants_of(plan)[0]
    rate = {"ipc": IPC_RATE, "gloo": GLOO_RATE, "nccl": devices.send_rate()}[plan.transport()]
    gathered = exchange_seconds(policy, 1, devices) if stage_of(policy) == 3 else 0
    return SYNC_SECONDS + sync_bytes(plan) / rate + gathered


def phase_seconds(plan: RLPlan, devices: Devices) -> dict[str, float]:
    config, (policy, *beside) = plan.config, tenants_of(plan)
    length = plan.longest_prompt + plan.rollout.max_new_tokens
    tokens = config.prompts_per_step * config.algorithm.group_size * length
    updates, again = config.minibatches * config.epochs, config.algorithm.old_logprobs == "recompute"
    own_reference = config.algorithm.needs_reference() and config.model.lora.rank > 0
    scorers = [policy] * ((again and not fresh_old_logprobs(config)) + own_reference)
    scorers += [one for one in beside if one.section != "reward_model"]  # which works while answers are sampled
    trained = [one for one in (policy, *beside) if isinstance(one.ranks, TrainingConfig)]
    return {
        "rollout": rollout_seconds(plan, devices),
        "score": sum(score_seconds(one, tokens, length, devices) for one in scorers),
        "train": sum(train_seconds(one, tokens * config.epochs, length, updates, devices) for one in trained),
        "sync": sync_seconds(plan, devices),
    }
