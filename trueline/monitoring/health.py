"""The health of a run: rules over the metrics of its steps, each OK, WATCH or BAD."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, isclose, isfinite, log
from statistics import fmean
from types import MappingProxyType

from trueline.monitoring.series import WINDOW, Series

OK, WATCH, BAD = 0, 1, 2
LEVELS = ("OK", "WATCH", "BAD")
# Standard errors that a change is beyond chance, for whoever looks after each of 300 steps: docs/metrics.md has the
# shares of sound runs that get there.
SURE, LIKELY, GAINED = 5.0, 3.5, 3.0
HELD_OUT_SURE = 4.5  # as above, for the few looks at evaluations
STREAK = 2 * WINDOW  # steps in a row
RARE = 1e-5  # chance of a streak
SPIKE = 10.0  # times what gradients seldom exceed
LEAST_GAP = 1e-8  # nats; smaller ones are rounding
GAP, UNIFORM = "mismatch/logprob_gap_mean", "reward/uniform_groups_share"
CUT_OFF, CUT_BY = 0.5, "cut_by/"  # share of answers that is warned of; before the key of a limit, in metrics
NOTHING: Mapping[str, object] = MappingProxyType({})
Row = dict[str, float]
Verdict = tuple[int, str]  # level, and why
FINE: Verdict = (OK, "")


@dataclass(slots=True)
class History:
    """What a run has reported so far, metric by metric."""

    max_staleness: int = 0  # that the run allows
    series: dict[str, Series] = field(default_factory=dict)
    last: Row = field(default_factory=dict)
    equal: int = 0  # steps in which all rewards are equal
    still: int = 0  # such steps in a row, up to the last, with one and the same reward

    def add(self, row: Row) -> None:
        self._count_equal(row)
        self.last = row
        for key in WATCHED:
            if key in row and isfinite(row[key]):
                value = log(max(row[key], LEAST_GAP)) if key == GAP else row[key]
                if key not in self.series:
                    self.series[key] = Series()
                self.series[key].add(value)

    def _count_equal(self, row: Row) -> None:
        if row.get("reward/std") != 0:
            self.still = 0
            return
        same = isclose(row["reward/mean"], self.last.get("reward/mean", row["reward/mean"]), abs_tol=1e-12)
        self.equal, self.still = self.equal + 1, self.still + 1 if same else 1

    def values(self, key: str) -> list[float]:
        return self.series[key].values() if key in self.series else []

    def start(self, key: str) -> float:
        return self.series[key].start() if key in self.series else 0.0

    def recent(self, key: str) -> float:
        return self.series[key].recent if key in self.series else 0.0

    def gains(self) -> bool:
        """Tell whether the reward was ever above that of the first steps; who cannot know yet is given credit."""
        series = self.series.get("reward/mean")
        if series is None or series.count < 2 * WINDOW:
            return True
        return series.sigmas(series.best - series.start()) > GAINED


def moved(history: History, key: str) -> str:
    return f"{key} went from {history.start(key):.3g} to {history.recent(key):.3g}"


def reward(history: History) -> Verdict:
    key = "reward/mean"
    series, spread = history.series[key], history.start("reward/std")
    start, recent = series.start(), series.recent
    fall, lost = series.sigmas(start - recent), series.sigmas(series.best - recent)
    if fall > SURE and start - recent > 0.2 * spread:
        return BAD, f"{moved(history, key)}: lower training.learning_rate, and look at what the reward says"
    if fall > LIKELY and start - recent > 0.1 * spread:
        return WATCH, f"{moved(history, key)}: lower training.learning_rate"
    if lost > SURE and recent < (start + series.best) / 2:
        return WATCH, f"{key} had {series.best:.3g} and has {recent:.3g}: lower training.learning_rate"
    return FINE


def entropy(history: History) -> Verdict:
    key = "policy/entropy"
    start, recent, values = history.start(key), history.recent(key), history.values(key)
    lower, risen = "lower training.learning_rate", history.gains()
    before = min(values[-WINDOW - 2 : -WINDOW])
    if before > 0.1 * start and max(values[-2:]) < 0.01 * before:
        return BAD, f"{key} fell from {before:.3g} to {values[-1]:.3g} in {WINDOW} steps: {lower}"
    if recent > 1.5 * start + 0.5:
        return (WATCH if risen else BAD), f"{moved(history, key)}, towards chance: {lower}"
    if recent < 0.1 * start:
        remedy = f"{lower}, or set algorithm.entropy_coefficient"
        return (WATCH if risen else BAD), f"{moved(history, key)}, nothing is tried any more: {remedy}"
    return FINE


def gap(history: History) -> Verdict:
    """Compare the gap with that of the first step, whose weights are proven, and of the first window."""
    if history.last.get("rollout/staleness_max", 0.0) > 0:
        return FINE  # what is stale differs by right
    series = history.series[GAP]
    recent, found = series.recent, FINE
    for start, steps in ((series.first[0], 1), (series.start(), WINDOW)):
        beyond = series.sigmas(recent - start, steps)
        level = min(gap_level(exp(recent), exp(start)), BAD if beyond > SURE else WATCH if beyond > LIKELY else OK)
        words = f"differ by {exp(recent):.2g} nats a token, {exp(start):.2g} at the start: see mismatch/ and sync/"
        found = max(found, (level, f"engine and trainer {words}" if level else ""))
    return found


def gap_level(found: float, floor: float) -> int:
    """Judge a mean gap of log-probs by that on weights which are known to be the same."""
    if found > 5 * floor + 0.02:
        return BAD
    return WATCH if found > 2 * floor + 0.01 or found > 10 * floor + 1e-4 else OK


def sampler(history: History) -> Verdict:
    """Judge the draws of the last step and of the run by their effect: rounding alone makes z grow with the tokens."""
    last = history.last
    step = last["mismatch/sampler_z"], last["mismatch/sampler_effect"]
    run = last["mismatch/sampler_z_run"], last["mismatch/sampler_effect_run"]
    z, effect = max(step, run, key=lambda test: draw_level(*test))
    why = (
        f"tokens are not drawn from the policy at rollout.temperature (effect {effect:+.2f}, z {z:+.1f}), whatever the "
        "log-probs say: see to the engine's version and options, speculation above all"
    )
    level = draw_level(z, effect)
    return (level, why) if level else FINE


def draw_level(z: float, effect: float) -> int:
    """Judge draws that are off by more than chance; z / effect is the root of their variance, below 10 too few."""
    if abs(z) < SURE or abs(z) < 10 * abs(effect):
        return OK
    return BAD if abs(effect) > 0.1 else WATCH if abs(effect) > 0.03 else OK


def staleness(history: History) -> Verdict:
    values, most = history.values("rollout/staleness_max"), history.max_staleness
    lag, always = max(values[-WINDOW:]), min(values[-WINDOW:]) > most
    why = f"answers lag {lag:.0f} versions behind, and rollout.max_staleness={most}: engines miss new weights"
    return (BAD, why) if always else (WATCH, why) if lag > most else FINE


def effective_samples(history: History) -> Verdict:
    recent = history.recent("mismatch/effective_share")
    why = f"the tokens weigh as much as {recent:.0%} of them: lower rollout.max_staleness"
    return (BAD, why) if recent < 0.1 else (WATCH, why) if recent < 0.5 else FINE


def equal_rewards(history: History) -> Verdict:
    """Judge rewards that say one thing; groups of one answer have no spread, and report no share of uniform groups."""
    still, before = history.still, history.series["reward/std"].count - history.still
    if still >= STREAK:
        chance = ((history.equal - still + 1) / (before + 2)) ** still  # by how often all were equal before
        found = history.last["reward/mean"]
        why = f"all rewards of {still} steps are {found:.3g}: "
        if not before or (chance < RARE and found < history.start("reward/mean")):
            return BAD, f"{why}`trueline reward try`"
        return WATCH, f"{why}harder prompts, or the run is done"
    share = history.recent(UNIFORM)
    if share > 0.9:
        return WATCH, f"in {share:.0%} of the groups all rewards are equal: easier or harder prompts"
    equal = history.values("reward/std")[-2 * STREAK :].count(0.0)
    if equal >= 0.2 * 2 * STREAK:
        return WATCH, f"in {equal} of {2 * STREAK} steps all rewards are equal: `trueline reward try`"
    return FINE


def limits_in(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the share of answers that each limit cut off, by its key."""
    prefix += CUT_BY
    return {name.removeprefix(prefix): share for name, share in metrics.items() if name.startswith(prefix)}


