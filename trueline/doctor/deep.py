"""`doctor --deep`: open a run's processes as a start would, try one step, and keep nothing of it."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trueline.config.base import Tree
from trueline.config.rl import RLConfig
from trueline.doctor.training import existing
from trueline.monitoring.findings import BAD, FINE, WATCH, Finding
from trueline.monitoring.health import TRUNCATED, UNIFORM, gap_level, limits_in, truncation_findings
from trueline.monitoring.limits import ALWAYS_TRUNCATED, CUT_OFF
from trueline.monitoring.limits import UNIFORM as MOSTLY_UNIFORM
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import duration
from trueline.offline.build import supervised_trainer
from trueline.plan.offline import SupervisedPlan
from trueline.plan.rl import RLPlan
from trueline.plan.tasks import Material
from trueline.rl.build import rl_trainer
from trueline.rl.metrics import Metrics, describe_step
from trueline.rl.step import mismatch, stored_samples
from trueline.rl.trainer import RLTrainer
from trueline.rollout.groups import sample_each
from trueline.rollout.summary import EpisodeSummary, SampledGroup
from trueline.runs.launch import FAILURES
from trueline.training.samples import StoredSamples

PROMPTS, COMPLETIONS = 16, 256  # that are sampled at most
KEEP_NOTHING: Tree = {
    "checkpoint": {"save": False, "keep_best": 0},
    "health": {"action": "log"},
    "monitoring": {"tensorboard": False, "wandb": None, "mlflow": None, "trackio": None},
}


def try_run(plan: RLPlan | SupervisedPlan, verb: str) -> list[Finding]:
    """Try one step of a run; an error here would also end the run."""
    found: list[Finding] = []
    trial = try_rl(plan, verb) if isinstance(plan, RLPlan) else try_supervised(plan, verb)
    try:
        for one in trial:
            found.append(one)  # one by one, to keep what was found before a failure
    except FAILURES as error:
        found.append(Finding(BAD, "failed", str(error), "the run would end with this error"))
    return found


@contextmanager
def passing_folder(plan: RLPlan | SupervisedPlan, verb: str) -> Iterator[tuple[RunFolder, Progress]]:
    """Make a temporary run folder; on a cluster, where its nodes see the folders of runs."""
    shared = existing(Path(plan.config.folder)) if plan.machine.nodes else None
    with tempfile.TemporaryDirectory(prefix="trueline-doctor-", dir=shared) as home:
        folder = RunFolder(Path(home, "run")).open(plan.config, verb, resume=False)
        yield folder, Progress("doctor", 1, Console(stderr=True, highlight=False), folder)


def try_rl(plan: RLPlan, verb: str) -> Iterator[Finding]:
    """Publish weights, sample, compare and train; yield each finding at once."""
    asked, once = plan.config, plan.config.with_keys(KEEP_NOTHING | {"minibatches": 1})
    tried = replace(plan, config=once)
    with passing_folder(tried, verb) as (folder, progress), rl_trainer(tried, folder, progress) as trainer:
        sync = trainer.publish()
        how = "verified" if trainer.sync.check else "not verified (sync.check=false)"
        what = f"weight sync takes {duration(sync['sync/seconds'])}, {how}"
        yield Finding(FINE, "weight_sync", what, key="sync.check")
        groups, failed, prompts = sample(trainer, asked.algorithm.group_size)
        yield from failures(failed, prompts, asked)
        if not groups:
            return
        samples = stored_samples(groups)
        metrics = describe_step(groups, samples.rows, trainer.rollouts.dropped, trainer.state.version)
        share = metrics[TRUNCATED]
        level = BAD if share > ALWAYS_TRUNCATED else WATCH if share > CUT_OFF else FINE
        cut = truncation_findings(level, share, limits_in(metrics, "response_length/"), asked)
        what = f"{cut.what}; their mean length is {metrics['response_length/mean']:.0f} tokens"
        yield replace(cut, what=what, why="" if level == FINE else f"{cut.why}, or check that completions can end")
        yield from rewards(groups, metrics) if asked.has_reward() else ()
        with trainer.sharing.training():
            yield gap(trainer, samples)
            yield from training_step(trainer, samples)
        yield step_time(trainer, asked, prompts)


def sample(trainer: RLTrainer, size: int) -> tuple[list[SampledGroup], list[EpisodeSummary], int]:
    """Sample the run's first prompts with its seeds; return groups to train on, failures, count of prompts."""
    rollouts = trainer.rollouts
    count = max(min(PROMPTS, len(rollouts.prompts), COMPLETIONS // size), 1)
    prompts = [rollouts.draw() for _ in range(count)]
    with trainer.timer.phase("rollout"):
        made: dict[int, Any] = dict(sample_each(rollouts.sampler, prompts, rollouts.loop, in_flight=COMPLETIONS))
    groups = [made[place].with_rewards() for place in sorted(made)]
    failed = [one for group in made.values() for one in group if one.outcome.is_failure]
    return [group for group in groups if len(group) >= min(2, size)], failed, count


def failures(failed: list[EpisodeSummary], prompts: int, config: RLConfig) -> Iterator[Finding]:
    if failed:
        asked, cause = prompts * config.algorithm.group_size, failed[0].error.strip().rpartition("\n")[2]
        what = f"{len(failed)} of {asked} completions have no reward: {failed[0].outcome}: {cause}"
        stops = len(failed) > config.reward.max_failure_share * asked
        why = "more than reward.max_failure_share, so the run would stop" if stops else "they are dropped"
        yield Finding(BAD if stops else WATCH, "failed_rewards", what, why, "reward.function")


def rewards(groups: list[SampledGroup], metrics: Metrics) -> Iterator[Finding]:
    found = [one.reward for group in groups for one in group if one.reward is not None]
    mean, spread = metrics["reward/mean"], metrics["reward/std"]
    what = f"{len(found)} rewards from {min(found):.3g} to {max(found):.3g}, mean {mean:.3g}, deviation {spread:.2g}"
    same = "" if spread else "all are equal, so there is nothing to learn: `trueline reward try`"
    yield Finding(FINE if spread else BAD, "equal_rewards", what, same, "reward.function")
    if share := metrics.get(UNIFORM):
        level = WATCH if share > MOSTLY_UNIFORM else FINE
        why = "they teach nothing: easier or harder prompts, or larger groups" if level == WATCH else ""
        what = f"in {share:.0%} of {len(groups)} groups all completions have the same reward"
        yield Finding(level, "uniform_groups", what, why, "algorithm.group_size")


def gap(trainer: RLTrainer, samples: StoredSamples) -> Finding:
    """Compare the log-probs of engines and trainer on sampled tokens, by their gap under equal weights."""
    for block in trainer.models.policy.score_stored(samples, "old_logprobs", temperature=trainer.models.temperature):
        samples.add(block)
    found = trainer.rollouts.loop.run(trainer.workers.run(mismatch, samples), "comparing log-probs")
    mean, largest = found["mismatch/logprob_gap_mean"], found["mismatch/logprob_gap_max"]
    level = gap_level(mean, trainer.sync.floor)
    what = f"log-probs of engines and trainer differ by {mean:.2g} nats per token on average, {largest:.2g} at most"
    why = "" if level == FINE else "the trained policy is not the sampled one: try rollout.dtype, or rollout.engine=hf"
    return Finding(level, "gap", what, why, "rollout.dtype")


def training_step(trainer: RLTrainer, samples: StoredSamples) -> Iterator[Finding]:
    with trainer.timer.phase("score"):
        trainer.models.score(samples, logprobs_from_update=trainer.logprobs_from_update())
    trainer.assign_advantages(samples)
    metrics = trainer.update_models(samples)
    if "loss" in metrics:
        yield from check_update(metrics)
    elif not metrics:
        what = "nothing was trained: no completion has a weight in the loss"
        yield Finding(WATCH, "trial_step", what, key="algorithm.shaping.overlong_filter")


def step_time(trainer: RLTrainer, config: RLConfig, prompts: int) -> Finding:
    """Scale the phases of the trial, except the sync, to the prompts of a step."""
    seconds, scale = trainer.timer.seconds, config.prompts_per_step / prompts
    scaled = {name: seconds[name] * (1 if name == "sync" else scale) for name in ("rollout", "score", "train", "sync")}
    whole = sum(scaled.values())
    parts = ", ".join(f"{name} {duration(value)}" for name, value in scaled.items())
    what = f"about {duration(whole)} per step ({parts}), {duration(whole * config.steps)} for {config.steps} steps"
    why = f"an estimate from {prompts} of {config.prompts_per_step} prompts; a first step is slower"
    return Finding(FINE, "step_time", what, why, "prompts_per_step")


def try_supervised(plan: SupervisedPlan, verb: str) -> Iterator[Finding]:
    """Train one step on the first rows of the run."""
    material = Material(plan.material.train, None)
    tried = replace(plan, config=plan.config.with_keys(KEEP_NOTHING), material=material, steps=1)
    with passing_folder(tried, verb) as (folder, progress), supervised_trainer(tried, folder, progress) as trainer:
        config, train = tried.config, material.train
        order = train.order(config.seed, config.data.shuffle, 0)
        rows = [next(order) for _ in range(config.samples_per_step)]
        yield from check_update(trainer.learn(rows))
        samples = train.take(rows)
        passes = trainer.model.plan(samples, train.task.samples_per_row)
        tokens = [sum(samples[at].length() for at in one if at >= 0) for rank in passes for one in rank]
        what = f"{len(tokens)} passes of up to {max(tokens)} tokens; the limit is {trainer.model.budget.tokens}"
        yield Finding(FINE, "passes", what, key="training.micro_batch_tokens")
        seconds = trainer.timer.seconds["train"]
        what = f"about {duration(seconds)} per step, {duration(seconds * plan.steps)} for {plan.steps} steps"
        yield Finding(FINE, "step_time", what, "an estimate; a first step is slower", "samples_per_step")


def check_update(metrics: Metrics) -> Iterator[Finding]:
    loss, norm = metrics["loss"], metrics["grad_norm"]
    memory = f"; {metrics['memory/peak_gib']:.2g} GiB of memory" if "memory/peak_gib" in metrics else ""
    what = f"one step was trained: loss {loss:.4g}, gradient norm {norm:.3g}{memory}"
    if math.isfinite(loss) and math.isfinite(norm):
        why = "" if norm else "nothing was learned from these rows"
        yield Finding(FINE if norm else WATCH, "trial_step", what, why, "training.learning_rate")
    else:
        why = "not finite, so the step was skipped: try model.dtype=float32"
        yield Finding(BAD, "not_finite", what, why, "model.dtype")
