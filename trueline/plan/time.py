"""Expected seconds of each phase of a step by a model of the hardware, for completions of full length."""

import math

from trueline.algorithms.shortcuts import fresh_old_logprobs
from trueline.config.model import TrainingConfig
from trueline.config.rl import OWN_GPU
from trueline.models.loading import ModelFacts
from trueline.plan.hardware import (
    GLOO_RATE,
    HOST_RATE,
    IPC_RATE,
    READING,
    SYNC_SECONDS,
    TOKEN_SECONDS,
    Devices,
    devices_of,
)
from trueline.plan.memory import GIB, ModelFootprint, bytes_of, cached_token_bytes, division
from trueline.plan.offline import SupervisedPlan
from trueline.plan.rl import RLPlan, tenants_of
from trueline.plan.tasks import TASKS


def forward_flops(facts: ModelFacts, tokens: float, length: float) -> float:
    """Count a forward pass: two for each parameter and token, and attention to half of a sequence's tokens."""
    return tokens * (2 * facts.parameters + 2 * facts.layers * facts.heads * facts.head_size * length)


def train_seconds(one: ModelFootprint, tokens: float, length: float, updates: int, devices: Devices) -> float:
    """Estimate `updates` of a model, which see so many tokens in all."""
    work = 3 - bool(one.model.lora.rank) + bool(one.model.gradient_checkpointing)  # in forward passes
    computed = work * forward_flops(one.facts, tokens, length) / devices.speed(one.world)
    gathered = 2 * gathers(one) + (not one.model.lora.rank)  # weights for each direction, and gradients
    moved = 16 * one.facts.parameters / one.world if one.ranks.offload == "moments" else 0
    return computed + gathered * exchange_seconds(one, tokens, devices) + updates * moved / HOST_RATE


def score_seconds(one: ModelFootprint, tokens: float, length: float, devices: Devices) -> float:
    computed = forward_flops(one.facts, tokens, length) / devices.speed(one.world)
    return computed + (exchange_seconds(one, tokens, devices) if gathers(one) else 0)


def exchange_seconds(one: ModelFootprint, tokens: float, devices: Devices) -> float:
    """Estimate what ranks need to exchange tensors of all weights once in every pass."""
    if one.world == 1:
        return 0.0
    width = one.model.tensor_parallel
    passes = math.ceil(tokens * width / one.world / one.ranks.tokens_per_pass())
    nbytes = bytes_of(one.model.dtype) * one.facts.parameters / width
    return passes * nbytes / devices.exchange_rate(one.world)


def gathers(one: ModelFootprint) -> bool:
    """Tell whether ranks gather weights in every pass."""
    return division(one).weights > 1


def rollout_seconds(plan: RLPlan, devices: Devices) -> float:
    """Estimate sampling: for each token an engine reads its weights and the cache of all in-flight sequences."""
    facts, rollout, engine = plan.facts, plan.rollout, plan.forecast.room.engine
    completions = math.ceil(plan.completions() / rollout.engines)
    cache, sequence = rollout.cpu_cache_gib * GIB, cached_token_bytes(rollout, facts) * rollout.longest()
    if plan.machine.gpus:
        cache = plan.cache_bytes() or OWN_GPU * plan.machine.gpu_bytes - engine.fixed
    at_once = min(completions, rollout.max_sequences, max(int(cache / sequence), 1))
    weights = facts.parameters * bytes_of(rollout.dtype) / rollout.tensor_parallel
    seen = (plan.longest_prompt + rollout.max_new_tokens / 2) / rollout.longest()
    read = (weights + at_once * sequence * seen) / (READING * devices.memory_rate(rollout.engines))
    speed = devices.speed(rollout.tensor_parallel * rollout.engines) / rollout.engines
    computed = forward_flops(facts, at_once, rollout.longest() / 2) / speed
    prompts = forward_flops(facts, completions * plan.longest_prompt, plan.longest_prompt) / speed
    turns = completions / at_once  # a sequence that ends makes room for the next
    return prompts + turns * rollout.max_new_tokens * (TOKEN_SECONDS + max(read, computed))


def sync_bytes(plan: RLPlan) -> float:
    """Return what every engine is sent: all weights, or adapters of all matrices in all layers."""
    facts, lora, width = plan.facts, plan.config.model.lora, bytes_of(plan.rollout.dtype)
    return width * (lora.rank * facts.adapter_elements() if lora.adapter_only() else facts.parameters)


def sync_seconds(plan: RLPlan, devices: Devices) -> float:
    policy = tenants_of(plan)[0]
    rate = {"ipc": IPC_RATE, "gloo": GLOO_RATE, "nccl": devices.send_rate()}[plan.transport()]
    collects = gathers(policy) and not plan.config.model.lora.adapter_only()  # adapters are small
    gathered = exchange_seconds(policy, 1, devices) if collects else 0
    return SYNC_SECONDS + sync_bytes(plan) / rate + gathered


def phase_seconds(plan: RLPlan, devices: Devices | None = None) -> dict[str, float]:
    """Estimate the phases of a step on these devices, or on those of the plan's machine."""
    devices = devices or devices_of(plan.machine)
    config, (policy, *others) = plan.config, tenants_of(plan)
    length = plan.longest_prompt + plan.rollout.max_new_tokens
    tokens = plan.completions() * length
    updates, again = config.minibatches * config.epochs, config.algorithm.old_logprobs == "recompute"
    own_reference = config.algorithm.needs_reference() and config.model.lora.rank > 0
    scorers = [policy] * ((again and not fresh_old_logprobs(config)) + own_reference)
    scorers += [one for one in others if one.section != "reward_model"]  # which works while completions are sampled
    trained = [one for one in (policy, *others) if isinstance(one.ranks, TrainingConfig)]
    return {
        "rollout": rollout_seconds(plan, devices),
        "score": sum(score_seconds(one, tokens, length, devices) for one in scorers),
        "train": sum(train_seconds(one, tokens * config.epochs, length, updates, devices) for one in trained),
        "sync": sync_seconds(plan, devices),
    }


def expected_seconds(phases: dict[str, float], *, overlaps: bool) -> float:
    """Return the seconds of a step; the shorter of sampling and training is hidden where they overlap."""
    hidden = min(phases["rollout"], phases["score"] + phases["train"]) if overlaps else 0
    return sum(phases.values()) - hidden


def update_seconds(plan: SupervisedPlan, devices: Devices) -> float:
    """Estimate a step of an offline run with rows of the longest length."""
    config, world = plan.config, plan.layout.policy_ranks
    sequences = config.samples_per_step * TASKS[config.task].samples_per_row
    share = config.model.place_tokens(sequences, plan.longest, world)
    one = ModelFootprint("model", "training", plan.facts, config.model, config.training, world, share)
    return train_seconds(one, sequences * plan.longest, plan.longest, 1, devices)