def cut_off_words(share: float, limits: Mapping[str, float], values: Mapping[str, object] = NOTHING) -> str:
    """Say how many answers are cut off and which limits to raise, the most frequent first, with their `values`."""
    frequent = sorted(limits, key=lambda key: limits[key], reverse=True) or ["rollout.max_new_tokens"]
    named = [f"{key}={values[key]}" if key in values else key for key in frequent]
    if len(named) > 1:
        named = [f"{name} ({limits[key]:.0%})" for name, key in zip(named, frequent, strict=True)]
    return f"{share:.0%} of the answers are cut off: raise {', '.join(named)}"


def truncation(history: History) -> Verdict:
    key = "response_length/truncated_share"
    series = history.series[key]
    start, recent = series.start(), series.recent
    limits = limits_in(history.last, "response_length/")
    never = series.lowest == 1 and series.count >= STREAK
    if never or (recent > 0.8 and recent > start + 0.5):
        why = f"{cut_off_words(recent, limits)}, or see whether they can end"
        return (WATCH if history.gains() else BAD), why
    if recent > start + 0.3:
        return WATCH, f"{moved(history, key)}: answers stop ending"
    if recent > 0.2:
        return WATCH, cut_off_words(recent, limits)
    return FINE


def repetition(history: History) -> Verdict:
    key = "response_length/repeated_share"
    start, recent = history.start(key), history.recent(key)
    if recent < start + 0.2:
        return FINE
    bad = recent > 0.6 and not history.gains()
    return (BAD if bad else WATCH), f"{moved(history, key)}, answers go round in circles: lower training.learning_rate"


