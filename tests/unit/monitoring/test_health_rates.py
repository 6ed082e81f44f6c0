"""How often the rules of health are wrong: sound runs that they call BAD, faults that they do not see.

With its soak tests and `-s` this file shows the shares that docs/metrics.md gives, of 200 runs of every shape.
"""

import numpy as np
import pytest

from tests.support.health_runs import FAULTS, SOUND, first_step, healthy, levels, sound
from trueline.monitoring.findings import HEALTH_LEVELS

RUNS, PATIENCE = 200, 60
FINE, WATCH, BAD = range(len(HEALTH_LEVELS))


def worst(shape: str, seed: int) -> float:
    return max(row["health/level"] for row in levels(sound(shape, np.random.default_rng(seed))))


def found(fault: str, strength: float, level: int, steps: int, runs: int = RUNS) -> float:
    """The share of runs with a fault that are judged so within some steps."""
    generators = [np.random.default_rng(seed) for seed in range(runs)]
    firsts = [first_step(healthy(one, steps) | FAULTS[fault](one, strength, steps), level) for one in generators]
    return float(np.mean([first <= steps for first in firsts]))


def test_at_most_one_sound_run_of_a_hundred_is_ever_bad_in_300_steps() -> None:
    """Shapes take turns."""
    shapes = list(SOUND)
    bad = [seed for seed in range(RUNS) if worst(shapes[seed % len(shapes)], seed) == BAD]
    assert len(bad) <= RUNS / 100, [shapes[seed % len(shapes)] for seed in bad]


@pytest.mark.soak
@pytest.mark.parametrize("shape", SOUND)
def test_no_shape_of_sound_runs_is_bad_more_often(shape: str) -> None:
    found = [worst(shape, seed) for seed in range(RUNS)]
    bad, watched = found.count(BAD) / RUNS, sum(level >= WATCH for level in found) / RUNS
    print(f"\n{shape}: BAD {bad:.1%}, WATCH or BAD {watched:.1%}")  # noqa: T201  (the figures of the docs)
    assert bad <= 0.01


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_bad_within_twenty_steps(fault: str) -> None:
    assert found(fault, 1.0, BAD, 20, runs=50) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_quarter_of_a_fault_is_seen_within_sixty_steps(fault: str) -> None:
    assert found(fault, 0.25, WATCH, PATIENCE) >= 0.9


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_fault_the_same_runs_are_not_even_watched(fault: str) -> None:
    assert found(fault, 0.0, WATCH, PATIENCE, runs=40) <= 0.05
