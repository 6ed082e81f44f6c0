"""Open the processes of a run: Ray, ranks, engines, rewards, and what turns prompts into scored completions."""

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trueline.config.base import Tree
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.config.rl import ResolvedRollout, RLConfig, SamplingControls
from trueline.config.sampling import SamplingConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Outcome, Trajectory
from trueline.environments.opening import OpenEnvironment
from trueline.environments.single_turn import reward_call
from trueline.models.loading import load_chat
from trueline.models.ring_attention import Mesh
from trueline.monitoring.timing import START, describe_parts, part_seconds
from trueline.plan.resolve import RoleModel, reward_model_name
from trueline.plan.rewards import RewardCheck
from trueline.plan.rl import RLPlan
from trueline.plan.sampling import SamplingPlan
from trueline.rewards.base import Call, Reward
from trueline.rewards.combined import REWARD_KINDS, CombinedReward, kind_of
from trueline.rewards.model import ModelReward
from trueline.rewards.replay import write_failure
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.episode import Episodes
from trueline.rollout.failures import EngineLost, Report
from trueline.rollout.groups import Numbered, SamplerSpec
from trueline.rollout.pool import SILENCE, EnginePool
from trueline.rollout.session import EpisodeLimits
from trueline.rollout.summary import EpisodeSummary
from trueline.runs.rollout_workers import TRAIN, EngineView, GroupWorker, RolloutWorkers, WorkerSampler
from trueline.runtime import mps
from trueline.runtime.actors import Actor, LocalActor, RayActor, RayHandle, Target
from trueline.runtime.cluster import START_SECONDS, Machine, check_folders, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout, Processes
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker, WorkerSpec, worker_target


@contextmanager
def open_processes(
    machine: Machine, layout: Layout, logs: Path, runtime: str, models: Sequence[str] = (), *, saves: bool = False
) -> Iterator[Processes]:
    """Start Ray, unless everything stays in this process, and end it with all that was started.

    The nodes of a cluster must see these models, and the run folder where each of them `saves`.
    """
    local = runtime == "local"
    with ExitStack() as stack:
        if not local:
            stack.enter_context(ray_cluster(machine, layout.store_bytes))
        at_once = layout.colocated and not layout.in_turns and machine.mps
        clients = stack.enter_context(mps.service(logs)) if at_once and not local else {}
        processes = Processes(machine, layout, logs, local, clients)
        if machine.nodes and not local:
            nodes = [machine.nodes[at] for at in processes.places.nodes()]
            check_folders(nodes, logs.parent, models, saves)
        yield processes


