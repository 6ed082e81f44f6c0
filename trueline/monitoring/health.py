"""The health of a run: rules over the metrics of its steps, each of which gives findings."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import copysign, exp, inf, isclose, isfinite, log, sqrt
from statistics import fmean, median

from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.monitoring import limits
from trueline.monitoring.findings import BAD, FINE, HEALTH_LEVELS, WATCH, Finding
from trueline.monitoring.limits import STREAK, WINDOW, Limits

LONGEST_WINDOW, REMEMBERED = 20, 100  # steps: at the end, in longer runs; of each series
MEDIAN_ERROR = 1.2533  # standard error of a median, in that of a mean
MEAN_CHANGE = 1.1284  # mean distance of two normal numbers, in their standard deviation
LEAST_GAP = 1e-8  # nats; smaller ones are rounding
GAP, UNIFORM = "mismatch/logprob_gap_mean", "reward/uniform_groups_share"
TRUNCATED, CUT_BY = "response_length/truncated_share", "cut_by/"  # the latter before the key of a limit, in metrics
RATE = "training.learning_rate"
Row = dict[str, float]


@dataclass(slots=True)
class Series:
    """One metric over the steps of a run: where it began, where it is now, and whether chance explains the change."""

    key: str = ""
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    count: int = 0
    changes: float = 0.0  # sum of what changed from step to step
    window: int = WINDOW
    recent: float = 0.0  # median of the last window
    lowest: float = inf
    best: float = -inf  # highest median of a window

    def add(self, value: float) -> None:
        if self.last:
            self.changes += abs(value - self.last[-1])
        if self.count < WINDOW:
            self.first.append(value)
        self.last.append(value)
        self.count += 1
        self.window = min(max(self.count // 4, WINDOW), LONGEST_WINDOW)
        self.recent = median([*self.last][-self.window :])
        self.lowest = min(self.lowest, value)
        if self.count >= 2 * WINDOW:
            self.best = max(self.best, self.recent)

    def start(self) -> float:
        return median(self.first) if self.first else 0.0

    def change(self) -> str:
        return f"{self.key} went from {self.start():.3g} to {self.recent:.3g}"

    def noise(self) -> float:
        """Return the standard deviation of a step, from the changes between steps: a slow trend is no noise."""
        return self.changes / max(self.count - 1, 1) / MEAN_CHANGE

    def sigmas(self, change: float, steps_before: int = WINDOW) -> float:
        """Return a change from the median of `steps_before` to that of the last window, in its standard errors."""
        if change == 0 or self.count < 2 * WINDOW:
            return 0.0
        steps, few = 1 / steps_before + 1 / self.window, 1 + WINDOW / self.count  # few steps: the noise is uncertain
        error = MEDIAN_ERROR * self.noise() * sqrt(steps) * few
        return change / error if error else copysign(inf, change)


@dataclass(slots=True)
class History:
    max_staleness: int = 0  # that the run allows
    series: dict[str, Series] = field(default_factory=lambda: {key: Series(key) for key in WATCHED})
    last: Row = field(default_factory=dict)
    equal: int = 0  # steps in which all rewards are equal
    still: int = 0  # such steps in a row, up to the last, with the same reward in all
    uniform: int = 0  # such steps in a row, whatever the reward

    def add(self, row: Row) -> None:
        if row.get("reward/std") == 0:
            same = isclose(row["reward/mean"], self.last.get("reward/mean", row["reward/mean"]), abs_tol=1e-12)
            self.equal, self.uniform, self.still = self.equal + 1, self.uniform + 1, self.still + 1 if same else 1
        else:
            self.uniform = self.still = 0
        self.last = row
        for key in WATCHED:
            if key in row and isfinite(row[key]):
                self.series[key].add(log(max(row[key], LEAST_GAP)) if key == GAP else row[key])

    def gains(self) -> bool:
        """Tell whether the reward was ever above its start; while it is too early to tell, assume so."""
        series = self.series["reward/mean"]
        return series.count < 2 * WINDOW or series.sigmas(series.best - series.start()) > limits.GAINED


# Rules of every step, each with the series of its own metric


def reward(history: History, series: Series) -> Finding:
    start, recent, spread = series.start(), series.recent, history.series["reward/std"].start()
    fall, lost = series.sigmas(start - recent), series.sigmas(series.best - recent)
    level, what, remedy = FINE, series.change(), "lower the learning rate"
    if fall > limits.SIGMAS.bad and start - recent > limits.REWARD_FALL.bad * spread:
        level, remedy = BAD, "lower the learning rate, and check the reward"
    elif fall > limits.SIGMAS.watch and start - recent > limits.REWARD_FALL.watch * spread:
        level = WATCH
    elif lost > limits.SIGMAS.bad and recent < (start + series.best) / 2:
        level, what = WATCH, f"{series.key} was {series.best:.3g} and is {recent:.3g}"
    return Finding(level, "reward", what, remedy, RATE)


def entropy(history: History, series: Series) -> Finding:
    start, recent, values = series.start(), series.recent, [*series.last]
    before = min(values[-WINDOW - 2 : -WINDOW])
    level, what, remedy = WATCH if history.gains() else BAD, series.change(), "lower the learning rate"
    factor, nats = limits.ENTROPY_RISE
    if before > limits.ENTROPY_FALL * start and max(values[-2:]) < limits.ENTROPY_COLLAPSE * before:
        level, what = BAD, f"{series.key} fell from {before:.3g} to {values[-1]:.3g} in {WINDOW} steps"
    elif recent > factor * start + nats:
        what += ", towards random tokens"
    elif recent < limits.ENTROPY_FALL * start:
        what, remedy = f"{what}, so nothing new is tried", f"{remedy}, or set algorithm.entropy_coefficient"
    else:
        level = FINE
    return Finding(level, "entropy", what, remedy, RATE)


def gap(history: History, series: Series) -> Finding:
    """Compare the gap with that of the first step, whose weights are verified, and of the first window."""
    recent, found = series.recent, Finding(FINE, "gap", "")
    if history.last.get("rollout/staleness_max", 0.0) > 0:
        return found  # stale completions differ by design
    for start, steps in ((series.first[0], 1), (series.start(), WINDOW)):
        beyond = limits.SIGMAS.above(series.sigmas(recent - start, steps))
        level = min(gap_level(exp(recent), exp(start)), beyond, key=HEALTH_LEVELS.index)
        what = f"log-probs of engine and trainer differ by {exp(recent):.2g} nats per token, "
        what += f"{exp(start):.2g} at the start"
        if HEALTH_LEVELS.index(level) >= HEALTH_LEVELS.index(found.level):
            found = Finding(level, "gap", what, "look at the mismatch/ and sync/ metrics")
    return found


def gap_level(found: float, floor: float) -> str:
    """Compare a mean gap of log-probs with that on weights which are known to be the same."""
    if found > limits.GAP_FACTOR.bad * floor + limits.GAP_EXTRA.bad:
        return BAD
    factor, nats = limits.GAP_TINY
    watched = found > limits.GAP_FACTOR.watch * floor + limits.GAP_EXTRA.watch or found > factor * floor + nats
    return WATCH if watched else FINE


def sampler(history: History, _: Series) -> Finding:
    """Test the draws of the last step and of the run by their effect: rounding alone makes z grow with the tokens."""
    last = history.last
    step = last["mismatch/sampler_z"], last["mismatch/sampler_effect"]
    run = last["mismatch/sampler_z_run"], last["mismatch/sampler_effect_run"]
    z, effect = max(step, run, key=lambda test: HEALTH_LEVELS.index(draw_level(*test)))
    what = f"tokens are not drawn from the policy at rollout.temperature (effect {effect:+.2f}, z {z:+.1f})"
    why = "whatever the log-probs say: check the engine's version and options, speculative decoding above all"
    return Finding(draw_level(z, effect), "sampler", what, why, "rollout.temperature")


def draw_level(z: float, effect: float) -> str:
    """Test draws that are off by more than chance; z / effect is the root of their variance."""
    if abs(z) < limits.DRAWS_SIGMAS or abs(z) < limits.DRAWS_ROOT * abs(effect):
        return FINE
    return limits.DRAWS.above(abs(effect))


def staleness(history: History, series: Series) -> Finding:
    values, most = [*series.last][-WINDOW:], history.max_staleness
    what = f"completions are {max(values):.0f} policy versions old, and rollout.max_staleness={most}"
    level = BAD if min(values) > most else WATCH if max(values) > most else FINE
    return Finding(level, "staleness", what, "engines miss new weights", "rollout.max_staleness")


def effective_samples(_: History, series: Series) -> Finding:
    what = f"after importance weighting, the tokens count as much as {series.recent:.0%} of them"
    level = limits.EFFECTIVE.below(series.recent)
    return Finding(level, "effective_samples", what, "lower it", "rollout.max_staleness")


def equal_rewards(history: History, series: Series) -> Finding:
    """Find rewards that never differ; groups of one completion report no share of uniform groups."""
    still, before = history.still, series.count - history.still
    level, why, key = WATCH, "check it with `trueline reward try`", "reward.function"
    share, equal = history.series[UNIFORM].recent, [*series.last][-limits.EQUAL_OF :].count(0.0)
    what = f"in {equal} of {limits.EQUAL_OF} steps all rewards are equal"
    if still >= STREAK:
        chance = ((history.equal - still + 1) / (before + 2)) ** still  # from how often all were equal before
        found = history.last["reward/mean"]
        what = f"all rewards of the last {still} steps are {found:.3g}"
        if not before or (chance < limits.RARE and found < history.series["reward/mean"].start()):
            level = BAD
        else:
            why, key = "use harder prompts, or end the run", "data.path"
    elif share > limits.UNIFORM:
        what, why, key = f"in {share:.0%} of the groups all rewards are equal", "easier or harder prompts", "data.path"
    elif equal < limits.EQUAL_STEPS:
        level = FINE
    return Finding(level, "equal_rewards", what, why, key)


def limits_in(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the share of completions that each limit truncated, by its key."""
    prefix += CUT_BY
    return {name.removeprefix(prefix): share for name, share in metrics.items() if name.startswith(prefix)}


