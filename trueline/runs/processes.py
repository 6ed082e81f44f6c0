"""Open the processes of a run: Ray, ranks, engines, rewards, and what turns prompts into scored completions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trueline.config.environment import EnvironmentConfig
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.config.rl import ResolvedRollout, SamplingControls
from trueline.data.types import Outcome, Trajectory
from trueline.environments.base import Environment
from trueline.environments.opening import OpenEnvironment
from trueline.environments.single_turn import reward_call
from trueline.models.loading import load_chat
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
from trueline.rollout.failures import Report
from trueline.rollout.groups import GroupSampler
from trueline.rollout.pool import EnginePool
from trueline.rollout.session import EpisodeLimits
from trueline.runtime.actors import Actor
from trueline.runtime.cluster import Machine, check_folders, ray_cluster
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
            stack.enter_context(ray_cluster(machine))
        processes = Processes(machine, layout, logs, local)
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

    episodes: Episodes
    environment: Callable[[], Environment]
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
    ) -> GroupSampler:
        params = SamplingParams(
            controls.temperature,
            max_new_tokens,
            self.stops,
            stop=tuple(controls.stop),
            top_p=controls.top_p,
            top_k=controls.top_k,
            min_p=controls.min_p,
            repetition_penalty=controls.repetition_penalty,
            experts=purpose == "train",
        )
        return GroupSampler(self.episodes, self.environment, params, size, seed, purpose, greedy)


@contextmanager
def open_sampling(
    plan: RLPlan | SamplingPlan[Any],
    pool: EnginePool,
    rewards: CombinedReward,
    loop: EventLoop,
    logs: Path,
    note: Callable[[str], None],
) -> Iterator[Sampling]:
    """Start the processes of an environment, yield what samples with it, and end them and the rewards."""
    config, rollout, chat = plan.config.environment, plan.rollout, plan.chat
    structures = ROLLOUT_ENGINES[rollout.engine].structures
    with ExitStack() as stack:
        stack.callback(lambda: loop.run(rewards.stop(), "stopping rewards"))
        environment = OpenEnvironment(config, rewards, chat, logs, engine=rollout.engine, structures=structures)
        stack.callback(lambda: loop.run(environment.stop(), "stopping the environment"))
        loop.run(environment.start(), "starting the environment")
        if environment.remark:
            note(environment.remark)
        episodes = Episodes(pool, chat, episode_budget(config, rollout))
        yield Sampling(episodes, environment, tuple(sorted(chat.stop_ids)), loop)


def episode_budget(environment: EnvironmentConfig, rollout: ResolvedRollout) -> EpisodeLimits:
    turns = environment.max_turns if environment.kind() else 1
    return EpisodeLimits(rollout.longest(), turns, environment.max_turn_tokens)


def role_group(
    role: RoleModel, processes: Processes, seed: int, timeout_seconds: float, updates: int = 0
) -> ModelGroup:
    """Make the processes of a role's model, not yet started."""
    specs = [
        WorkerSpec(role.model, role.ranks, rank, role.world, updates, seed, timeout_seconds, head=role.head)
        for rank in range(role.world)
    ]
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

    def write(number: int, trajectory: Trajectory) -> str:
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


def failed_call(trajectory: Trajectory) -> Call:
    return reward_call(trajectory.prompt, trajectory.reply, trajectory.talk)
