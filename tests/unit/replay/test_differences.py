"""When a number counts as different, and how steps and places are named."""

import math

import numpy as np
import pytest

from trueline.config.rl import RLConfig
from trueline.replay.differences import Gap, Replayed, changed_keys, narrow, token_gap, tolerance_of
from trueline.replay.steps import missing, spans
from trueline.runtime.actors import Stored
from trueline.training.samples import Fields, SampleBlock, SampleNumbers, StoredSamples

AGREES = tolerance_of(RLConfig.parse({"model": {"dtype": "float32"}}))


@pytest.mark.parametrize(
    ("name", "logged", "here", "agrees"),
    [
        ("loss", 1e-7, 9e-6, True),
        ("loss", 0.01, 0.01002, False),
        ("grad_norm", 10.0, 10.0009, True),
        ("grad_norm", 10.0, 10.002, False),
        ("learning_rate", 1e-6, 1.01e-6, False),
        ("critic/learning_rate", 1e-6, 1.00001e-6, True),
        ("loss", math.nan, math.nan, True),
        ("loss", math.nan, 0.0, False),
        ("loss", math.inf, 0.0, False),
    ],
)
def test_which_numbers_differ(name: str, logged: float, here: float, agrees: bool) -> None:
    assert AGREES(name, logged, here) is agrees


def test_bfloat16_may_differ_more() -> None:
    assert tolerance_of(RLConfig.parse({"model": {"dtype": "bfloat16"}}))("loss", 0.5, 0.515)


def test_the_first_token_that_differs_and_the_largest_difference() -> None:
    logged = np.array([-1.0, -2.0, -3.0, -4.0, -5.0], np.float32)
    rows = [SampleNumbers(length, length, 0, at, 0, 0.0, 0.0, False) for at, length in enumerate((2, 3))]
    block = SampleBlock(("old_logprobs",), (0, 1), Stored({"old_logprobs": logged}))
    samples = StoredSamples([0, 1], rows, Fields([2, 3], [block]))
    same = [logged[:2] + np.float32(1e-6), logged[2:]]
    assert token_gap(samples, same, AGREES).sample == -1
    other = [logged[:2], np.array([-3.0, -4.25, -5.5], np.float32)]
    assert token_gap(samples, other, AGREES) == Gap(0.5, 1, 1, -4.0, -4.25)


def test_the_first_difference_in_words() -> None:
    gap = Gap(0.5, 1, 7, -4.0, -4.25)
    found = Replayed(3, {"loss": 0.1234, "kl": 1.0}, {"loss": 0.124, "kl": 2.0}, gap, [], ["loss", "kl"])
    place = "token log-probs differ first at sample 1, token 7 (-4 in the run, -4.25 here)"
    assert found.first() == f"step 3: loss 0.1234 in the log, 0.124 here, {place}"
    found.different = []
    assert found.first() == f"step 3: {place}" and not found.agrees()
    found.tokens = None
    assert found.agrees()
    found.wrong = ["no row"]
    assert found.first() == "step 3: no row"


def test_only_keys_that_change_what_is_computed_are_causes() -> None:
    before = {"training": {"ranks": 2, "learning_rate": 1e-3, "engine": "deepspeed"}, "runtime": "ray"}
    given = {"training": {"ranks": 1, "learning_rate": 1e-2, "engine": "torch"}, "runtime": "local"}
    assert [*changed_keys(before, given)] == ["training.learning_rate is 0.001 in the run and 0.01 here"]
    assert not [*changed_keys(before, {"training": {"learning_rate": 1e-3}})]


def test_the_bottom_of_a_valley() -> None:
    assert narrow(lambda at: abs(at - 0.7), 0.25, 4.0) == pytest.approx(0.7, abs=1e-6)


def test_steps_in_words() -> None:
    assert spans([1, 2, 3, 5, 8, 9]) == "1-3, 5, 8-9"
    assert missing([1, 2, 4], 1, 4) == [3] and missing([3], 2, 3) == []
