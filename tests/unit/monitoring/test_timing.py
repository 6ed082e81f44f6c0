import time

import pytest

from trueline.monitoring.timing import Timer, duration


def test_phases_add_up_until_they_are_flushed() -> None:
    timer = Timer()
    for _ in range(2):
        with timer.phase("train"):
            time.sleep(0.02)
    with timer.phase("save"):
        time.sleep(0.01)
    times = timer.flush()
    assert set(times) == {"time/train", "time/save", "time/step"}
    assert 0.04 <= times["time/train"] <= times["time/step"]
    assert 0.01 <= times["time/save"] <= times["time/step"]


def test_a_step_is_all_the_time_since_the_last_flush() -> None:
    timer = Timer()
    time.sleep(0.02)
    with timer.phase("train"):
        time.sleep(0.01)
    assert timer.flush()["time/step"] >= 0.03
    again = timer.flush()
    assert set(again) == {"time/step"}
    assert again["time/step"] < 0.02


def test_a_phase_that_fails_is_counted() -> None:
    timer = Timer()
    with pytest.raises(KeyError), timer.phase("train"):
        time.sleep(0.01)
        raise KeyError
    assert timer.flush()["time/train"] >= 0.01


def test_durations_are_said_in_units_that_fit() -> None:
    said = {0.04: "0.04 s", 9.5: "9.5 s", 42.3: "42 s", 59.7: "1 min", 600: "10 min", 6600: "1 h 50 min"}
    for seconds, words in (said | {3600: "1 h 0 min", 86400 * 2 + 3600 * 5: "2 d 5 h"}).items():
        assert duration(seconds) == words
