"""Estimate the memory that models share, phase by phase, and choose the fastest keys that fit."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from trueline.config.base import ConfigError, Tree
from trueline.config.model import LARGEST_PASS, ModelConfig, RanksConfig, TrainingConfig
from trueline.config.rl import OWN_GPU, ResolvedRollout, RolloutConfig
from trueline.models.head import HEAD_CHUNK
from trueline.models.loading import ModelFacts
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.cluster import PROCESS_BYTES, Machine
from trueline.training.engines.division import Division, Sizes
from trueline.training.engines.optimizer import PIECE
from trueline.training.engines.table import TRAIN_ENGINES

GIB = 2**30
SPARE = 0.1  # share of a memory that is left alone while it can be
MOST_PASS = {"cuda": LARGEST_PASS, "cpu": 4096}  # tokens; what is computed of more leaves the caches of a CPU
LEAST_PASS = {"cuda": 4096, "cpu": 1024}  # tokens; fewer are slow, and the last resort
SHORTEST = 64  # tokens of a sequence that a refusal still proposes
# What a GPU holds besides what follows from a model's shape.
CONTEXT = 1.3 * GIB  # of a process that trains or scores: CUDA context, cuBLAS, NCCL
SLACK = 0.06  # of a pass's tensors: what the caching allocator holds besides them, in pieces that fit nothing
ENGINE_WORK = 4.0 * GIB  # inside an engine's share: its context, and activations of the longest prefill; amply
ENGINE_LOGITS = 4  # float32 rows of logits for each sequence, inside its share: raw, processed, probabilities, sorted
ENGINE_OUTSIDE = 1.0 * GIB  # above an engine's share: CUDA graphs
ENGINE_ASLEEP = 2.0 * GIB  # what is left of an engine that sleeps: context, CUDA graphs, buffers
SENDING, LOADING = 2, 2  # pieces of weights: buffers that a rank keeps, and what an engine copies and fills
FEWEST_SEQUENCES = 8  # that an engine must hold at a time, or an eighth of what it may
HOST_SHARE = 0.6  # of the machine's free memory that moments may take


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """One rank of a model in a memory that it may share."""

    name: str
    section: str  # of the configuration, with its micro_batch_tokens
    facts: ModelFacts
    model: ModelConfig
    ranks: RanksConfig  # a TrainingConfig for a model that is trained
    world: int
    step_tokens: float  # of its share of a step; a pass cannot have more

    def may_move(self) -> bool:
        """Tell whether the moments may move to the host: those of a whole model, where no key places them."""
        if not isinstance(self.ranks, TrainingConfig) or self.ranks.optimizer == "muon" or self.model.lora.rank:
            return False
        return self.ranks.offload is None and "moments" in TRAIN_ENGINES[self.ranks.engine].offloads


@dataclass(frozen=True, slots=True)
class Choice:
    """What memory decides."""

    tokens: dict[str, int]  # most of a pass, by section
    checkpointing: bool  # activations are computed again
    on_host: bool = False  # the moments of all models whose keys allow it
    share: float = 0.0  # of a GPU that an engine takes, where models share it

    def is_as_quick(self, other: "Choice", enough: float) -> bool:
        """Tell whether passes and engine lose nothing against another choice; an engine uses no more than `enough`."""
        alike = (self.tokens, self.checkpointing, self.on_host) == (other.tokens, other.checkpointing, other.on_host)
        return alike and self.share >= min(other.share, enough)

    def keys(self, moved: Collection[str] = ()) -> Tree:
        """Return what is decided as keys; `moved` are sections whose moments may live on the host."""
        places = {section: {"offload": "moments" if self.on_host else "none"} for section in moved}
        tokens = {
            section: {"micro_batch_tokens": most} | places.get(section, {}) for section, most in self.tokens.items()
        }
        return {"model": {"gradient_checkpointing": self.checkpointing}, **tokens}


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Bytes of an engine: the most that it can use, the least it can work with, and asleep; or a share that was set."""

    most: float
    least: float
    asleep: float
    share: float | None = None
    fixed: float = 0.0  # of these, weights and work: the rest is the cache's
    sequence: float = 0.0  # of the cache, one longest sequence: without it an engine does not start
    piece: float = 0.0  # of the weights on their way to it: a bucket, or the largest tensor

    def cache_bytes(self, taken: float) -> int:
        """Return what is left to the KV cache of an engine that takes so much; never less than it can work with."""
        return int(max(taken, self.least) - self.fixed)


