"""Offline training: the same worker, the same update, no sampling."""

from dataclasses import asdict, dataclass
from functools import partial

from trueline.data.types import Sample
from trueline.monitoring.progress import Progress
from trueline.monitoring.timing import Timer, flops_per_token, speed_metrics
from trueline.monitoring.trackers import Tracker
from trueline.plan.offline import SupervisedPlan
from trueline.runs.guard import UpdateMonitor
from trueline.runs.interrupts import Interrupts
from trueline.runs.rescue import HealthAction, MemoryWatch, SaveOnFailure
from trueline.runs.state import SupervisedState
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import ModelGroup, write_models
from trueline.training.report import LossSettings


@dataclass(slots=True)
class SupervisedTrainer:
    plan: SupervisedPlan
    model: ModelGroup
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    state: SupervisedState
    guard: UpdateMonitor
    timer: Timer
    watch: MemoryWatch
    care: HealthAction

    def fit(self) -> SupervisedState:
        plan, state, train = self.plan, self.state, self.plan.material.train
        config = plan.config
        order = train.order(config.seed, config.data.shuffle, state.rows)
        self.guard.watch()
        rescue = SaveOnFailure(state, [self.guard], lambda: self.save({}), self.checkpoints, self.watch, self.progress)
        interrupts = Interrupts(self.progress.note, config.checkpoint.save, asked=self.progress.stops)
        with self.progress, interrupts, rescue:
            self.care.begin(lambda: self.save({}))
            metrics = self.evaluate() if state.step == 0 else {}
            if metrics:
                self.tracker.log(0, metrics)
                self.progress.note(describe_start(metrics))
            while state.step < plan.steps and not interrupts.has_request():
                rows = [next(order) for _ in range(config.samples_per_step)]
                metrics = self.learn(rows)
                state.step, state.rows, state.skipped_steps = state.step + 1, order.position, self.guard.skipped
                self.guard.whole = True
                if self.evaluation_due():
                    metrics |= self.evaluate()
                times = self.timer.flush()
                metrics |= times | self.speed(train.take(rows), times["time/train"], metrics)
                metrics |= self.care.monitor.check(state.step, metrics)
                self.tracker.log(state.step, metrics)
                self.watch.see(metrics)
                self.progress.step(state.step, metrics)
                self.guard.follow("loss", metrics["loss"])
                self.care.act(state, lambda: self.save({}), interrupts)
                # After its metrics are written: a kill in between repeats the step, and loses no row.
                if self.checkpoints.due(state.step) or state.step == plan.steps:
                    self.save(metrics)
                elif self.checkpoints.pending is not None:
                    with self.timer.phase("save"):
                        self.checkpoints.settle()
            self.save({})
            self.checkpoints.settle(wait=True)
        return state

    def learn(self, rows: list[int]) -> dict[str, float]:
        """Make one optimizer step on these rows and return its metrics."""
        train = self.plan.material.train
        with self.timer.phase("train"):
            samples = train.take(rows)
            settings = self.model.prepare_settings(samples, train.task.loss, self.settings())
            metrics = self.guard.update(samples, train.task.loss, settings, samples_per_row=train.task.samples_per_row)
            return metrics | settings.statistics

    def settings(self) -> LossSettings:
        return LossSettings(section=self.plan.material.train.task.section_of(self.plan.config))

    def evaluation_due(self) -> bool:
        every, step = self.plan.config.evaluation.every, self.state.step
        return step == self.plan.steps or (every > 0 and step % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Return the loss of all held-out rows; nothing where none are held out."""
        held_out = self.plan.material.held_out
        if held_out is None:
            return {}
        with self.timer.phase("evaluate"):
            samples, task = held_out.take(list(range(held_out.rows()))), held_out.task
            settings = self.model.prepare_settings(samples, task.loss, self.settings())
            found = self.model.evaluate(samples, task.loss, settings, samples_per_row=task.samples_per_row)
            self.model.keep_facts(samples, task.loss, settings)
        return {f"evaluation/{name}": value for name, value in found.items()}

    def speed(self, samples: list[Sample], seconds: float, known: dict[str, float]) -> dict[str, float]:
        plan, tokens = self.plan, sum(sample.length() for sample in samples)
        computed = 1 - known.get("speed/shared_prefixes", 0.0)
        flops = computed * flops_per_token(plan.facts.parameters, adapters=plan.config.model.lora.rank > 0)
        return speed_metrics(tokens, seconds, plan.layout.policy_ranks, flops, plan.machine.gpu_name)

    def save(self, metrics: dict[str, float]) -> None:
        with self.timer.phase("save"):
            whole = self.plan.config.checkpoint.holds_model(self.state.step, self.plan.steps)
            write = partial(write_models, {"": self.model}, whole=whole)
            self.checkpoints.save(self.state.step, asdict(self.state), write, metrics)


def describe_start(metrics: dict[str, float]) -> str:
    return "start      " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
