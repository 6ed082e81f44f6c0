"""Check what must hold after every step: numbers are finite, and weights move."""

import math
from collections.abc import Callable
from statistics import fmean, pvariance

import numpy as np

from trueline.algorithms.entries import is_own
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import TrainingConfig
from trueline.data.types import Sample
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings, Metrics
from trueline.training.worker import Worker

WINDOW = 20  # steps after which a run is asked whether it gets anywhere; again after twice as many
SAMPLED = 256  # weights of each tensor
STILL = 0.01  # of the weights' norm: a change below is small
FIRST_STEPS = 2  # some tensors get their first gradient only in the second step, such as a LoRA's first matrix


class TrainingFailure(RuntimeError):
    """Training cannot go on; the message says why and what to change."""


class Guard:
    """Watch the updates of one model from wherever a run starts or resumes."""

    def __init__(
        self, model: ModelGroup, config: TrainingConfig, note: Callable[[str], None], section: str = "training"
    ) -> None:
        self.model, self.config, self.note, self.section = model, config, note, section
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

    def update(self, samples: list[Sample], loss: str, settings: LossSettings, *, together: int = 1) -> Metrics:
        """Make one optimizer step and return its metrics."""
        self.own = own_loss(settings)
        whole, self.whole = self.whole, False
        halved = self.model.halved
        metrics = self.model.update(samples, loss, settings, together=together)
        if self.model.halved > halved:
            self.note(
                f"warning: memory ran out, so passes have up to {self.model.budget.tokens} tokens from now on: set "
                f"{self.section}.micro_batch_tokens to that"
            )
        self.whole = whole and bool(metrics["skipped"])  # a step that was skipped changed nothing
        return self.check(metrics)

    def watch(self) -> None:
        """Remember the weights that training starts from."""
        self.at_start = self.model.call(Worker.fingerprints)[0]
        if self.suited:
            self.sampled = self.model.call(Worker.weight_sample, SAMPLED)[0]

    def follow(self, name: str, value: float) -> None:
        """Follow a number that training should move, and warn where it does not move and the weights hardly do."""
        if not self.made or not math.isfinite(value):
            return  # nothing is trained yet, or the step was skipped
        self.history.append(value)
        windows, rest = divmod(len(self.history), WINDOW)
        if rest or windows & (windows - 1) or moved(self.history):
            return
        change = relative_change(self.sampled, self.model.call(Worker.weight_sample, SAMPLED)[0])
        if change < STILL:
            low = self.config.peak_rate() < self.suited
            advice = "raise it" if low else "it is not too small, so look at data and rewards, or give it more steps"
            self.note(
                f"warning: in {len(self.history)} steps {name} has not moved beyond its noise "
                f"({fmean(self.history[-WINDOW // 2 :]):.4g}) and the weights only by {change:.1e} of their norm; "
                f"{self.section}.learning_rate={self.config.peak_rate():g}, about {self.suited:.0e} suits a model of "
                f"this size: {advice}"
            )

    def check(self, metrics: dict[str, float]) -> Metrics:
        """Check a step's metrics; return them with the count of skipped steps in place of the flag."""
        bad = bool(metrics.pop("skipped"))
        self.skipped += bad
        self.in_a_row = self.in_a_row + 1 if bad else 0
        moved = not bad and metrics["grad_norm"] > 0  # a gradient of exactly zero rightly moves nothing
        self.made += moved
        if bad:
            self._warn(metrics)
        elif moved and self.made <= self.patience and self.at_start:
            self._compare()
        return metrics | {"skipped_steps": float(self.skipped)}

    def _warn(self, metrics: dict[str, float]) -> None:
        limit = self.config.max_bad_steps
        found = f"loss {metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g}"
        if self.in_a_row > limit:
            raise TrainingFailure(
                f"{self.in_a_row} steps in a row were not finite ({found}); {self.section}.max_bad_steps={limit}: "
                f"lower {self.section}.learning_rate, look at the last rows of the data, or try "
                f"model.dtype=float32{self.own}"
            )
        self.note(f"warning: {found}: not finite, so this step was skipped ({self.in_a_row} in a row){self.own}")

    def _compare(self) -> None:
        now = self.model.call(Worker.fingerprints)[0]
        still = [name for name, before in self.at_start.items() if now[name] == before]
        self.note(
            f"changed    {len(now) - len(still)} of {len(now)} trained tensors ({self.section}) after step {self.made}"
        )
        if not still:
            self.made = self.patience
        elif self.made == self.patience:
            raise TrainingFailure(
                f"{len(still)} of {len(now)} trained tensors did not change in {self.patience} steps, {still[0]} for "
                f"one: {self.section}.learning_rate={self.config.learning_rate} may be too small for their precision, "
                "or the loss does not reach them"
            )


def own_loss(settings: LossSettings) -> str:
    """Return where to look, besides, when the loss of a step is not finite and the user's own."""
    section = settings.section
    own = isinstance(section, AlgorithmConfig) and is_own(section.loss)
    return f"; see to logarithms and divisions in algorithm.loss={section.loss}" if own else ""


def moved(history: list[float]) -> bool:
    """Tell whether the means of the first and the last steps differ by more than twice their standard error."""
    first, last = history[: WINDOW // 2], history[-WINDOW // 2 :]
    noise = 2 * ((pvariance(first) + pvariance(last)) / len(last)) ** 0.5
    return abs(fmean(last) - fmean(first)) > noise


def relative_change(before: np.ndarray, now: np.ndarray) -> float:
    return float(np.linalg.norm(now - before) / np.linalg.norm(before))
