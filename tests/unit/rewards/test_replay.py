import json
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.config.reward import RewardPartConfig
from trueline.rewards.replay import write_failure

FUNCTIONS = """
import os, sys

def half(reply, level, pattern, factor): return factor * level + len(pattern) + len(reply)
def batched(replies): return [len(reply) for reply in replies]
async def later(reply): return 0.25
def raises(reply): raise KeyError("no such thing as " + reply)
def nan(reply): return float("nan")
def leaves(reply): sys.exit(0)
def dies(reply): os._exit(3)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path / "functions.py"


def replay(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trueline.rewards.replay", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def replayed(part: RewardPartConfig, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    write_failure(tmp_path / "failure.json", part, {"reply": "four", "level": 2, "place": tmp_path}, "it failed")
    return replay(tmp_path / "failure.json")


@pytest.mark.parametrize(("name", "reward"), [("half", "9.0"), ("batched", "4.0"), ("later", "0.25")])
def test_a_call_that_works_now_shows_its_number(functions: Path, name: str, reward: str) -> None:
    part = RewardPartConfig(function=f"{functions}:{name}", pattern="abc", options={"factor": 1})
    if name != "half":
        part = RewardPartConfig(function=part.function)
    done = replayed(part, functions.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{reward}\n", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'no such thing as four'"),
        ("nan", "a reward must be a finite number, got nan"),
        ("leaves", "the function called sys.exit(0)"),
        ("absent", "has no function 'absent'"),
        ("dies", ""),
    ],
)
def test_a_call_that_fails_again_shows_why(functions: Path, name: str, reason: str) -> None:
    done = replayed(RewardPartConfig(function=f"{functions}:{name}"), functions.parent)
    assert done.returncode == {"absent": 2, "dies": 3}.get(name, 1)  # a crash is not hidden
    assert reason in done.stderr
    assert done.stdout == ""


def test_a_scorer_cannot_be_replayed_and_a_password_is_not_kept(tmp_path: Path) -> None:
    file, part = tmp_path / "failure.json", RewardPartConfig(function="http://scorer:80/score")
    write_failure(file, part, {"reply": ""}, "no answer from http://me:hidden@scorer:80/score")
    assert json.loads(file.read_text())["error"] == "no answer from http://scorer:80/score"
    done = replay(file)
    assert done.returncode == 2
    assert "only functions can be replayed" in done.stderr


def test_an_episode_is_not_replayed_as_if_its_reward_had_failed(tmp_path: Path) -> None:
    write_failure(tmp_path / "1.json", None, {"prompt": "2+2="}, "the agent raised")
    for name, said in (
        ("1.json", "an episode cannot be replayed without a model"),
        ("gone.json", "not a file of a failed call"),
    ):
        done = replay(tmp_path / name)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"error: {tmp_path / name}: " in done.stderr and said in done.stderr
        assert "Traceback" not in done.stderr


def test_what_is_written(tmp_path: Path) -> None:
    part = RewardPartConfig(function="regex", pattern="x", weight=2.0)
    file = tmp_path / "failures" / "1.json"
    write_failure(file, part, {"reply": "é", "label": 1}, "it failed")
    assert json.loads(file.read_text()) == {
        "function": "regex",
        "pattern": "x",
        "options": {},
        "call": {"reply": "é", "label": 1},
        "error": "it failed",
    }