def truncation_findings(level: str, share: float, found: Row, config: RunConfig | None = None) -> Finding:
    """Report truncated completions and the limits to raise, the most frequent first, with their values."""
    keys = sorted(found, key=lambda key: found[key], reverse=True) or ["rollout.max_new_tokens"]
    values = {key.path: key.default for key in config.leaves()} if config is not None else {}
    named = [f"{key}={values[key]}" if key in values else key for key in keys]
    if len(named) > 1:
        named = [f"{name} ({found[key]:.0%})" for name, key in zip(named, keys, strict=True)]
    what = f"{share:.0%} of the completions are truncated"
    return Finding(level, "truncation", what, f"raise {', '.join(named)}", keys[0])


def truncation(history: History, series: Series) -> Finding:
    start, recent = series.start(), series.recent
    found, rise = limits_in(history.last, "response_length/"), limits.TRUNCATED_RISE
    never_ends = series.lowest == 1 and series.count >= STREAK
    if never_ends or (recent > limits.TRUNCATED.bad and recent > start + rise.bad):
        return truncation_findings(WATCH if history.gains() else BAD, recent, found)
    if recent > start + rise.watch:
        return Finding(WATCH, "truncation", series.change(), "completions no longer end", "rollout.max_new_tokens")
    return truncation_findings(WATCH if recent > limits.TRUNCATED.watch else FINE, recent, found)


