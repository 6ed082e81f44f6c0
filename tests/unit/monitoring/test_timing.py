import logging
import time

import pytest

from trueline.monitoring.timing import (
    PEAK_TFLOPS,
    START,
    Timer,
    describe_parts,
    duration,
    flops_per_token,
    part_seconds,
    parts_in_log,
    speed_metrics,
)


def test_phases_add_up_until_they_are_flushed() -> None:
    timer = Timer()
    time.sleep(0.02)
    for _ in range(2):
        with timer.phase("train"):
            time.sleep(0.02)
    with timer.phase("save"):
        time.sleep(0.01)
    times = timer.flush()
    assert set(times) == {"time/train", "time/save", "time/step"}
    assert 0.04 <= times["time/train"] <= times["time/step"]
    assert times["time/save"] >= 0.01 and times["time/step"] >= 0.07  # all the time since the last flush
    again = timer.flush()
    assert set(again) == {"time/step"} and again["time/step"] < 0.02


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


def test_tokens_per_second_are_also_told_for_each_device() -> None:
    metrics = speed_metrics(tokens=3000, seconds=1.5, devices=4, flops=6 * 10**9, device_name="")
    assert metrics == {"speed/tokens_per_second": 2000.0, "speed/tokens_per_second_per_device": 500.0}


def test_mfu_is_six_flops_per_parameter_and_token_over_the_peak() -> None:
    """989 TFLOP/s on two devices: 1e9 parameters at 100 000 tokens per second need 600."""
    metrics = speed_metrics(200_000, 2.0, 2, flops_per_token(10**9, adapters=False), "NVIDIA H100 80GB HBM3")
    assert metrics["speed/mfu"] == pytest.approx(600 / (2 * 989))


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.0), ("NVIDIA H20", 148.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 80GB HBM3", 989.0)],
)
def test_a_device_is_known_by_its_name(name: str, peak: float) -> None:
    assert speed_metrics(1, 1.0, 1, 10**12, name)["speed/mfu"] == pytest.approx(1 / peak)


@pytest.mark.parametrize("name", ["", "NVIDIA RTX A1000", "NVIDIA GeForce GTX 1080", "AMD Instinct MI100", "Tesla T4"])
def test_an_unknown_device_has_no_mfu(name: str) -> None:
    assert "speed/mfu" not in speed_metrics(1, 1.0, 1, 10**9, name)


def test_no_name_hides_a_longer_one_behind_it() -> None:
    names = list(PEAK_TFLOPS)
    hidden = [(one, other) for at, one in enumerate(names) for other in names[at + 1 :] if one in other]
    assert hidden == []


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    assert flops_per_token(10, adapters=True) == 40


def test_parts_of_a_start_follow_each_other() -> None:
    parts = part_seconds(100.0, [("imports", 109.0), ("compile", 115.0), ("nothing", 115.1), ("compile", 121.4)])
    assert parts == pytest.approx({"imports": 9.0, "compile": 12.3, "nothing": 0.1})
    assert describe_parts(parts) == "imports 9, compile 12"


def test_what_a_library_logs_ends_a_part() -> None:
    log = logging.getLogger("tests.library")
    log.setLevel(logging.INFO)
    START.begin()
    with parts_in_log({"loading took": "weights", "captured": "graphs"}):
        log.info("Model loading took %s seconds", 3)
        log.info("something else")
        log.info("all is captured")
    log.info("Model loading took %s seconds", 4)
    assert [part for part, _ in START.ends] == ["weights", "graphs"]
    assert START.begun <= START.ends[0][1] <= START.ends[1][1] <= time.time()