NO_ENGINE = EngineRoom(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """One memory, and how many ranks of each model and how many engines share it."""

    size: float
    device: str  # "cuda" or "cpu"
    tenants: list[tuple[ModelFootprint, int]]
    engines: int = 0
    engine: EngineRoom = NO_ENGINE
    host: float = 0.0  # bytes of the machine's memory for the moments of one rank of each model
    in_turns: bool = True  # an engine sleeps while the models on its GPU train
    place: str = "here"  # or the address of a node
    samples: float = 0.0  # bytes in the object store, on a CPU

    def each(self, choice: Choice, phase: str = "training") -> dict[str, tuple[int, float]]:
        """Return how many processes there are of each kind, and the bytes of one in a phase."""
        found = {}
        for tenant, count in self.tenants:
            moved = choice.on_host and tenant.may_move()
            one = replace(tenant, ranks=tenant.ranks.with_keys({"offload": "moments"})) if moved else tenant
            works = phase == "training" or tenant.section == "reward_model"
            tokens = choice.tokens[tenant.section]
            size = tenant_bytes(one, tokens, choice.checkpointing, self.device) if works else idle_bytes(one)
            found[tenant.name] = (count, size)
        found |= {"samples": (1, self.samples)} if self.samples else {}
        return found | ({"engine": (self.engines, self.engine_bytes(choice, phase))} if self.engines else {})

    def engine_bytes(self, choice: Choice, phase: str) -> float:
        if self.device == "cpu":
            return self.engine.most
        if phase == "training" and self.in_turns:
            return self.engine.asleep + SENDING * self.engine.piece
        return choice.share * self.size + ENGINE_OUTSIDE + (SENDING + LOADING) * self.engine.piece

    def phases(self, choice: Choice) -> dict[str, float]:
        """Return the bytes in use by phase: on GPUs an engine and its models may take turns."""
        names = ("rollout", "training") if self.device == "cuda" and self.engines and self.in_turns else ("training",)
        return {name: sum(count * size for count, size in self.each(choice, name).values()) for name in names}

    def bytes_needed(self, choice: Choice) -> float:
        return max(self.phases(choice).values())

    def holds(self, choice: Choice, share: float) -> bool:
        return self.bytes_needed(choice) <= share * self.size

    def may_move(self) -> bool:
        """Tell whether the host has room for the moments of all models here."""
        return sum(count * moment_bytes(one) for one, count in self.tenants if one.may_move()) <= self.host

    def shares(self, opened: Collection[str]) -> list[float]:
        """Return what an engine may take of the GPU: what was set, or the most that it can use and then the least."""
        if self.device == "cpu" or not self.engines:
            return [0.0]
        if self.engine.share is not None and "rollout" not in opened:
            return [self.engine.share]
        return list(dict.fromkeys([self.engine.most / self.size, self.engine.least / self.size]))

    def engine_share(self) -> float:
        """Return the most of the memory that an engine can use."""
        return math.floor(self.engine.most / self.size * 1000) / 1000

    def grow_engine(self, choice: Choice, share: float) -> Choice:
        """Give an engine whose share was not set what the models leave while it works, up to what it can use."""
        if self.device == "cpu" or not self.engines or self.engine.share is not None:
            return choice
        left = share - next(iter(self.phases(choice).values())) / self.size  # while it works
        most = min(choice.share + left, max(self.engine.most / self.size, choice.share))
        return replace(choice, share=math.floor(most * 1000) / 1000)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was chosen for a device, and the expected bytes of each phase."""

    room: MemoryPool
    choice: Choice
    quickest: Choice
    moved: list[str]  # sections whose moments may live on the host

    def keys(self) -> Tree:
        return self.choice.keys(self.moved)

    def largest(self) -> str:
        phases = self.room.phases(self.choice)
        name = max(phases, key=lambda phase: phases[phase])
        return f"{phases[name] / GIB:.1f} GiB ({name})"


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def tenant_bytes(tenant: ModelFootprint, tokens: float, checkpointing: bool, device: str) -> float:
    """Estimate the bytes of one rank at work."""
    passes = activation_bytes(tenant, min(tokens, tenant.step_tokens), checkpointing, device)
    if device == "cpu":
        return PROCESS_BYTES + model_bytes(tenant) + passes
    return CONTEXT + model_bytes(tenant) + (1 + SLACK) * passes + stepping_bytes(tenant)


def stepping_bytes(tenant: ModelFootprint) -> float:
    """Estimate what its engine holds besides, and the pieces of moments that come from the host in two streams."""
    if not isinstance(tenant.ranks, TrainingConfig):
        return 0.0
    facts, cut, model = tenant.facts, cut_parameters(tenant), tenant.model
    tables = min(2 * facts.vocabulary * facts.hidden_size, cut)
    sizes = Sizes(cut, facts.layers, tables, tenant.world // model.tensor_parallel)
    held = 0.0 if model.lora.rank else TRAIN_ENGINES[tenant.ranks.engine].working(tenant.ranks, model.dtype, sizes)
    moments = 2 * 2 * min(PIECE, trained_parameters(tenant)) if tenant.ranks.offload == "moments" else 0
    return held * bytes_of(model.dtype) + 4 * moments


def idle_bytes(tenant: ModelFootprint) -> float:
    """Estimate the bytes of one rank on a GPU between its turns, and while it starts near an engine that is awake."""
    each = 4 * part_of(tenant, trained_parameters(tenant), division(tenant).optimizer)  # masters or first gradients
    return CONTEXT + max(kept_bytes(tenant), weight_bytes(tenant) + 2 * each)


def model_bytes(tenant: ModelFootprint) -> float:
    """Estimate the bytes of one rank: what it keeps and, if trained, the float32 sums of its gradients."""
    return kept_bytes(tenant) + 4 * part_of(tenant, trained_parameters(tenant), division(tenant).gradients)


def kept_bytes(tenant: ModelFootprint) -> float:
    """Estimate weights and, if trained, what the optimizer keeps of them on the device."""
    kept = weight_bytes(tenant)
    if not isinstance(tenant.ranks, TrainingConfig) or tenant.ranks.offload in ("optimizer", "all"):
        return kept
    masters = 4 * ((tenant.model.dtype == "bfloat16") + (tenant.ranks.ema_decay > 0))
    moments = 0.0 if tenant.ranks.offload == "moments" else moment_bytes(tenant)
    return kept + moments + masters * part_of(tenant, trained_parameters(tenant), division(tenant).optimizer)


def moment_bytes(tenant: ModelFootprint) -> float:
    trained, facts = trained_parameters(tenant), tenant.facts
    moments = 8 * trained
    muon = isinstance(tenant.ranks, TrainingConfig) and tenant.ranks.optimizer == "muon"
    if muon and not facts.experts:  # those lie in blocks of three dimensions: AdamW's
        moments -= 4 * max(trained - 2 * facts.vocabulary * facts.hidden_size, 0)
    return 8 * part_of(tenant, moments / 8, division(tenant).optimizer)


def weight_bytes(tenant: ModelFootprint) -> float:
    each = 0.5 if tenant.model.lora.quantize else bytes_of(tenant.model.dtype)
    casts = division(tenant).casts and not tenant.model.lora.rank
    weights = each * part_of(tenant, cut_parameters(tenant), division(tenant).weights)
    return 0.0 if casts or tenant.ranks.offload == "all" else weights


def part_of(tenant: ModelFootprint, parameters: float, ranks: int) -> float:
    """Count what a rank has of parameters that so many ranks divide; experts may be divided by more."""
    experts = min(tenant.facts.expert_parameters, parameters)
    return (parameters - experts) / ranks + experts / max(ranks, division(tenant).experts)


def trained_parameters(tenant: ModelFootprint) -> float:
    """Count what a rank's gradients are of, before ranks divide it; adapters are small."""
    trained = isinstance(tenant.ranks, TrainingConfig) and not tenant.model.lora.rank
    return cut_parameters(tenant) - tenant.facts.tower.frozen(tenant.model.train_vision) if trained else 0.0


def cut_parameters(tenant: ModelFootprint) -> float:
    """Count what tensor parallelism leaves a rank: its part of the layers, and all of embeddings and head."""
    facts = tenant.facts
    whole = min(2 * facts.vocabulary * facts.hidden_size, facts.parameters)
    return whole + (facts.parameters - whole) / tenant.model.tensor_parallel


def division(tenant: ModelFootprint) -> Division:
    """Return how the ranks that hold the same parameters divide them."""
    row, alike = TRAIN_ENGINES[tenant.ranks.engine], tenant.world // tenant.model.tensor_parallel
    return row.division(tenant.ranks, tenant.model.dtype, alike)


def activation_bytes(tenant: ModelFootprint, tokens: float, checkpointing: bool, device: str) -> float:
    """Count what a pass keeps of every layer for its gradient, the current layer twice, and the head's slice."""
    facts, model, width = tenant.facts, tenant.model, bytes_of(tenant.model.dtype)
    chunk = min(tokens, model.head_chunk_tokens or HEAD_CHUNK[device])
    logits = 3 * 4 * chunk * facts.vocabulary
    # Of each token: two norms with float32 copies, inputs of projections, attention, and four of the MLP's.
    attention = 2 * (facts.heads + facts.key_heads) * facts.head_size
    layer = tokens * width * (8 * facts.hidden_size + attention + 4 * facts.intermediate_size)
    seen = width * facts.tower.activations(tokens, "nothing")  # gone before the language model begins
    if not isinstance(tenant.ranks, TrainingConfig):
        return max(layer + logits, seen)
    kept = tokens * width * 2 * facts.hidden_size if checkpointing else layer
    head = 0 if model.lora.rank else facts.vocabulary * facts.hidden_size * (4 + width)  # its gradient
    whole = facts.layers * kept + 2 * layer + logits + head
    learning = width * facts.tower.activations(tokens, "inputs" if checkpointing else "layers")
    return whole + learning if model.train_vision == "all" else max(whole, seen)


def engine_weights(rollout: RolloutConfig, facts: ModelFacts) -> float:
    return facts.parameters * bytes_of(rollout.dtype) / rollout.tensor_parallel


def engine_work(rollout: RolloutConfig, facts: ModelFacts) -> float:
    return ENGINE_WORK + ENGINE_LOGITS * 4 * rollout.max_sequences * facts.vocabulary


def cached_token_bytes(rollout: RolloutConfig, facts: ModelFacts) -> float:
    """Return what a token takes of the KV cache on a device, which has at least one key head, if not of its own."""
    heads = math.ceil(facts.key_heads / rollout.tensor_parallel)
    return 2 * facts.layers * heads * facts.head_size * bytes_of(rollout.dtype)


def longest_cached(rollout: RolloutConfig, facts: ModelFacts, machine: Machine) -> int:
    """Return the tokens of the longest sequence that the model reads and the KV cache of an engine by itself holds."""
    cache = rollout.cpu_cache_gib * GIB
    if machine.gpus:
        taken = (rollout.gpu_memory_utilization or OWN_GPU) * machine.gpu_bytes
        cache = taken - engine_weights(rollout, facts) - engine_work(rollout, facts)
    return min(facts.context, max(int(cache / cached_token_bytes(rollout, facts)), 0))


def engine_room(
    rollout: ResolvedRollout,
    facts: ModelFacts,
    machine: Machine,
    completions: float,
    share: float | None,
    *,
    bucket: float = 0.0,
    adapter_rank: int = 0,
) -> EngineRoom:
    """Return the room of an engine; one that shares a GPU needs weights, work, and a cache of long sequences.

    Weights reach it in pieces of a `bucket`, or of their largest tensor; adapters alone have a room of their own.
    """
    if not machine.gpus:
        taken = ROLLOUT_ENGINES[rollout.engine].memory(rollout, facts, machine)
        return EngineRoom(taken, taken, taken)
    width, weights, work = bytes_of(rollout.dtype), engine_weights(rollout, facts), engine_work(rollout, facts)
    ranks = [one for one in ROLLOUT_ENGINES[rollout.engine].adapter_ranks if one >= adapter_rank > 0]
    work += width * facts.adapter_elements() * min(ranks, default=0)
    cache = cached_token_bytes(rollout, facts) * rollout.longest()
    largest = 0 if adapter_rank else width * facts.vocabulary * facts.hidden_size
    many = min(rollout.max_sequences, math.ceil(completions / rollout.engines))
    few = min(many, max(rollout.max_sequences // 8, FEWEST_SEQUENCES))
    most, least = (min(weights + work + count * cache, OWN_GPU * machine.gpu_bytes) for count in (many, few))
    sleeps, size = ROLLOUT_ENGINES[rollout.engine].sleeps, machine.gpu_bytes
    asleep = ENGINE_ASLEEP if sleeps else (share or most / size) * size
    return EngineRoom(most, least, asleep, share, weights + work, cache, max(bucket, largest))


def settle(rooms: list[MemoryPool], longest: int, lengths: str, divide: Callable[[], str] = str) -> Forecast:
    """Choose keys that hold the longest sequence in every memory, or propose `lengths` or what `divide` finds."""
    for share in (1 - SPARE, 1.0):
        if (choice := first_choice(rooms, longest, share)) is not None:
            moved = [one.section for room in rooms for one, _ in room.tenants if one.may_move()]
            return Forecast(rooms[0], rooms[0].grow_engine(choice, share), next(candidates(rooms, longest, ())), moved)
    raise ConfigError(refusal(rooms, longest, lengths, divide))


def first_choice(rooms: list[MemoryPool], longest: int, share: float, opened: Collection[str] = ()) -> Choice | None:
    """Return the first choice that takes no more than `share` of any room; keys of `opened` sections may change."""
    choices = candidates(rooms, longest, opened)
    return next((one for one in choices if all(room.holds(one, share) for room in rooms)), None)


def candidates(rooms: list[MemoryPool], longest: int, opened: Collection[str]) -> Iterator[Choice]:
    """Yield choices from fast to frugal: smaller micro-batches, gradient checkpointing, moments on the host, a smaller
    engine; last, the most frugal of these with the smallest micro-batches.
    """
    tenants = [tenant for room in rooms for tenant, _ in room.tenants]
    fixed = {one.section: one.ranks.micro_batch_tokens for one in tenants if one.section not in opened}
    floors = {one.section: math.ceil(longest / one.model.context_parallel) for one in tenants}
    shortest, least, most = min(floors.values()), LEAST_PASS[rooms[0].device], MOST_PASS[rooms[0].device]
    sizes = [most >> halvings for halvings in range(most.bit_length())]
    sizes = [size for size in sizes if size > shortest] + [shortest]
    quick = [size for size in sizes if size >= least] or sizes[:1]
    wanted = None if "model" in opened else tenants[0].model.gradient_checkpointing
    able = any(one.may_move() for one in tenants) and all(room.may_move() for room in rooms)
    moves = (False, True) if able else (False,)
    first, *smaller = rooms[0].shares(opened)
    rungs = [
        (checkpointing, on_host, share)
        for on_host, share in (*((move, first) for move in moves), *((moves[-1], share) for share in smaller))
        for checkpointing in ((False, True) if wanted is None else (wanted,))
    ]
    tried = [(rung, size) for rung in rungs for size in quick]
    for rung, size in (*tried, *((rungs[-1], size) for size in sizes if size not in quick)):
        tokens = {section: fixed.get(section) or max(size, floor) for section, floor in floors.items()}
        yield Choice(tokens, *rung)


def refusal(rooms: list[MemoryPool], longest: int, lengths: str, divide: Callable[[], str]) -> str:
    """Say how much memory is missing where, and which values would fit."""
    *_, smallest = candidates(rooms, longest, ())
    room = next(room for room in rooms if room.bytes_needed(smallest) > room.size)
    phases = room.phases(smallest)
    phase = max(phases, key=lambda name: phases[name])
    parts = ", ".join(
        f"{count} x {name} {size / GIB:.1f}" for name, (count, size) in room.each(smallest, phase).items()
    )
    place = f"on a GPU ({phase})" if room.device == "cuda" else f"free {room.place}"
    return (
        f"the run needs about {phases[phase] / GIB:.1f} GiB of memory ({parts}), {room.size / GIB:.1f} GiB are "
        f"{place}: {remedy(rooms, longest, lengths, divide)}"
    )


def remedy(rooms: list[MemoryPool], longest: int, lengths: str, divide: Callable[[], str]) -> str:
    tenants = [tenant for room in rooms for tenant, _ in room.tenants]
    given = dict.fromkeys(tenant.section for tenant in tenants if tenant.ranks.micro_batch_tokens)
    given |= dict.fromkeys(["rollout"] * (rooms[0].engine.share is not None))
    everything = [*given, "model"]
    for opened in (*([section] for section in given), ["model"], everything):
        if (found := first_choice(rooms, longest, 1.0, opened)) is not None:
            return "set " + " and ".join(key_value(found, section) for section in opened)
    for engines in range(max(room.engines for room in rooms) - 1, 0, -1):
        if first_choice([replace(room, engines=min(room.engines, engines)) for room in rooms], longest, 1.0):
            return f"set rollout.engines={engines}"
    if keys := divide():
        return f"set {keys}"
    for shorter in (longest >> halvings for halvings in range(1, longest.bit_length())):
        if shorter >= SHORTEST and first_choice(rooms, shorter, 1.0, everything):
            return f"sequences of up to {shorter} tokens would fit: lower {lengths}"
    if rooms[0].device == "cuda":
        return "no keys make it fit: use more or larger GPUs, or a smaller model"
    policy = tenants[0]
    helps = {"lower training.ranks": policy.world > 1, "set model.lora.rank": not policy.model.lora.rank}
    return ", or ".join([*(words for words, applies in helps.items() if applies), "use a smaller model"])


def key_value(choice: Choice, section: str) -> str:
    """Return a value that fits, as a configuration writes it."""
    if section == "rollout":
        return f"rollout.gpu_memory_utilization={math.floor(choice.share * 1000) / 1000}"
    key, value = next(iter(choice.keys()[section].items()))
    return f"{section}.{key}={str(value).lower()}"


def node_rooms(
    machine: Machine,
    tenants: Sequence[tuple[ModelFootprint, list[int]]],
    engines: Sequence[int] = (),
    engine: EngineRoom = NO_ENGINE,
    samples: float = 0.0,
) -> list[MemoryPool]:
    """Return the memory of each node that has work; of models and engines the nodes of their processes are given.

    All nodes together store the samples of a run.
    """
    rooms = []
    for at, node in enumerate(machine.split()):
        here = [(tenant, nodes.count(at)) for tenant, nodes in tenants if at in nodes]
        place = f"on {node.address}" if node.address else "here"
        if here or at in engines:
            stored, count = samples / len(machine.split()), list(engines).count(at)
            rooms.append(MemoryPool(node.memory_bytes, "cpu", here, count, engine, place=place, samples=stored))
    return rooms
