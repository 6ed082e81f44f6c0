"""Plan a run of reinforcement learning: fill in what the machine and the model decide, refuse what cannot work."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from trueline.algorithms.advantages import check_needs, needs, policy_learns, policy_waits
from trueline.algorithms.shortcuts import check_truncation, stream_obstacle
from trueline.config.base import ConfigError, Tree, merge
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig, check_training, resolve_path
from trueline.config.rl import OWN_GPU, ResolvedRollout, RLConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import fingerprint
from trueline.data.prompts import sample_of
from trueline.data.rows import Joined
from trueline.data.types import Prompt
from trueline.models.loading import ModelFacts
from trueline.models.routing import KEY, check_kind
from trueline.monitoring.findings import Finding
from trueline.plan.findings import check_settled, difficulty_findings, find, reproducible
from trueline.plan.inputs import Measured, PlanInputs, PromptSet, Reading, check_sight, fitting_prompts, look_around
from trueline.plan.memory import (
    FEWEST_SEQUENCES,
    GIB,
    HOST_SHARE,
    EngineRoom,
    Forecast,
    MemoryPool,
    ModelFootprint,
    engine_room,
    node_rooms,
    settle,
    tenant_bytes,
)
from trueline.plan.resolve import (
    RoleModel,
    adapter_sync,
    check_engines,
    check_model_keys,
    check_rollout,
    compile_keys,
    contexts,
    first_fitting_keys,
    others,
    own_gpus,
    rate_findings,
    rate_keys,
    resolve_dtype,
    resolve_rollout,
    roles_of,
    worker_count,
)
from trueline.plan.rewards import RewardCheck
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import Layout, check_devices, place_processes, store_bytes, store_findings
from trueline.training.engines.table import TRAIN_ENGINES, kept_gradients
from trueline.training.samples import sample_bytes

ENGINE_WIDTHS = (2, 4, 8)  # GPUs of an engine that a refusal proposes


@dataclass(frozen=True, slots=True)
class RLDraft:
    """A plan but for what memory decides."""

    config: RLConfig  # resolved
    rollout: ResolvedRollout
    machine: Machine
    facts: ModelFacts
    layout: Layout
    roles: list[RoleModel]
    sources: list[PromptSet]  # one for each dataset
    evaluation_sets: dict[str, list[Prompt]]
    chat: ChatFormat
    rewards: RewardCheck

    @property
    def prompts(self) -> Sequence[Prompt]:
        return Joined([source.prompts for source in self.sources])

    @property
    def reward_roles(self) -> list[RoleModel]:
        """Return the rewards that are models on this machine."""
        return [role for role in self.roles if role.section == "reward_model"]

    @property
    def longest_prompt(self) -> int:
        return max(source.longest for source in self.sources)

    def completions(self) -> int:
        """Return how many completions a step samples."""
        return self.config.prompts_per_step * self.config.algorithm.group_size

    def models(self) -> list[str]:
        return [self.config.model.path, *(role.model.path for role in self.roles)]

    def transport(self) -> str:
        """Return by what weights travel from the trainer's processes to the engines'."""
        if self.config.sync.transport != "auto":
            return self.config.sync.transport
        return "ipc" if self.shares_gpus() else "nccl" if self.machine.gpus else "gloo"

    def shares_gpus(self) -> bool:
        return self.layout.colocated and self.machine.gpus > 0

    def takes_turns(self) -> bool:
        """Tell whether engines sleep while models on the same GPUs train."""
        return self.shares_gpus() and self.layout.in_turns

    def streaming(self, *, on: bool) -> "RLDraft":
        """Return the draft with or without streamed steps, for which models and engines work at once."""
        in_turns = self.rollout.max_staleness == 0 and not on
        config = self.config.with_keys({"training": {"stream": on}})
        return replace(self, config=config, layout=replace(self.layout, in_turns=in_turns))

    def reading(self) -> Reading:
        held_out = [prompt for prompts in self.evaluation_sets.values() for prompt in prompts]
        rows = [prompt for source in self.sources for prompt in sample_of(source.prompts)]
        total = len(self.prompts) if len(rows) < len(self.prompts) else None
        return Reading(self.facts, self.chat, rows, held_out, self.rewards.trials, total)

    def fingerprint(self, before: Tree | None = None) -> Tree:
        """Return the fingerprint of the data, which can be compared with an earlier one."""
        data, sizes = self.config.data, [len(source.prompts) for source in self.sources]
        like = [one["digest"] for one in before["sources"]] if before else []
        same = len(like) == len(sizes)
        digests = [one.digest(like[at]) if same else one.digest() for at, one in enumerate(self.sources)]
        return fingerprint(data.sources(), sizes, digests, self.config.seed, data.shuffle)


@dataclass(frozen=True, slots=True)
class RLPlan(RLDraft):
    forecast: Forecast  # of the memory that the policy lives in
    findings: list[Finding] = field(default_factory=list)

    def rates(self) -> list[tuple[int, str, ModelConfig, TrainingConfig, str]]:
        """Return each trained model by its size and kind, with the keys of its learning rate."""
        config, critics = self.config, [role for role in self.roles if role.head == "value"]
        return [
            (self.facts.parameters, "policy", config.model, config.training, "training"),
            *((one.facts.parameters, "critic", one.model, config.critic, "critic") for one in critics),
        ]

    def cache_bytes(self) -> int:
        """Return the KV cache of an engine that shares GPUs: it cannot measure free memory while models load."""
        share, room = self.forecast.choice.share, self.forecast.room
        return room.engine.cache_bytes(share * room.size) if self.shares_gpus() else 0

    def policy_share(self) -> float:
        """Return how much of a GPU the policy may hold, cached memory included, beside those that work at once."""
        if not self.shares_gpus() or self.layout.in_turns:
            return 1.0
        room = self.forecast.room
        others = [count * size for name, (count, size) in room.each(self.forecast.choice).items() if name != "policy"]
        return 1 - sum(others) / room.size


def plan_rl(config: RLConfig) -> RLPlan:
    """Fill in and check what can be known without loading a model, the quickest checks first."""
    check_algorithm(config)
    check_engines(config, "training", "rollout", *["critic"] * ("critic" in needs(config.algorithm)))
    config = reproducible(config)
    plan = decide(config, look_around(config))
    check_settled(config, plan.forecast, sampled=any(one.sampled for one in plan.sources))
    rates = [finding for one in plan.rates() for finding in rate_findings(*one)]
    samples = sample_bytes(plan.config, plan.rollout, plan.facts) if config.runtime != "local" else 0
    stored = store_findings(samples, plan.layout.store_bytes, plan.machine)
    rests = difficulty_findings(plan.config, [source.prompts for source in plan.sources])
    found = find(plan.config, plan.layout, plan.machine, plan.chat, [*rates, *stored, *plan.rewards.warnings, *rests])
    return replace(plan, findings=found)


def decide(asked: RLConfig, around: PlanInputs) -> RLPlan:
    """Make the plan with the longest context that fits, or refuse it and look for keys with which it would fit."""
    dtype = resolve_dtype(asked.model.dtype, asked.training, around.machine)
    *longer, least = contexts(asked.environment, asked.rollout, around.facts, around.machine, dtype)
    for context in longer:
        with suppress(ConfigError):
            return decide_within(asked, around, context)
    return decide_within(asked, around, least, propose=True)


def decide_within(asked: RLConfig, around: PlanInputs, context: int, *, propose: bool = False) -> RLPlan:
    """Make the plan for sequences of several turns that have up to `context` tokens, or refuse it."""
    facts, machine, trained, tested = around.facts, around.machine, around.trained, around.tested
    config, rollout, layout, roles = resolve(asked, facts, machine, [*trained, *tested.values()], context)
    check_engines(config, "training", *(role.section for role in roles))  # with what the machine has filled in
    readers = {f"{role.name} {role.model.path}": role.facts.family for role in roles}
    prompts = [one.prompts for one in (*trained, *tested.values())]
    config = config.with_keys(check_sight(config.environment, prompts, readers))
    if config.runtime != "local":
        check_devices(layout, machine)
    check_rollout(rollout, config.model, facts, machine)
    check_lengths(config, roles, around.check_lessons(config, rollout))
    check_model_keys(config.training, config.model, facts)
    check_transport(config, layout, machine)
    check_replay(config, facts, machine)
    limit, too_long = rollout.max_prompt_tokens, config.data.too_long
    fitted = [fitting_prompts(source, limit, too_long) for source in trained]
    sets = {name: list(fitting_prompts(source, limit, too_long).prompts) for name, source in tested.items()}
    draft = RLDraft(config, rollout, machine, facts, layout, roles, fitted, sets, around.chat, around.rewards)
    divide = partial(dividing_keys, asked, around, ["training", *(role.section for role in roles)])
    share = asked.rollout.gpu_memory_utilization
    return settle_stream(draft, lambda one: settle_memory(one, share, divide if propose else str))


def dividing_keys(config: RLConfig, around: PlanInputs, sections: list[str]) -> str:
    """Return the first keys that divide engine or models further and make the run fit, in a configuration's words."""
    sharded: Tree = {section: TRAIN_ENGINES[config.engines()[section]].sharded for section in sections}
    models: list[Tree] = [
        {},
        {"training": sharded["training"]},
        sharded,
        merge(sharded, {"training": TRAIN_ENGINES[config.training.engine].on_host}),
        {"model": {"lora": {"rank": 16}}},
        {name: keys for name, keys in sharded.items() if name != "reference"} | {"model": {"lora": {"rank": 16}}},
    ]
    widths = [width for width in ENGINE_WIDTHS if width > config.rollout.tensor_parallel]
    engines: list[Tree] = [{}, *({"rollout": {"tensor_parallel": width}} for width in widths)]
    tried = [merge(model, engine) for model in models for engine in engines if around.machine.gpus]

    def fits(changed: RLConfig) -> bool:
        engine = decide_within(changed, around, 0).forecast.room.engine
        return engine.fixed + FEWEST_SEQUENCES * engine.sequence <= OWN_GPU * around.machine.gpu_bytes

    return first_fitting_keys(config, tried, fits)