@contextmanager
def open_loop(timeout_seconds: float) -> Iterator[EventLoop]:
    loop = EventLoop(timeout_seconds)
    try:
        yield loop
    finally:
        loop.stop()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Everything that turns prompts into scored completions."""

    workers: RolloutWorkers
    stops: tuple[int, ...]
    loop: EventLoop

    def sampler(
        self,
        controls: SamplingControls,
        max_new_tokens: int,
        size: int,
        seed: int | None,
        purpose: str,
        greedy: bool = False,
    ) -> WorkerSampler:
        params = SamplingParams(
            controls.temperature,
            max_new_tokens,
            self.stops,
            stop=tuple(controls.stop),
            top_p=controls.top_p,
            top_k=controls.top_k,
            min_p=controls.min_p,
            repetition_penalty=controls.repetition_penalty,
            experts=purpose == TRAIN,
        )
        return WorkerSampler(self.workers, SamplerSpec(params, size, seed, purpose, greedy))


@dataclass(frozen=True, slots=True)
class RolloutWorkerSpec:
    """What a rollout worker in a process of its own is made from."""

    config: RLConfig | SamplingConfig
    rollout: ResolvedRollout
    engines: EngineView
    judges: list[tuple[RoleModel, list[RayHandle[Worker]]]]  # reward models and their ranks
    logs: Path
    number: int
    folder: Path  # that the run was started in: user code is found from there


class RolloutWorker(GroupWorker):
    """A rollout worker in a process of its own: with its own rewards, environment and view of the engines."""

    def __init__(self, spec: RolloutWorkerSpec) -> None:
        config, rollout, logs = spec.config, spec.rollout, spec.logs / f"rollouts-{spec.number}"
        logs.mkdir(parents=True, exist_ok=True)
        if spec.folder.is_dir():
            os.chdir(spec.folder)
        chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
        pool = EnginePool(spec.engines.engines, rollout.max_sequences, takes_groups=True)
        pool.use(spec.engines.engines, spec.engines.incarnations, spec.engines.lost)
        groups = {role.name: judge_group(role, ranks, config.timeout_seconds) for role, ranks in spec.judges}
        played = config.environment.with_keys(share_of(config.environment.processes, rollout.workers))
        rewards = open_rewards(
            share_of_rewards(config.reward, rollout.workers), [role for role, _ in spec.judges], groups, logs
        )
        environment = environment_of(played, rewards, chat, logs, rollout.engine)
        super().__init__(Episodes(pool, chat, episode_budget(config, rollout)), environment)

    async def sample(self, spec: SamplerSpec, numbered: Numbered, place: int, engine: int | None) -> tuple[Any, ...]:
        try:
            return await super().sample(spec, numbered, place, engine)
        except EngineLost as lost:  # which the controller has to act on
            return str(lost), {}, {}, {}, [], {}


def share_of(processes: int, workers: int) -> Tree:
    """Return the key of one worker: all of them together have the configured processes of user code."""
    return {"processes": math.ceil(processes / workers)}


def share_of_rewards(config: RewardConfig, workers: int) -> RewardConfig:
    """Do the same for rewards, and divide the concurrent requests to their servers."""

    def requests(part: RewardPartConfig) -> Tree:
        return {"remote": {"concurrency": math.ceil(part.remote.concurrency / workers)}}

    keys = requests(config)
    if config.parts:
        keys = {"parts": {name: requests(part) for name, part in config.parts.items()}}
    return config.with_keys(keys | share_of(config.processes, workers))


def judge_group(role: RoleModel, ranks: Sequence[Actor[Worker]], seconds: float) -> ModelGroup:
    mesh = Mesh(role.world, role.model.context_parallel, role.model.tensor_parallel)
    return ModelGroup(role.name, ranks, role.ranks, seconds, mesh)


def environment_of(
    config: EnvironmentConfig, rewards: CombinedReward, chat: ChatFormat, logs: Path, engine: str
) -> OpenEnvironment:
    return OpenEnvironment(config, rewards, chat, logs, engine=engine, structures=ROLLOUT_ENGINES[engine].structures)


BULK = (RolloutWorker.sample.__name__, RolloutWorker.run.__name__, RolloutWorker.next_loss.__name__)


@contextmanager
def open_sampling(
    plan: RLPlan | SamplingPlan[Any],
    pool: EnginePool,
    processes: Processes,
    judges: dict[str, ModelGroup],
    loop: EventLoop,
    note: Callable[[str], None],
    wait: Callable[[], None],
) -> Iterator[Sampling]:
    """Start rollout workers, or what they hold in this process; yield what samples with it, and end it.

    `judges` are the models of the run by the names of their roles, reward models among them. `wait` returns when models
    and engines are ready; the processes of rollout workers start meanwhile.
    """
    with ExitStack() as stack:
        if plan.rollout.workers:
            workers = start_workers(plan, pool, processes, judges, note)
        else:
            workers = stack.enter_context(open_worker_here(plan, pool, judges, loop, processes.logs))
        stack.callback(lambda: loop.run(workers.stop(), "stopping rollout workers"))
        wait()
        for remark in loop.run(workers.start(), "starting rollout workers"):
            note(remark)
        asyncio.run_coroutine_threadsafe(workers.watch(plan.config.timeout_seconds / SILENCE), loop.loop)
        yield Sampling(workers, plan.chat.sampled_stops(), loop)


def describe_start(actors: Sequence[Actor[Any]]) -> str:
    """Describe how long the parts of this start took, of each kind of process for the one that was ready last."""
    lasted: dict[str, dict[str, float]] = {}
    for actor in (one for one in actors if isinstance(one, RayActor)):
        kind, parts = actor.name.rpartition("-")[0], part_seconds(actor.begun, actor.milestones().result(START_SECONDS))
        lasted[kind] = max(lasted.get(kind, {}), parts, key=lambda one: sum(one.values()))
    whole = part_seconds(START.begun, START.ends)
    each = [f"; {kind} {sum(parts.values()):.0f} ({describe_parts(parts)})" for kind, parts in lasted.items()]
    return f"start      {sum(whole.values()):.0f} s: {describe_parts(whole)}{''.join(each)}"


def start_workers(
    plan: RLPlan | SamplingPlan[Any],
    pool: EnginePool,
    processes: Processes,
    judges: dict[str, ModelGroup],
    note: Callable[[str], None],
) -> RolloutWorkers:
    plan.rewards.close()  # each worker starts its own
    roles = [(role, judges[role.name]) for role in plan.reward_roles]

    def spec(number: int) -> RolloutWorkerSpec:
        ranks = [(role, handles(group.actors)) for role, group in roles]
        places = processes.logs, number, Path.cwd()
        return RolloutWorkerSpec(plan.config, plan.rollout, EngineView.of(pool), ranks, *places)

    target: Target[GroupWorker] = Target(f"{RolloutWorker.__module__}:{RolloutWorker.__name__}", True, BULK)
    actors = processes.rollout_workers(target, [spec(number) for number in range(plan.rollout.workers)])
    return RolloutWorkers(actors, pool, spec, note)


def handles(actors: Sequence[Actor[Worker]]) -> list[RayHandle[Worker]]:
    return [one.for_others() for one in actors if isinstance(one, RayActor)]


@contextmanager
def open_worker_here(
    plan: RLPlan | SamplingPlan[Any], pool: EnginePool, judges: dict[str, ModelGroup], loop: EventLoop, logs: Path
) -> Iterator[RolloutWorkers]:
    """Hold rewards and environment in this process."""
    with ExitStack() as stack:
        rewards = open_rewards(plan.config.reward, plan.reward_roles, judges, logs, plan.rewards)
        stack.callback(lambda: loop.run(rewards.stop(), "stopping rewards"))
        environment = environment_of(plan.config.environment, rewards, plan.chat, logs, plan.rollout.engine)
        stack.callback(lambda: loop.run(environment.stop(), "stopping the environment"))
        episodes = Episodes(pool, plan.chat, episode_budget(plan.config, plan.rollout))
        yield RolloutWorkers([LocalActor("rollouts", GroupWorker(episodes, environment))], pool)


def episode_budget(config: RLConfig | SamplingConfig, rollout: ResolvedRollout) -> EpisodeLimits:
    played = config.environment
    turns, images = (played.max_turns, played.max_images) if played.kind() else (1, 0)
    return EpisodeLimits(rollout.longest(), turns, played.max_turn_tokens, images, config.data.max_pixels)


def role_group(
    role: RoleModel, processes: Processes, seed: int, timeout_seconds: float, updates: int = 0
) -> ModelGroup:
    """Make the processes of a role's model, not yet started."""
    deterministic = processes.layout.deterministic
    first = WorkerSpec(role.model, role.ranks, 0, role.world, updates, seed, timeout_seconds, role.head)
    specs = [replace(first, rank=rank, deterministic=deterministic) for rank in range(role.world)]
    return model_group(role.name, processes.role(role.layout(), worker_target(role.ranks), specs), specs)


