"""From a plan to a trainer with all its processes, and back to nothing when it ends."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trueline.config.model import RanksConfig
from trueline.config.rl import RLConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import make_order
from trueline.environments.base import Environment
from trueline.environments.single_turn import SingleTurn
from trueline.models.loading import load_tokenizer, stop_tokens
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.rewards.pool import RewardPool
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool
from trueline.rollout.rollouts import EventLoop, RolloutPlan, Rollouts
from trueline.runtime.actors import Target
from trueline.runtime.cluster import ray_cluster
from trueline.runtime.placement import Processes
from trueline.sync.weights import Canary, WeightSync
from trueline.trainers.evaluation import Evaluator
from trueline.trainers.guard import Guard
from trueline.trainers.plan import RLPlan
from trueline.trainers.rl import RLTrainer, Turns
from trueline.trainers.state import RLState, restore
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import ModelGroup, start_groups
from trueline.training.mesh import Mesh
from trueline.training.worker import WorkerSpec

CANARY_TOKENS = 32
WORKER = Target("trueline.training.worker:Worker")
ENGINES = {
    "vllm": Target("trueline.rollout.vllm_engine:VllmEngine", asynchronous=True),
    "hf": Target("trueline.rollout.hf_engine:HFEngine", asynchronous=True),
}


@contextmanager
def rl_trainer(plan: RLPlan, folder: RunFolder, progress: Progress) -> Iterator[RLTrainer]:
    """Starts every process, hands out the trainer, and ends every process."""
    config = plan.config
    local = config.runtime == "local"
    with ExitStack() as stack:
        if not local:
            stack.enter_context(ray_cluster(plan.machine))
        processes = Processes(plan.machine, plan.layout, folder.logs, local)
        loop = EventLoop(config.timeout_seconds)
        stack.callback(loop.stop)
        progress.note("starting   models and engines; each process imports its libraries first")
        policy, reference, pool = start_models(plan, processes)
        chat = ChatFormat(load_tokenizer(config.model), config.data.chat_template == "auto")
        rewards = RewardPool(config.reward, folder.logs / "reward.log")
        stack.callback(lambda: loop.run(rewards.stop(), "stopping reward processes"))
        checkpoints = Checkpoints(folder.path, config.checkpoint, progress.note)
        state = restore(RLState, checkpoints, policy, progress)
        tracker = Tracker(folder, config.monitoring, state.step, state.tracker)
        stack.callback(tracker.close)
        tracker.recover(state.step, checkpoints.newest_metrics())
        state.tracker = tracker.run_id
        guard = Guard(policy, config.training, progress.note)
        guard.skipped = state.skipped_steps

        def environment() -> Environment:
            return SingleTurn(rewards)

        episodes = Episodes(pool, chat)
        stops = tuple(stop_tokens(config.model, chat.tokenizer))
        tokens = chat.prompt_tokens(plan.prompts[0].messages)
        yield RLTrainer(
            config=config,
            policy=policy,
            reference=reference,
            rollouts=make_rollouts(plan, episodes, environment, stops, state, loop),
            sync=make_sync(plan, policy, pool, loop, tokens),
            turns=Turns(pool, loop, plan.layout.colocated and plan.machine.gpus > 0),
            evaluator=make_evaluator(plan, episodes, environment, stops, loop),
            checkpoints=checkpoints,
            tracker=tracker,
            progress=progress,
            state=state,
            timer=Timer(),
            guard=guard,
        )


def start_models(plan: RLPlan, processes: Processes) -> tuple[ModelGroup, ModelGroup | None, EnginePool]:
    config, layout = plan.config, plan.layout
    updates = config.steps * config.minibatches * config.epochs
    specs = worker_specs(config, config.training, layout.policy_ranks, updates)
    mesh = specs[0].mesh()
    policy = processes.policy(WORKER, specs)
    engines = processes.engines(ENGINES[config.rollout.engine], engine_specs(plan), config.rollout.cpu_cache_gib)
    groups = [ModelGroup("policy", policy, config.training, config.timeout_seconds, mesh)]
    if layout.reference_ranks:
        actors = processes.reference(WORKER, worker_specs(config, config.reference, layout.reference_ranks, 0))
        beside = Mesh(layout.reference_ranks, mesh.ring, mesh.tensor)
        groups.append(ModelGroup("reference", actors, config.reference, config.timeout_seconds, beside))
    start_groups(groups)
    return groups[0], groups[1] if len(groups) > 1 else None, EnginePool(engines)


def worker_specs(config: RLConfig, ranks: RanksConfig, world: int, updates: int) -> list[WorkerSpec]:
    seconds = config.timeout_seconds
    return [WorkerSpec(config.model, ranks, rank, world, updates, config.seed, seconds) for rank in range(world)]


def engine_specs(plan: RLPlan) -> list[EngineSpec]:
    config, rollout = plan.config, plan.config.rollout
    assert rollout.max_new_tokens and rollout.max_prompt_tokens
    return [
        EngineSpec(
            model=config.model.path,
            dtype=rollout.dtype,
            context=rollout.max_prompt_tokens + rollout.max_new_tokens,
            tensor_parallel=rollout.tensor_parallel,
            max_sequences=rollout.max_sequences,
            seed=config.seed + number,
            gpu_memory_share=rollout.gpu_memory_share,
            cuda_graphs=rollout.cuda_graphs,
            sleeps=plan.layout.colocated,
            trust_remote_code=config.model.trust_remote_code,
        )
        for number in range(plan.layout.engines)
    ]


def make_rollouts(
    plan: RLPlan, episodes: Episodes, environment: Any, stops: tuple[int, ...], state: RLState, loop: EventLoop
) -> Rollouts:
    config, rollout = plan.config, plan.config.rollout
    assert rollout.max_new_tokens
    return Rollouts(
        episodes,
        environment,
        plan.prompts,
        make_order(plan.sizes, list(config.data.sources().values()), config.seed, config.data.shuffle, state.groups),
        SamplingParams(rollout.temperature, rollout.max_new_tokens, stops),
        RolloutPlan(
            groups_per_step=config.groups_per_step,
            group_size=config.algorithm.group_size,
            max_staleness=rollout.max_staleness,
            seed=config.seed,
            seeded=rollout.seeded,
            max_failure_share=config.reward.max_failure_share,
        ),
        loop,
    )


def make_sync(plan: RLPlan, policy: ModelGroup, pool: EnginePool, loop: EventLoop, prompt: list[int]) -> WeightSync:
    config = plan.config
    exact = config.model.dtype == config.rollout.dtype == "float32"
    tolerance = config.sync.tolerance or (1e-3 if exact else 0.1)
    assert config.rollout.max_prompt_tokens
    length = min(CANARY_TOKENS, config.rollout.max_prompt_tokens)
    tokens = (prompt * CANARY_TOKENS)[: max(length, 2)]
    in_process = config.runtime == "local"
    return WeightSync(policy, pool, loop, config.sync, Canary(tokens, tolerance), config.rollout.dtype, in_process)


def make_evaluator(
    plan: RLPlan, episodes: Episodes, environment: Any, stops: tuple[int, ...], loop: EventLoop
) -> Evaluator | None:
    config = plan.config
    if not plan.evaluation_prompts:
        return None
    assert config.rollout.max_new_tokens
    params = SamplingParams(config.evaluation.temperature, config.rollout.max_new_tokens, stops)
    return Evaluator(episodes, environment, plan.evaluation_prompts, params, loop)
