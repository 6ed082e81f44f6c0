"""Compare a step that was computed again with the log, and look for what made it differ."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import Tree
from trueline.config.rl import RLConfig
from trueline.replay.steps import RecordedRun, play, score
from trueline.rl.metrics import Metrics, over_updates
from trueline.training.kept_samples import KeptStep
from trueline.training.samples import StoredSamples

TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (0.02, 0.05)}  # of a number; the larger of absolute and relative
OF_THIS_MACHINE = ("memory/", "speed/", "time/")
FIRST = ("loss", "grad_norm", "learning_rate")  # of the metrics, the others follow
TRIED, SEARCHED = 8, 24  # sequences by which weights are recognised; temperatures
COOLEST, HOTTEST = 0.25, 4.0
Tolerance = Callable[[str, float, float], bool]


@dataclass(frozen=True, slots=True)
class Gap:
    """The first token whose log-prob differs, and the largest difference of all."""

    largest: float = 0.0
    sample: int = -1  # -1: none differs
    token: int = -1
    logged: float = 0.0
    here: float = 0.0


@dataclass(slots=True)
class Replayed:
    step: int
    logged: Metrics
    here: Metrics
    tokens: Gap | None  # None: the trainer scored none in this run
    wrong: list[str]  # what does not fit together in the kept samples and the log
    different: list[str] = field(default_factory=list)  # metrics
    causes: list[str] = field(default_factory=list)

    def agrees(self) -> bool:
        return not (self.wrong or self.different or (self.tokens is not None and self.tokens.sample >= 0))

    def first(self) -> str:
        """Name the first difference."""
        if self.wrong:
            return f"step {self.step}: {self.wrong[0]}"
        numbers = [f"{name} {self.logged[name]:.6g} in the log, {self.here[name]:.6g} here" for name in self.different]
        gap = self.tokens
        if gap is not None and gap.sample >= 0:
            place = f"token log-probs differ first at sample {gap.sample}, token {gap.token}"
            numbers[1:] = [f"{place} ({gap.logged:.6g} in the run, {gap.here:.6g} here)"]
        return f"step {self.step}: {', '.join(numbers[:2])}"


def tolerance_of(config: RLConfig) -> Tolerance:
    absolute, relative = TOLERANCES[config.model.dtype]

    def agrees(name: str, logged: float, here: float) -> bool:
        if not (math.isfinite(logged) and math.isfinite(here)):
            return str(logged) == str(here)
        least = 0.0 if name.endswith("learning_rate") else absolute
        return abs(logged - here) <= max(least, relative * abs(logged))

    return agrees


def compare(run: RecordedRun, step: int) -> Replayed:
    """Compute a step again from the nearest weights, and compare it with the log."""
    kept = run.open(step)
    config, logged = run.config(kept), run.log.get(step, {})
    heat, agrees = config.rollout.temperature, tolerance_of(config)
    with run.weights(step - 1, run.start(step), config) as models:
        scored = "old_logprobs" not in kept.samples.fields.same
        tokens = token_gap(kept.samples, score(models, kept.samples, heat), agrees) if scored else None
        made = play(models, kept, config, run.keys)
    here = over_updates([metrics for loss, metrics in made if loss == "policy"])
    critic = over_updates([metrics for loss, metrics in made if loss != "policy"])
    here |= {f"critic/{name.removeprefix('critic/')}": value for name, value in critic.items()}
    found = Replayed(step, logged, here, tokens, [*contradictions(kept, logged)])
    shared = [name for name in here if name in logged and not name.removeprefix("critic/").startswith(OF_THIS_MACHINE)]
    shared.sort(key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    found.different = [name for name in shared if not agrees(name, logged[name], here[name])]
    found.causes = [] if found.agrees() else likely(run, kept, found, agrees)
    return found


def token_gap(samples: StoredSamples, here: list[np.ndarray], agrees: Tolerance) -> Gap:
    largest, first = 0.0, None
    for at, values in enumerate(here):
        logged = samples.part("old_logprobs", at)
        gaps = np.abs(logged.astype(np.float64) - values)
        largest = max(largest, float(gaps.max(initial=0.0)))
        for token in np.flatnonzero(gaps) if first is None else ():
            if not agrees("", float(logged[token]), float(values[token])):
                first = (at, int(token), float(logged[token]), float(values[token]))
                break
    return Gap(largest, *first) if first else Gap(largest)


def contradictions(kept: KeptStep, logged: Metrics) -> Iterator[str]:
    """Yield where the kept samples, the configuration of the step and the log contradict each other."""
    config, rows = kept.config, kept.samples.rows
    tokens, counted = sum(row.length for row in rows), logged.get("speed/tokens")
    if not logged:
        yield "metrics.jsonl has no row of it"
    elif counted is not None and counted != tokens:
        yield f"the log counts {counted:.0f} tokens, the kept samples have {tokens}"
    whole = config["minibatches"] * config["epochs"]
    for loss in dict.fromkeys(update.loss for update in kept.updates):
        updates = [update for update in kept.updates if update.loss == loss]
        seen = Counter(number for update in updates for number in update.numbers)
        learnt = [number for number, row in zip(kept.samples.numbers, rows, strict=True) if not row.filtered]
        wanted = config["epochs"] if len(updates) == whole else 1
        if out := [number for number in learnt if seen[number] < wanted]:
            yield f"sample {out[0]} is left out of the {loss} update ({len(out)} of {len(rows)} samples are)"
    for number, update in enumerate(kept.updates, 1):
        heat, usual = update.settings["temperature"], config["rollout"]["temperature"]
        if heat != usual:
            yield f"update {number} has temperature {heat:g}, and rollout.temperature is {usual:g}"
        aggregation, part = config["algorithm"]["loss_aggregation"], kept.of_update(update)
        set_weights(part.rows, aggregation, config["rollout"]["max_new_tokens"])
        pairs = zip(part.rows, update.weights, update.numbers, strict=True)
        if other := [one for row, weight, one in pairs if not math.isclose(row.weight, weight, rel_tol=1e-9)]:
            yield f"update {number}: the weight of sample {other[0]} is not that of loss_aggregation={aggregation}"


def likely(run: RecordedRun, kept: KeptStep, found: Replayed, agrees: Tolerance) -> list[str]:
    """Return what explains a difference: given keys, what is contradictory, another temperature, other weights."""
    causes = [*changed_keys(kept.config, run.keys), *found.wrong]
    if causes or found.tokens is None or found.tokens.sample < 0:
        return causes
    return [*fitting_temperature(run, kept, agrees)] or [*fitting_weights(run, kept, agrees)]


def changed_keys(before: Tree, keys: Tree, path: str = "") -> Iterator[str]:
    """Yield given keys with other values than the run's, but for those of the layout."""
    for name, value in keys.items():
        if isinstance(value, dict):
            yield from changed_keys(before.get(name) or {}, value, f"{path}{name}.")
        elif before.get(name) != value and not (path + name).endswith((".ranks", ".engine", "runtime", "_parallel")):
            yield f"{path}{name} is {before.get(name)} in the run and {value} here"


