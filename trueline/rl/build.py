"""Start all processes of a plan, make its trainer, and end them with it."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from trueline.algorithms.advantages import needs
from trueline.config.model import reads_experts
from trueline.config.rl import RLConfig
from trueline.data.loader import make_order
from trueline.data.pictures import Shown
from trueline.data.prompts import LazyPrompts, known_rates, sample_of
from trueline.monitoring.events import Events
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import START, Timer
from trueline.monitoring.trackers import Tracker
from trueline.plan.inputs import most_pictures
from trueline.plan.resolve import suited_rate
from trueline.plan.rl import RLPlan, plan_rl
from trueline.plan.survey import survey
from trueline.rl.keeping import SampleKeeper
from trueline.rl.lessons import Tutor
from trueline.rl.models import DeviceSharing, Models, policy_specs
from trueline.rl.showcase import Showcase
from trueline.rl.streaming import Stream
from trueline.rl.trainer import RLTrainer
from trueline.rollout.engine import RolloutEngine
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.evaluation import Evaluator
from trueline.rollout.failures import FailureBudget
from trueline.rollout.pool import SILENCE, EnginePool
from trueline.rollout.rollouts import RolloutPlan, Rollouts
from trueline.runs.guard import UpdateMonitor
from trueline.runs.launch import Job, Start, movable, training
from trueline.runs.processes import (
    Sampling,
    describe_start,
    engine_specs,
    failure_files,
    model_group,
    open_loop,
    open_processes,
    open_sampling,
    role_group,
)
from trueline.runs.rescue import MemoryWatch, care_of
from trueline.runs.state import RLState, check_data, data_before, restore
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Processes, place_processes
from trueline.sync.weights import STRANGE, Canary, SyncPlan, WeightSync
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import ModelGroup, prepare_saving, start_groups
from trueline.training.kept_samples import SampleFiles
from trueline.training.worker import worker_target

CANARY_TOKENS = 32
LOOKED_AT = 1000  # prompts, for one with pictures


def prepare_rl(config: RLConfig, start: Start) -> Job:
    plan = plan_rl(config)
    return training(plan, plan.config.steps, partial(rl_trainer, plan))


@contextmanager
def rl_trainer(plan: RLPlan, folder: RunFolder, progress: Progress) -> Iterator[RLTrainer]:
    """Start every process, yield the trainer, and end every process."""
    config = plan.config
    checkpoints = Checkpoints(folder.path, config.checkpoint, progress.note)
    check_data(checkpoints, data := plan.fingerprint(data_before(checkpoints)))
    with ExitStack() as stack:
        place, saves = (plan.machine, plan.layout, folder.logs, config.runtime), config.checkpoint.save
        processes = stack.enter_context(open_processes(*place, plan.models(), saves=saves))
        START.end("Ray")
        warn_without_mps(plan, processes, progress)
        loop = stack.enter_context(open_loop(config.timeout_seconds))
        progress.note("starting   models and engines; each process imports its libraries first")
        groups, pool = begin_models(plan, processes)
        for group in groups.values():
            group.report = progress.report
        models = gather_models(config, groups)
        wait = partial(wait_for_models, groups, pool, loop, progress)
        sampling = stack.enter_context(open_sampling(plan, pool, processes, groups, loop, progress.note, wait))
        sync = make_sync(plan, models.policy, pool, loop)
        # Before a checkpoint is restored: engines have loaded the initial model.
        progress.note(f"Weight sync {sync.verify_initial_sync()}")
        START.end("sync")
        progress.note(describe_start([*(one for group in groups.values() for one in group.actors), *pool.actors]))
        state = restore(RLState, checkpoints, models.load, progress)
        if config.checkpoint.save:
            prepare_saving(list(models.trained_models().values()))
        tracker = Tracker(folder, config.monitoring, state.step, state.tracker, progress.note)
        stack.callback(tracker.close, progress.follower.write_report)
        tracker.follow(Events(folder.logs))
        state.tracker, state.data = tracker.run_ids, data
        guard, critic_guard = make_guards(plan, models, state, progress)
        timer, rollouts = Timer(), make_rollouts(plan, sampling, state, folder)
        tutor = Tutor(config, config.lesson_tokens(plan.rollout, plan.facts.context), rollouts, sampling.workers)
        stack.enter_context(survey_all(plan, folder.logs))
        yield RLTrainer(
            config=config,
            rollout=plan.rollout,
            models=models,
            rollouts=rollouts,
            sync=sync,
            sharing=DeviceSharing(pool, loop, plan.takes_turns(), list(groups.values()), progress.note),
            evaluator=make_evaluator(plan, sampling),
            checkpoints=checkpoints,
            tracker=tracker,
            progress=progress,
            state=state,
            timer=timer,
            guard=guard,
            critic_guard=critic_guard,
            watch=MemoryWatch(plan.forecast, timer),
            care=care_of(config, folder, checkpoints, progress),
            workers=sampling.workers,
            tutor=tutor,
            showcase=Showcase(config, loop, sampling.workers, tracker),
            keeper=make_keeper(plan, sampling, checkpoints, state.step, [guard, critic_guard]),
            stream=make_stream(plan, models.policy) if config.training.stream else None,
        )


def make_guards(
    plan: RLPlan, models: Models, state: RLState, progress: Progress
) -> tuple[UpdateMonitor, UpdateMonitor | None]:
    """Return what checks the updates of the policy and of the critic, if there is one."""
    config = plan.config
    guard = UpdateMonitor(models.policy, config.training, progress.report)
    guard.skipped = state.skipped_steps
    guard.suited = suited_rate(plan.facts.parameters, "policy", adapters=config.model.lora.rank > 0)
    critic_guard = UpdateMonitor(models.critic, config.critic, progress.report, "critic") if models.critic else None
    if critic_guard is not None:
        critic_guard.skipped = state.critic_skipped_steps
    return guard, critic_guard


def gather_models(config: RLConfig, groups: dict[str, ModelGroup]) -> Models:
    teachers = {name.partition("-")[2]: one for name, one in groups.items() if name.startswith("teacher")}
    others = groups.get("reference"), teachers, groups.get("critic")
    return Models(config.algorithm, config.rollout.temperature, groups["policy"], *others)


def warn_without_mps(plan: RLPlan, processes: Processes, progress: Progress) -> None:
    if plan.machine.mps and plan.shares_gpus() and not (plan.layout.in_turns or processes.clients):
        progress.note(
            f"warning: MPS did not start ({processes.logs}/mps), so models and engines slow each other down on their "
            "GPUs: allow it, or set training.stream=false and rollout.max_staleness=0"
        )


@contextmanager
def survey_all(plan: RLPlan, logs: Path) -> Iterator[None]:
    """Measure the prompts of large datasets in the background."""
    data = plan.config.data
    with ExitStack() as stack:
        for source in plan.sources:
            if isinstance(source.prompts, LazyPrompts):
                stack.enter_context(survey(source.prompts, data, plan.config.model, logs / "survey.log"))
        yield


def begin_models(plan: RLPlan, processes: Processes) -> tuple[dict[str, ModelGroup], EnginePool]:
    """Begin all processes of models and engines at once; return models by name, and the engines."""
    config, ranks = plan.config, plan.layout.policy_ranks
    updates, seconds = config.steps * config.minibatches * config.epochs, config.timeout_seconds
    template, share = plan.chat.template.with_defaults(), plan.policy_share()
    specs = [replace(one, chat_template=template, memory_share=share) for one in policy_specs(config, ranks)]
    groups = {"policy": model_group("policy", processes.policy(worker_target(config.training), specs), specs)}
    played = config.environment.plays()
    experts, sizes = reads_experts(config.training), (config.seed, plan.cache_bytes())
    sets = [*(one.prompts for one in plan.sources), *plan.evaluation_sets.values()]
    shown = most_pictures(sets, plan.chat, config.environment)
    specified = engine_specs(config.model, plan.rollout, plan.layout, *sizes, structured=played, experts=experts)
    engine = [replace(spec, pictures=shown) for spec in specified]
    engines = processes.engines(ROLLOUT_ENGINES[plan.rollout.engine].target(plan.rollout), engine)
    pool = EnginePool(engines, plan.rollout.max_sequences, takes_groups=True)
    groups |= {role.name: role_group(role, processes, config.seed, seconds, updates) for role in plan.roles}
    return groups, pool


@WORK.doing("phase", "start")
def wait_for_models(groups: dict[str, ModelGroup], pool: EnginePool, loop: EventLoop, progress: Progress) -> None:
    """Let all models meet and load, and wait for them and for the engines."""
    begun = time.monotonic()
    start_groups(list(groups.values()))
    progress.note(f"loaded     {', '.join(groups)} ({time.monotonic() - begun:.0f} s); engines may need longer")
    loop.run(pool.call(RolloutEngine.processes), "start of the engines")
    progress.note(f"engines    are ready ({time.monotonic() - begun:.0f} s)")
    START.end("models and engines")
    asyncio.run_coroutine_threadsafe(pool.watch(groups["policy"].timeout_seconds / SILENCE), loop.loop)


def make_rollouts(plan: RLPlan, sampling: Sampling, state: RLState, folder: RunFolder) -> Rollouts:
    config, rollout, algorithm = plan.config, plan.rollout, plan.config.algorithm
    difficulty = config.data.difficulty
    if difficulty.enabled and difficulty.column is not None and not state.ledger.drawn:
        known = (known_rates(source.prompts, difficulty.column) for source in plan.sources)
        for row, rate in enumerate(chain.from_iterable(known)):
            if rate is not None:
                state.ledger.pools.judge(row, rate, difficulty)
    sizes = [len(source.prompts) for source in plan.sources]
    weights = list(config.data.sources().values())
    seed, greedy = config.seed if rollout.seeded else None, "greedy" in needs(algorithm)
    completions = config.prompts_per_step * algorithm.group_size
    return Rollouts(
        sampling.sampler(rollout, rollout.max_new_tokens, algorithm.group_size, seed, "train", greedy),
        plan.prompts,
        make_order(sizes, weights, config.seed, config.data.shuffle, state.ledger.drawn),
        RolloutPlan(
            config.prompts_per_step,
            rollout.max_staleness,
            algorithm.dynamic_sampling,
            rollout.too_old == "drop",
            extra_share=rollout.extra_share(),
            window=rollout.window,
            difficulty=difficulty,
        ),
        FailureBudget(config.reward.max_failure_share, completions, failure_files(config.reward, folder.path)),
        sampling.loop,
        state.ledger,
    )


def make_stream(plan: RLPlan, policy: ModelGroup) -> Stream:
    """Make the stream of a run's steps: a part fills half a pass of every rank, or is an eighth of a small step."""
    aggregation, longest = plan.config.algorithm.loss_aggregation, plan.rollout.max_new_tokens
    tokens, passes = plan.completions() * longest, policy.budget.tokens * policy.mesh.data
    expected = tokens / 2 if aggregation == "token_mean" else plan.completions()
    return Stream(aggregation, longest, expected, least=min(passes // 2, tokens // 8))


def make_keeper(
    plan: RLPlan, sampling: Sampling, checkpoints: Checkpoints, step: int, guards: list[UpdateMonitor | None]
) -> SampleKeeper:
    files, monitors = SampleFiles(checkpoints.folder.parent), [one for one in guards if one is not None]
    files.forget_after(step)
    given = movable(plan.config), files, sampling.workers, sampling.loop, checkpoints
    return SampleKeeper(*given, monitors, checkpoints.note)


def make_sync(plan: RLPlan, policy: ModelGroup, pool: EnginePool, loop: EventLoop) -> WeightSync:
    config = plan.config
    exact = config.model.dtype == config.rollout.dtype == "float32"
    limits = 1e-3 if exact else 0.1, config.sync.tolerance, STRANGE if exact else math.inf
    tokens, shown, text = canary_tokens(plan)
    return WeightSync(policy, pool, loop, config.sync, Canary(tokens, *limits, shown, text), sync_plan(plan))


def canary_tokens(plan: RLPlan) -> tuple[list[int], Shown | None, list[int]]:
    """Return tokens that engines and trainer score, their pictures, and those behind the last picture.

    They are of the prompt with the most pictures, which cannot be cut, or the first tokens of the first prompt.
    """
    sampled = [prompt for source in plan.sources for prompt in sample_of(source.prompts)]
    chosen = max(sampled[:LOOKED_AT], key=lambda prompt: len(set(prompt.pictures)))
    prompt = plan.chat.begin(chosen.messages, chosen.tools, chosen.pictures)
    if prompt.shown is not None:
        last = max(at for at, token in enumerate(prompt.tokens) if plan.chat.is_picture(token))
        return prompt.tokens, prompt.shown, prompt.tokens[last + 1 :]
    length = min(CANARY_TOKENS, plan.rollout.max_prompt_tokens)
    return (prompt.tokens * CANARY_TOKENS)[: max(length, 2)], None, []


def sync_plan(plan: RLPlan) -> SyncPlan:
    """Choose how weights travel, and say why the trainer's are not the checkpoint's bit for bit, if they are not."""
    config = plan.config
    differs = "the trainer holds them in 4 bits" if config.model.lora.quantize else ""
    if config.model.dtype == "bfloat16" and config.rollout.dtype == "float32":
        differs = "the trainer holds them in bfloat16, the engines in float32"
    transport = "local" if config.runtime == "local" else plan.transport()
    places = place_processes(plan.layout, plan.machine)
    nodes = (places.policy[0], *places.engines)
    adapter_only, or_gloo = config.model.lora.adapter_only(), transport == "nccl" and config.sync.transport == "auto"
    proofs, on_update = ROLLOUT_ENGINES[config.rollout.engine].proofs, config.rollout.on_update
    return SyncPlan(config.rollout.dtype, transport, differs, adapter_only, on_update, nodes, or_gloo, proofs)


def make_evaluator(plan: RLPlan, sampling: Sampling) -> Evaluator | None:
    evaluation, seed = plan.config.evaluation, plan.config.seed
    if not plan.evaluation_sets:
        return None
    longest = plan.rollout.max_new_tokens
    sampler = sampling.sampler(evaluation, longest, evaluation.samples, seed, "evaluate")
    return Evaluator(sampler, plan.evaluation_sets, evaluation, sampling.loop)
