"""The tutorials, as a reader follows them: their commands, one after the other, in an empty folder."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trueline.runtime import REACH

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
EXAMPLES = {"environment": "environment/game.py", "calling_tools": "tools/tools.py"}


def fenced(page: str, language: str) -> list[str]:
    text = (TUTORIALS / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    readers = {name: value for name, value in os.environ.items() if name not in REACH}  # which runs of this process set
    return {**readers, "PATH": path, "PYTHONPATH": str(ROOT)}


def follow(commands: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def reward(folder: Path) -> float:
    return float(json.loads((folder / "evaluation.json").read_text())["metrics"]["evaluation/reward"])


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (program,) = fenced("laptop", "python")
    (folder / "mine.py").write_text(program)
    return folder


@pytest.fixture(scope="module")
def said(laptop: Path) -> str:
    return follow("\n".join(fenced("laptop", "bash")), laptop)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_first_tutorial_teaches_a_model_to_add(said: str, laptop: Path) -> None:
    runs = laptop / "runs"
    assert reward(runs / "after") > reward(runs / "before") + 0.2
    assert (laptop / "demo.html").is_file()
    for line in (
        "  reward   0.00132275\n",
        "0 refused, 0 bad, 1 watch, 5 fine",
        "ledger     640 prompts sampled, all trained",
    ):
        assert line in said and line.strip() in (TUTORIALS / "laptop.md").read_text(), line


@pytest.fixture
def started(laptop: Path, said: str) -> Iterator[tuple[str, str]]:
    """Start the nodes of the tutorial as it does, on a free port; return what sets the shell up, and the run."""
    shared, token, head, node, run = fenced("two_nodes", "bash")
    short = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets may have 107 bytes
    setting, port = f"{shared}export RAY_TMPDIR={short}\n", str(free_port())
    follow(shared + token, laptop)
    terminals = []
    try:
        for words in (head, node):
            command = ["bash", "-euc", setting + words.replace("6399", port)]
            with (laptop / f"terminal-{len(terminals)}").open("wb") as log:
                terminal = subprocess.Popen(
                    command, cwd=laptop, env=environment(), stdout=log, stderr=log, start_new_session=True
                )
            terminals.append(terminal)
            wait_for(laptop / f"terminal-{len(terminals) - 1}", "Ray runtime started", terminal)
        yield setting, run.replace("6399", port)
    finally:
        for terminal in reversed(terminals):
            with contextlib.suppress(ProcessLookupError):  # it may have failed
                os.killpg(terminal.pid, signal.SIGTERM)
            terminal.wait(60)
        shutil.rmtree(short)


def wait_for(file: Path, text: str, program: "subprocess.Popen[bytes]") -> None:
    while text not in file.read_text():
        assert program.poll() is None, file.read_text()
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_trains_over_two_nodes(started: tuple[str, str], laptop: Path) -> None:
    setting, run = started
    said = follow(setting + run, laptop)
    assert "cluster    2 nodes, free on them 4 CPU cores" in said
    assert len(re.findall(r"^node ", said, flags=re.MULTILINE)) == 2
    assert "ledger     48 prompts sampled, all trained" in said


@pytest.mark.parametrize(("page", "file"), EXAMPLES.items())
def test_code_of_a_tutorial_is_that_of_its_example(page: str, file: str) -> None:
    (block,) = fenced(page, "python")
    assert block in (ROOT / "examples" / file).read_text()


@pytest.mark.parametrize(("page", "example"), [("environment", "environment"), ("calling_tools", "tools")])
def test_commands_of_a_tutorial_are_those_of_its_example(page: str, example: str) -> None:
    """The last of run.sh is written out; a run stands for its checkpoint there, and the folder has its name."""
    script, command = fenced(page, "bash")
    folder = script.split()[-1]
    text = (ROOT / "examples" / example / "run.sh").read_text().replace("\\\n  ", "").replace('"', "")
    line = text.strip().splitlines()[-1].replace("$here", f"examples/{example}").replace("$folder", folder)
    assert command.split() == line.replace("/checkpoints/step_*/model", "").replace("${@:2}", "").split()
