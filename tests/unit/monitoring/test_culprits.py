"""Each rule finds its culprit, and the more telling rule comes first."""

import shutil
from pathlib import Path

import pytest

from trueline.monitoring.heartbeat import ELSEWHERE, GONE, ActivityGroup, Heartbeat, SeenProcess, run_py_spy
from trueline.monitoring.watch import CULPRITS, SAVING, Situation, find_culprit
from trueline.training.worker import Worker

NOW, PLENTY = 1_000_000.0, 500 * 2**30
IN_ALL_REDUCE = """Thread 0x00007f (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 3027 in all_reduce
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/venv/trueline/training/engines/torch_engine.py", line 80 in step
"""
IN_BARRIER = """Thread 12 (idle): "MainThread"
    barrier (torch/distributed/distributed_c10d.py:4800)
    step (trueline/training/engines/torch_engine.py:80)
"""
COMPUTING = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/venv/torch/nn/functional.py", line 2300 in linear
"""


def row(kind: str, who: str, what: str = "", age: float = 200.0, count: int = 1, waits: bool = False) -> ActivityGroup:
    return ActivityGroup(kind, who, what, waits, count, NOW - age)


def seen(name: str, *rows: ActivityGroup, state: str = "sleeping", stack: str = "", silent: float = 0.5) -> SeenProcess:
    beat = Heartbeat(name, 1, 0.0, "here", NOW - silent, NOW - 200, sorted(rows, key=lambda one: one.since))
    return SeenProcess(beat, state, stack)


def named(
    *rows: ActivityGroup, others: list[SeenProcess] | None = None, free: int = PLENTY, driver: str = "sleeping"
) -> str:
    return find_culprit(Situation(seen("run", *rows, state=driver), others or [], "/runs/first", free, NOW))


ROLLOUT, TRAIN, SAVE = (row("phase", name, age=210) for name in ("rollout", "train", "save"))
GENERATE = row("call", "engine-0", "generate", count=8)
UPDATES = [row("call", f"policy-{rank}", "update", age=100) for rank in range(4)]
URL = "https://judge.example/v1"


def test_a_process_that_is_gone() -> None:
    others = [seen("engine-0"), seen("engine-1", state=GONE), seen("engine-2", state=ELSEWHERE)]
    assert named(ROLLOUT, GENERATE, others=others).startswith("engine-1's process is gone;")
    assert named(row("phase", "end"), others=others) == "the run itself is in `end` since 3 min"


def test_a_process_that_is_stopped() -> None:
    others = [seen("engine-0", state="stopped"), seen("engine-1", state="stopped")]
    assert named(ROLLOUT, GENERATE, others=others).startswith("engine-0 is stopped (state T), so are engine-1")
    assert named(ROLLOUT, GENERATE, driver="stopped").startswith("run is stopped (state T)")


def test_a_child_that_is_stopped() -> None:
    engine = SeenProcess(seen("engine-0").beat, "sleeping", stopped_children=["VLLM::EngineCore, pid 7"])
    said = "a child process of engine-0 (VLLM::EngineCore, pid 7) is stopped (state T)"
    assert named(ROLLOUT, GENERATE, others=[engine]) == said


def test_a_disk_that_is_full_and_one_that_is_slow() -> None:
    assert all(callable(vars(Worker).get(method)) for method in SAVING)
    call = row("call", "policy-0", Worker.save_result.__name__, age=90)
    full = named(SAVE, call, free=0)
    assert full.startswith("the disk of /runs/first is full; a checkpoint is being written by policy-0 since 4 min")
    assert named(SAVE, call) == "a checkpoint is being written by policy-0 since 4 min, to /runs/first (500 GiB free)"
    assert named(ROLLOUT, free=0) == "the disk of /runs/first is full"


def test_data_that_never_come() -> None:
    assert named(row("phase", "plan"), row("data", "data.path", "a.jsonl", age=30)) == (
        "the data is being read since 30 s: data.path=a.jsonl"
    )


def test_a_reward_that_does_not_answer() -> None:
    rows = [ROLLOUT, row("group", "train", count=4), row("environment", "SingleTurn", "step", waits=True)]
    reward = row("reward", "judge", URL, age=50, count=31)
    assert named(*rows, reward) == f"reward `judge` has not answered for 50 s: 31 calls wait on {URL}"


def test_an_environment_that_waits_for_nothing_else() -> None:
    stuck = row("environment", "Game", "step", age=40, count=2)
    waits = row("environment", "Game", "step", age=45, waits=True)
    reward = row("reward", "judge", URL, age=30)
    assert named(ROLLOUT, stuck, waits, reward) == (
        "environment Game has not returned from `step` for 40 s: 2 episodes wait"
    )


def test_what_is_waited_for_longest_is_blamed() -> None:
    reward = row("reward", "judge", URL, age=5)
    engine = seen("engine-0", row("call", "", "generate"))
    assert named(ROLLOUT, GENERATE, reward, others=[engine]) == (
        "engine-0 has not answered for 3 min: 8 calls wait for `generate`; it is in `generate` since 3 min"
    )


def test_a_rank_that_is_elsewhere_while_the_others_meet() -> None:
    waiting = [seen(f"policy-{rank}", row("call", "", "update"), stack=IN_ALL_REDUCE) for rank in range(3)]
    late = seen("policy-3", row("call", "", "update"), row("part", "optimizer step", age=10), stack=COMPUTING)
    assert named(TRAIN, *UPDATES, others=[*waiting, late]) == (
        "policy rank 3 is in the optimizer step of `update` since 3 min, "
        "while policy ranks 0-2 wait in a collective (all_reduce)"
    )
    done = seen("policy-3", stack=COMPUTING)
    assert named(TRAIN, *UPDATES[:3], others=[*waiting, done]).startswith("policy rank 3 has no call to work on, while")


def test_ranks_that_meet_in_different_places_or_nowhere() -> None:
    two = [seen("policy-0", stack=IN_ALL_REDUCE), seen("policy-1", stack=IN_BARRIER)]
    assert named(TRAIN, others=two) == (
        "ranks wait in different collectives: policy rank 0 in all_reduce, policy rank 1 in barrier"
    )
    same = [seen("policy-0", stack=IN_BARRIER), seen("policy-1", stack=IN_BARRIER)]
    assert named(TRAIN, others=same).startswith("policy ranks 0-1 all wait for each other in barrier")


def test_while_weights_travel_only_those_who_are_asked_to_meet() -> None:
    others = [seen("policy-0", stack=IN_BARRIER), seen("policy-1"), seen("engine-0", row("call", "", "receive"))]
    calls = [row("call", "policy-0", "send_weights"), row("call", "engine-0", "receive")]
    assert named(row("phase", "sync"), *calls, others=others) == (
        "engine rank 0 is in `receive` since 3 min, while policy rank 0 waits in a collective (barrier)"
    )


def test_a_process_that_lives_but_tells_nothing() -> None:
    engine = seen("engine-0", row("call", "", "generate"), silent=150)
    assert named(ROLLOUT, GENERATE, others=[engine]).endswith("since 3 min (last heartbeat 2 min ago)")


def test_the_run_itself() -> None:
    assert named(row("phase", "score", age=45)) == "the run itself is in `score` since 45 s"
    assert named() == "nothing is in flight; see the stacks"


@pytest.mark.parametrize("rule", CULPRITS)
def test_rules_are_silent_where_all_is_well(rule: object) -> None:
    assert callable(rule) and rule(Situation(seen("run"), [seen("policy-0")], "/runs/first", PLENTY, NOW)) == ""


@pytest.mark.parametrize(("status", "found"), [(0, "thread of 4711\n"), (1, "")])
def test_what_py_spy_prints_of_a_process_is_taken_as_text(
    status: int, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f'#!/bin/sh\necho "thread of $4"\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: str(tool))
    assert run_py_spy(4711) == found