def model_group(name: str, actors: list[Actor[Worker]], specs: list[WorkerSpec]) -> ModelGroup:
    return ModelGroup(name, actors, specs[0].ranks, specs[0].timeout_seconds, specs[0].mesh())


def engine_specs(
    model: ModelConfig,
    rollout: ResolvedRollout,
    layout: Layout,
    seed: int,
    cache_bytes: int = 0,
    *,
    structured: bool = False,
    experts: bool = False,
) -> list[EngineSpec]:
    return [
        EngineSpec(
            model=model.path,
            dtype=rollout.dtype,
            context=rollout.longest(),
            tensor_parallel=rollout.tensor_parallel,
            max_sequences=rollout.max_sequences,
            seed=seed + number,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            cuda_graphs=rollout.cuda_graphs,
            sleeps=layout.colocated and layout.in_turns and ROLLOUT_ENGINES[rollout.engine].sleeps,
            trust_remote_code=model.trust_remote_code,
            adapter_rank=model.lora.rank if model.lora.adapter_only() else 0,
            cache_bytes=cache_bytes,
            structured=structured and ROLLOUT_ENGINES[rollout.engine].structures,
            experts=experts,
            speculative=rollout.speculative != "none",
            lean_logprobs=rollout.lean_logprobs,
        )
        for number in range(layout.engines)
    ]


def open_rewards(
    config: RewardConfig,
    roles: list[RoleModel],
    groups: dict[str, ModelGroup],
    logs: Path,
    checked: RewardCheck | None = None,
) -> CombinedReward:
    """Open the rewards of a run, with the processes of functions that a check has loaded.

    `groups` are the models of the run by the names of their roles.
    """
    models = {role.name: role for role in roles}
    functions = checked.functions if checked else {}
    rewards: dict[str, tuple[Reward, RewardPartConfig]] = {}
    for name, part in config.named_parts().items():
        role, log = reward_model_name(name, config), logs / (f"reward-{name}.log" if config.parts else "reward.log")
        load_model = partial(lambda part, role: model_reward(part, config, models[role], groups[role]), part, role)
        opened = REWARD_KINDS[kind_of(part)].open(part, config, log, functions.pop(name, None), load_model)
        rewards[name] = opened, part
    return CombinedReward(rewards, config.policy_error, config.processes)


def model_reward(part: RewardPartConfig, config: RewardConfig, role: RoleModel, group: ModelGroup) -> ModelReward:
    """Make the reward of a reward model, which reads messages through its own tokenizer and template."""
    chat = load_chat(role.model, part.chat_template)
    longest = min(role.facts.context, role.ranks.tokens_per_pass() * role.model.context_parallel)
    return ModelReward(group.score, chat, part, max_tokens=longest, batch=config.batch)


def failure_files(config: RewardConfig, folder: Path) -> Report:
    """Return a function that writes the call of a failed completion into a run folder, and returns how to see it."""

    def write(number: int, trajectory: Trajectory | EpisodeSummary) -> str:
        part: RewardPartConfig | None = None
        if trajectory.outcome is not Outcome.ENVIRONMENT_ERROR:
            part = config.named_parts().get(trajectory.failed_reward, config)
        file = folder / "failures" / f"{number}.json"
        try:
            write_failure(file, part, failed_call(trajectory), trajectory.error)
        except OSError:  # a full disk must not hide why the run stops
            return ""
        runs_again = part is not None and part.function and kind_of(part) == "function"
        return f"python -m trueline.rewards.replay {file}" if runs_again else str(file)

    return write


def failed_call(trajectory: Trajectory | EpisodeSummary) -> Call:
    if isinstance(trajectory, EpisodeSummary):
        return trajectory.call
    return reward_call(trajectory.prompt, trajectory.reply, trajectory.talk)
