"""From a plan to a trainer with all its processes, and back to nothing when it ends."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from trueline.config.model import ModelConfig
from trueline.config.rl import RolloutConfig
from trueline.config.run import RunConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import make_order
from trueline.environments.base import Environment
from trueline.environments.single_turn import SingleTurn
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.failures import FailureBudget
from trueline.rollout.pool import EnginePool
from trueline.rollout.rollouts import EventLoop, GroupSampler, RolloutPlan, Rollouts
from trueline.runtime.actors import Actor, Target
from trueline.runtime.cluster import ray_cluster
from trueline.runtime.placement import Layout, Processes
from trueline.sync.weights import Canary, WeightSync
from trueline.trainers.evaluation import Evaluator
from trueline.trainers.guard import Guard
from trueline.trainers.learning_rate import suited_rate
from trueline.trainers.models import Models
from trueline.trainers.plan import RLPlan
from trueline.trainers.rewards import failure_files, open_rewards
from trueline.trainers.rl import RLTrainer, Turns
from trueline.trainers.roles import RoleModel
from trueline.trainers.state import RLState, check_data, restore
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import ModelGroup, start_groups
from trueline.training.worker import WORKER, Worker, WorkerSpec

CANARY_TOKENS = 32
ENGINES: dict[str, Target[RolloutEngine]] = {
    "vllm": Target("trueline.rollout.vllm_engine:VllmEngine", asynchronous=True),
    "hf": Target("trueline.rollout.hf_engine:HFEngine", asynchronous=True),
}


@dataclass(frozen=True, slots=True)
class Conversations:
    """All that turns prompts into judged answers."""

    episodes: Episodes
    environment: Callable[[], Environment]
    stops: tuple[int, ...]
    loop: EventLoop

    def params(self, temperature: float, max_new_tokens: int | None) -> SamplingParams:
        assert max_new_tokens
        return SamplingParams(temperature, max_new_tokens, self.stops)


@contextmanager
def rl_trainer(plan: RLPlan, folder: RunFolder, progress: Progress) -> Iterator[RLTrainer]:
    """Starts every process, hands out the trainer, and ends every process."""
    config = plan.config
    local = config.runtime == "local"
    checkpoints = Checkpoints(folder.path, config.checkpoint, progress.note)
    data = plan.fingerprint()
    check_data(checkpoints, data)
    with ExitStack() as stack:
        if not local:
            stack.enter_context(ray_cluster(plan.machine))
        processes = Processes(plan.machine, plan.layout, folder.logs, local)
        loop = EventLoop(config.timeout_seconds)
        stack.callback(loop.stop)
        progress.note("starting   models and engines; each process imports its libraries first")
        groups, pool = start_models(plan, processes)
        models = Models(
            config.algorithm,
            config.rollout.temperature,
            groups["policy"],
            groups.get("reference"),
            groups.get("teacher"),
            groups.get("critic"),
        )
        rewards = open_rewards(config.reward, plan.roles, groups, folder.logs)
        stack.callback(lambda: loop.run(rewards.stop(), "stopping rewards"))
        talk = converse(plan.chat, pool, lambda: SingleTurn(rewards), loop)
        sync = make_sync(plan, models.policy, pool, talk)
        progress.note(f"attested   {sync.calibrate()}")  # a checkpoint restored first would part trainer and engines
        state = restore(RLState, checkpoints, models.load, progress)
        tracker = Tracker(folder, config.monitoring, state.step, state.tracker, progress.note)
        stack.callback(tracker.close)
        state.tracker, state.data = tracker.run_id, data
        guard = Guard(models.policy, config.training, progress.note)
        guard.skipped = state.skipped_steps
        guard.suited = suited_rate(plan.facts.parameters, "policy", adapters=config.model.lora.rank > 0)
        yield RLTrainer(
            config=config,
            models=models,
            rollouts=make_rollouts(plan, talk, state, folder),
            sync=sync,
            turns=Turns(pool, loop, plan.layout.colocated and plan.machine.gpus > 0),
            evaluator=make_evaluator(plan, talk),
            checkpoints=checkpoints,
            tracker=tracker,
            progress=progress,
            state=state,
            timer=Timer(),
            guard=guard,
            critic_guard=Guard(models.critic, config.critic, progress.note, "critic") if models.critic else None,
        )


def start_models(plan: RLPlan, processes: Processes) -> tuple[dict[str, ModelGroup], EnginePool]:
    """The policy and the models beside it by name, and the engines; all of them start at once."""
    config, ranks = plan.config, plan.layout.policy_ranks
    updates = config.steps * config.minibatches * config.epochs
    waits = config.algorithm.critic_only_steps if config.algorithm.needs_critic() else 0
    learns = max(config.steps - waits, 1) * config.minibatches * config.epochs
    seconds = config.timeout_seconds
    template = plan.chat.tokenizer.chat_template
    specs = [
        WorkerSpec(config.model, config.training, rank, ranks, learns, config.seed, seconds, chat_template=template)
        for rank in range(ranks)
    ]
    groups = {"policy": model_group("policy", processes.policy(WORKER, specs), specs)}
    engines = start_engines(
        processes, config.rollout, engine_specs(config.model, config.rollout, plan.layout, config.seed)
    )
    for role in plan.roles:
        specs = role_specs(role, config, updates)
        groups[role.name] = model_group(role.name, processes.beside(role.beside(), WORKER, specs), specs)
    start_groups(list(groups.values()))
    return groups, EnginePool(engines)


def role_specs(role: RoleModel, config: RunConfig, updates: int) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            role.model, role.ranks, rank, role.world(), updates, config.seed, config.timeout_seconds, head=role.head
        )
        for rank in range(role.world())
    ]


def model_group(name: str, actors: list[Actor[Worker]], specs: list[WorkerSpec]) -> ModelGroup:
    return ModelGroup(name, actors, specs[0].ranks, specs[0].timeout_seconds, specs[0].mesh())


def start_engines(processes: Processes, rollout: RolloutConfig, specs: list[EngineSpec]) -> list[Actor[RolloutEngine]]:
    return processes.engines(ENGINES[rollout.engine], specs, rollout.cpu_cache_gib)


def engine_specs(model: ModelConfig, rollout: RolloutConfig, layout: Layout, seed: int) -> list[EngineSpec]:
    assert rollout.max_new_tokens and rollout.max_prompt_tokens
    return [
        EngineSpec(
            model=model.path,
            dtype=rollout.dtype,
            context=rollout.max_prompt_tokens + rollout.max_new_tokens,
            tensor_parallel=rollout.tensor_parallel,
            max_sequences=rollout.max_sequences,
            seed=seed + number,
            gpu_memory_share=rollout.gpu_memory_share,
            cuda_graphs=rollout.cuda_graphs,
            sleeps=layout.colocated,
            trust_remote_code=model.trust_remote_code,
        )
        for number in range(layout.engines)
    ]


def converse(
    chat: ChatFormat, pool: EnginePool, environment: Callable[[], Environment], loop: EventLoop
) -> Conversations:
    return Conversations(Episodes(pool, chat), environment, tuple(sorted(chat.stop_ids)), loop)


def make_rollouts(plan: RLPlan, talk: Conversations, state: RLState, folder: RunFolder) -> Rollouts:
    config, rollout, algorithm = plan.config, plan.config.rollout, plan.config.algorithm
    sizes = [len(source.prompts) for source in plan.sources]
    weights = list(config.data.sources().values())
    about = RolloutPlan(
        groups_per_step=config.groups_per_step,
        group_size=algorithm.group_size,
        max_staleness=rollout.max_staleness,
        seed=config.seed,
        seeded=rollout.seeded,
        greedy=algorithm.advantage == "greedy_baseline",
        dynamic=algorithm.dynamic_sampling,
    )
    answers = config.groups_per_step * algorithm.group_size
    params = talk.params(rollout.temperature, rollout.max_new_tokens)
    return Rollouts(
        GroupSampler(talk.episodes, talk.environment, params, about),
        plan.prompts,
        make_order(sizes, weights, config.seed, config.data.shuffle, state.groups),
        about,
        FailureBudget(config.reward.max_failure_share, answers, failure_files(config.reward, folder.path)),
        talk.loop,
    )


def make_sync(plan: RLPlan, policy: ModelGroup, pool: EnginePool, talk: Conversations) -> WeightSync:
    config = plan.config
    exact = config.model.dtype == config.rollout.dtype == "float32"
    assert config.rollout.max_prompt_tokens
    length = min(CANARY_TOKENS, config.rollout.max_prompt_tokens)
    prompt = talk.episodes.chat.prompt_tokens(plan.prompts[0].messages, plan.prompts[0].tools)
    tokens = (prompt * CANARY_TOKENS)[: max(length, 2)]
    canary = Canary(tokens, 1e-3 if exact else 0.1, config.sync.tolerance)
    in_process = config.runtime == "local"
    return WeightSync(policy, pool, talk.loop, config.sync, canary, config.rollout.dtype, in_process)


def make_evaluator(plan: RLPlan, talk: Conversations) -> Evaluator | None:
    evaluation = plan.config.evaluation
    if not plan.evaluation_sets:
        return None
    params = talk.params(evaluation.temperature, plan.config.rollout.max_new_tokens)
    return Evaluator(talk.episodes, talk.environment, plan.evaluation_sets, params, evaluation, talk.loop)