def held_out(history: History) -> Verdict:
    """Compare the last two evaluations with the first two and with the best two, by the noise of one."""
    key = "evaluation/reward"
    values, series = history.values(key), history.series[key]
    if series.count < 4:
        return FINE
    first, last = fmean(series.first[:2]), fmean(values[-2:])
    best = max(fmean(pair) for pair in pairwise(values))
    error = held_out_error(history, series)
    if history.gains() and first - last > HELD_OUT_SURE * error:
        return (
            BAD,
            f"held-out reward had {first:.3g} and has {last:.3g} while the reward in training rises: it is gamed",
        )
    return (
        (WATCH, f"held-out reward had {best:.3g} and has {last:.3g}") if best - last > HELD_OUT_SURE * error else FINE
    )


def held_out_error(history: History, series: Series) -> float:
    """Return the standard error of an evaluation: as it was reported, or by what changes from one to the next."""
    interval = history.series.get("evaluation/reward_ci95")
    if interval is None:
        return series.noise() * (1 + WINDOW / series.count)
    return max(*interval.first[:2], *interval.values()[-2:]) / 1.96


def gradient(history: History) -> Verdict:
    values = history.values("grad_norm")
    if len(values) < 4 * WINDOW:
        return FINE  # gradients grow while the rate warms up
    usual = sorted(values[:-WINDOW])[-len(values) // 10]  # where rewards are sparse most steps have none
    spikes = [value for value in values[-WINDOW:] if value > SPIKE * usual > 0]
    why = f"gradients of {max(values[-WINDOW:]):.3g} beside {usual:.3g}: lower training.learning_rate"
    return (BAD, why) if len(spikes) >= 3 else (WATCH, why) if spikes else FINE


def clipping(history: History) -> Verdict:
    share = history.recent("policy/clip_fraction")
    why = f"{share:.0%} of the tokens are clipped: lower training.learning_rate, or fewer epochs or minibatches"
    return (BAD, why) if share > 0.6 else (WATCH, why) if share > 0.3 else FINE


def length(history: History) -> Verdict:
    key = "response_length/mean"
    if history.recent(key) > 2 * history.start(key) and not history.gains():
        return WATCH, f"{moved(history, key)}, the reward does not: algorithm.shaping.overlong_factor"
    return FINE


def loss(history: History) -> Verdict:
    """Judge a task's own loss, which has to fall; that of a policy has no such meaning."""
    if "reward/mean" in history.last:
        return FINE
    series = history.series["loss"]
    rise = series.recent - series.start()
    if series.sigmas(rise) > SURE and rise > 0.1 * abs(series.start()):
        bad = rise > 0.3 * abs(series.start())
        return (BAD if bad else WATCH), f"{moved(history, 'loss')}: lower training.learning_rate"
    return FINE


RULES: dict[str, tuple[str, Callable[[History], Verdict]]] = {  # name -> the metric that it needs, and the rule
    "reward": ("reward/mean", reward),
    "entropy": ("policy/entropy", entropy),
    "gap": (GAP, gap),
    "sampler": ("mismatch/sampler_z", sampler),
    "staleness": ("rollout/staleness_max", staleness),
    "effective_samples": ("mismatch/effective_share", effective_samples),
    "equal_rewards": ("reward/std", equal_rewards),
    "truncation": ("response_length/truncated_share", truncation),
    "repetition": ("response_length/repeated_share", repetition),
    "held_out": ("evaluation/reward", held_out),
    "gradient": ("grad_norm", gradient),
    "clipping": ("policy/clip_fraction", clipping),
    "length": ("response_length/mean", length),
    "loss": ("loss", loss),
}
WATCHED = {key for key, _ in RULES.values()} | {UNIFORM, "evaluation/reward_ci95"}  # metrics that rules read


class Health:
    """Judge each step by the steps before it; say what changes."""

    def __init__(self, note: Callable[[str], None], max_staleness: int = 0) -> None:
        self.note, self.history = note, History(max_staleness)
        self.known: dict[str, int] = {}  # levels of the last step, by rule

    def judge(self, step: int, metrics: Row) -> Row:
        """Return the verdicts on a step as metrics: the level of each rule that is not OK, and the worst of all."""
        self.history.add(metrics)
        found = {name: self._verdict(name, key, rule) for name, (key, rule) in RULES.items()}
        for name, (level, why) in found.items():
            if level > self.known.get(name, OK):
                self.note(f"health     {LEVELS[level]} in step {step}, {name}: {why}")
        self.known = {name: level for name, (level, _) in found.items() if level}
        return {"health/level": float(max(self.known.values(), default=OK))} | {
            f"health/{name}": float(level) for name, level in self.known.items()
        }

    def _verdict(self, name: str, key: str, rule: Callable[[History], Verdict]) -> Verdict:
        if key not in self.history.last:
            return self.known.get(name, OK), ""  # no evaluation in this step: the last one counts
        series = self.history.series.get(key)
        judged = series is not None and (series.count > WINDOW or key.startswith("evaluation/"))
        return rule(self.history) if judged else FINE

    def recall(self, rows: Iterable[Row]) -> None:
        """Take up what a run that goes on has reported before."""
        for row in rows:
            self.history.add(row)

    def bad(self) -> list[str]:
        return [name for name, level in self.known.items() if level == BAD]


def verdict_words(metrics: Row) -> str:
    """Return the verdict on a step in a word or two, with the rules behind it."""
    level = int(metrics.get("health/level", OK))
    rules = [name.removeprefix("health/") for name, value in metrics.items() if name.startswith("health/") and value]
    named = [rule for rule in rules if rule != "level" and metrics[f"health/{rule}"] == level]
    return f"{LEVELS[level]} ({', '.join(named)})" if level else ""
