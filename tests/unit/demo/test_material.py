"""The demo's sums: what is held out stays out, and what the teacher gets wrong is the carry alone."""

import json
from pathlib import Path

import pytest

from trueline.demo.material import FORGETS, HELD_OUT, carries, make_data


def rows(file: Path) -> dict[tuple[int, int], int]:
    read = [json.loads(line) for line in file.read_text().splitlines()]
    terms = [row["prompt"].removesuffix("=").split("+") for row in read]
    return {(int(left), int(right)): int(row["answer"]) for (left, right), row in zip(terms, read, strict=True)}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, dict[tuple[int, int], int]]:
    make_data(tmp_path, seed=3)
    return {name: rows(tmp_path / f"{name}.jsonl") for name in ("held_out", "practice", "teacher")}


def test_truth_is_held_out_and_practised(data: dict[str, dict[tuple[int, int], int]]) -> None:
    held_out, practice = data["held_out"], data["practice"]
    assert len(held_out) == HELD_OUT and not set(held_out) & set(practice)
    assert all(left + right == answer for (left, right), answer in (held_out | practice).items())
    assert sum(carries(*pair) for pair in held_out | practice) == len(held_out | practice) / 2


def test_the_teacher_forgets_most_carries_and_errs_nowhere_else(data: dict[str, dict[tuple[int, int], int]]) -> None:
    slips = {pair: answer - sum(pair) for pair, answer in data["teacher"].items()}
    assert set(slips) == set(data["practice"])
    assert {slip for pair, slip in slips.items() if not carries(*pair)} == {0}
    carried = [slip for pair, slip in slips.items() if carries(*pair)]
    assert set(carried) == {0, -10}
    assert carried.count(-10) / len(carried) == pytest.approx(FORGETS, abs=0.03)
