"""Steps of a run span by span, chosen so that the page does not grow, and the memory of its processes."""

from typing import Any

from trueline.report.digest import (
    EVENT_BYTES,
    MOST_POINTS,
    MOST_PROCESSES,
    MOST_STEPS,
    as_json,
    fit_bytes,
    memory,
    timeline,
)


def rows(count: int, spans: int = 2, longest: int = 7) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "start": 1.8e9 + 10 * step,
            "seconds": 30.0 if step == longest else 10.0,
            "spans": [[f"engine-{number}", "generate", 0.125 * number, 9.875] for number in range(spans)],
            "memory": {"run": 1.0, "policy-0": 2.0 + step},
        }
        for step in range(count)
    ]


def steps_of(found: Any, window: str) -> list[int]:
    first, length = found["windows"][window]
    return [row["step"] for row in found["steps"][first : first + length]]


def test_windows_of_a_long_run() -> None:
    found = timeline(rows(1000), MOST_STEPS)
    assert found is not None and len(found["steps"]) == 3 * MOST_STEPS  # the longest is among the first
    assert steps_of(found, "last") == list(range(980, 1000)) and steps_of(found, "first") == list(range(20))
    assert steps_of(found, "middle") == list(range(490, 510)) and steps_of(found, "worst") == [7]
    assert found["names"] == ["engine-0", "generate", "engine-1"]
    assert found["steps"][0]["spans"] == [[0, 1, 0.0, 9.875], [2, 1, 0.125, 9.875]]


def test_windows_of_a_short_run_share_its_steps() -> None:
    found = timeline(rows(3), MOST_STEPS)
    assert found is not None and [row["step"] for row in found["steps"]] == [0, 1, 2]
    assert all(steps_of(found, window) == [0, 1, 2] for window in ("first", "middle", "last"))
    assert timeline([], MOST_STEPS) is None


def test_many_spans_fit() -> None:
    many = rows(200, spans=200)
    found = fit_bytes(lambda count: timeline(many, count), MOST_STEPS, EVENT_BYTES // 4)
    assert len(as_json(found)) < EVENT_BYTES // 4 and steps_of(found, "last")[-1] == 199


def test_what_is_no_span_is_left_out() -> None:
    odd: list[Any] = [None, [], ["a", "b", 0, "c"], ["a", "b", float("nan"), 1], ["a", 3, 0, 1], ["a", "b", 0, 1]]
    found = timeline([{"step": 1, "start": 5.0, "seconds": 2.0, "spans": odd}, {"step": 2, "spans": 3}], 5)
    assert found is not None and found["steps"] == [{"step": 1, "start": 5.0, "seconds": 2.0, "spans": [[0, 1, 0, 1]]}]


def test_memory_of_the_largest_processes() -> None:
    found = memory(rows(1000))
    assert found is not None and len(found["step"]) == MOST_POINTS and found["step"][-1] == 999
    assert list(found["gib"]) == ["policy-0", "run"] and found["gib"]["policy-0"][-1] == 1001
    many = [{"step": 1, "memory": {f"engine-{number}": number for number in range(100)}}]
    most = memory([*many, {"step": 2}, {"step": 3, "memory": {"engine-99": float("nan")}}])
    assert most is not None and len(most["gib"]) == MOST_PROCESSES and most["gib"]["engine-99"] == [99, None]
    assert memory([{"step": 1}, {"step": 2, "memory": 3}]) is None
