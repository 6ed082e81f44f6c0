"""What a process says of itself: while it lasts, in what it is nested, and in a file for others."""

import asyncio
import gc
import os
import queue
import socket
import threading
from pathlib import Path

import psutil
import pytest

from trueline.monitoring import heartbeat
from trueline.monitoring.heartbeat import ActivityGroup, ActivityLog, clear_beats, read_beat, start_beating, write_beat


def told(work: ActivityLog) -> list[tuple[str, str, int, bool]]:
    return [(row.kind, row.who, row.count, row.waits) for row in work.rows()]


def test_what_lasts_is_told_with_what_it_waits_for() -> None:
    work = ActivityLog()
    with work.doing("environment", "Game", "step"):
        assert told(work) == [("environment", "Game", 1, False)]
        with work.doing("reward", "judge"):
            assert told(work) == [("environment", "Game", 1, True), ("reward", "judge", 1, False)]
    assert told(work) == []


def test_a_part_of_a_call_is_not_what_the_call_waits_for() -> None:
    work = ActivityLog()
    with work.doing("call", "policy", "update"), work.doing("part", "optimizer step"):
        assert told(work) == [("call", "policy", 1, False), ("part", "optimizer step", 1, False)]


def test_tasks_begun_inside_count_for_what_they_were_begun_in() -> None:
    work = ActivityLog()

    async def reward() -> None:
        with work.doing("reward", "judge"):
            await asyncio.sleep(0.01)

    async def step() -> list[tuple[str, str, int, bool]]:
        with work.doing("environment", "Game", "step"):
            both = asyncio.gather(reward(), reward())
            await asyncio.sleep(0)
            found = told(work)
            await both
            return found

    assert asyncio.run(step()) == [("environment", "Game", 1, True), ("reward", "judge", 2, False)]


def test_what_nobody_waits_for_any_more_is_forgotten() -> None:
    work = ActivityLog()
    call = work.begin("call", "engine-0", "generate")
    assert told(work) == [("call", "engine-0", 1, False)]
    del call
    gc.collect()
    assert told(work) == []


def test_only_what_ends_well_has_moved_the_run() -> None:
    work = ActivityLog()
    work.moved = 0.0
    with pytest.raises(OSError), work.doing("reward", "judge"):
        raise OSError
    assert work.moved == 0.0 and told(work) == []
    with work.doing("reward", "judge"):
        pass
    assert work.moved > 0.0
    work.moved = 0.0
    with work.doing("phase", "train"):
        assert work.moved > 0.0


def test_others_read_what_was_written(tmp_path: Path) -> None:
    work = ActivityLog()
    with work.doing("call", "", "update"):
        write_beat(tmp_path, beat := work.beat("policy-0"))
    assert read_beat(tmp_path / "policy-0.beat") == beat
    assert (beat.pid, beat.rows) == (os.getpid(), [ActivityGroup("call", "", "update", False, 1, beat.rows[0].since)])
    (tmp_path / "torn.beat").write_text('{"name": ')
    assert read_beat(tmp_path / "torn.beat") is None and read_beat(tmp_path / "none.beat") is None
    write_beat(tmp_path / "gone", beat)  # a folder that is not there costs nothing
    clear_beats(tmp_path)
    assert not list(tmp_path.iterdir())


def test_thousands_of_calls_are_few_rows() -> None:
    work = ActivityLog()
    calls = [work.begin("call", f"engine-{number % 8}", "generate") for number in range(4096)]
    assert [row.count for row in work.rows()] == [512] * 8
    for call in calls:
        work.end(call)
    assert work.rows() == []


def test_the_oldest_of_a_kind_is_told_and_the_oldest_kind_first() -> None:
    work = ActivityLog()
    calls = [work.begin("call", who, "generate") for who in ("late", "early", "early")]
    for call, since in zip(calls, (30.0, 20.0, 10.0), strict=True):
        call.since = since
    assert [(row.who, row.count, row.since) for row in work.rows()] == [("early", 2, 10.0), ("late", 1, 30.0)]


def test_what_has_ended_inside_is_not_waited_for_and_what_follows_is_beside_it() -> None:
    work = ActivityLog()
    with work.doing("environment", "Game"):
        for _ in range(2):
            with work.doing("reward", "judge"):
                assert told(work)[0] == ("environment", "Game", 1, True)
            assert told(work) == [("environment", "Game", 1, False)]
    with work.doing("reward", "judge"):  # begun in nothing
        assert told(work) == [("reward", "judge", 1, False)]


def test_whoever_records_is_told_once_of_everything_that_ends() -> None:
    work, ended = ActivityLog(), []
    work.recorder = lambda doing: ended.append((doing.who, work.lock.locked()))
    with work.doing("phase", "train"):
        call = work.begin("call", "policy-0")
        work.end(call)
        work.end(call)
        assert told(work) == [("phase", "train", 1, False)]
    with pytest.raises(OSError), work.doing("reward", "judge"):
        raise OSError
    assert ended == [("policy-0", True), ("train", True), ("judge", True)]


def test_a_beat_says_who_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    work = ActivityLog()
    work.moved = 5.0
    monkeypatch.setattr("trueline.monitoring.heartbeat.time.time", lambda: 7.0)
    beat = work.beat("engine-0")
    assert (beat.name, beat.written, beat.moved) == ("engine-0", 7.0, 5.0)
    assert (beat.born, beat.host) == (psutil.Process().create_time(), socket.gethostname())
    work.move()
    assert work.beat("engine-0").moved == 7.0


def test_stacks_are_written_where_they_are_asked_for_and_once(tmp_path: Path) -> None:
    beat = ActivityLog().beat("policy-0")
    write_beat(tmp_path, beat)
    assert [file.name for file in tmp_path.iterdir()] == ["policy-0.beat"]  # nothing is left beside it
    (tmp_path / "policy-0.asked").touch()
    (tmp_path / "policy-1.asked").touch()
    write_beat(tmp_path, beat)
    stacks = (tmp_path / "policy-0.stacks").read_text()
    assert "Thread MainThread, the innermost first:" in stacks
    assert (
        f'  File "{__file__}", line ' in stacks
        and f"in {os.environ['PYTEST_CURRENT_TEST'].split('::')[1].split()[0]}" in stacks
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy-0.beat", "policy-0.stacks", "policy-1.asked"]
    (tmp_path / "policy-1.beat.77").touch()  # of a process that was killed while it wrote
    (tmp_path / "run.log").touch()
    clear_beats(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.log"]


def test_a_process_beats_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(heartbeat, "write_beat", lambda folder, beat: written.put(f"{folder.name} {beat.name}"))
    naps: queue.Queue[float] = queue.Queue()
    asleep = threading.Event()

    def sleep(seconds: float) -> None:
        naps.put(seconds)
        if naps.qsize() > 3:
            asleep.wait()  # it is a daemon, and ends with the tests

    monkeypatch.setattr("trueline.monitoring.heartbeat.time.sleep", sleep)
    start_beating(tmp_path, "critic-1")
    assert [written.get(timeout=60) for _ in range(3)] == [f"{tmp_path.name} critic-1"] * 3
    assert naps.get(timeout=60) == 0.001