def fitting_temperature(run: RecordedRun, kept: KeptStep, agrees: Tolerance) -> Iterator[str]:
    """Yield the temperature that explains the log-probs, if one does."""
    part = few(kept)
    with run.weights(kept.step - 1, run.start(kept.step), run.config(kept)) as models:

        def distance(heat: float) -> float:
            return token_gap(part, score(models, part, heat), agrees).largest

        tried = np.geomspace(COOLEST, HOTTEST, SEARCHED).tolist()
        best = min(range(len(tried)), key=lambda at: distance(tried[at]))
        heat = narrow(distance, tried[max(best - 1, 0)], tried[min(best + 1, SEARCHED - 1)])
        if token_gap(part, score(models, part, heat), agrees).sample < 0:
            yield f"the log-probs of the run are those of temperature {heat:.3g}"


def narrow(distance: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one valley is smallest."""
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-7:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if distance(left) < distance(right) else (left, high)
    return (low + high) / 2


def fitting_weights(run: RecordedRun, kept: KeptStep, agrees: Tolerance) -> Iterator[str]:
    """Yield the weights that explain the log-probs: of another step, or not those that a checkpoint should have."""
    part, before = few(kept), kept.step - 1
    start, config = run.start(kept.step), run.config(kept)
    for other in run.starts(kept.step)[1:]:
        if fits(run, part, config, (before, other), agrees):
            yield f"the log-probs fit weights computed from step {other}: those saved as step {start} are others"
            return
    for step in sorted({*range(start, before), *run.checkpoints, 0}, reverse=True):
        begin = max((one for one in (0, *run.checkpoints) if one <= step), default=0)
        if step != before and fits(run, part, config, (step, begin), agrees):
            yield f"the log-probs of the run are those of the weights after step {step}, not {before}"
            return


def fits(run: RecordedRun, part: StoredSamples, config: RLConfig, weights: tuple[int, int], agrees: Tolerance) -> bool:
    with run.weights(*weights, config) as models:
        return token_gap(part, score(models, part, config.rollout.temperature), agrees).sample < 0


def few(kept: KeptStep) -> StoredSamples:
    return kept.samples.subset(range(min(TRIED, len(kept.samples))))
