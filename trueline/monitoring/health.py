"""The health of a run: rules over the metrics of its steps, each OK, WATCH or BAD."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

OK, WATCH, BAD = 0, 1, 2
LEVELS = ("OK", "WATCH", "BAD")
WINDOW = 5  # steps at the start and at the end that are compared
REMEMBERED = 200  # steps, for the best that a run had
SPIKE = 10.0  # times the median
SURE = 5.0  # standard deviations
Row = dict[str, float]
Verdict = tuple[int, str]  # level, and why
FINE: Verdict = (OK, "")


@dataclass(slots=True)
class History:
    """What a run has reported so far, metric by metric."""

    series: dict[str, list[float]] = field(default_factory=dict)
    last: Row = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.last = row
        for key, _ in RULES.values():
            if key in row:
                self.series.setdefault(key, []).append(row[key])

    def values(self, key: str) -> list[float]:
        return self.series.get(key, [])

    def start(self, key: str) -> float:
        return fmean(self.values(key)[:WINDOW])

    def recent(self, key: str) -> float:
        return fmean(self.values(key)[-WINDOW:])

    def noise(self, key: str) -> float:
        """Return how far the mean of a few steps may be off by chance, by what changes from step to step."""
        changes = [later - before for before, later in pairwise(self.values(key)[-4 * WINDOW :])]
        return 3 * (fmean(change**2 for change in changes) / 2 / WINDOW) ** 0.5

    def gains(self) -> bool:
        """Tell whether the reward is above that of the first steps; of a run without rewards nothing else is known."""
        key = "reward/mean"
        return not self.values(key) or self.recent(key) > self.start(key) + self.noise(key)


def moved(history: History, key: str) -> str:
    return f"{key} went from {history.start(key):.3g} to {history.recent(key):.3g}"


def reward(history: History) -> Verdict:
    key = "reward/mean"
    values, start, recent = history.values(key), history.start(key), history.recent(key)
    fall = max(history.noise(key), 0.3 * abs(start), 0.01)
    if recent < start - fall:
        return BAD, f"{moved(history, key)}: lower training.learning_rate, and look at what the reward says"
    past = values[-REMEMBERED:]
    best = max(fmean(past[at : at + WINDOW]) for at in range(len(past) - WINDOW + 1))
    if recent < best - max(0.5 * (best - start), history.noise(key), 0.05):
        return WATCH, f"{key} had {best:.3g} and has {recent:.3g}: lower training.learning_rate"
    return FINE


def entropy(history: History) -> Verdict:
    key = "policy/entropy"
    start, recent = history.start(key), history.recent(key)
    remedy = "lower training.learning_rate, or set algorithm.entropy_coefficient"
    if recent > 1.5 * start + 0.5:
        return BAD, f"{moved(history, key)}, towards chance: lower training.learning_rate"
    if recent < 0.1 * start:
        return (WATCH if history.gains() else BAD), f"{moved(history, key)}, nothing is tried any more: {remedy}"
    return FINE


def gap(history: History) -> Verdict:
    key = "mismatch/logprob_gap_mean"
    if history.last.get("rollout/staleness_max", 0.0) > 0:
        return FINE  # what is stale differs by right
    floor, last = history.values(key)[0], min(history.values(key)[-2:])
    why = f"engine and trainer differ by {last:.2g} nats a token, {floor:.2g} at the start: see mismatch/ and sync/"
    level = gap_level(last, floor)
    return (level, why) if level else FINE


def gap_level(found: float, floor: float) -> int:
    """Judge a mean gap of log-probs by that on weights which are known to be the same."""
    return BAD if found > 5 * floor + 0.02 else WATCH if found > 2 * floor + 0.01 else OK


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
    values = history.values("rollout/staleness_max")
    if len(values) >= 3 * WINDOW and values[-1] - values[-1 - WINDOW] >= WINDOW:
        return BAD, f"answers lag {values[-1]:.0f} versions behind, one more in every step: engines get no new weights"
    return FINE


def effective_samples(history: History) -> Verdict:
    recent = history.recent("mismatch/effective_share")
    why = f"the tokens weigh as much as {recent:.0%} of them: lower rollout.max_staleness"
    return (BAD, why) if recent < 0.1 else (WATCH, why) if recent < 0.5 else FINE


def equal_rewards(history: History) -> Verdict:
    shares = history.values("reward/uniform_groups_share")[-2 * WINDOW :]
    rewards = history.values("reward/mean")[-2 * WINDOW :]
    if len(rewards) == 2 * WINDOW and len(set(rewards)) == 1 and min(shares) == 1:
        return (
            BAD,
            f"all rewards of {len(rewards)} steps are {history.recent('reward/mean'):.3g}: `trueline reward try`",
        )
    share = history.recent("reward/uniform_groups_share")
    if share > 0.9:
        return WATCH, f"in {share:.0%} of the groups all rewards are equal: easier or harder prompts"
    return FINE


def truncation(history: History) -> Verdict:
    key = "response_length/truncated_share"
    values, start, recent = history.values(key), history.start(key), history.recent(key)
    always = len(values) >= 2 * WINDOW and min(values[-2 * WINDOW :]) > 0.95
    if always or (recent > 0.8 and recent > start + 0.5):
        why = f"{recent:.0%} of the answers are cut off: raise rollout.max_new_tokens, or see whether they can end"
        return (WATCH if history.gains() else BAD), why
    if recent > start + 0.3:
        return WATCH, f"{moved(history, key)}: answers stop ending"
    return FINE


def repetition(history: History) -> Verdict:
    key = "response_length/repeated_share"
    start, recent = history.start(key), history.recent(key)
    if recent < start + 0.2:
        return FINE
    bad = recent > 0.6 and not history.gains()
    return (BAD if bad else WATCH), f"{moved(history, key)}, answers go round in circles: lower training.learning_rate"


def held_out(history: History) -> Verdict:
    values = history.values("evaluation/reward")
    if len(values) < 2 or values[-1] >= max(values) - 0.05:
        return FINE
    why = f"held-out reward had {max(values):.3g} and has {values[-1]:.3g}"
    gamed = history.gains() and values[-1] < values[0] - 0.05
    return (BAD, f"{why} while the reward in training rises: it is gamed") if gamed else (WATCH, why)


def gradient(history: History) -> Verdict:
    values = history.values("grad_norm")
    if len(values) < 4 * WINDOW:
        return FINE  # gradients grow while the rate warms up
    usual = median(values[: -WINDOW or None])
    spikes = [value for value in values[-WINDOW:] if value > SPIKE * max(usual, 1e-6)]
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
    start, recent = history.start("loss"), history.recent("loss")
    if recent > start + max(history.noise("loss"), 0.3 * abs(start)):
        return BAD, f"{moved(history, 'loss')}: lower training.learning_rate"
    return FINE


RULES: dict[str, tuple[str, Callable[[History], Verdict]]] = {  # name -> the metric that it needs, and the rule
    "reward": ("reward/mean", reward),
    "entropy": ("policy/entropy", entropy),
    "gap": ("mismatch/logprob_gap_mean", gap),
    "sampler": ("mismatch/sampler_z", sampler),
    "staleness": ("rollout/staleness_max", staleness),
    "effective_samples": ("mismatch/effective_share", effective_samples),
    "equal_rewards": ("reward/uniform_groups_share", equal_rewards),
    "truncation": ("response_length/truncated_share", truncation),
    "repetition": ("response_length/repeated_share", repetition),
    "held_out": ("evaluation/reward", held_out),
    "gradient": ("grad_norm", gradient),
    "clipping": ("policy/clip_fraction", clipping),
    "length": ("response_length/mean", length),
    "loss": ("loss", loss),
}


class Health:
    """Judge each step by the steps before it; say what changes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.history = note, History()
        self.known: dict[str, int] = {}  # levels of the last step, by rule

    def judge(self, step: int, metrics: Row) -> Row:
        """Return the verdicts on a step as metrics: the level of each rule that is not OK, and the worst of all."""
        self.history.add(metrics)
        found = {name: self._verdict(key, rule) for name, (key, rule) in RULES.items()}
        for name, (level, why) in found.items():
            if level > self.known.get(name, OK):
                self.note(f"health     {LEVELS[level]} in step {step}, {name}: {why}")
        self.known = {name: level for name, (level, _) in found.items() if level}
        return {"health/level": float(max(self.known.values(), default=OK))} | {
            f"health/{name}": float(level) for name, level in self.known.items()
        }

    def _verdict(self, key: str, rule: Callable[[History], Verdict]) -> Verdict:
        few = 1 if key.startswith("evaluation/") else WINDOW
        if key not in self.history.last or len(self.history.values(key)) <= few:
            return FINE
        return rule(self.history)

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