def repetition(history: History, series: Series) -> Finding:
    level = FINE if series.recent < series.start() + limits.REPEATED else WATCH
    if level == WATCH and series.recent > limits.MOSTLY_REPEATED and not history.gains():
        level = BAD
    why = "completions repeat themselves: lower the learning rate"
    return Finding(level, "repetition", series.change(), why, RATE)


def held_out(history: History, series: Series) -> Finding:
    """Compare the last two evaluations with the first two and with the best two, by the noise of one."""
    if series.count < 4:
        return Finding(FINE, "held_out", "")
    first, last = fmean(series.first[:2]), fmean([*series.last][-2:])
    best = max(fmean(pair) for pair in pairwise(series.last))
    limit = limits.HELD_OUT_SIGMAS * held_out_error(history, series)
    if history.gains() and first - last > limit:
        what = f"the held-out reward was {first:.3g} and is {last:.3g}"
        why = "the training reward rises meanwhile: the policy exploits the reward"
        return Finding(BAD, "held_out", what, why, "reward.function")
    level = WATCH if best - last > limit else FINE
    return Finding(level, "held_out", f"the held-out reward was {best:.3g} and is {last:.3g}")


def held_out_error(history: History, series: Series) -> float:
    """Return the standard error of an evaluation: as reported, or from the changes between evaluations."""
    interval = history.series["evaluation/reward_ci95"]
    if not interval.count:
        return series.noise() * (1 + WINDOW / series.count)
    return max(*interval.first[:2], *[*interval.last][-2:]) / 1.96