def check_engine(draft: RLDraft, engine: EngineRoom, divide: Callable[[], str]) -> None:
    """Refuse an engine that does not start on its GPUs, whoever else is there."""
    least, most = engine.fixed + engine.sequence, OWN_GPU * draft.machine.gpu_bytes
    if least <= most or not draft.machine.gpus:
        return
    keys, width = divide(), f"rollout.tensor_parallel={draft.rollout.tensor_parallel}"
    too_small = "no division of its models fits these GPUs: take more of them, or a smaller model"
    remedy = f"set {keys}" if keys else too_small
    needs = f"an engine needs about {least / GIB:.1f} GiB on each of its GPUs ({width}), {most / GIB:.1f} GiB are there"
    raise ConfigError(f"{needs}: {remedy}")


def check_algorithm(config: RLConfig) -> None:
    """Look functions up by name before the start, not first in a worker, and check that they get what they need."""
    check_needs(config.algorithm)
    check_truncation(config)
    check_critic(config)
    part = config.algorithm.dynamic_sampling.reward
    if part is not None and part not in config.reward.parts:
        raise ConfigError(
            f"algorithm.dynamic_sampling.reward={part} is none of reward.parts ({', '.join(config.reward.parts)})"
        )


def check_critic(config: RLConfig) -> None:
    """Check the critic's section, which is read only where there is a critic, and that its warm-up leaves steps."""
    if "critic" in needs(config.algorithm):
        check_training(config.critic, config.critic.model_like(config.model, config.model.path), "critic")
    steps, limit = config.algorithm.critic_warmup_steps, config.algorithm.critic_warmup_limit
    remedy = "none to the policy: lower the former or raise the latter"
    if policy_waits(config.algorithm) >= config.steps:
        raise ConfigError(f"algorithm.critic_warmup_steps={steps} of steps={config.steps} leave {remedy}")
    if not policy_learns(config.algorithm, config.steps - 1, critic_ready=False):
        raise ConfigError(f"algorithm.critic_warmup_limit={limit} of steps={config.steps} may leave {remedy}")


