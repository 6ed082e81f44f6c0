"""Offline training: the same worker, the same update, no sampling."""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev

from torch import Tensor

from trueline.data.types import Sample
from trueline.monitoring.progress import Progress
from trueline.monitoring.speed import flops_per_token, speed_metrics
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.offline.dataset import Dataset
from trueline.offline.plan import SupervisedPlan
from trueline.runs.guard import Guard
from trueline.runs.interrupts import Interrupts
from trueline.runs.rescue import Rescue
from trueline.runs.state import SupervisedState
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import ModelGroup, write_model
from trueline.training.report import LossSettings
from trueline.training.worker import Worker


@dataclass(slots=True)
class SupervisedTrainer:
    plan: SupervisedPlan
    model: ModelGroup
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    state: SupervisedState
    guard: Guard
    timer: Timer

    def fit(self) -> SupervisedState:
        plan, state, train = self.plan, self.state, self.plan.material.train
        config = plan.config
        order = train.order(config.seed, config.data.shuffle, state.rows)
        self.guard.watch()
        rescue = Rescue(state, [self.guard], lambda: self.save({}), self.progress.note)
        with self.progress, Interrupts(self.progress.note) as interrupts, rescue:
            metrics = self.evaluate() if state.step == 0 else {}
            if metrics:
                self.tracker.log(0, metrics)
                self.progress.note(shown(metrics))
            while state.step < plan.steps and not interrupts.requested:
                rows = [next(order) for _ in range(config.samples_per_step)]
                metrics = self.learn(rows)
                state.step, state.rows, state.skipped_steps = state.step + 1, order.position, self.guard.skipped
                self.guard.whole = True
                if self.evaluation_due():
                    metrics |= self.evaluate()
                times = self.timer.flush()
                metrics |= times | self.speed(train.take(rows), times["time/train"])
                self.tracker.log(state.step, metrics)
                self.progress.step(state.step, metrics)
                self.guard.follow("loss", metrics["loss"])
                # After its numbers are written: a kill in between costs the step again, not its row.
                if self.checkpoints.due(state.step) or state.step == plan.steps:
                    self.save(metrics)
            self.save({})
        return state

    def learn(self, rows: list[int]) -> dict[str, float]:
        """One optimizer step on these rows."""
        train = self.plan.material.train
        with self.timer.phase("train"):
            samples = train.take(rows)
            settings = self.settings(train, [train.mismatched[row] for row in rows] if train.mismatched else [])
            metrics = self.guard.update(samples, train.task.loss, settings, together=train.task.together)
            return metrics | settings.statistics

    def settings(self, dataset: Dataset, mismatched: list[Sample]) -> LossSettings:
        statistics = {}
        if mismatched:
            statistics["kto/kl"] = kl_estimate(mismatched, self.model.score(mismatched))
        return LossSettings(1.0, dataset.task.settings(self.plan.config), statistics)

    def evaluation_due(self) -> bool:
        every, step = self.plan.config.evaluation.every, self.state.step
        return step == self.plan.steps or (every > 0 and step % every == 0)

    def evaluate(self) -> dict[str, float]:
        """The loss of all held-out rows; nothing where none are held out."""
        held_out = self.plan.material.held_out
        if held_out is None:
            return {}
        with self.timer.phase("evaluate"):
            samples = held_out.take(list(range(held_out.rows())))
            settings = self.settings(held_out, held_out.mismatched)
            found = self.model.evaluate(samples, held_out.task.loss, settings, together=held_out.task.together)
            if held_out.task.head == "reward":
                self.store_scale(samples)
        return {f"evaluation/{name}": value for name, value in found.items()}

    def store_scale(self, samples: list[Sample]) -> None:
        """Mean and deviation of a reward model's scores are saved with it, for whoever normalises rewards."""
        scores = [float(scores[-1, 0]) for scores in self.model.score(samples)]
        self.model.call(Worker.annotate, {"reward_mean": fmean(scores), "reward_std": pstdev(scores)})

    def speed(self, samples: list[Sample], seconds: float) -> dict[str, float]:
        plan, tokens = self.plan, sum(sample.length() for sample in samples)
        flops = flops_per_token(plan.facts.parameters, adapters=plan.config.model.lora.rank > 0)
        return speed_metrics(tokens, seconds, plan.layout.policy_ranks, flops, plan.machine.gpu_name)

    def save(self, metrics: dict[str, float]) -> None:
        with self.timer.phase("save"):
            self.checkpoints.save(self.state.step, asdict(self.state), self._write, metrics)

    def _write(self, folder: Path) -> None:
        write_model(self.model, folder)


def kl_estimate(mismatched: list[Sample], logprobs: list[Tensor]) -> float:
    """KTO's z: how far the model is from the reference on answers to other prompts; never below zero."""
    ratios = [
        float(((scores - sample.ref_logprobs) * sample.mask).sum())
        for sample, scores in zip(mismatched, logprobs, strict=True)
    ]
    return max(fmean(ratios), 0.0)


def shown(metrics: dict[str, float]) -> str:
    return "start      " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
