"""NVIDIA's multi-process service, by a control program that writes down how it is called.

Covers `trueline.runtime.mps`; tests/gpu/ has the real one.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trueline.runtime import mps

CONTROL = """#!/bin/sh
echo "$@ $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {calls}
[ "$1" = "-d" ] && exit {status}
exit 0
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path, monkeypatch, 0)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, client: int = 0) -> Path:
    (program := folder / mps.CONTROL).write_text(CONTROL.format(calls=folder / "calls", status=status))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mps, "CLIENT", f"import os, sys; sys.exit({client} or '{mps.PIPES}' not in os.environ)")
    return folder / "calls"


def test_the_service_has_folders_of_its_own_and_ends_with_the_run(calls: Path, tmp_path: Path) -> None:
    with mps.service(tmp_path / "logs") as environment:
        pipes, logs = environment[mps.PIPES], environment[mps.LOGS]
        assert Path(pipes).is_dir() and logs == str(tmp_path / "logs" / "mps") and Path(logs).is_dir()
        assert calls.read_text().split() == ["-d", pipes, logs]
    assert not Path(pipes).exists()
    assert calls.read_text().splitlines()[1].split() == ["quit", "-t", "1", pipes, logs]
    assert mps.PIPES not in os.environ


def test_two_runs_do_not_share_a_service(calls: Path, tmp_path: Path) -> None:
    with mps.service(tmp_path / "one") as one, mps.service(tmp_path / "other") as other:
        assert one[mps.PIPES] != other[mps.PIPES]


def test_it_ends_with_a_run_that_fails(calls: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError), mps.service(tmp_path):
        raise ValueError
    assert "quit" in calls.read_text()


def test_it_ends_with_a_run_that_is_killed(calls: Path, tmp_path: Path) -> None:
    """The guard is no child that the run's signals reach, and waits for nothing but the run's end."""
    program = (
        "import sys, time; from pathlib import Path; from trueline.runtime import mps\n"
        "mps.CLIENT = ''\n"
        f"with mps.service(Path({str(tmp_path)!r})) as own:\n"
        "    print(own[mps.PIPES], flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, process_group=0) as run:
        assert run.stdout is not None
        pipes = Path(run.stdout.readline().strip())
        assert pipes.is_dir() and "quit" not in calls.read_text()
        (guard,) = psutil.Process(run.pid).children()
        os.killpg(run.pid, signal.SIGKILL)
    guard.wait()
    assert not pipes.exists()
    assert calls.read_text().splitlines()[-1].split()[:3] == ["quit", "-t", "1"]


def test_where_it_does_not_start_processes_share_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, 1)
    with mps.service(tmp_path) as environment:
        assert environment == {}


def test_where_it_refuses_clients_processes_share_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(tmp_path, monkeypatch, 0, client=5)
    with mps.service(tmp_path) as environment:
        assert environment == {}
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["-d", "quit"]


def test_where_it_is_not_installed_processes_share_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not mps.is_installed()
    with mps.service(tmp_path) as environment:
        assert environment == {}