def check_transport(config: RLConfig, layout: Layout, machine: Machine) -> None:
    """Refuse a way of weights that this layout does not have."""
    asked = config.sync.transport
    if asked == "ipc" and not (layout.colocated and machine.gpus):
        raise ConfigError("sync.transport=ipc needs models and engines on the same GPUs: set sync.transport=auto")
    if asked == "nccl" and (layout.colocated or not machine.gpus):
        raise ConfigError("sync.transport=nccl needs a GPU of its own for every process: set sync.transport=auto")


def check_replay(config: RLConfig, facts: ModelFacts, machine: Machine) -> None:
    """Refuse to replay experts where there are none, no engine tells them, or their weights are unknown."""
    asked, device = f"{KEY}={str(config.training.replay_routing).lower()}", "gpu" if machine.gpus else "cpu"
    if not config.training.replay_routing:
        return
    if not facts.experts:
        raise ConfigError(f"{asked}: {config.model.path} is a dense model, which has no experts; set it to false")
    check_kind(facts.kind)
    if device not in ROLLOUT_ENGINES[config.rollout.engine].experts_on:
        raise ConfigError(
            f"{asked}: {config.rollout.engine} on a {device.upper()} does not report which experts it chose; set it to "
            f"false, or {others('rollout', lambda row: device in row.experts_on)}"
        )


