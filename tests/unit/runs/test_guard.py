from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueline.config.model import TrainingConfig
from trueline.monitoring.findings import WATCH, Finding
from trueline.monitoring.limits import STALLED_CHANGE as STILL
from trueline.monitoring.limits import STALLED_STEPS as WINDOW
from trueline.runs.guard import TrainingFailure, UpdateMonitor, has_moved, relative_change


class Weights:
    """Stands for all ranks of a model: it has fingerprints, and a test changes them."""

    def __init__(self, *names: str) -> None:
        self.marks = dict.fromkeys(names, 0)
        self.drift = 0.0

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        sample = np.array([3.0, 4.0]) * (1 + self.drift)
        return {"fingerprints": [dict(self.marks)], "weight_sample": [sample]}[method.__name__]

    def change(self, *names: str) -> None:
        self.marks |= {name: self.marks[name] + 1 for name in names}


def make_guard(weights: Weights, **training: Any) -> tuple[UpdateMonitor, list[Finding]]:
    notes: list[Finding] = []
    guard = UpdateMonitor(weights, TrainingConfig(**training), notes.append)  # type: ignore[arg-type]
    guard.watch()
    return guard, notes


def report(skipped: bool = False) -> dict[str, float]:
    loss = float("nan") if skipped else 0.5
    return {"loss": loss, "grad_norm": float("inf") if skipped else 1.0, "skipped": float(skipped)}


def test_skipped_steps_are_counted_in_place_of_the_flag() -> None:
    weights = Weights("a")
    guard, notes = make_guard(weights)
    weights.change("a")
    counts = [guard.check(report(skipped))["skipped_steps"] for skipped in (False, True, False, True, True)]
    assert counts == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert guard.check(report()) == {"loss": 0.5, "grad_norm": 1.0, "skipped_steps": 3.0}
    skipped = [note for note in notes if note.code == "not_finite"]
    assert [note.level for note in skipped] == [WATCH] * 3
    assert skipped[-1].what == "loss nan, gradient norm inf: not finite, so this step was skipped (2 in a row)"


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_too_many_in_a_row_stop_the_run(limit: int) -> None:
    guard, _ = make_guard(Weights("a"), max_bad_steps=limit)
    for _ in range(limit):
        guard.check(report(skipped=True))
    with pytest.raises(TrainingFailure) as caught:
        guard.check(report(skipped=True))
    for part in (f"{limit + 1} steps in a row", f"training.max_bad_steps={limit}", "training.learning_rate"):
        assert part in str(caught.value)


def test_a_good_step_begins_the_count_in_a_row_anew() -> None:
    weights = Weights("a")
    guard, _ = make_guard(weights, max_bad_steps=1)
    weights.change("a")
    for skipped in (True, False, True, False, True):
        guard.check(report(skipped))
    assert (guard.skipped, guard.in_a_row) == (3, 1)


def test_counting_goes_on_where_a_resumed_run_stood() -> None:
    guard, _ = make_guard(Weights("a"))
    guard.skipped = 7
    assert guard.check(report(skipped=True))["skipped_steps"] == 8.0


def test_weights_that_all_change_are_looked_at_once() -> None:
    weights = Weights("a", "b")
    guard, notes = make_guard(weights)
    weights.change("a", "b")
    guard.check(report())
    guard.check(report())
    assert [note.what for note in notes] == ["All 2 trainable tensors changed in step 1"]


def test_a_tensor_may_change_in_the_second_step_first() -> None:
    """LoRA's first matrix has no gradient while the second is zero."""
    weights = Weights("a", "b")
    guard, notes = make_guard(weights)
    weights.change("b")
    guard.check(report())
    weights.change("a", "b")
    guard.check(report())
    assert [note.what.split()[0] for note in notes] == ["1", "All"]


def test_a_tensor_that_never_changes_stops_the_run_by_name() -> None:
    weights = Weights("a", "b.bias", "c")
    guard, _ = make_guard(weights, learning_rate=1e-30)
    weights.change("a")
    guard.check(report())
    weights.change("a", "c")
    with pytest.raises(TrainingFailure) as caught:
        guard.check(report())
    for part in ("1 of 3 trainable tensors did not change in 2 steps", "b.bias", "training.learning_rate=1e-30"):
        assert part in str(caught.value)


def test_skipped_steps_change_nothing_and_are_not_held_against_the_weights() -> None:
    weights = Weights("a")
    guard, _ = make_guard(weights)
    for _ in range(3):
        guard.check(report(skipped=True))
    weights.change("a")
    assert guard.check(report())["skipped_steps"] == 3.0


def test_without_watching_nothing_is_compared() -> None:
    notes: list[Finding] = []
    guard = UpdateMonitor(Weights("a"), TrainingConfig(), notes.append)  # type: ignore[arg-type]
    for _ in range(4):
        guard.check(report())
    assert notes == []


def test_steps_without_a_gradient_are_not_held_against_the_weights() -> None:
    """All answers of the first prompts may get the same reward: then nothing can be learnt, and nothing is broken."""
    guard, _ = make_guard(Weights("a"))
    for _ in range(3):
        guard.check(report() | {"grad_norm": 0.0})


NOISE = [0.1, 0.3] * WINDOW
STEPS = np.arange(len(NOISE))


def test_a_number_moves_when_its_means_differ_beyond_their_error() -> None:
    assert not has_moved([0.5] * WINDOW)
    assert not has_moved(NOISE[:WINDOW])
    assert has_moved((np.array(NOISE) + 0.02 * STEPS)[:WINDOW].tolist())
    assert has_moved([0.5] * (WINDOW - 1) + [0.6]) is False  # one step of ten is no trend


def test_change_is_relative_to_the_norm() -> None:
    assert relative_change(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(0.1)


def followed(history: list[float], drift: float, rate: float = 1e-6, suited: float = 1e-3) -> list[Finding]:
    weights = Weights("a")
    notes: list[Finding] = []
    guard = UpdateMonitor(weights, TrainingConfig(learning_rate=rate), notes.append)  # type: ignore[arg-type]
    guard.suited = suited
    guard.watch()
    guard.made = 1
    weights.drift = drift
    for value in history:
        guard.follow("reward/mean", value)
    return notes


def test_a_run_that_gets_nowhere_is_told_after_a_window_and_after_twice_as_many() -> None:
    notes = followed(NOISE[:WINDOW] * 4, drift=STILL / 2)
    assert [(note.code, note.what.split()[1]) for note in notes] == [("stalled", count) for count in ("20", "40", "80")]
    for part in ("reward/mean", "(0.2)", "5.0e-03", "training.learning_rate=1e-06", "1e-03", "raise it"):
        assert part in notes[0].text()


def test_a_run_whose_rewards_or_weights_move_is_left_alone() -> None:
    assert followed(NOISE[:WINDOW], drift=2 * STILL) == []
    assert followed((np.array(NOISE) + 0.02 * STEPS)[:WINDOW].tolist(), drift=0.0) == []


def test_steps_that_were_not_finite_do_not_count() -> None:
    assert followed([float("nan")] * WINDOW, drift=0.0) == []
    assert len(followed([float("nan")] * WINDOW + NOISE[:WINDOW], drift=0.0)) == 1


def test_a_rate_that_suits_is_not_blamed() -> None:
    (note,) = followed(NOISE[:WINDOW], drift=0.0, rate=1e-3)
    assert "check data and rewards" in note.why and "raise it" not in note.why


def test_steps_before_the_first_update_do_not_count() -> None:
    guard, notes = make_guard(Weights("a"))
    for _ in range(WINDOW):
        guard.follow("reward/mean", 0.0)
    assert notes == guard.history == []