def gradient(_: History, series: Series) -> Finding:
    values = [*series.last]
    if len(values) < limits.GRADIENT_STEPS:
        return Finding(FINE, "gradient", "")  # gradients grow while the rate warms up
    usual = sorted(values[:-WINDOW])[-len(values) // 10]  # with sparse rewards most steps have no gradient
    spikes = [value for value in values[-WINDOW:] if value > limits.SPIKE * usual > 0]
    level = BAD if len(spikes) >= limits.SPIKES else WATCH if spikes else FINE
    what = f"gradient norm {max(values[-WINDOW:]):.3g}, seldom above {usual:.3g} before"
    return Finding(level, "gradient", what, "lower the learning rate", RATE)


def clipping(_: History, series: Series) -> Finding:
    what = f"{series.recent:.0%} of the tokens are clipped"
    why = "lower the learning rate, or use fewer epochs or minibatches"
    return Finding(limits.CLIPPED.above(series.recent), "clipping", what, why, RATE)


def length(history: History, series: Series) -> Finding:
    longer = series.recent > limits.LONGER * series.start() and not history.gains()
    what = f"{series.change()}, and the reward does not rise"
    return Finding(WATCH if longer else FINE, "length", what, key="algorithm.shaping.overlong_factor")


def length_bias(_: History, series: Series) -> Finding:
    error = MEDIAN_ERROR * series.noise() / sqrt(series.window)
    biased = -series.recent > max(limits.LENGTH_BIAS, limits.SIGMAS.watch * error)
    what = f"completions that are trained are {-series.recent:.0%} shorter than those that are drawn"
    return Finding(WATCH if biased else FINE, "length_bias", what, "set rollout.too_old=wait", "rollout.too_old")


def resting(_: History, series: Series) -> Finding:
    what = f"nearly all prompts rest as too easy or too hard: {series.recent:.0f} in a step come back early"
    level = WATCH if series.recent > 0 else FINE
    return Finding(level, "resting", what, "use other prompts, or end the run", "data.difficulty.longest_rest")


def untaught(_: History, series: Series) -> Finding:
    what = f"teachers read {series.recent:.0%} of the completions: others have no context, or one that is too long"
    remedy, key = "check the column, or raise max_prompt_tokens", "algorithm.distillation.max_prompt_tokens"
    return Finding(limits.TAUGHT.below(series.recent), "untaught", what, remedy, key)


def loss(history: History, series: Series) -> Finding:
    """Check a task's own loss, which has to fall; that of a policy has no such meaning."""
    start, rise, level = series.start(), series.recent - series.start(), FINE
    if "reward/mean" not in history.last and series.sigmas(rise) > limits.SIGMAS.bad:
        level = Limits(*(share * abs(start) for share in limits.LOSS_RISE)).above(rise)
    return Finding(level, "loss", series.change(), "lower the learning rate", RATE)


Rule = Callable[[History, Series], Finding]
RULES: dict[str, tuple[str, Rule]] = {  # name, which is the code -> the metric that it needs, and the rule
    "reward": ("reward/mean", reward),
    "entropy": ("policy/entropy", entropy),
    "gap": (GAP, gap),
    "sampler": ("mismatch/sampler_z", sampler),
    "staleness": ("rollout/staleness_max", staleness),
    "effective_samples": ("mismatch/effective_share", effective_samples),
    "equal_rewards": ("reward/std", equal_rewards),
    "truncation": (TRUNCATED, truncation),
    "repetition": ("response_length/repeated_share", repetition),
    "held_out": ("evaluation/reward", held_out),
    "gradient": ("grad_norm", gradient),
    "clipping": ("policy/clip_fraction", clipping),
    "length": ("response_length/mean", length),
    "length_bias": ("rollout/length_bias", length_bias),
    "resting": ("data/woken", resting),
    "untaught": ("distill/taught_share", untaught),
    "loss": ("loss", loss),
}
WATCHED: set[str] = {key for key, _ in RULES.values()} | {UNIFORM, "evaluation/reward_ci95"}  # metrics that rules read


# Rules of the first step, and of steps in a row


def first_step(metrics: Row, config: RLConfig) -> Iterator[Finding]:
    """Yield the signs of a first step that a run will not learn."""
    if metrics[TRUNCATED] > limits.CUT_OFF:
        yield truncation_findings(WATCH, metrics[TRUNCATED], limits_in(metrics, "response_length/"), config)
    if metrics.get("tools/errors"):
        what = f"{metrics['tools/errors']:.2g} tool calls per episode raised an exception"
        yield Finding(WATCH, "tool_errors", what, "the model sees it, and logs/environment.log has the tracebacks")
    algorithm = config.algorithm
    if config.has_reward() and metrics.get(UNIFORM, 0.0) > limits.UNIFORM:
        what = f"in {metrics[UNIFORM]:.0%} of the groups all completions have the same reward"
        why = f"there is nothing to learn (mean reward {metrics['reward/mean']:.3f}): easier or harder prompts, "
        why += f"another reward, or a larger algorithm.group_size={algorithm.group_size}"
        yield Finding(WATCH, "uniform_groups", what, why, "algorithm.group_size")
    alpha, mean = algorithm.length_adaptive, metrics["response_length/mean"]
    if "critic/explained_variance" in metrics and alpha and alpha * mean <= 1:
        key = "algorithm.length_adaptive"
        what = f"{key}={alpha:g} makes lambda 0 for responses of up to {1 / alpha:g} tokens; their mean is {mean:.0f}"
        why = "only the critic credits tokens before the last: set it to null"
        yield Finding(WATCH, "length_adaptive", what, why, key)
    if algorithm.shaping.overlong_filter and algorithm.shaping.overlong_factor:
        key = "algorithm.shaping.overlong_filter"
        what = f"{key} leaves truncated completions out of the loss, so overlong_factor has no effect on them"
        yield Finding(WATCH, "overlong", what, "keep one of the two", key)


def reward_streak(history: History, step: int, steps: int) -> Iterator[Finding]:
    """Yield a finding after some numbers of steps in a row in which all completions had the same reward."""
    if history.uniform in limits.UNIFORM_STEPS or (step >= steps and history.uniform >= 2):
        mean = history.last["reward/mean"]
        what = f"in {history.uniform} steps in a row all completions had the same reward, {mean:.3f}"
        why = "nothing was learned: check the reward with `trueline reward try`, and transcripts.jsonl"
        yield Finding(WATCH, "constant_rewards", what, why, "reward.function")


class RunMonitor:
    """Check each step with the rules, and report each finding that is new or worse."""

    def __init__(self, report: Callable[[Finding, int], object], config: RunConfig | None = None) -> None:
        self.report, self.config = report, config
        self.history = History(config.rollout.max_staleness if isinstance(config, RLConfig) else 0)
        self.known: dict[str, Finding] = {}  # of the last step, by rule; those that are fine are left out

    def check(self, step: int, metrics: Row) -> Row:
        """Return the levels of a step as metrics: of each rule that is not fine, and the worst of all."""
        self.history.add(metrics)
        found = [self._apply(name, key, rule) for name, (key, rule) in RULES.items()]
        worse = [one for one in found if HEALTH_LEVELS.index(one.level) > self._number(one.code)]
        if isinstance(self.config, RLConfig):
            worse += first_step(metrics, self.config) if step == 1 else ()
            worse += reward_streak(self.history, step, self.config.steps)
        for one in worse:
            self.report(one, step)
        self.known = {one.code: one for one in found if one.level != FINE}
        numbers = {f"health/{name}": self._number(name) for name in self.known}
        return {"health/level": max(numbers.values(), default=0.0)} | numbers

    def _number(self, name: str) -> float:
        return float(HEALTH_LEVELS.index(self.known[name].level)) if name in self.known else 0.0

    def _apply(self, name: str, key: str, rule: Rule) -> Finding:
        series, fine = self.history.series[key], Finding(FINE, name, "")
        if key not in self.history.last:
            return self.known.get(name, fine)  # no evaluation in this step: the last one counts
        ready = series.count > (0 if key.startswith("evaluation/") else WINDOW)
        return rule(self.history, series) if ready else fine

    def recall(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.history.add(row)

    def bad(self) -> list[str]:
        return [name for name, one in self.known.items() if one.level == BAD]


def describe_health(metrics: Row) -> str:
    """Return the level of a step, unless it is fine, with the rules behind it."""
    level = int(metrics.get("health/level", 0))
    rules = [name for name in RULES if metrics.get(f"health/{name}") == level]
    return f"{HEALTH_LEVELS[level]} ({', '.join(rules)})" if level else ""
