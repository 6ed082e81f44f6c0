"""One report for each silence, to the screen and to a file; and the same for whoever asks from outside."""

import queue
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from trueline.config.base import ConfigError
from trueline.monitoring import heartbeat
from trueline.monitoring.findings import FINE, REFUSED, Finding
from trueline.monitoring.heartbeat import ELSEWHERE, GONE, WORK, SeenProcess, look_at_process, read_beat, write_beat
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.watch import Watch, explain

HOUR = 3600.0  # of silence; nothing here takes as long, so that only `check` reports, at the time it is given


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (folder := tmp_path / "logs").mkdir()
    return folder


def test_a_silence_is_reported_once_and_the_next_one_again(logs: Path) -> None:
    said: list[str] = []
    (logs / "policy-0.beat").write_text("of a run before")
    with Watch(10 * HOUR, said.append) as watch, WORK.doing("phase", "score"):
        watch.move(logs, said.append)
        assert not (logs / "policy-0.beat").exists() and not watch.aside.exists()
        watch.check(WORK.moved + HOUR - 1)
        assert not said
        watch.check(WORK.moved + HOUR + 1)
        watch.check(WORK.moved + 3 * HOUR)
        assert len(said) == 1
        assert explain(logs.parent).startswith("The run makes progress: it computes log-probs (`score`) since ")
        WORK.moved -= HOUR
        watch.check(WORK.moved)
        assert explain(logs.parent).startswith("the run itself is in `score` since")
        with WORK.doing("phase", "train"):
            watch.check(WORK.moved + HOUR - 1)
            assert len(said) == 1
            watch.check(WORK.moved + HOUR + 1)
    first, second = said
    assert first.startswith("stuck: the run itself is in `score` since") and str(logs / "stuck-1.txt") in first
    assert second.startswith("stuck: the run itself is in `train` since")
    whole = (logs / "stuck-2.txt").read_text()
    assert whole.splitlines()[0] == second.splitlines()[0].removeprefix("stuck: ")
    assert "== stacks of run" in whole and "test_a_silence_is_reported_once" in whole
    assert sorted(file.name for file in logs.iterdir()) == ["stuck-1.txt", "stuck-2.txt"]


def test_what_moves_in_another_process_moves_the_run(logs: Path) -> None:
    said: list[str] = []
    with Watch(10 * HOUR, said.append) as watch, WORK.doing("phase", "train"):
        watch.move(logs, said.append)
        write_beat(logs, replace(WORK.beat("policy-0"), moved=WORK.moved + HOUR))
        watch.check(WORK.moved + HOUR + 1)
        assert not said
        watch.check(WORK.moved + 2 * HOUR + 1)
        assert len(said) == 1


def test_of_runs_in_runs_only_the_inner_one_reports() -> None:
    said: list[str] = []
    with Watch(10 * HOUR, said.append) as outer, WORK.doing("phase", "train"):
        with Watch(10 * HOUR, said.append):
            outer.check(WORK.moved + 2 * HOUR)
            assert not said
        outer.check(WORK.moved + 2 * HOUR)
        assert len(said) == 1


def test_the_thread_reports_by_itself() -> None:
    said: queue.Queue[str] = queue.Queue()
    with Watch(1.0, said.put), WORK.doing("phase", "train"):
        assert said.get(timeout=HOUR)


def test_a_run_that_has_ended_and_what_is_none(tmp_path: Path, logs: Path) -> None:
    with pytest.raises(ConfigError, match="has no logs: name a run that was started"):
        explain(logs)
    (logs / "run.log").write_text("step 1\ndone: step 4 of 4\n\n")
    assert explain(tmp_path) == "The run has ended. Last log line: done: step 4 of 4"
    started, failed = Finding(FINE, "started", "grpo"), Finding(REFUSED, "failed", "engine-0 is gone")
    progress = Progress("run", 4, Console(quiet=True), RunFolder(tmp_path))
    progress.record([started, failed, started])
    assert explain(tmp_path) == "The run has ended. Last log line: done: step 4 of 4"
    progress.record([failed])
    assert explain(tmp_path) == "The run has ended. Its error: error: engine-0 is gone"
    child = "import sys; from pathlib import Path; from trueline.monitoring.heartbeat import *; "
    child += "write_beat(Path(sys.argv[1]), WORK.beat('run'))"
    subprocess.run([sys.executable, "-c", child, str(logs)], check=True)
    assert "is gone. Its error: error: engine-0 is gone" in explain(tmp_path)


def test_a_run_that_moves_is_explained_calmly(tmp_path: Path, logs: Path) -> None:
    """Also from a machine that shares the disk with its own; what is certainly wrong is told all the same."""
    (tmp_path / "config.yaml").write_text("# trueline grpo\nsteps: 9\ntimeout_seconds: 36000\n")
    with WORK.doing("phase", "start"):
        write_beat(logs, WORK.beat("run"))
    begun = "The run makes progress: step 1 of 9, it loads models and engines, which may compile (`start`) since "
    assert explain(tmp_path).startswith(begun)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with WORK.doing("phase", "rollout"), WORK.doing("call", "engine-0", "generate"):
        beat = WORK.beat("run")
    for one in (beat, replace(beat, host="another")):
        write_beat(logs, one)
        head, *rest = explain(tmp_path).splitlines()
        assert head.startswith(
            "The run makes progress: step 3 of 9, it samples completions and waits for their rewards (`rollout`)"
        )
        assert "Last progress" in head and "Nothing has moved" not in "".join(rest)
    write_beat(logs, replace(beat, host="another", written=beat.written - HOUR))
    assert f"its process {beat.pid} on another is gone" in explain(tmp_path)
    assert f"Resume with: trueline grpo --resume --name {tmp_path.name} folder={tmp_path.parent}" in explain(tmp_path)
    write_beat(logs, beat)
    write_beat(logs, replace(beat, name="engine-0", born=0.0))
    assert explain(tmp_path).startswith("engine-0's process is gone")
    (logs / "engine-0.beat").unlink()
    (tmp_path / "config.yaml").write_text("# trueline grpo\nsteps: 9\ntimeout_seconds: 100\n")
    write_beat(logs, replace(beat, moved=beat.moved - HOUR))
    assert explain(tmp_path).startswith("engine-0 has not answered for ")


BUSY = """
import sys, threading, time
from pathlib import Path
from trueline.monitoring.heartbeat import start_beating

def deeper(level):
    return deeper(level - 1) if level else time.sleep(0.001)

def work_on():
    while True:
        deeper(20)

for _ in range(4):
    threading.Thread(target=work_on, daemon=True).start()
start_beating(Path(sys.argv[1]), "engine-0")
time.sleep(600)
"""


def test_threads_that_are_at_work_survive_being_looked_at(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)]) as busy:
        while (beat := read_beat(tmp_path / "engine-0.beat")) is None:
            time.sleep(0.05)
        for _ in range(5):
            while not (stacks := heartbeat.request_stacks(tmp_path / "engine-0")):
                assert busy.poll() is None
            assert stacks.count("in work_on") == 4
        assert look_at_process(beat, tmp_path).stack and busy.poll() is None
        busy.kill()


def test_a_number_that_another_process_has_taken_is_not_the_process(tmp_path: Path) -> None:
    beat = WORK.beat("engine-0")
    stranger = replace(beat, born=beat.born - 60)
    assert look_at_process(stranger, tmp_path) == SeenProcess(stranger, GONE)
    assert look_at_process(replace(beat, host="another"), tmp_path).state == ELSEWHERE
