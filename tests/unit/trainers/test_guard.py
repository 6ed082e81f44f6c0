from typing import Any

import pytest

from trueline.config.model import TrainingConfig
from trueline.trainers.guard import Guard, TrainingFailure


class Weights:
    """Stands for all ranks of a model: it has fingerprints, and a test changes them."""

    def __init__(self, *names: str) -> None:
        self.marks = dict.fromkeys(names, 0)

    def call(self, method: str, *args: Any) -> list[dict[str, int]]:
        assert method == "fingerprints"
        return [dict(self.marks)]

    def change(self, *names: str) -> None:
        self.marks |= {name: self.marks[name] + 1 for name in names}


def make_guard(weights: Weights, **training: Any) -> tuple[Guard, list[str]]:
    notes: list[str] = []
    guard = Guard(weights, TrainingConfig(**training), notes.append)  # type: ignore[arg-type]
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
    warnings = [note for note in notes if note.startswith("warning")]
    assert len(warnings) == 3
    assert "loss nan, gradient norm inf: not finite, so this step was skipped (2 in a row)" in warnings[-1]


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
    assert notes == ["changed    2 of 2 trained tensors (training) after step 1"]


def test_a_tensor_may_change_in_the_second_step_first() -> None:
    """LoRA's first matrix has no gradient while the second is zero."""
    weights = Weights("a", "b")
    guard, notes = make_guard(weights)
    weights.change("b")
    guard.check(report())
    weights.change("a", "b")
    guard.check(report())
    assert [note.split()[1] for note in notes] == ["1", "2"]


def test_a_tensor_that_never_changes_stops_the_run_by_name() -> None:
    weights = Weights("a", "b.bias", "c")
    guard, _ = make_guard(weights, learning_rate=1e-30)
    weights.change("a")
    guard.check(report())
    weights.change("a", "c")
    with pytest.raises(TrainingFailure) as caught:
        guard.check(report())
    for part in ("1 of 3 trained tensors did not change in 2 steps", "b.bias", "training.learning_rate=1e-30"):
        assert part in str(caught.value)


def test_skipped_steps_change_nothing_and_are_not_held_against_the_weights() -> None:
    weights = Weights("a")
    guard, _ = make_guard(weights)
    for _ in range(3):
        guard.check(report(skipped=True))
    weights.change("a")
    assert guard.check(report())["skipped_steps"] == 3.0


def test_without_watching_nothing_is_compared() -> None:
    notes: list[str] = []
    guard = Guard(Weights("a"), TrainingConfig(), notes.append)  # type: ignore[arg-type]
    for _ in range(4):
        guard.check(report())
    assert notes == []


def test_steps_without_a_gradient_are_not_held_against_the_weights() -> None:
    """All answers of the first prompts may get the same reward: then nothing can be learnt, and nothing is broken."""
    guard, _ = make_guard(Weights("a"))
    for _ in range(3):
        guard.check(report() | {"grad_norm": 0.0})
