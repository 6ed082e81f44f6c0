"""What a process says of itself: while it lasts, in what it is nested, and in a file for others."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from trueline.monitoring.beats import Row, Work, clear_beats, read_beat, write_beat


def told(work: Work) -> list[tuple[str, str, int, bool]]:
    return [(row.kind, row.who, row.count, row.waits) for row in work.rows()]


def test_what_lasts_is_told_with_what_it_waits_for() -> None:
    work = Work()
    with work.doing("environment", "Game", "step"):
        assert told(work) == [("environment", "Game", 1, False)]
        with work.doing("reward", "judge"):
            assert told(work) == [("environment", "Game", 1, True), ("reward", "judge", 1, False)]
    assert told(work) == []


def test_a_part_of_a_call_is_not_what_the_call_waits_for() -> None:
    work = Work()
    with work.doing("call", "policy", "update"), work.doing("part", "optimizer step"):
        assert told(work) == [("call", "policy", 1, False), ("part", "optimizer step", 1, False)]


def test_tasks_begun_inside_count_for_what_they_were_begun_in() -> None:
    work = Work()

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
    work = Work()
    call = work.begin("call", "engine-0", "generate")
    assert told(work) == [("call", "engine-0", 1, False)]
    del call
    gc.collect()
    assert told(work) == []


def test_only_what_ends_well_has_moved_the_run() -> None:
    work = Work()
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


def test_an_end_counts_once() -> None:
    work = Work()
    with work.doing("phase", "train"):
        call = work.begin("call", "policy-0", "update")
        work.end(call)
        work.end(call)
        assert told(work) == [("phase", "train", 1, False)]


def test_others_read_what_was_written(tmp_path: Path) -> None:
    work = Work()
    with work.doing("call", "", "update"):
        write_beat(tmp_path, beat := work.beat("policy-0"))
    assert read_beat(tmp_path / "policy-0.beat") == beat
    assert (beat.pid, beat.rows) == (os.getpid(), [Row("call", "", "update", False, 1, beat.rows[0].since)])
    (tmp_path / "torn.beat").write_text('{"name": ')
    assert read_beat(tmp_path / "torn.beat") is None and read_beat(tmp_path / "none.beat") is None
    write_beat(tmp_path / "gone", beat)  # a folder that is not there costs nothing
    clear_beats(tmp_path)
    assert not list(tmp_path.iterdir())


def test_thousands_of_calls_are_few_rows() -> None:
    work = Work()
    calls = [work.begin("call", f"engine-{number % 8}", "generate") for number in range(4096)]
    assert [row.count for row in work.rows()] == [512] * 8
    for call in calls:
        work.end(call)
    assert work.rows() == []
