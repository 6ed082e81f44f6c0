"""What is printed of completions without a reward: a new cause at once, an old one each time failures have doubled."""

import pytest

from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.rollout.failures import MOST_FILES, FailureBudget, RolloutFailure

TRACEBACK = 'reward.function=mine.py:f: Traceback (most recent call last):\n  File "/my/mine.py", line {}, in f\n{}'


def ended(error: str = "") -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "1:"}])
    outcome = Outcome.REWARD_ERROR if error else Outcome.FINISHED
    return Trajectory(prompt, 0, outcome=outcome, error=error, reward=None if error else 1.0)


def raised(error: str, line: int = 3) -> Trajectory:
    return ended(TRACEBACK.format(line, error))


def kept(number: int, trajectory: Trajectory) -> str:
    return f"file {number}"


def test_the_first_failure_is_reported_with_its_cause_and_its_file() -> None:
    budget = FailureBudget(1.0, 4, kept)
    assert budget.add([ended(), ended()]) == 0
    assert budget.news() == [] and budget.total() == []
    assert budget.add([ended(), raised("KeyError: 'a'")]) == 1
    (line,) = budget.news()
    assert line.startswith(
        "warning: 1 of the last 4 completions got no reward (reward_error: KeyError: 'a' (mine.py, line 3"
    )
    assert line.endswith("; reproduce it: file 1")
    assert budget.news() == []


def test_a_cause_is_the_exception_and_its_line_whatever_its_message() -> None:
    budget = FailureBudget(1.0, 100, kept)
    budget.add([raised("KeyError: 'a'")])
    assert len(budget.news()) == 1
    budget.add([ended(), raised("KeyError: 'b'"), ended()])
    (doubled,) = budget.news()
    assert "1 of the last 3" in doubled and "KeyError: 'a'" in doubled
    budget.add([raised("KeyError: 'c'")])
    assert budget.news() == []  # three, and two were reported
    budget.add([raised("KeyError: 'c'", line=9)])
    (new,) = budget.news()
    assert "2 of the last 2" in new and "line 9" in new and "file 2" in new
    budget.add([raised("ValueError: 'c'", line=9)])
    assert "ValueError" in budget.news()[0]
    assert budget.total() == [
        "failed     5 of 7 completions got no reward: 3 x reward_error: KeyError: 'a' (mine.py, line 3); "
        "1 x reward_error: KeyError: 'c' (mine.py, line 9); 1 x reward_error: ValueError: 'c' (mine.py, line 9)"
    ]


def test_lines_grow_slower_than_failures() -> None:
    budget = FailureBudget(1.0, 100)
    lines = 0
    for _ in range(1000):
        budget.add([raised("KeyError: 'a'")])
        lines += len(budget.news())
    assert lines == 10  # at 1, 2, 4, ... 512


def test_an_evaluation_counts_failures_and_spends_no_budget() -> None:
    budget = FailureBudget(0.0, 1, kept)
    assert budget.count([raised("KeyError: 'a'")]) == 1
    assert len(budget.news()) == 1 and "1 of 1" in budget.total()[0]
    with pytest.raises(RolloutFailure, match=r"1 of the last 1 completions have[^#]*2 x reward_error[^#]*file 1"):
        budget.add([raised("KeyError: 'b'")])


def test_files_are_few() -> None:
    numbers: list[int] = []

    def write(number: int, trajectory: Trajectory) -> str:
        numbers.append(number)
        return ""

    budget = FailureBudget(1.0, 100, write)
    for line in range(2 * MOST_FILES):
        budget.add([raised("KeyError: 'a'", line)])
    assert numbers == list(range(1, MOST_FILES + 1))
    assert "its call" not in budget.news()[0]


def test_the_place_is_one_of_the_users_own_files() -> None:
    deep = '  File "/folder/mine.py", line 3, in f\n  File "/x/lib/python3.11/json/decoder.py", line 355, in decode\n'
    budget = FailureBudget(1.0, 4)
    budget.add([ended(f"Traceback:\n{deep}ValueError: {'x' * 999}")])
    (line,) = budget.news()
    assert "(mine.py, line 3)" in line and len(line) < 450
