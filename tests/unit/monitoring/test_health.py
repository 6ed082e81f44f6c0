"""Every rule of a run's health, on series that are fine, strange and bad, and at the edges of its streaks."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.health_runs import FAULTS, healthy, rows, sound
from trueline.config.rl import RLConfig
from trueline.monitoring import health as rules
from trueline.monitoring.findings import BAD, FINE, WATCH, Finding
from trueline.monitoring.health import (
    RULES,
    TRUNCATED,
    History,
    Row,
    RunMonitor,
    describe_health,
    first_step,
    gap_level,
    held_out_error,
    reward_streak,
    truncation,
)

STEPS = 20
Series = Callable[[int], float]


def quiet_monitor() -> RunMonitor:
    return RunMonitor(lambda finding, step: None)


def level_of(monitor: RunMonitor, rule: str) -> str:
    return monitor.known[rule].level if rule in monitor.known else FINE


def judged(*, max_staleness: int = 0, steps: int = STEPS, **series: Series) -> RunMonitor:
    """A run of some steps whose metrics are functions of the step; two underscores stand for a slash."""
    health = quiet_monitor()
    health.history.max_staleness = max_staleness
    for step in range(1, steps + 1):
        health.check(step, {name.replace("__", "/"): value(step) for name, value in series.items()})
    return health


def level_after(rule: str, key: str, values: list[float], **others: list[float]) -> str:
    """The level of a rule after the last of these values."""
    health = quiet_monitor()
    for step, value in enumerate(values):
        health.check(step + 1, {key: value} | {name.replace("__", "/"): row[step] for name, row in others.items()})
    return level_of(health, rule)


def noisy(mean: float, share: float = 0.1) -> Series:
    return lambda step: mean * (1 + share * random.Random(step).uniform(-1, 1))


def line(start: float, end: float) -> Series:
    return lambda step: start + (end - start) * step / STEPS


def after(step: int, early: float, late: float) -> Series:
    return lambda at: early if at < step else late


RISES, LEVEL = line(0.1, 0.6), noisy(0.3)


def draws(z: float, effect: float, run_z: float = 0.0, run_effect: float = 0.0) -> dict[str, Series]:
    named = {"z": z, "effect": effect, "z_run": run_z, "effect_run": run_effect}
    return {f"mismatch__sampler_{name}": noisy(value, 0.01) for name, value in named.items()}


CASES: list[tuple[str, str, dict[str, Series]]] = [
    ("reward", FINE, {"reward__mean": RISES}),
    ("reward", FINE, {"reward__mean": noisy(0.3, 0.5)}),
    ("reward", FINE, {"reward__mean": after(8, 0.50, 0.49), "reward__std": lambda step: 0.5}),
    ("reward", WATCH, {"reward__mean": after(8, 0.50, 0.42), "reward__std": lambda step: 0.5}),
    ("reward", BAD, {"reward__mean": after(8, 0.50, 0.38), "reward__std": lambda step: 0.5}),
    ("reward", BAD, {"reward__mean": line(0.3, 0.0)}),
    ("reward", BAD, {"reward__mean": line(-3.0, -6.0)}),
    ("reward", WATCH, {"reward__mean": lambda step: 0.1 + 0.06 * min(step, 12) - 0.06 * max(step - 12, 0)}),
    ("entropy", FINE, {"policy__entropy": line(4.0, 1.0), "reward__mean": RISES}),
    ("entropy", WATCH, {"policy__entropy": lambda step: 4 * 0.7**step, "reward__mean": RISES}),
    ("entropy", BAD, {"policy__entropy": lambda step: 4 * 0.7**step, "reward__mean": LEVEL}),
    ("entropy", BAD, {"policy__entropy": line(1.0, 6.0), "reward__mean": LEVEL}),
    ("entropy", WATCH, {"policy__entropy": line(1.0, 6.0), "reward__mean": RISES}),
    ("entropy", BAD, {"policy__entropy": after(17, 4.0, 0.01), "reward__mean": RISES}),
    ("gap", FINE, {"mismatch__logprob_gap_mean": noisy(0.1, 0.4)}),
    ("gap", FINE, {"mismatch__logprob_gap_mean": lambda step: 4e-7 if step % 2 else 3e-6}),
    ("gap", WATCH, {"mismatch__logprob_gap_mean": after(9, 0.02, 0.06)}),
    ("gap", WATCH, {"mismatch__logprob_gap_mean": after(9, 1e-6, 0.0099)}),
    ("gap", WATCH, {"mismatch__logprob_gap_mean": line(1e-6, 0.0099)}),
    ("gap", BAD, {"mismatch__logprob_gap_mean": line(0.001, 0.3)}),
    ("gap", BAD, {"mismatch__logprob_gap_mean": after(2, 1e-6, 0.3)}),
    ("gap", FINE, {"mismatch__logprob_gap_mean": line(0.001, 0.3), "rollout__staleness_max": lambda step: 1.0}),
    ("sampler", FINE, draws(1.5, 0.2)),
    ("sampler", FINE, draws(8.0, 0.004)),  # rounding, over very many tokens
    ("sampler", FINE, draws(-30.0, -70.0)),  # one token that hardly ever comes, where all else is certain
    ("sampler", WATCH, draws(7.0, 0.07)),
    ("sampler", WATCH, draws(1.5, 0.06, 7.0, 0.05)),  # too little in one step, and plain over the run
    ("sampler", BAD, draws(-37.0, -0.6)),
    ("sampler", BAD, draws(0.5, 0.01, 9.0, 0.2)),
    ("staleness", FINE, {"rollout__staleness_max": lambda step: 0.0}),
    ("staleness", WATCH, {"rollout__staleness_max": lambda step: float(step % 4 == 0)}),
    ("staleness", BAD, {"rollout__staleness_max": lambda step: float(step)}),
    ("effective_samples", FINE, {"mismatch__effective_share": noisy(0.95)}),
    ("effective_samples", WATCH, {"mismatch__effective_share": noisy(0.3)}),
    ("effective_samples", BAD, {"mismatch__effective_share": noisy(0.05)}),
    ("equal_rewards", FINE, {"reward__uniform_groups_share": noisy(0.4), "reward__mean": LEVEL, "reward__std": LEVEL}),
    ("equal_rewards", FINE, {"reward__mean": LEVEL, "reward__std": LEVEL}),
    ("equal_rewards", WATCH, {"reward__uniform_groups_share": noisy(0.99, 0.01), "reward__std": LEVEL}),
    ("equal_rewards", WATCH, {"reward__mean": line(0.1, 1.0), "reward__std": lambda step: 0.0}),
    ("equal_rewards", WATCH, {"reward__mean": after(6, 0.1, 1.0), "reward__std": after(6, 0.3, 0.0)}),
    ("equal_rewards", BAD, {"reward__mean": after(6, 0.1, 0.0), "reward__std": after(6, 0.3, 0.0)}),
    ("equal_rewards", BAD, {"reward__mean": lambda step: 0.5, "reward__std": lambda step: 0.0}),
    ("truncation", FINE, {"response_length__truncated_share": noisy(0.1), "reward__mean": RISES}),
    ("truncation", WATCH, {"response_length__truncated_share": noisy(0.29), "reward__mean": RISES}),
    ("truncation", WATCH, {"response_length__truncated_share": line(0.0, 0.6), "reward__mean": RISES}),
    ("truncation", WATCH, {"response_length__truncated_share": lambda step: 1.0, "reward__mean": RISES}),
    ("truncation", WATCH, {"response_length__truncated_share": after(2, 0.99, 1.0), "reward__mean": LEVEL}),
    ("truncation", BAD, {"response_length__truncated_share": lambda step: 1.0, "reward__mean": LEVEL}),
    ("truncation", BAD, {"response_length__truncated_share": line(0.0, 1.0), "reward__mean": LEVEL}),
    ("repetition", FINE, {"response_length__repeated_share": noisy(0.5), "reward__mean": LEVEL}),
    ("repetition", WATCH, {"response_length__repeated_share": line(0.0, 0.9), "reward__mean": RISES}),
    ("repetition", WATCH, {"response_length__repeated_share": line(0.0, 0.4), "reward__mean": LEVEL}),
    ("repetition", BAD, {"response_length__repeated_share": line(0.0, 0.9), "reward__mean": LEVEL}),
    ("held_out", FINE, {"evaluation__reward": RISES, "reward__mean": RISES}),
    ("held_out", FINE, {"evaluation__reward": noisy(3.0, 0.1), "reward__mean": RISES}),
    ("held_out", FINE, {"evaluation__reward": line(0.6, 0.3), "evaluation__reward_ci95": lambda step: 0.2}),
    ("held_out", WATCH, {"evaluation__reward": line(0.6, 0.3), "reward__mean": LEVEL}),
    ("held_out", BAD, {"evaluation__reward": line(0.6, 0.3), "reward__mean": RISES}),
    ("gradient", FINE, {"grad_norm": noisy(1.0, 0.8)}),
    ("gradient", FINE, {"grad_norm": lambda step: 0.0}),
    ("gradient", FINE, {"grad_norm": lambda step: 0.5 if step % 4 == 0 else 1e-6}),
    ("gradient", WATCH, {"grad_norm": after(STEPS, 1.0, 30.0)}),
    ("gradient", BAD, {"grad_norm": after(STEPS - 2, 1.0, 30.0)}),
    ("clipping", FINE, {"policy__clip_fraction": noisy(0.1)}),
    ("clipping", WATCH, {"policy__clip_fraction": noisy(0.4)}),
    ("clipping", BAD, {"policy__clip_fraction": noisy(0.8)}),
    ("length", FINE, {"response_length__mean": line(10, 40), "reward__mean": RISES}),
    ("length", WATCH, {"response_length__mean": line(10, 40), "reward__mean": LEVEL}),
    ("length_bias", FINE, {"rollout__length_bias": noisy(-0.05, 3.0)}),
    ("length_bias", FINE, {"rollout__length_bias": lambda step: -0.5 if step < 3 else 0.0}),  # the first steps
    ("length_bias", FINE, {"rollout__length_bias": lambda step: (-1.0) ** step - 0.2}),  # chance explains it
    ("length_bias", FINE, {"rollout__length_bias": noisy(0.3)}),
    ("length_bias", WATCH, {"rollout__length_bias": noisy(-0.15)}),
    ("resting", FINE, {"data__woken": lambda step: float(step == 9)}),
    ("untaught", FINE, {"distill__taught_share": noisy(0.9, 0.1)}),
    ("untaught", WATCH, {"distill__taught_share": after(9, 0.9, 0.1)}),
    ("untaught", BAD, {"distill__taught_share": after(9, 0.9, 0.0)}),
    ("resting", WATCH, {"data__woken": after(9, 0.0, 4.0)}),
    ("loss", FINE, {"loss": line(3.0, 1.0)}),
    ("loss", FINE, {"loss": noisy(0.7, 0.5)}),
    ("loss", WATCH, {"loss": after(8, 1.0, 1.2)}),
    ("loss", BAD, {"loss": line(1.0, 3.0)}),
    ("loss", FINE, {"loss": line(-1.0, 1.0), "reward__mean": RISES}),
]


@pytest.mark.parametrize(("rule", "level", "series"), CASES)
def test_a_rule_tells_fine_from_strange_and_bad(rule: str, level: str, series: dict[str, Series]) -> None:
    assert level_of(judged(**series), rule) == level


def test_every_rule_is_tried_at_every_level_that_it_has() -> None:
    assert {rule for rule, *_ in CASES} == set(RULES)
    tried = {(rule, level) for rule, level, _ in CASES}
    assert all({(rule, FINE)} <= tried for rule in RULES) and len(tried) >= 2 * len(RULES)


def test_a_verdict_is_a_metric_a_word_and_said_once() -> None:
    found: list[Finding] = []
    health, rows = RunMonitor(lambda finding, step: found.append(finding)), []
    for step in range(1, STEPS + 1):
        rows.append(health.check(step, {"reward/mean": line(0.3, 0.0)(step)}))
    assert rows[0] == {"health/level": 0.0} and rows[-1] == {"health/level": 2.0, "health/reward": 2.0}
    assert (describe_health(rows[0]), describe_health(rows[-1]), describe_health({})) == ("", "bad (reward)", "")
    assert [(one.level, one.code, one.key) for one in found] == [
        (level, "reward", "training.learning_rate") for level in (WATCH, BAD)
    ]


def test_few_steps_are_not_judged() -> None:
    assert [level_after("clipping", "policy/clip_fraction", [0.9] * steps) for steps in (5, 6)] == [FINE, BAD]
    fallen = [0.5] * 4 + [0.0] * 6
    assert [level_after("reward", "reward/mean", fallen[:steps]) for steps in (9, 10)] == [FINE, BAD]
    assert [level_after("loss", "loss", [1 - value for value in fallen][:steps]) for steps in (9, 10)] == [FINE, BAD]
    assert [level_after("gap", "mismatch/logprob_gap_mean", [1e-3] + [0.5] * more) for more in (8, 9)] == [FINE, WATCH]


def test_answers_lag_too_far_only_beyond_what_the_run_allows() -> None:
    for most in (0, 3):
        levels = [
            level_of(
                judged(max_staleness=most, rollout__staleness_max=after(7, most, most + 1), steps=6 + late), "staleness"
            )
            for late in (0, 1, 4, 5)
        ]
        assert levels == [FINE, WATCH, WATCH, BAD]


def test_a_lag_is_forgotten_after_five_steps() -> None:
    lags = [0.0] * 6 + [1.0] + [0.0] * 5
    key = "rollout/staleness_max"
    assert [level_after("staleness", key, lags[:steps]) for steps in (11, 12)] == [WATCH, FINE]


def equal_rewards_after(stds: list[float], means: list[float]) -> str:
    return level_after("equal_rewards", "reward/std", stds, reward__mean=means)


def test_ten_steps_of_one_reward_from_the_start_are_bad() -> None:
    assert [equal_rewards_after([0.0] * steps, [0.1] * steps) for steps in (9, 10)] == [WATCH, BAD]
    assert equal_rewards_after([0.0] * 10, [0.1] * 5 + [0.2] * 5) == WATCH  # it says two things


def test_rewards_that_become_one_are_bad_where_that_is_no_chance_and_no_gain() -> None:
    for value, level in ((0.0, BAD), (1.0, WATCH)):
        for still, found in ((9, WATCH), (10, level)):
            assert equal_rewards_after([0.3] * 10 + [0.0] * still, [0.5] * 10 + [value] * still) == found
    broken = [0.3] * 10 + [0.0] * 9 + [0.3, 0.0]
    assert equal_rewards_after(broken, [0.5] * 10 + [0.0] * 11) == WATCH  # a step between two streaks ends the first
    often = [0.0, 0.3] * 19  # half of the steps: 0.5 ** 16 is no rare chance, 0.5 ** 17 is
    for still, level in ((16, WATCH), (17, BAD)):
        assert equal_rewards_after(often + [0.0] * still, [0.5] * 38 + [0.1] * still) == level


def test_four_of_twenty_steps_with_equal_rewards_are_watched() -> None:
    for equal, level in ((3, FINE), (4, WATCH)):
        stds = [0.0 if step % 5 == 0 and step < 5 * equal else 0.3 for step in range(20)]
        assert equal_rewards_after(stds, [0.5] * 20) == level
    assert equal_rewards_after([0.0, *[0.3] * 16, *[0.0] * 3, 0.3], [0.5] * 21) == FINE  # the first of 21 is forgotten


def test_answers_of_which_none_ended_in_ten_steps_are_bad() -> None:
    key, level = "response_length/truncated_share", [0.3] * 10
    assert [level_after("truncation", key, [1.0] * n, reward__mean=level) for n in (9, 10)] == [WATCH, BAD]


def test_answers_that_are_cut_off_name_the_limits_of_the_last_step() -> None:
    by = {"environment.max_turns": 0.75, "rollout.max_new_tokens": 0.25}
    row = {"response_length/truncated_share": 1.0, "reward/mean": 0.3, "reward/std": 0.1}
    history = History()
    for _ in range(10):
        history.add(row | {f"response_length/cut_by/{key}": share for key, share in by.items()})
    found = truncation(history, history.series[TRUNCATED])
    assert (found.level, found.key) == (BAD, "environment.max_turns")
    assert found.why == "raise environment.max_turns (75%), rollout.max_new_tokens (25%)"
    history.add(row | {"response_length/cut_by/environment.max_turns": 1.0})
    assert truncation(history, history.series[TRUNCATED]).why == "raise environment.max_turns"


def test_three_gradients_of_five_are_bad_from_step_twenty() -> None:
    def after_steps(*late: float, usual: int) -> str:
        return level_after("gradient", "grad_norm", [1.0] * usual + list(late))

    assert [after_steps(30.0, usual=usual) for usual in (18, 19)] == [FINE, WATCH]
    assert [after_steps(10.0, usual=30), after_steps(10.1, usual=30)] == [FINE, WATCH]
    assert after_steps(30.0, 1.0, 1.0, 1.0, 30.0, usual=30) == WATCH
    assert after_steps(30.0, 1.0, 30.0, 1.0, 30.0, usual=30) == BAD
    assert after_steps(30.0, 1.0, 30.0, 1.0, 1.0, 30.0, usual=30) == WATCH
    assert [after_steps(30.0, *[1.0] * later, usual=30) for later in (4, 5)] == [WATCH, FINE]


def test_a_sudden_end_of_entropy_is_bad_though_the_reward_rises() -> None:
    def after_steps(*late: float) -> str:
        rises = [0.1 + 0.05 * step for step in range(6 + len(late))]
        return level_after("entropy", "policy/entropy", [4.0] * 6 + list(late), reward__mean=rises)

    assert [after_steps(0.03), after_steps(0.03, 0.03)] == [FINE, BAD]  # one step may be strange
    assert after_steps(0.03, 2.0) == FINE
    assert [after_steps(*[1.0] * 3, 0.03, 0.03), after_steps(*[1.0] * 4, 0.03, 0.03)] == [BAD, FINE]
    assert [after_steps(0.039, 0.039), after_steps(0.041, 0.041)] == [BAD, FINE]
    assert after_steps(1.0, 4.0, 1.0, 1.0, 1.0, 0.03, 0.03) == FINE  # it was high for one step
    assert after_steps(*[0.02] * 8, 1e-4, 1e-4) == WATCH  # there was little left


def test_a_reward_that_may_still_rise_is_given_credit_for_nine_steps() -> None:
    fallen = [4.0] * 3 + [0.3] * 7
    levels = [level_after("entropy", "policy/entropy", fallen[:steps], reward__mean=[0.3] * steps) for steps in (9, 10)]
    assert levels == [WATCH, BAD]


def test_four_evaluations_are_needed_to_judge_them_and_the_last_counts_until_the_next() -> None:
    health, levels = quiet_monitor(), []
    for step in range(1, 101):
        held_out = {"evaluation/reward": 0.8 if step <= 50 else 0.1, "evaluation/reward_ci95": 0.1}
        health.check(step, {"reward/mean": 0.01 * step} | (held_out if step % 25 == 0 else {}))
        levels.append(level_of(health, "held_out"))
    assert levels == [FINE] * 99 + [BAD]
    health.check(101, {"reward/mean": 1.01})
    assert health.bad() == ["held_out"]


def test_evaluations_are_judged_by_the_interval_that_they_report() -> None:
    rises, held_out = [0.01 * step for step in range(20)], [0.5, 0.5] + [0.3] * 18
    for interval, level in ((0.08, BAD), (0.11, FINE)):
        found = level_after(
            "held_out", "evaluation/reward", held_out, reward__mean=rises, evaluation__reward_ci95=[interval] * 20
        )
        assert found == level


def test_a_gap_is_judged_by_its_size_and_by_its_growth() -> None:
    assert [gap_level(found, 1e-6) for found in (1e-4, 2e-4, 0.0099, 0.02, 0.021)] == [FINE, WATCH, WATCH, WATCH, BAD]
    assert [gap_level(found, 0.02) for found in (0.05, 0.051, 0.12, 0.121)] == [FINE, WATCH, WATCH, BAD]


def test_numbers_that_are_not_finite_leave_the_other_steps_their_verdict() -> None:
    values = [0.5] * 8 + [float("nan")] + [0.0] * 8
    assert level_after("reward", "reward/mean", values) == BAD


@pytest.mark.parametrize("cut", [1, 7, 10, 31])
def test_a_run_that_is_taken_up_again_is_judged_as_if_it_had_never_ended(cut: int) -> None:
    for fault, strength in [("constant reward", 0.5), ("sign", 0.25), ("rate", 0.25), ("stale weights", 0.25)]:
        generator = np.random.default_rng(3)
        metrics = healthy(generator, 60) | FAULTS[fault](generator, strength, 60)
        told = list(rows(metrics))
        whole, resumed = quiet_monitor(), quiet_monitor()
        verdicts: list[Row] = [whole.check(step, row) for step, row in enumerate(told, 1)]
        resumed.recall(row | verdict for row, verdict in zip(told[:cut], verdicts, strict=False))
        assert [resumed.check(step, row) for step, row in enumerate(told[cut:], cut + 1)] == verdicts[cut:]
        assert any(verdict["health/level"] for verdict in verdicts)


def test_what_a_run_remembers_does_not_grow() -> None:
    health = quiet_monitor()
    for step, row in enumerate(list(rows(sound("slow gain", np.random.default_rng(0)))) * 2, 1):
        health.check(step, row)
    filled = [series for series in health.history.series.values() if series.count]
    assert filled and all(len(series.last) <= 100 and len(series.first) == 5 for series in filled)


def test_the_noise_of_a_step_is_what_changes_between_two() -> None:
    series = rules.Series()
    for value in (0.0, 1.0, 0.0, 1.0, 0.0):
        series.add(value)
    assert series.noise() == pytest.approx(1 / rules.MEAN_CHANGE)


def test_an_evaluation_is_as_sure_as_the_worst_of_the_first_two_and_the_last_two() -> None:
    history = History()
    for interval in (0.1, 0.2, 9.0, 9.0, 0.3, 0.4):
        history.add({"evaluation/reward": 0.5, "evaluation/reward_ci95": interval})
    assert held_out_error(history, history.series["evaluation/reward"]) == pytest.approx(0.4 / 1.96)


def codes(metrics: Row, config: RLConfig) -> dict[str, Finding]:
    return {one.code: one for one in first_step(metrics, config)}


def test_responses_too_short_for_a_lambda_that_follows_their_length_are_found() -> None:
    metrics = {"response_length/truncated_share": 0.0, "critic/explained_variance": 0.5, "response_length/mean": 20.0}
    vapo, ppo = (RLConfig.load([], [f"algorithm.preset={name}"]) for name in ("vapo", "ppo"))
    what = codes(metrics, vapo)["length_adaptive"].what
    assert what.startswith("algorithm.length_adaptive=0.05 makes lambda 0 for responses of up to 20 tokens")
    assert not codes(metrics | {"response_length/mean": 21.0}, vapo) and not codes(metrics, ppo)


def test_tools_that_raise_and_limits_of_an_environment_are_found() -> None:
    config = RLConfig.load([], ["environment.tools=python", "rollout.max_new_tokens=7"])
    metrics = {"response_length/truncated_share": 0.6, "reward/uniform_groups_share": 0.0, "response_length/mean": 9.0}
    by = {"response_length/cut_by/rollout.max_new_tokens": 0.2, "response_length/cut_by/environment.max_turns": 0.4}
    found = codes(metrics | by | {"tools/errors": 0.5}, config)
    assert set(found) == {"truncation", "tool_errors"}
    assert found["truncation"].text() == (
        "60% of the completions are truncated; raise environment.max_turns=8 (40%), rollout.max_new_tokens=7 (20%)"
    )
    alone = codes(metrics | {"response_length/cut_by/environment.max_turns": 0.6}, config)["truncation"]
    assert (alone.why, alone.key) == ("raise environment.max_turns=8", "environment.max_turns")
    assert found["tool_errors"].what == "0.5 tool calls per episode raised an exception"


def test_equal_rewards_are_reported_after_ten_and_a_hundred_steps_and_at_the_end() -> None:
    history, found = History(), []
    for step in range(1, 151):
        history.add({"reward/mean": 0.5, "reward/std": 0.0})
        found += [(step, one.what) for one in reward_streak(history, step, 150)]
    assert [step for step, _ in found] == [10, 100, 150]
    assert found[0][1] == "in 10 steps in a row all completions had the same reward, 0.500"
    for equal in (0, 1):  # a streak of one is no streak
        assert not list(reward_streak(History(uniform=equal), 1, 1))
