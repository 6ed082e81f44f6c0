"""Every rule of a run's health, on series that are fine, strange and bad."""

import random
from collections.abc import Callable

import pytest

from trueline.monitoring.health import BAD, LEVELS, OK, RULES, WATCH, Health, verdict_words

STEPS = 20
Series = Callable[[int], float]


def judged(**series: Series) -> Health:
    """A run of some steps whose metrics are functions of the step; two underscores stand for a slash."""
    health = Health(lambda line: None)
    for step in range(1, STEPS + 1):
        health.judge(step, {name.replace("__", "/"): value(step) for name, value in series.items()})
    return health


def noisy(mean: float, share: float = 0.1) -> Series:
    return lambda step: mean * (1 + share * random.Random(step).uniform(-1, 1))


def line(start: float, end: float) -> Series:
    return lambda step: start + (end - start) * step / STEPS


RISES, LEVEL = line(0.1, 0.6), noisy(0.3)


def draws(z: float, effect: float, run_z: float = 0.0, run_effect: float = 0.0) -> dict[str, Series]:
    named = {"z": z, "effect": effect, "z_run": run_z, "effect_run": run_effect}
    return {f"mismatch__sampler_{name}": noisy(value, 0.01) for name, value in named.items()}


CASES: list[tuple[str, int, dict[str, Series]]] = [
    ("reward", OK, {"reward__mean": RISES}),
    ("reward", OK, {"reward__mean": noisy(0.3, 0.5)}),
    ("reward", BAD, {"reward__mean": line(0.3, 0.0)}),
    ("reward", WATCH, {"reward__mean": lambda step: 0.1 + 0.06 * min(step, 12) - 0.06 * max(step - 12, 0)}),
    ("entropy", OK, {"policy__entropy": line(4.0, 1.0), "reward__mean": RISES}),
    ("entropy", WATCH, {"policy__entropy": lambda step: 4 * 0.7**step, "reward__mean": RISES}),
    ("entropy", BAD, {"policy__entropy": lambda step: 4 * 0.7**step, "reward__mean": LEVEL}),
    ("entropy", BAD, {"policy__entropy": line(1.0, 6.0)}),
    ("gap", OK, {"mismatch__logprob_gap_mean": noisy(0.1, 0.4)}),
    ("gap", WATCH, {"mismatch__logprob_gap_mean": lambda step: 0.02 if step < 9 else 0.06}),
    ("gap", BAD, {"mismatch__logprob_gap_mean": line(0.001, 0.3)}),
    ("gap", OK, {"mismatch__logprob_gap_mean": line(0.001, 0.3), "rollout__staleness_max": lambda step: 1.0}),
    ("sampler", OK, draws(1.5, 0.2)),
    ("sampler", OK, draws(8.0, 0.004)),  # rounding, over very many tokens
    ("sampler", OK, draws(-30.0, -70.0)),  # one token that hardly ever comes, where all else is certain
    ("sampler", WATCH, draws(7.0, 0.07)),
    ("sampler", WATCH, draws(1.5, 0.06, 7.0, 0.05)),  # too little in one step, and plain over the run
    ("sampler", BAD, draws(-37.0, -0.6)),
    ("sampler", BAD, draws(0.5, 0.01, 9.0, 0.2)),
    ("staleness", OK, {"rollout__staleness_max": lambda step: min(step, 3)}),
    ("staleness", BAD, {"rollout__staleness_max": lambda step: float(step)}),
    ("effective_samples", OK, {"mismatch__effective_share": noisy(0.95)}),
    ("effective_samples", WATCH, {"mismatch__effective_share": noisy(0.3)}),
    ("effective_samples", BAD, {"mismatch__effective_share": noisy(0.05)}),
    ("equal_rewards", OK, {"reward__uniform_groups_share": noisy(0.4), "reward__mean": LEVEL}),
    ("equal_rewards", WATCH, {"reward__uniform_groups_share": noisy(0.99, 0.01), "reward__mean": LEVEL}),
    ("equal_rewards", BAD, {"reward__uniform_groups_share": lambda step: 1.0, "reward__mean": lambda step: 0.5}),
    ("truncation", OK, {"response_length__truncated_share": noisy(0.2), "reward__mean": RISES}),
    ("truncation", WATCH, {"response_length__truncated_share": line(0.0, 0.6), "reward__mean": RISES}),
    ("truncation", WATCH, {"response_length__truncated_share": lambda step: 1.0, "reward__mean": RISES}),
    ("truncation", BAD, {"response_length__truncated_share": lambda step: 1.0, "reward__mean": LEVEL}),
    ("truncation", BAD, {"response_length__truncated_share": line(0.0, 1.0), "reward__mean": LEVEL}),
    ("repetition", OK, {"response_length__repeated_share": noisy(0.5), "reward__mean": LEVEL}),
    ("repetition", WATCH, {"response_length__repeated_share": line(0.0, 0.9), "reward__mean": RISES}),
    ("repetition", WATCH, {"response_length__repeated_share": line(0.0, 0.4), "reward__mean": LEVEL}),
    ("repetition", BAD, {"response_length__repeated_share": line(0.0, 0.9), "reward__mean": LEVEL}),
    ("held_out", OK, {"evaluation__reward": RISES, "reward__mean": RISES}),
    ("held_out", WATCH, {"evaluation__reward": line(0.6, 0.3), "reward__mean": LEVEL}),
    ("held_out", BAD, {"evaluation__reward": line(0.6, 0.3), "reward__mean": RISES}),
    ("gradient", OK, {"grad_norm": noisy(1.0, 0.8)}),
    ("gradient", WATCH, {"grad_norm": lambda step: 30.0 if step == STEPS else 1.0}),
    ("gradient", BAD, {"grad_norm": lambda step: 30.0 if step > STEPS - 3 else 1.0}),
    ("clipping", OK, {"policy__clip_fraction": noisy(0.1)}),
    ("clipping", WATCH, {"policy__clip_fraction": noisy(0.4)}),
    ("clipping", BAD, {"policy__clip_fraction": noisy(0.8)}),
    ("length", OK, {"response_length__mean": line(10, 40), "reward__mean": RISES}),
    ("length", WATCH, {"response_length__mean": line(10, 40), "reward__mean": LEVEL}),
    ("loss", OK, {"loss": line(3.0, 1.0)}),
    ("loss", BAD, {"loss": line(1.0, 3.0)}),
    ("loss", OK, {"loss": line(-1.0, 1.0), "reward__mean": RISES}),
]


