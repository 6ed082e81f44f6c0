"""Runs made of numbers alone, sound and faulty, to see how often rules of health are wrong.

Rewards are drawn answer by answer and reduced as a run does it; the shapes of faults are those of real runs of
`tests/learning/test_health.py`, whose metrics were looked at for full and for a quarter of their strength.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from trueline.monitoring.health import Row, RunMonitor

Array = NDArray[np.float64]
Metrics = dict[str, Array]  # [steps] of each metric; NaN where a step does not report it
STEPS, GROUPS, ANSWERS, EVERY = 300, 16, 8, 10


def told(rewards: Array) -> Metrics:
    """What a step says of rewards [steps, groups, answers]; groups of one have no share of uniform ones."""
    flat = rewards.reshape(len(rewards), -1)
    found = {"reward/mean": flat.mean(1), "reward/std": np.where(np.ptp(flat, 1) == 0, 0.0, flat.std(1))}
    if rewards.shape[2] > 1:
        found["reward/uniform_groups_share"] = (np.ptp(rewards, 2) == 0).mean(1)
    return found


def graded(random: Generator, level: Array, spread: float = 0.2, answers: int = ANSWERS) -> Metrics:
    """Rewards of any value: prompts differ by as much as the answers to one of them."""
    shape = (len(level), GROUPS, 1)
    prompts, own = random.normal(0, spread, shape), random.normal(0, spread, (len(level), GROUPS, answers))
    return told(level[:, None, None] + prompts + own)


def right_or_wrong(random: Generator, chance: Array, answers: int = ANSWERS) -> Metrics:
    """Rewards of 0 and 1: prompts are easy and hard."""
    odds = chance[:, None, None] * random.uniform(0, 2, (len(chance), GROUPS, 1))
    return told((random.random((len(chance), GROUPS, answers)) < odds).astype(float))


def line(start: float, end: float, steps: int = STEPS) -> Array:
    return np.linspace(start, end, steps)


def noisy(random: Generator, level: Array, share: float) -> Array:
    return np.asarray(level * np.exp(random.normal(0, share, len(level))))


def wandering(random: Generator, level: float, width: float) -> Array:
    """A policy that is now better and now worse, as it stays so for ten steps or so."""
    found = np.zeros(STEPS)
    for step in range(1, STEPS):
        found[step] = 0.9 * found[step - 1] + random.normal(0, width * 0.44)
    return level + found


def evaluated(random: Generator, level: Array, error: float, interval: bool = True) -> Metrics:
    """Held-out rewards of every tenth step, with the interval that they report."""
    due = np.arange(1, len(level) + 1) % EVERY == 0
    found = {"evaluation/reward": np.where(due, random.normal(level, error), np.nan)}
    return found | ({"evaluation/reward_ci95": np.where(due, 1.96 * error, np.nan)} if interval else {})


def healthy(random: Generator, steps: int = STEPS) -> Metrics:
    """All metrics of a run of RL that learns slowly, in bfloat16."""
    cut = random.binomial(GROUPS * ANSWERS, 0.04, steps) / (GROUPS * ANSWERS)
    return graded(random, line(0.3, 0.5, steps)) | {
        "policy/entropy": noisy(random, line(1.0, 0.4, steps), 0.05),
        "policy/clip_fraction": noisy(random, line(0.02, 0.02, steps), 0.5),
        "mismatch/logprob_gap_mean": noisy(random, line(0.01, 0.01, steps), 0.3),
        "mismatch/effective_share": 1 - noisy(random, line(0.02, 0.02, steps), 0.5),
        "rollout/staleness_max": np.zeros(steps),
        "response_length/mean": noisy(random, line(200, 300, steps), 0.05),
        "response_length/truncated_share": cut,
        "response_length/repeated_share": noisy(random, line(0.02, 0.03, steps), 0.3),
        "grad_norm": noisy(random, line(0.5, 0.5, steps), 0.5),
    }


def offline(loss: Array) -> Metrics:
    return {"loss": loss, "grad_norm": np.abs(loss)}


def solved(random: Generator) -> Metrics:
    """All answers become right; gradients are gone but for a few."""
    found = right_or_wrong(random, 0.5 / (1 + np.exp(-(np.arange(STEPS) - 30) / 6)) * 1.05)
    rest = np.where(found["reward/std"] == 0, 1e-5, 0.3)
    return found | {"grad_norm": rest, "policy/entropy": noisy(random, 1.0 * 0.97 ** np.arange(STEPS), 0.1)}


Shape = Callable[[Generator], Metrics]
SOUND: dict[str, Shape] = {  # name -> what differs from a healthy run
    "slow gain": lambda random: {},
    "flat around zero": lambda random: graded(random, np.zeros(STEPS)),
    "flat": lambda random: graded(random, np.full(STEPS, 0.5)),
    "fast gain": lambda random: graded(random, 0.1 + 0.8 / (1 + np.exp(-(np.arange(STEPS) - 25) / 5))),
    "negative": lambda random: graded(random, np.full(STEPS, -5.0), 2.0),
    "large and flat": lambda random: graded(random, np.full(STEPS, 100.0), 1.0),
    "sparse": lambda random: right_or_wrong(random, np.full(STEPS, 0.05)),
    "very sparse": lambda random: right_or_wrong(random, np.full(STEPS, 0.02)),
    "sparse gain": lambda random: right_or_wrong(random, line(0.02, 0.4)),
    "nearly all right": lambda random: right_or_wrong(random, np.full(STEPS, 0.49)),
    "heavy tails": lambda random: told(random.standard_t(2, (STEPS, GROUPS, ANSWERS))),
    "heavier tails": lambda random: told(random.pareto(1.5, (STEPS, GROUPS, ANSWERS))),
    "groups of one": lambda random: graded(random, line(0.0, 0.1), 0.5, answers=1),
    "right or wrong, groups of one": lambda random: right_or_wrong(random, line(0.2, 0.3), answers=1),
    "wandering": lambda random: graded(random, wandering(random, 0.5, 0.03)),
    "solved": solved,
    "held out flat": lambda random: evaluated(random, np.full(STEPS, 3.0), 0.15),
    "held out flat, no interval": lambda random: evaluated(random, np.full(STEPS, 3.0), 0.15, interval=False),
    "held out on 100 prompts": lambda random: evaluated(random, line(0.3, 0.5), 0.05),
    "held out of several sets": lambda random: evaluated(random, line(0.3, 0.5), 0.05, interval=False),
    "gap of bfloat16": lambda random: {"mismatch/logprob_gap_mean": np.exp(random.uniform(-5.3, -1.9, STEPS))},
    "gap of float32": lambda random: {"mismatch/logprob_gap_mean": noisy(random, line(4e-7, 2e-6), 0.3)},
    "gap that doubles": lambda random: {"mismatch/logprob_gap_mean": noisy(random, line(0.02, 0.04), 0.4)},
    "entropy falls": lambda random: {"policy/entropy": noisy(random, line(1.0, 0.15), 0.1)},
    "entropy rises": lambda random: {"policy/entropy": noisy(random, line(0.3, 0.7), 0.1)},
    "answers grow": lambda random: {"response_length/mean": noisy(random, line(200, 900), 0.1)},
    "some are cut off": lambda random: {
        "response_length/truncated_share": random.binomial(128, line(0.05, 0.15)) / 128
    },
    "wild gradients": lambda random: {"grad_norm": noisy(random, line(0.5, 0.5), 1.2)},
    "loss falls": lambda random: offline(noisy(random, 0.3 + 2 * np.exp(-np.arange(STEPS) / 40), 0.15)),
    "loss is flat": lambda random: offline(np.abs(random.normal(0.69, 0.1, STEPS))),
    "small loss": lambda random: offline(random.gamma(1.0, 0.02, STEPS)),
}


def sound(shape: str, random: Generator) -> Metrics:
    if "loss" in shape:
        return SOUND[shape](random)
    found = healthy(random)
    differs = SOUND[shape](random)
    if "reward/mean" in differs and "reward/uniform_groups_share" not in differs:
        del found["reward/uniform_groups_share"]
    return found | differs


def rows(metrics: Metrics) -> Iterator[Row]:
    """The rows of a run, as it would report them."""
    for values in zip(*metrics.values(), strict=True):
        yield {name: float(value) for name, value in zip(metrics, values, strict=True) if value == value}


def levels(metrics: Metrics) -> list[Row]:
    health = RunMonitor(lambda finding, step: None)
    return [health.check(step, row) for step, row in enumerate(rows(metrics), 1)]


def too_high_a_rate(random: Generator, strength: float, steps: int) -> Metrics:
    """Real runs at 100 and 25 times a good rate: entropy falls by 96 % and 55 % a step, and all answers become one."""
    alive = np.exp(-3.2 * strength * np.clip(np.arange(steps) - random.integers(2, 10), 0, None))
    end, one = random.choice([0.0, 1.0]), (alive < 0.1)[:, None, None]  # a bad answer, or as in those runs a good one
    answers = random.normal(0.3, 0.2, (steps, GROUPS, ANSWERS)) * alive[:, None, None]
    return told(np.where(one, end, answers + end * (1 - alive[:, None, None]))) | {
        "policy/entropy": noisy(random, alive, 0.05)
    }


def flipped_sign(random: Generator, strength: float, steps: int) -> Metrics:
    """A wrong sign at a quarter of the rate: in real runs the reward is halved in step 15 instead of 5.

    Advantages times -1/4 are no weaker fault, as Adam divides by their size; with the sign of every fourth step
    flipped a real run learns what it should.
    """
    level = 0.1 / (1 + np.exp((np.arange(steps) - 4 / strength) * strength)) if strength else np.full(steps, 0.1)
    prompts, own = random.normal(0, 0.5, (steps, GROUPS, 1)), random.normal(0, 0.5, (steps, GROUPS, ANSWERS))
    return told(level[:, None, None] * (1 + prompts + own))


def lost_weights(random: Generator, strength: float, steps: int) -> Metrics:
    """Of the updates a share never arrives: answers lag until the next one does, and differ by 0.1 nats and more."""
    lag, lost = np.zeros(steps), random.random(steps) < strength
    for step in range(1, steps):
        lag[step] = lag[step - 1] + 1 if lost[step] else 0
    return {"rollout/staleness_max": lag, "mismatch/logprob_gap_mean": noisy(random, 0.01 + 0.12 * lag, 0.3)}


def no_end(random: Generator, strength: float, steps: int) -> Metrics:
    """A share of the answers cannot end; a real run of a quarter has 25 to 35 % cut off."""
    share = 0.04 + 0.96 * strength
    return {"response_length/truncated_share": random.binomial(GROUPS * ANSWERS, share, steps) / (GROUPS * ANSWERS)}


def constant_reward(random: Generator, strength: float, steps: int) -> Metrics:
    """In a share of the steps the reward says one thing, as one does whose service is down at times.

    A reward that is constant for a quarter of the prompts cannot be told from prompts that are too easy or too hard.
    """
    said = random.normal(0.3, 0.2, (steps, GROUPS, ANSWERS))
    return told(np.where((random.random(steps) < strength)[:, None, None], 0.5, said))


FAULTS: dict[str, Callable[[Generator, float, int], Metrics]] = {
    "rate": too_high_a_rate,
    "sign": flipped_sign,
    "stale weights": lost_weights,
    "no end": no_end,
    "constant reward": constant_reward,
}


def first_step(metrics: Metrics, level: int) -> float:
    """The first step that is judged so, or worse; infinity: none."""
    health = RunMonitor(lambda finding, step: None)
    for step, row in enumerate(rows(metrics), 1):
        if health.check(step, row)["health/level"] >= level:
            return step
    return np.inf
