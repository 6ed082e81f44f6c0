"""The reinforcement-learning loop: it reads like the algorithm."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
from torch import Tensor

from trueline.algorithms.advantages import assign_advantages
from trueline.algorithms.correction import mismatch_metrics
from trueline.algorithms.weighting import set_weights
from trueline.config.rl import RLConfig
from trueline.data.types import Sample, Trajectory, to_sample
from trueline.monitoring.progress import Progress
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.rollout.pool import EnginePool
from trueline.rollout.rollouts import EventLoop, Group, Rollouts
from trueline.sync.weights import WeightSync
from trueline.trainers.evaluation import Evaluator
from trueline.trainers.guard import Guard
from trueline.trainers.interrupts import Interrupts
from trueline.trainers.state import RLState
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import LossSettings, ModelGroup, write_model


class Turns:
    """Models and engines that share GPUs take turns; those that do not are always awake."""

    def __init__(self, pool: EnginePool, loop: EventLoop, shared: bool) -> None:
        self.pool, self.loop, self.shared = pool, loop, shared

    def _engines(self, method: str, *args: str) -> None:
        if self.shared:
            self.loop.run(self.pool.call(method, *args), f"{method} of the engines")

    @contextmanager
    def training(self) -> Iterator[None]:
        self._engines("sleep")
        yield

    @contextmanager
    def syncing(self) -> Iterator[None]:
        self._engines("wake", "weights")
        yield
        self._engines("wake", "kv_cache")


@dataclass(slots=True)
class RLTrainer:
    config: RLConfig  # resolved
    policy: ModelGroup
    reference: ModelGroup | None
    rollouts: Rollouts
    sync: WeightSync
    turns: Turns
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    state: RLState
    timer: Timer
    guard: Guard

    def fit(self) -> RLState:
        state, config = self.state, self.config
        self.guard.watch()
        with self.progress, Interrupts(self.progress.note) as interrupts:
            self.publish()
            if state.step == 0:
                self.tracker.log(0, self.evaluate() | self.timer.flush())
            self.rollouts.start()
            while state.step < config.steps and not interrupts.requested:
                with self.timer.phase("rollout"):
                    groups = self.rollouts.take(config.groups_per_step)
                trajectories = [trajectory for group in groups for trajectory in group]
                samples = [to_sample(trajectory) for trajectory in trajectories]
                with self.turns.training():
                    self.score(samples)
                    assign_advantages(samples, config.algorithm)
                    metrics = self.learn(samples)
                    metrics |= self.describe(groups, samples)
                    state.advance(len(groups) + self.rollouts.failures.dropped_groups)
                    state.skipped_steps = self.guard.skipped
                    self.save_if_due(metrics)
                metrics |= self.publish()
                if self.evaluation_due():
                    metrics |= self.evaluate()
                if state.step < config.steps:
                    self.rollouts.release(len(groups))
                self.report(metrics, trajectories)
            self.save({})
        return state

    def publish(self) -> dict[str, float]:
        """Make the newest weights live in the engines, and prove it."""
        with self.timer.phase("sync"):
            with self.turns.syncing():
                metrics = self.sync.publish(self.state.version)
            return metrics | self.sync.verify()

    def score(self, samples: list[Sample]) -> None:
        """What the models say of the samples before the update."""
        with self.timer.phase("score"):
            temperature = self.config.rollout.temperature
            for sample, scores in zip(samples, self.policy.score(samples, temperature), strict=True):
                sample.old_logprobs = scores
            if self.config.algorithm.kl.coefficient > 0:
                for sample, scores in zip(samples, self.reference_scores(samples), strict=True):
                    sample.ref_logprobs = scores

    def reference_scores(self, samples: list[Sample]) -> list[Tensor]:
        """By a model of its own, or by a policy with adapters without them."""
        temperature = self.config.rollout.temperature
        if self.reference is not None:
            return self.reference.score(samples, temperature)
        return self.policy.score(samples, temperature, reference=True)

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """One optimizer step per minibatch; the numbers of the last one are reported."""
        config = self.config
        assert config.rollout.max_new_tokens
        settings = LossSettings(config.rollout.temperature, config.algorithm)
        metrics: dict[str, float] = {}
        with self.timer.phase("train"):
            for epoch in range(config.epochs):
                order = np.random.default_rng([config.seed, self.state.step, epoch]).permutation(len(samples))
                for part in np.array_split(order, config.minibatches):
                    minibatch = [samples[at] for at in part]
                    set_weights(minibatch, config.algorithm.weighting, config.rollout.max_new_tokens)
                    metrics = self.guard.check(self.policy.update(minibatch, "policy", settings))
        return metrics

    def evaluate(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        with self.timer.phase("evaluate"):
            metrics, trajectories = self.evaluator.run(self.config.seed)
        self.tracker.show(self.state.step, [transcript(one, "evaluate") for one in trajectories[:3]])
        if "evaluation/reward" in metrics:
            self.progress.note(f"held-out reward after step {self.state.step}: {metrics['evaluation/reward']:.3f}")
        return metrics

    def describe(self, groups: list[Group], samples: list[Sample]) -> dict[str, float]:
        rewards = [sample.reward for sample in samples]
        lengths = [sample.sampled_tokens() for sample in samples]
        uniform = [len({trajectory.reward for trajectory in group}) == 1 for group in groups]
        failures = self.rollouts.failures
        return {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/uniform_groups_share": fmean(uniform),
            "reward/failed": failures.count,
            "answer/tokens_mean": fmean(lengths),
            "answer/tokens_max": max(lengths),
            "answer/truncated_share": fmean(sample.truncated for sample in samples),
            "rollout/staleness_max": max(self.state.version - sample.version for sample in samples),
            "rollout/dropped_groups": failures.dropped_groups,
            "speed/tokens": sum(sample.length() for sample in samples),
            **mismatch_metrics(samples),
        }

    def report(self, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        times = self.timer.flush()
        metrics |= times | {"speed/tokens_per_second": metrics["speed/tokens"] / times["time/step"]}
        self.tracker.log(self.state.step, metrics)
        shown = trajectories[: self.config.monitoring.transcripts_per_step]
        self.tracker.show(self.state.step, [transcript(one, "train") for one in shown])
        self.progress.step(self.state.step, metrics)
        if self.state.step == 1:
            for warning in first_step_warnings(metrics, self.config):
                self.progress.note(f"warning: {warning}")

    def evaluation_due(self) -> bool:
        every, step = self.config.evaluation.every, self.state.step
        return step == self.config.steps or (every > 0 and step % every == 0)

    def save_if_due(self, metrics: dict[str, float]) -> None:
        """The last step is saved before its evaluation, so that nothing trained can be lost to it."""
        if self.checkpoints.due(self.state.step) or self.state.step == self.config.steps:
            with self.timer.phase("save"):
                self.save(metrics)

    def save(self, metrics: dict[str, float]) -> None:
        self.checkpoints.save(self.state.step, asdict(self.state), self._write, metrics)

    def _write(self, folder: Path) -> None:
        write_model(self.policy, folder)


def transcript(trajectory: Trajectory, purpose: str) -> dict[str, object]:
    return {
        "purpose": purpose,
        "prompt": trajectory.prompt.messages[-1]["content"],
        "reply": trajectory.reply,
        "label": trajectory.prompt.label,
        "reward": trajectory.reward,
        "outcome": str(trajectory.outcome),
    }


def first_step_warnings(metrics: dict[str, float], config: RLConfig) -> list[str]:
    """Signs that a run will not learn, told at once and with the key to change."""
    warnings = []
    if metrics["answer/truncated_share"] > 0.5:
        warnings.append(
            f"{metrics['answer/truncated_share']:.0%} of the answers were cut off: raise "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    if metrics["reward/uniform_groups_share"] > 0.9:
        warnings.append(
            f"in {metrics['reward/uniform_groups_share']:.0%} of the groups all answers have one reward, so there is "
            f"nothing to learn from (mean reward {metrics['reward/mean']:.3f}): easier or harder prompts, "
            f"another reward, or a larger algorithm.group_size={config.algorithm.group_size}"
        )
    return warnings
