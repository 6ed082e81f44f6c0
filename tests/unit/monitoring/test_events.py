"""Who did what from when to when: merged as it comes, bounded, and nothing lost where a row ends."""

import gc
import json
import os
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trueline.config.run import MonitoringConfig
from trueline.monitoring import events as module
from trueline.monitoring.events import GAP_SECONDS, MOST_SPANS, Events, add_span, close_gaps, resident_memory
from trueline.monitoring.heartbeat import Activity, ActivityLog, write_beat
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker

QUIET = MonitoringConfig(tensorboard=False)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def recorder(clock: Clock, tmp_path: Path) -> Events:
    return Events(tmp_path, ActivityLog())


def begun(recorder: Events, clock: Clock, *words: str) -> Activity:
    doing = recorder.work.begin(*words)
    doing.since = clock.now
    return doing


def do(recorder: Events, clock: Clock, seconds: float, *words: str) -> None:
    doing = begun(recorder, clock, *words)
    clock.now += seconds
    recorder.work.end(doing)


def lane(*spans: tuple[float, float]) -> list[tuple[float, float]]:
    made: list[tuple[float, float]] = []
    for span in spans:
        add_span(made, *span)
    return made


def test_spans_that_overlap_or_nearly_touch_are_one() -> None:
    near = GAP_SECONDS / 2
    assert lane((0, 1), (0.5, 2), (2 + near, 3)) == [(0, 3)]
    assert lane((0, 1), (1.5, 2)) == [(0, 1), (1.5, 2)]
    assert lane((1, 2), (3, 4), (5, 6), (0, 7)) == [(0, 7)]  # a long one that ends last
    assert lane((1, 2), (3, 4), (2.5, 5)) == [(1, 2), (2.5, 5)]


def test_kinds_of_work_have_their_rows(recorder: Events, clock: Clock) -> None:
    for kind in ("phase", "call", "reward", "environment", "group", "data", "part"):
        do(recorder, clock, 1.0, kind, "who", "what")
    assert recorder.row()["spans"] == [
        ["run", "who", 0.0, 1.0],
        ["who", "what", 1.0, 2.0],
        ["rewards", "who", 2.0, 3.0],
        ["environments", "who", 3.0, 4.0],
    ]


def test_work_under_way_is_cut_where_a_row_ends_and_goes_on_in_the_next(recorder: Events, clock: Clock) -> None:
    clock.now += 1
    call = begun(recorder, clock, "call", "engine-0", "generate")
    clock.now += 2
    first = recorder.row()
    clock.now += 4
    second = recorder.row()
    clock.now += 1
    recorder.work.end(call)
    clock.now += 1
    third, fourth = recorder.row(), recorder.row()
    assert (first["start"], first["seconds"], first["spans"]) == (1000.0, 3.0, [["engine-0", "generate", 1.0, 3.0]])
    assert (second["start"], second["spans"]) == (1003.0, [["engine-0", "generate", 0.0, 4.0]])
    assert (third["start"], third["spans"]) == (1007.0, [["engine-0", "generate", 0.0, 1.0]])
    assert fourth["spans"] == []


def test_work_that_failed_is_told_and_what_was_forgotten_is_not(recorder: Events, clock: Clock) -> None:
    failed, forgotten = (begun(recorder, clock, "call", "engine-0", name) for name in ("generate", "alive"))
    clock.now += 1
    recorder.work.end(failed, well=False)
    del forgotten
    gc.collect()
    assert recorder.row()["spans"] == [["engine-0", "generate", 0.0, 1.0]]


def test_many_spans_of_a_step_become_fewer_that_cover_them(recorder: Events, clock: Clock) -> None:
    for number in range(5 * MOST_SPANS):
        do(recorder, clock, 0.01, "call", f"engine-{number % 4}", "generate")
        clock.now += 0.01 * (number % 7)
    row = recorder.row()
    assert len(row["spans"]) == MOST_SPANS and "left_out" not in row
    for who in range(4):
        spans = [span[2:] for span in row["spans"] if span[0] == f"engine-{who}"]
        assert spans == sorted(spans) and all(one[1] < other[0] for one, other in pairwise(spans))
    assert row["spans"][0][2] == 0.0 and max(span[3] for span in row["spans"]) > row["seconds"] - 0.1