def resolve(
    config: RLConfig, facts: ModelFacts, machine: Machine, prompts: list[Measured], context: int
) -> tuple[RLConfig, ResolvedRollout, Layout, list[RoleModel]]:
    """Fill in every key that was left to the machine, the model or the data, but for those of memory."""
    dtype = resolve_dtype(config.model.dtype, config.training, machine)
    places: Tree = {"model": {"dtype": dtype, "path": resolve_path(config.model.path)}}
    config = config.with_keys(places | {"teacher": {"path": resolve_path(config.teacher.path)}})
    roles = roles_of(config)
    ranks, engines, colocated = share_devices(config, machine, own_gpus(roles))
    roles = [role.spread(ranks) for role in roles]
    lengths = np.concatenate([np.asarray(one.lengths) for one in prompts])
    trained = [
        (role, rate_keys(role.facts.parameters, role.name, role.model, role.ranks))
        for role in roles
        if isinstance(role.ranks, TrainingConfig)
    ]
    rollout = resolve_rollout(config.rollout, facts, lengths, engines, dtype, machine.gpus, context)
    judges = [role for role in roles if role.section == "reward_model"]
    rollout = rollout.with_keys({"workers": worker_count(config, judges, machine)})
    values: Tree = {
        "placement": "colocated" if colocated else "separate",
        "training": {"ranks": ranks}
        | compile_keys(config, facts, machine)
        | rate_keys(facts.parameters, "policy", config.model, config.training),
        "rollout": rollout.model_dump(),
        **{role.section: {"ranks": role.world} for role in roles},
        **{role.section: {"ranks": role.world} | rates for role, rates in trained},
    }
    placed, in_turns = tuple(role.layout() for role in roles), rollout.max_staleness == 0
    config, width = config.with_keys(values), config.model.width()
    rest = (width, store_bytes(sample_bytes(config, rollout, facts), machine), config.deterministic)
    layout = Layout(ranks, engines, rollout.tensor_parallel, colocated, placed, in_turns, *rest)
    config = config.with_keys({"model": {"lora": {"sync": adapter_sync(config, facts, machine.gpus)}}})
    check_critic(config)
    return config, rollout, layout, roles


