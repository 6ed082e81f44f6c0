"""Estimate what models take of a memory that they share, and choose passes that are small enough to fit in."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from trueline.config.base import ConfigError, Tree
from trueline.config.model import LARGEST_PASS, ModelConfig, RanksConfig, TrainingConfig
from trueline.config.rl import RolloutConfig
from trueline.models.loading import ModelFacts
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.cluster import PROCESS_BYTES, Machine
from trueline.training.engines import TRAIN_ENGINES
from trueline.training.worker import HEAD_CHUNK

GIB = 2**30
SPARE = 0.1  # share of a memory that is left alone while it can be
LEAST_PASS = {"cuda": 4096, "cpu": 1024}  # tokens; where fewer would fit, activations are computed again instead
SHORTEST = 64  # tokens of a sequence that a refusal still proposes


@dataclass(frozen=True, slots=True)
class Tenant:
    """One rank of a model in a memory that it may share."""

    name: str
    section: str  # of the configuration, with its micro_batch_tokens
    facts: ModelFacts
    model: ModelConfig
    ranks: RanksConfig  # a TrainingConfig for a model that is trained
    world: int
    step_tokens: float  # of its share of a step; a pass cannot have more


@dataclass(frozen=True, slots=True)
class Passes:
    """What memory decides: the most tokens of a pass by section, and whether activations are computed again."""

    tokens: dict[str, int]
    checkpointing: bool

    def keys(self) -> Tree:
        sections = {section: {"micro_batch_tokens": tokens} for section, tokens in self.tokens.items()}
        return {"model": {"gradient_checkpointing": self.checkpointing}, **sections}


@dataclass(frozen=True, slots=True)
class Room:
    """One memory, and how many ranks of each model and how many engines share it."""

    size: float
    device: str  # "cuda" or "cpu"
    tenants: list[tuple[Tenant, int]]
    engines: int = 0
    engine_bytes: float = 0.0

    def each(self, passes: Passes) -> dict[str, tuple[int, float]]:
        """Return how many there are of each kind, and the bytes of one."""
        found = {
            tenant.name: (
                count,
                tenant_bytes(tenant, passes.tokens[tenant.section], passes.checkpointing, self.device),
            )
            for tenant, count in self.tenants
        }
        return found | ({"engine": (self.engines, self.engine_bytes)} if self.engines else {})

    def needed(self, passes: Passes) -> float:
        return sum(count * size for count, size in self.each(passes).values())


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def tenant_bytes(tenant: Tenant, tokens: float, checkpointing: bool, device: str) -> float:
    base = 0.0 if device == "cuda" else PROCESS_BYTES
    tokens = min(tokens, tenant.step_tokens)
    return base + model_bytes(tenant) + activation_bytes(tenant, tokens, checkpointing, device)


def model_bytes(tenant: Tenant) -> float:
    """Estimate the bytes of one rank: weights; if trained, gradients, their float32 sums and the optimizer."""
    model, ranks, world = tenant.model, tenant.ranks, tenant.world
    width, stage = bytes_of(model.dtype), TRAIN_ENGINES[ranks.engine].stage(ranks, model.dtype)
    share = tenant.facts.parameters / model.tensor_parallel
    weights = share * (0.5 if model.lora.quantize else width) / (world if stage == 3 else 1)
    if ranks.offload == "all":
        weights = 0.0
    if not isinstance(ranks, TrainingConfig):
        return weights
    trained = 0.0 if model.lora.rank else share  # adapters are small beside the model
    gradients = trained * (width + (4 if width == 2 else 0)) / (world if stage >= 2 else 1)
    moments = 8 * trained
    if ranks.optimizer == "muon" and not tenant.facts.experts:  # those lie in blocks of three dimensions: AdamW's
        moments -= 4 * max(trained - 2 * tenant.facts.vocabulary * tenant.facts.hidden_size, 0)
    optimizer = (moments + (4 * trained if width == 2 else 0)) / (world if stage >= 1 else 1)
    return weights + gradients + (optimizer if ranks.offload == "none" else 0.0)


def activation_bytes(tenant: Tenant, tokens: float, checkpointing: bool, device: str) -> float:
    """Count what a pass keeps of every layer for its gradient, the layer under way twice over, and the head's slice."""
    facts, model = tenant.facts, tenant.model
    width = bytes_of(model.dtype)
    chunk = min(tokens, model.head_chunk_tokens or HEAD_CHUNK[device])
    logits = 3 * 4 * chunk * facts.vocabulary
    # Of each token: norms, projections and attention, and four of the MLP's (counted in Llama and Qwen2).
    layer = tokens * width * (13 * facts.hidden_size + 4 * facts.intermediate_size)
    if not isinstance(tenant.ranks, TrainingConfig):
        return layer + logits
    kept = tokens * width * 2 * facts.hidden_size if checkpointing else layer
    head = 0 if model.lora.rank else facts.vocabulary * facts.hidden_size * (4 + width)  # its gradient
    return facts.layers * kept + 2 * layer + logits + head