def test_a_lane_never_holds_many_more_than_a_step_shows() -> None:
    made: list[tuple[float, float]] = []
    for number in range(20_000):
        add_span(made, number, number + 0.5)
        assert len(made) <= 2 * MOST_SPANS
    assert len(made) > MOST_SPANS and made[0][0] == 0 and made[-1][1] == 19_999.5


def test_the_shortest_gaps_are_closed_first() -> None:
    made = lane((0, 1), (2, 3), (3.5, 4), (9, 10), (10.2, 11))
    close_gaps(made, 2)
    assert made == [(0, 1), (2, 4), (9, 11)]
    close_gaps(made, 9)
    assert made == [(0, 11)]


def test_of_more_processes_than_spans_the_longest_and_all_phases_stay(recorder: Events, clock: Clock) -> None:
    do(recorder, clock, 0.001, "phase", "save")
    for number in range(MOST_SPANS + 50):
        do(recorder, clock, 0.1 + 0.001 * number, "call", f"engine-{number}", "generate")
    row = recorder.row()
    names = {span[0] for span in row["spans"]}
    assert len(row["spans"]) == MOST_SPANS and row["left_out"] == 51
    assert {"run", f"engine-{MOST_SPANS + 49}"} <= names and "engine-0" not in names


def test_threads_end_work_while_rows_are_taken(tmp_path: Path) -> None:
    work = ActivityLog()
    recorder, rows, begin = Events(tmp_path, work), [], threading.Barrier(9)

    def ask(name: str) -> None:
        begin.wait()
        for _ in range(500):
            with work.doing("call", name, "generate"):
                pass

    threads = [threading.Thread(target=ask, args=(f"engine-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    begin.wait()
    while any(thread.is_alive() for thread in threads):
        rows.append(recorder.row())
    rows.append(recorder.row())
    assert {span[0] for row in rows for span in row["spans"]} == {f"engine-{number}" for number in range(8)}
    assert all(0 <= span[2] <= span[3] <= row["seconds"] for row in rows for span in row["spans"])
    assert work.rows() == []


def test_rows_stand_beside_the_times_of_steps_and_are_cut_on_resuming(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for resumed, steps in ((0, range(4)), (2, range(3, 5))):
        work = ActivityLog()
        tracker = Tracker(folder, QUIET, resumed)
        tracker.follow(Events(tmp_path, work))
        for step in steps:
            with work.doing("phase", f"train {resumed}"):
                pass
            tracker.log(step, {"loss": 1.0})  # a row without times is no step
            tracker.log(step, {"time/step": 0.1})
        tracker.close()
        assert work.recorder is None
    rows = read(folder.events)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["spans"][0][1] for row in rows] == ["train 0"] * 3 + ["train 2"] * 2
    assert [row["step"] for row in read(tmp_path / "events.after_step_000002.jsonl")] == [3]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_later_recorder_stays_when_an_earlier_one_stops(tmp_path: Path) -> None:
    work = ActivityLog()
    first, second = Events(tmp_path, work), Events(tmp_path, work)
    first.stop()
    assert work.recorder == second.add
    second.stop()
    assert work.recorder is None


def test_memory_is_that_of_processes_that_live_here(tmp_path: Path) -> None:
    beat = ActivityLog().beat("policy-0")
    write_beat(tmp_path, beat)
    write_beat(tmp_path, replace(beat, name="engine-0", host="elsewhere"))
    write_beat(tmp_path, replace(beat, name="engine-1", born=beat.born - 1000))  # another process had this number
    write_beat(tmp_path, replace(beat, name="run"))
    found = resident_memory(tmp_path)
    assert set(found) == {"run", "policy-0"} and beat.pid == os.getpid()
    assert found["run"] == pytest.approx(found["policy-0"], rel=0.2) and 0.01 < found["run"] < 64


def test_memory_is_looked_at_once_a_second_at_most(recorder: Events, clock: Clock) -> None:
    looked = []
    for _ in range(10):
        clock.now += 0.3
        looked.append("memory" in recorder.row())
    assert looked == [True, False, False, False, True, False, False, False, True, False]