def share_devices(config: RLConfig, machine: Machine, taken: int) -> tuple[int, int, bool]:
    """Return ranks, engines, and whether they share GPUs; apart, each side gets about half of those not `taken`."""
    width = config.rollout.tensor_parallel
    if config.runtime == "local":
        return 1, 1, False
    if not machine.gpus:
        return config.training.ranks or 1, config.rollout.engines or 1, config.placement == "colocated"
    gpus = max(machine.gpus - taken, 1)
    wanted = (config.training.ranks or 1) + (config.rollout.engines or 1) * width
    asked = config.training.ranks is not None and config.rollout.engines is not None
    waits = config.rollout.max_staleness == 0 and not asked  # half of the GPUs would always wait for the other half
    colocated = config.placement == "colocated" or (config.placement == "auto" and (waits or wanted > gpus))
    if colocated:
        ranks = config.training.ranks or gpus
        return ranks, config.rollout.engines or max(ranks // width, 1), True
    engines = config.rollout.engines or max((gpus - (config.training.ranks or gpus // 2)) // width, 1)
    return config.training.ranks or max(gpus - engines * width, 1), engines, False


def check_lengths(config: RLConfig, roles: list[RoleModel], longest: int) -> None:
    """Check that one sequence fits into the context and into one pass of every model that reads it."""
    readers: dict[str, tuple[RanksConfig, int]] = {"training": (config.training, config.model.context_parallel)}
    for role in roles:
        check_model_keys(role.ranks, role.model, role.facts, role.section)
    reading = [role for role in roles if role.section != "reward_model"]  # refuses long completions one by one
    readers |= {role.section: (role.ranks, role.model.context_parallel) for role in reading}
    for role in reading:
        if longest > role.facts.context:
            raise ConfigError(
                f"{role.name}: {role.model.path} reads {role.facts.context} tokens, one sequence may have {longest}: "
                "lower rollout.max_prompt_tokens or rollout.max_new_tokens, or choose another model"
            )
    for section, (ranks, ring) in readers.items():
        if ranks.micro_batch_tokens is not None and longest > ranks.micro_batch_tokens * ring:
            raise ConfigError(
                f"one sequence may have {longest} tokens (rollout.max_prompt_tokens + rollout.max_new_tokens), more "
                f"than {section}.micro_batch_tokens={ranks.micro_batch_tokens}: raise it, or lower one of the two"
            )


def settle_memory(draft: RLDraft, share: float | None, divide: Callable[[], str]) -> RLPlan:
    """Fill in what memory decides, for all models, and for an engine whose `share` was not set."""
    lengths = "rollout.max_prompt_tokens or rollout.max_new_tokens"
    rooms = rooms_of(draft, share)
    check_engine(draft, rooms[0].engine, divide)
    forecast = settle(rooms, draft.config.longest_read(draft.rollout, draft.facts.context), lengths, divide)
    choice = forecast.choice
    config = draft.config.with_keys(forecast.keys())
    again = {"gradient_checkpointing": choice.checkpointing}
    sections, rollout = config.roles(), draft.rollout
    roles = [replace(one, model=one.model.with_keys(again), ranks=sections[one.section]) for one in draft.roles]
    if draft.shares_gpus():
        rollout = rollout.with_keys({"gpu_memory_utilization": choice.share})
        config = config.with_keys({"rollout": rollout.model_dump()})
    rest = (draft.sources, draft.evaluation_sets, draft.chat, draft.rewards, forecast)
    return RLPlan(config, rollout, draft.machine, draft.facts, draft.layout, roles, *rest)


def settle_stream(draft: RLDraft, settle: Callable[[RLDraft], RLPlan]) -> RLPlan:
    """Stream steps where that is exact and, on shared GPUs, where memory holds all at once with the same keys."""
    asked, reason = draft.config.training.stream, stream_obstacle(draft.config, kept_gradients(draft.config.training))
    if asked is True and reason:
        raise ConfigError(f"training.stream=true, but {reason}: set training.stream=auto", key="training.stream")
    if reason or asked is False or (asked == "auto" and (draft.config.runtime == "local" or not draft.machine.gpus)):
        return settle(draft.streaming(on=False))
    if asked is True or not draft.shares_gpus():
        return settle(draft.streaming(on=True))
    if not draft.machine.mps:
        return settle(draft.streaming(on=False))
    apart = settle(draft.streaming(on=False))
    with suppress(ConfigError):
        together = settle(draft.streaming(on=True))
        if together.forecast.choice.is_as_quick(apart.forecast.choice, together.forecast.room.engine_share()):
            return together
    return apart


def tenants_of(plan: RLDraft) -> list[ModelFootprint]:
    """Return the models with their share of a step's tokens: trained ones of a minibatch's, others of all."""
    config, world, completions = plan.config, plan.layout.policy_ranks, plan.completions()
    longest = plan.longest_prompt + plan.rollout.max_new_tokens

    def tenant(
        name: str, section: str, facts: ModelFacts, model: ModelConfig, ranks: RanksConfig, world: int
    ) -> ModelFootprint:
        scored = completions / (config.minibatches if isinstance(ranks, TrainingConfig) else 1)
        return ModelFootprint(name, section, facts, model, ranks, world, model.place_tokens(scored, longest, world))

    return [
        tenant("policy", "training", plan.facts, config.model, config.training, world),
        *(tenant(one.name, one.section, one.facts, one.model, one.ranks, one.world) for one in plan.roles),
    ]


def memory_bytes(plan: RLPlan) -> dict[str, float]:
    """Estimate the bytes of one process of each model and of one engine; on GPUs, of device memory."""
    device, again = "cuda" if plan.machine.gpus else "cpu", bool(plan.config.model.gradient_checkpointing)
    each = {one.name: tenant_bytes(one, one.ranks.tokens_per_pass(), again, device) for one in tenants_of(plan)}
    return each | {"engine": ROLLOUT_ENGINES[plan.rollout.engine].memory(plan.config.rollout, plan.facts, plan.machine)}


def rooms_of(plan: RLDraft, share: float | None) -> list[MemoryPool]:
    """Return a room for all processes on a node's CPUs; of GPUs the policy's, and one for each model with its own."""
    machine, layout, tenants = plan.machine, plan.layout, tenants_of(plan)
    lora, bucket = plan.config.model.lora, plan.config.sync.bucket_mib * 2**20
    rank = lora.rank if lora.adapter_only() else 0
    engine = engine_room(plan.rollout, plan.facts, machine, plan.completions(), share, bucket=bucket, adapter_rank=rank)
    if not machine.gpus:
        if plan.config.runtime == "local":
            return [MemoryPool(machine.memory_bytes, "cpu", [(one, 1) for one in tenants], layout.engines, engine)]
        places = place_processes(layout, machine)
        nodes = {"policy": places.policy, **places.roles}
        samples = sample_bytes(plan.config, plan.rollout, plan.facts)
        return node_rooms(machine, [(one, nodes[one.name]) for one in tenants], places.engines, engine, samples)
    own = {one.name for one in layout.roles if not one.shared}
    shared = [(one, 1) for one in tenants if one.name not in own]
    host = HOST_SHARE * machine.memory_bytes / machine.gpus
    return [
        MemoryPool(machine.gpu_bytes, "cuda", shared, int(layout.colocated), engine, host, layout.in_turns),
        *(MemoryPool(machine.gpu_bytes, "cuda", [(one, 1)], host=host) for one in tenants if one.name in own),
    ]