def engine_bytes(rollout: RolloutConfig, facts: ModelFacts, machine: Machine) -> float:
    return ROLLOUT_ENGINES[rollout.engine].memory(rollout, facts, machine)


def settled(rooms: list[Room], longest: int, lengths: str) -> Passes:
    """Choose passes that hold the longest sequence and fit every room; `lengths` are the keys that bound sequences."""
    for share in (1 - SPARE, 1.0):
        passes = fitting(rooms, longest, share)
        if passes is not None:
            return passes
    raise ConfigError(refusal(rooms, longest, lengths))


def fitting(rooms: list[Room], longest: int, share: float, opened: Collection[str] = ()) -> Passes | None:
    """Return the first choice that takes no more than `share` of any room; keys of `opened` sections may change."""
    choices = ladder(rooms, longest, opened)
    return next((one for one in choices if all(room.needed(one) <= share * room.size for room in rooms)), None)


def ladder(rooms: list[Room], longest: int, opened: Collection[str]) -> Iterator[Passes]:
    """Yield from quick to frugal: shorter passes, then activations computed again, then passes of one sequence."""
    tenants = [tenant for room in rooms for tenant, _ in room.tenants]
    fixed = {one.section: one.ranks.micro_batch_tokens for one in tenants if one.section not in opened}
    floors = {one.section: math.ceil(longest / one.model.context_parallel) for one in tenants}
    shortest = min(floors.values())
    sizes = [LARGEST_PASS >> halvings for halvings in range(LARGEST_PASS.bit_length())]
    sizes = [size for size in sizes if size > shortest] + [shortest]
    wanted = None if "model" in opened else tenants[0].model.gradient_checkpointing
    least = LEAST_PASS[rooms[0].device]
    for checkpointing in (False, True) if wanted is None else (wanted,):
        for size in sizes:
            if wanted is None and not checkpointing and size < least and size != sizes[0]:
                continue
            tokens = {section: fixed.get(section) or max(size, floor) for section, floor in floors.items()}
            yield Passes(tokens, checkpointing)


def refusal(rooms: list[Room], longest: int, lengths: str) -> str:
    """Say what is missing where, and which values would fit."""
    *_, smallest = ladder(rooms, longest, ())
    room = next(room for room in rooms if room.needed(smallest) > room.size)
    parts = ", ".join(f"{count} x {name} {size / GIB:.1f}" for name, (count, size) in room.each(smallest).items())
    place = "on a GPU" if room.device == "cuda" else "free here"
    return (
        f"the run needs about {room.needed(smallest) / GIB:.1f} GiB of memory ({parts}), {room.size / GIB:.1f} GiB are "
        f"{place}: {remedy(rooms, longest, lengths)}"
    )


def remedy(rooms: list[Room], longest: int, lengths: str) -> str:
    tenants = [tenant for room in rooms for tenant, _ in room.tenants]
    given = dict.fromkeys(tenant.section for tenant in tenants if tenant.ranks.micro_batch_tokens)
    everything = [*given, "model"]
    for opened in (*([section] for section in given), ["model"], everything):
        found = fitting(rooms, longest, 1.0, opened)
        if found is not None:
            return "set " + " and ".join(named(found, section) for section in opened)
    for engines in range(max(room.engines for room in rooms) - 1, 0, -1):
        if fitting([replace(room, engines=min(room.engines, engines)) for room in rooms], longest, 1.0):
            return f"set rollout.engines={engines}"
    for shorter in (longest >> halvings for halvings in range(1, longest.bit_length())):
        if shorter >= SHORTEST and fitting(rooms, shorter, 1.0, everything):
            return f"sequences of up to {shorter} tokens would fit: lower {lengths}"
    return "lower training.ranks, raise training.zero_stage, set model.lora.rank, or take a smaller model"


def named(passes: Passes, section: str) -> str:
    """Return a value that would fit, as it is written in a configuration."""
    key, value = next(iter(passes.keys()[section].items()))
    return f"{section}.{key}={str(value).lower()}"
