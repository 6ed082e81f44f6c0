"""The deep part: a run's processes are opened as a start would, one step of it is tried, and nothing of it is kept."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from trueline.algorithms.importance_sampling import mismatch_metrics
from trueline.config.base import Tree
from trueline.config.rl import RLConfig
from trueline.data.types import Sample, Trajectory, to_samples
from trueline.doctor.findings import Finding, named_key
from trueline.doctor.machine import existing
from trueline.monitoring.health import BAD, CUT_OFF, OK, WATCH, cut_off_words, gap_level, limits_in
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import duration
from trueline.offline.build import supervised_trainer
from trueline.offline.dataset import Material
from trueline.offline.plan import SupervisedPlan
from trueline.offline.trainer import SupervisedTrainer
from trueline.rl.build import rl_trainer
from trueline.rl.metrics import UNIFORM, Metrics, describe_step
from trueline.rl.plan import RLPlan
from trueline.rl.trainer import RLTrainer
from trueline.rollout.groups import Group
from trueline.runs.launch import FAILURES

PROMPTS, COMPLETIONS = 16, 256  # that are sampled at most
ALWAYS_CUT = 0.95  # share of answers
LEVELS = {OK: "fine", WATCH: "watch", BAD: "bad"}
KEEP_NOTHING: Tree = {
    "checkpoint": {"save": False, "keep_best": 0},
    "health": {"action": "log"},
    "monitoring": {"tensorboard": False, "wandb": None, "mlflow": None, "trackio": None},
}


def try_run(plan: RLPlan | SupervisedPlan, verb: str) -> list[Finding]:
    """Try one step of a run; what ends it early would end the run."""
    found: list[Finding] = []
    trial = try_rl(plan, verb) if isinstance(plan, RLPlan) else try_supervised(plan, verb)
    try:
        for one in trial:
            found.append(one)  # one by one: what was found before a failure counts
    except FAILURES as error:
        why = "the run would stop with this"
        found.append(Finding("bad", str(error), why, named_key(str(error), type(plan.config))))
    return found


@contextmanager
def passing_folder(plan: RLPlan | SupervisedPlan, verb: str) -> Iterator[tuple[RunFolder, Progress]]:
    """Make a run folder that goes again; of a cluster, where its nodes see the folders of runs."""
    shared = existing(Path(plan.config.folder)) if plan.machine.nodes else None
    with tempfile.TemporaryDirectory(prefix="trueline-doctor-", dir=shared) as home:
        folder = RunFolder(Path(home, "run")).open(plan.config, verb, resume=False)
        yield folder, Progress("doctor", 1, Console(stderr=True, highlight=False), folder.log)


# Reinforcement learning


@dataclass(frozen=True, slots=True)
class Sampled:
    """Groups that a step could train on, and answers that have no reward."""

    groups: list[Group]
    failed: list[Trajectory]
    prompts: int

    def answers(self) -> list[Trajectory]:
        return [one for group in self.groups for one in group]

    def samples(self) -> list[Sample]:
        return [one for number, episode in enumerate(self.answers()) for one in to_samples(episode, number)]


def try_rl(plan: RLPlan, verb: str) -> Iterator[Finding]:
    """Publish weights, sample, compare, train; yield what is found as it is found."""
    asked, once = plan.config, plan.config.replaced(KEEP_NOTHING | {"minibatches": 1})
    tried = replace(plan, config=once)
    with passing_folder(tried, verb) as (folder, progress), rl_trainer(tried, folder, progress) as trainer:
        sync = trainer.publish()
        how = "proven" if trainer.sync.check else "not proven (sync.check=false)"
        yield Finding("fine", f"weights reach the engines in {duration(sync['sync/seconds'])}, {how}", "", "sync.check")
        sampled = sample(trainer, asked.algorithm.group_size)
        yield from failures(sampled, asked)
        if not sampled.groups:
            return
        samples = sampled.samples()
        metrics = describe_step(sampled.groups, samples, trainer.rollouts.dropped, trainer.state.version)
        yield from truncation(metrics, asked)
        yield from rewards(sampled, metrics) if asked.judged() else ()
        with trainer.sharing.training():
            yield from gaps(trainer, samples)
            yield from training_step(trainer, samples)
        yield step_time(trainer, asked, sampled.prompts)


def sample(trainer: RLTrainer, size: int) -> Sampled:
    """Answer the first prompts of the run, with the seeds that they would have in it."""
    rollouts = trainer.rollouts
    count = max(min(PROMPTS, len(rollouts.prompts), COMPLETIONS // size), 1)
    prompts = [(number, rollouts.prompts[next(rollouts.order)]) for number in range(count)]
    with trainer.timer.phase("rollout"):
        made = dict(rollouts.sampler.each(prompts, rollouts.loop, under_way=COMPLETIONS))
    groups = [[one for one in made[place] if one.outcome.scored] for place in sorted(made)]
    failed = [one for group in made.values() for one in group if one.outcome.failed]
    return Sampled([group for group in groups if len(group) >= min(2, size)], failed, count)


def failures(sampled: Sampled, config: RLConfig) -> Iterator[Finding]:
    if sampled.failed:
        asked = sampled.prompts * config.algorithm.group_size
        first = sampled.failed[0]
        what = f"{len(sampled.failed)} of {asked} answers have no reward: {first.outcome}: {last_line(first.error)}"
        stops = len(sampled.failed) > config.reward.max_failure_share * asked
        why = "more than reward.max_failure_share, so the run would stop" if stops else "they leave their group"
        yield Finding("bad" if stops else "watch", what, why, "reward.function")


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def truncation(metrics: Metrics, config: RLConfig) -> Iterator[Finding]:
    share, limits = metrics["response_length/truncated_share"], limits_in(metrics, "response_length/")
    values = {key.path: key.default for key in config.leaves()}
    key = max(limits, key=lambda one: limits[one], default="rollout.max_new_tokens")
    length = f"mean length {metrics['response_length/mean']:.0f} tokens"
    level = "bad" if share > ALWAYS_CUT else "watch" if share > CUT_OFF else "fine"
    why = "" if level == "fine" else "what is cut off is judged unfinished; see whether answers can end"
    cut = f"{share:.0%} of the answers are" if round(share, 2) else "hardly any answer is" if share else "no answer is"
    what = f"{cut} cut off" if level == "fine" else cut_off_words(share, limits, values)
    yield Finding(level, f"{what}; {length}", why, key)


def rewards(sampled: Sampled, metrics: Metrics) -> Iterator[Finding]:
    found = [one.reward for one in sampled.answers() if one.reward is not None]
    mean, spread = metrics["reward/mean"], metrics["reward/std"]
    what = f"{len(found)} rewards from {min(found):.3g} to {max(found):.3g}, mean {mean:.3g}, deviation {spread:.2g}"
    same = "" if spread else "all are equal, so there is nothing to learn from: `trueline reward try`"
    yield Finding("fine" if spread else "bad", what, same, "reward.function")
    share = metrics.get("reward/uniform_groups_share")
    if share:
        level = "watch" if share > UNIFORM else "fine"
        why = "they teach nothing: easier or harder prompts, or larger groups" if level == "watch" else ""
        words = f"in {share:.0%} of {len(sampled.groups)} groups all answers have one reward"
        yield Finding(level, words, why, "algorithm.group_size")


def gaps(trainer: RLTrainer, samples: list[Sample]) -> Iterator[Finding]:
    """Compare the log-probs of engines and trainer on what was sampled, by what is known of equal weights."""
    scored = trainer.models.policy.score(samples, trainer.models.temperature)
    for one, logprobs in zip(samples, scored, strict=True):
        one.old_logprobs = logprobs
    found = mismatch_metrics(samples)
    mean, largest = found["mismatch/logprob_gap_mean"], found["mismatch/logprob_gap_max"]
    level = LEVELS[gap_level(mean, trainer.sync.floor)]
    what = f"log-probs of engines and trainer differ by {mean:.2g} nats a token on average, {largest:.2g} at most"
    why = "" if level == "fine" else "what is trained is not what was sampled: see rollout.dtype, or rollout.engine=hf"
    yield Finding(level, what, why, "rollout.dtype")


def training_step(trainer: RLTrainer, samples: list[Sample]) -> Iterator[Finding]:
    with trainer.timer.phase("score"):
        trainer.models.score(samples, fresh=trainer.fresh())
    trainer.assess(samples)
    metrics = trainer.learn(samples)
    if "loss" in metrics:
        yield from learnt(metrics)
    elif not metrics:
        yield Finding(
            "watch", "no step was trained: no answer has a weight in the loss", "", "algorithm.shaping.overlong_filter"
        )


def step_time(trainer: RLTrainer, config: RLConfig, prompts: int) -> Finding:
    """Scale the phases of the trial, but for the sync, to the prompts of a step."""
    seconds = trainer.timer.seconds
    scale = config.prompts_per_step / prompts
    scaled = {name: seconds[name] * (1 if name == "sync" else scale) for name in ("rollout", "score", "train", "sync")}
    whole = sum(scaled.values())
    parts = ", ".join(f"{name} {duration(value)}" for name, value in scaled.items())
    what = f"about {duration(whole)} a step ({parts}), {duration(whole * config.steps)} for {config.steps} steps"
    why = f"an estimate by {prompts} prompts where a step has {config.prompts_per_step}; a first step is slower"
    return Finding("fine", what, why, "prompts_per_step")


# Tasks on given rows


def try_supervised(plan: SupervisedPlan, verb: str) -> Iterator[Finding]:
    """Train one step on the rows that the run begins with."""
    material = Material(plan.material.train, None)
    tried = replace(plan, config=plan.config.replaced(KEEP_NOTHING), material=material, steps=1)
    with passing_folder(tried, verb) as (folder, progress), supervised_trainer(tried, folder, progress) as trainer:
        config, train = tried.config, material.train
        order = train.order(config.seed, config.data.shuffle, 0)
        rows = [next(order) for _ in range(config.samples_per_step)]
        metrics = trainer.learn(rows)
        yield from learnt(metrics)
        yield passes(trainer, train.take(rows))
        seconds = trainer.timer.seconds["train"]
        what = f"about {duration(seconds)} a step, {duration(seconds * plan.steps)} for {plan.steps} steps"
        yield Finding("fine", what, "an estimate; a first step is slower", "samples_per_step")


def passes(trainer: SupervisedTrainer, samples: list[Sample]) -> Finding:
    plan = trainer.model.plan(samples, trainer.plan.material.train.task.together)
    tokens = [sum(samples[at].length() for at in one if at >= 0) for rank in plan for one in rank]
    what = f"{len(tokens)} passes of up to {max(tokens)} tokens; {trainer.model.budget.tokens} may be in one"
    return Finding("fine", what, "", "training.micro_batch_tokens")


def learnt(metrics: Metrics) -> Iterator[Finding]:
    """Judge an optimizer step by its loss and gradients."""
    loss, norm = metrics["loss"], metrics["grad_norm"]
    memory = f"; {metrics['memory/peak_gib']:.2g} GiB of memory" if "memory/peak_gib" in metrics else ""
    what = f"one step is trained: loss {loss:.4g}, gradient norm {norm:.3g}{memory}"
    if not (math.isfinite(loss) and math.isfinite(norm)):
        yield Finding("bad", what, "not finite, so the step was skipped: try model.dtype=float32", "model.dtype")
    elif norm == 0:
        yield Finding("watch", what, "nothing was learnt from these rows", "training.learning_rate")
    else:
        yield Finding("fine", what, "", "training.learning_rate")
