"""Check what must hold after every update: numbers are finite, and weights move."""

import math
from collections.abc import Callable
from statistics import fmean, pvariance

import numpy as np

from trueline.algorithms.entries import is_own
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import TrainingConfig
from trueline.monitoring.findings import FINE, WATCH, Finding
from trueline.monitoring.limits import FIRST_STEPS, STALLED_CHANGE, STALLED_STEPS
from trueline.training.group import ModelGroup
from trueline.training.kept_samples import Update
from trueline.training.report import LossSettings, Metrics
from trueline.training.samples import Samples, StoredSamples
from trueline.training.worker import Worker

SAMPLED = 256  # weights of each tensor


class TrainingFailure(RuntimeError):
    """Training cannot continue; the message has the cause and the remedy."""

    def __init__(self, message: str, code: str = "failed", key: str = "") -> None:
        super().__init__(message)
        self.code, self.key = code, key  # of the finding that reports it


class UpdateMonitor:
    """Watch the updates of one model from the start or resumption of a run."""

    def __init__(
        self, model: ModelGroup, config: TrainingConfig, report: Callable[[Finding], None], section: str = "training"
    ) -> None:
        self.model, self.config, self.report, self.section = model, config, report, section
        self.own = ""  # where a user's own loss is computed
        self.skipped = 0
        self.in_a_row = 0
        self.made = 0
        # A critic's new head is zero, so the first gradients behind it are tiny, and tinier while the rate warms up.
        self.patience = FIRST_STEPS + (config.warmup_steps + FIRST_STEPS if section == "critic" else 0)
        self.at_start: dict[str, int] = {}
        self.whole = True  # the weights are those of a whole step of the run, not of some of its minibatches
        self.suited = 0.0  # learning rate that suits the model's size; 0 asks for no `follow`
        self.sampled = np.zeros(0)
        self.history: list[float] = []
        self.updates: list[Update] = []  # of the step under way, by reference to its samples

    def update(self, samples: Samples, loss: str, settings: LossSettings, *, samples_per_row: int = 1) -> Metrics:
        """Make one optimizer step and return its metrics."""
        section = settings.section
        is_users = isinstance(section, AlgorithmConfig) and is_own(section.loss)
        self.own = f"; check logarithms and divisions in algorithm.loss={section.loss}" if is_users else ""
        whole, self.whole = self.whole, False
        halved = self.model.halved
        metrics = self.model.update(samples, loss, settings, samples_per_row=samples_per_row)
        if self.model.halved > halved:
            key, tokens = f"{self.section}.micro_batch_tokens", self.model.budget.tokens
            what = f"memory ran out, so passes now have up to {tokens} tokens"
            self.report(Finding(WATCH, "smaller_passes", what, f"set {key}={tokens}", key))
        self.whole = whole and bool(metrics["skipped"])  # a skipped step changed nothing
        if isinstance(samples, StoredSamples):
            self.updates.append(Update.of(loss, samples, settings, metrics))
        return self.check(metrics)

    def take_updates(self) -> list[Update]:
        """Return the updates of a step, and begin another one."""
        taken, self.updates = self.updates, []
        return taken

    def watch(self) -> None:
        """Remember the weights that training starts from."""
        self.at_start = self._fingerprints()
        if self.suited:
            self.sampled = self.model.call(Worker.weight_sample, SAMPLED)[0]

    def _fingerprints(self) -> dict[str, int]:
        first, *others = self.model.call(Worker.fingerprints)
        return {name: sum((other[name] for other in others), part) for name, part in first.items()}

    def follow(self, name: str, value: float) -> None:
        """Follow a number that training should move, and report if neither it nor the weights move."""
        if not self.made or not math.isfinite(value):
            return  # nothing is trained yet, or the step was skipped
        self.history.append(value)
        windows, rest = divmod(len(self.history), STALLED_STEPS)
        if rest or windows & (windows - 1) or has_moved(self.history):
            return
        change = relative_change(self.sampled, self.model.call(Worker.weight_sample, SAMPLED)[0])
        if change < STALLED_CHANGE:
            low, key = self.config.peak_rate() < self.suited, f"{self.section}.learning_rate"
            advice = "raise it" if low else "it is not too small, so check data and rewards, or train more steps"
            what = (
                f"in {len(self.history)} steps {name} has not moved beyond its noise "
                f"({fmean(self.history[-STALLED_STEPS // 2 :]):.4g}), the weights only by {change:.1e} of their norm"
            )
            why = f"{key}={self.config.peak_rate():g}, and about {self.suited:.0e} suits a model of this size: {advice}"
            self.report(Finding(WATCH, "stalled", what, why, key))

    def check(self, metrics: dict[str, float]) -> Metrics:
        """Check a step's metrics; return them with the count of skipped steps in place of the flag."""
        bad = bool(metrics.pop("skipped"))
        self.skipped += bad
        self.in_a_row = self.in_a_row + 1 if bad else 0
        moved = not bad and metrics["grad_norm"] > 0  # a gradient of exactly zero rightly moves nothing
        self.made += moved
        if bad:
            self._report_skipped(metrics)
        elif moved and self.made <= self.patience and self.at_start:
            self._compare()
        return metrics | {"skipped_steps": float(self.skipped)}

    def _report_skipped(self, metrics: dict[str, float]) -> None:
        limit, key = self.config.max_bad_steps, f"{self.section}.learning_rate"
        found = f"loss {metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g}"
        if self.in_a_row > limit:
            raise TrainingFailure(
                f"{self.in_a_row} steps in a row were not finite ({found}); {self.section}.max_bad_steps={limit}: "
                f"lower {key}, check the last rows of the data, or try model.dtype=float32{self.own}",
                "not_finite",
                key,
            )
        what = f"{found}: not finite, so this step was skipped ({self.in_a_row} in a row){self.own}"
        self.report(Finding(WATCH, "not_finite", what, key=key))

    def _compare(self) -> None:
        now = self._fingerprints()
        still = [name for name, before in self.at_start.items() if now[name] == before]
        key = f"{self.section}.learning_rate"
        count = f"{len(now) - len(still)} of {len(now)}" if still else f"All {len(now)}"
        what = f"{count} trainable tensors{' of the critic' * (self.section == 'critic')} changed in step {self.made}"
        self.report(Finding(FINE, "tensors_changed", what))
        if not still:
            self.made = self.patience
        elif self.made == self.patience:
            raise TrainingFailure(
                f"{len(still)} of {len(now)} trainable tensors did not change in {self.patience} steps, for example "
                f"{still[0]}: {key}={self.config.learning_rate} may be too small for their precision, or the loss does "
                "not reach them",
                "unchanged_tensors",
                key,
            )


def has_moved(history: list[float]) -> bool:
    """Tell whether the means of the first and the last steps differ by more than twice their standard error."""
    first, last = history[: STALLED_STEPS // 2], history[-STALLED_STEPS // 2 :]
    noise = 2 * ((pvariance(first) + pvariance(last)) / len(last)) ** 0.5
    return abs(fmean(last) - fmean(first)) > noise


def relative_change(before: np.ndarray, now: np.ndarray) -> float:
    return float(np.linalg.norm(now - before) / np.linalg.norm(before))
