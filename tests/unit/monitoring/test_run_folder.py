import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trueline.config.base import ConfigError
from trueline.config.run import RunConfig
from trueline.monitoring.run_folder import RunFolder, default_name


def config(folder: Path, name: str = "first") -> RunConfig:
    return RunConfig(folder=str(folder), name=name, seed=5)


def create(folder: Path, name: str = "first", verb: str = "grpo") -> RunFolder:
    return RunFolder(folder / name).open(config(folder, name), verb, resume=False)


def test_a_run_folder_keeps_its_configuration_and_its_verb(tmp_path: Path) -> None:
    made = create(tmp_path / "runs")
    assert made.path == tmp_path / "runs" / "first"
    assert made.logs.is_dir() and stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert RunConfig.load([made.config], []) == config(tmp_path / "runs")
    assert made.verb() == "grpo"


def test_any_folder_of_that_name_is_in_the_way(tmp_path: Path) -> None:
    """Also one without logs: its metrics and checkpoints would be mixed with the new run's."""
    (tmp_path / "first" / "checkpoints").mkdir(parents=True)
    (tmp_path / "first" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError) as caught:
        create(tmp_path)
    for part in (str(tmp_path / "first"), "--resume", "--name"):
        assert part in str(caught.value)
    assert (tmp_path / "first" / "config.yaml").read_text() == "seed: 1\n"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/nowhere"])
def test_a_place_that_cannot_be_written_is_refused_by_its_name(tmp_path: Path, place: str, resume: bool) -> None:
    """Permissions do not bind root, a file in the way does."""
    (tmp_path / "taken").write_text("")
    folder = {"a file": tmp_path / "taken", "below a file": tmp_path / "taken" / "runs"}.get(place, Path(place))
    with pytest.raises(ConfigError) as caught:
        RunFolder(folder / "first").open(config(folder), "grpo", resume=resume)
    for part in (f"folder={folder}", f"{folder / 'first'} cannot be written", "choose another place", "permissions"):
        assert part in str(caught.value)


def test_a_run_to_go_on_with_is_left_as_it_is(tmp_path: Path) -> None:
    made = create(tmp_path)
    before = made.config.read_text()
    made.open(config(tmp_path), "grpo", resume=True)
    assert made.config.read_text() == before
    assert {path.name for path in made.path.iterdir()} == {"config.yaml", "logs"}


def test_a_named_run_is_found_or_missed(tmp_path: Path) -> None:
    create(tmp_path)
    assert RunFolder.find(str(tmp_path), "first", "grpo").path == tmp_path / "first"
    with pytest.raises(ConfigError, match="second is not a run that can be resumed"):
        RunFolder.find(str(tmp_path), "second", "grpo")


def test_a_run_of_another_verb_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Both are reinforcement learning, so the keys of one would do for the other."""
    create(tmp_path, verb="rloo")
    with pytest.raises(
        ConfigError, match=r"first is a run of rloo: resume it with the verb that started it \(got grpo\)"
    ):
        RunFolder.find(str(tmp_path), "first", "grpo")


def age(run: RunFolder, seconds: int) -> None:
    for path in (*run.path.rglob("*"), run.path):
        os.utime(path, (10_000 - seconds, 10_000 - seconds))


@pytest.mark.parametrize("touched", ["config.yaml", "metrics.jsonl", "checkpoints/step_000003", "round_1/sft/x.jsonl"])
def test_without_a_name_the_run_of_the_verb_that_was_touched_last_is_found(tmp_path: Path, touched: str) -> None:
    """Whatever it is called, and whichever began last."""
    older, newer = create(tmp_path, "mine"), create(tmp_path, "grpo-20250101-000000")
    others = [create(tmp_path, "grpo-like", "sft"), create(tmp_path, "other", "dr_grpo")]
    unfinished = create(tmp_path, "killed").path.rename(tmp_path / "killed.unfinished")
    for run, seconds in ((older, 50), (newer, 40), *((other, 10) for other in others), (RunFolder(unfinished), 5)):
        age(run, seconds)
    assert RunFolder.find(str(tmp_path), None, "grpo").path == newer.path
    file = older.path / touched
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    age(newer, 40)
    assert RunFolder.find(str(tmp_path), None, "grpo").path == older.path
    assert RunFolder.find(str(tmp_path), None, "sft").path.name == "grpo-like"


def test_where_no_run_of_the_verb_is_that_is_said(tmp_path: Path) -> None:
    create(tmp_path, verb="sft")
    with pytest.raises(ConfigError, match=rf"no rloo run to resume in {tmp_path}: name its place with folder="):
        RunFolder.find(str(tmp_path), None, "rloo")


def test_a_name_of_the_clock_can_be_a_folder() -> None:
    assert RunConfig(name=default_name("grpo")).name.startswith("grpo-")  # type: ignore[union-attr]


def test_a_run_names_the_command_that_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usual, other = create(tmp_path / "runs"), create(tmp_path / "my runs")
    assert usual.resume_command() == "trueline grpo --resume --name first"
    assert other.resume_command() == f"trueline grpo --resume --name first 'folder={tmp_path}/my runs'"


# The lock

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from trueline.monitoring.run_folder import RunFolder

with RunFolder(Path(sys.argv[1])).hold_lock():
    executed = subprocess.Popen(["sleep", "600"]).pid
    reading, writing = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(writing, b"runs")
        time.sleep(600)
    os.read(reading, 4)  # by then it has given up what a child gives up
    print(executed, forked, flush=True)
    time.sleep(600)
"""


def test_a_run_is_locked_as_long_as_its_process_lives_and_not_by_its_children(tmp_path: Path) -> None:
    """Both children outlive their parent, which is killed without a word: one was executed, one forked."""
    run = create(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    children = [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]
    said = rf"first is being run by process {holder.pid} on {socket.gethostname()} since 20.*kill -INT {holder.pid}"
    with pytest.raises(ConfigError, match=said):
        run.check_idle()
    with pytest.raises(ConfigError, match="then --resume it"), run.hold_lock():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    try:
        assert all(child.is_running() for child in children)
        run.check_idle()
        with run.hold_lock() as findings:
            assert findings == [] and json.loads(run.lock.read_text())["pid"] == os.getpid()
            with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
                RunFolder(run.path).check_idle()
    finally:
        for child in children:
            child.kill()
    run.check_idle()


def test_a_disk_without_locks_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    run = create(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with run.hold_lock() as (finding,):
        assert finding.code == "no_file_locks" and "cannot be locked (No locks available)" in finding.what
        run.check_idle()