@pytest.mark.parametrize(("rule", "level", "series"), CASES)
def test_a_rule_tells_fine_from_strange_and_bad(rule: str, level: int, series: dict[str, Series]) -> None:
    assert judged(**series).known.get(rule, OK) == level


def test_every_rule_is_tried_at_every_level_that_it_has() -> None:
    assert {rule for rule, *_ in CASES} == set(RULES)
    tried = {(rule, level) for rule, level, _ in CASES}
    assert all({(rule, OK)} <= tried for rule in RULES) and len(tried) >= 2 * len(RULES)


def test_a_verdict_is_a_metric_a_word_and_said_once() -> None:
    said: list[str] = []
    health, rows = Health(said.append), []
    for step in range(1, STEPS + 1):
        rows.append(health.judge(step, {"reward/mean": line(0.3, 0.0)(step)}))
    assert rows[0] == {"health/level": 0.0} and rows[-1] == {"health/level": 2.0, "health/reward": 2.0}
    assert (verdict_words(rows[0]), verdict_words(rows[-1]), verdict_words({})) == ("", "BAD (reward)", "")
    assert [word for one in said for word in LEVELS if f" {word} " in one] == ["WATCH", "BAD"]
    assert all("training.learning_rate" in one for one in said)


def test_few_steps_are_not_judged() -> None:
    health = Health(lambda line: None)
    for step in range(1, 5):
        assert health.judge(step, {"reward/mean": 1.0 / step, "grad_norm": 10.0**step}) == {"health/level": 0.0}
