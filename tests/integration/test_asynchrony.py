"""Sampling while training, through Ray, vLLM and DeepSpeed: how stale tokens are, and what becomes of every prompt."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROWS = 24
LETTERS = """
def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "policy", tied=True)
    rows = [{"prompt": f"{number}:"} for number in range(ROWS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(LETTERS)
    return folder


def command(name: str, *words: str) -> list[str]:
    named = ["--model", "policy", "--data", "prompts.jsonl", "--reward", "reward.py:letters", "--name", name]
    small = ["rollout.max_new_tokens=16", "prompts_per_step=2", "algorithm.group_size=4", "training.learning_rate=1e-3"]
    return [sys.executable, "-m", "tests.support.slow_run", "grpo", *named, *small, *words]


def environment(seconds_per_token: float) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "SECONDS_PER_TOKEN": str(seconds_per_token)}


def steps_of(home: Path, name: str) -> list[dict[str, Any]]:
    lines = (home / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def fates_of(home: Path, name: str) -> Counter[tuple[str, int]]:
    """Count what became of each prompt's number, as the rows of the ledger tell it."""
    rows = [json.loads(line) for line in (home / "runs" / name / "ledger.jsonl").read_text().splitlines()]
    return Counter((fate, number) for row in rows for fate in row if fate != "step" for number in row[fate])


@pytest.mark.parametrize(("staleness", "mode"), [(1, "interrupt"), pytest.param(3, "keep", marks=pytest.mark.slow)])
def test_tokens_are_as_stale_as_they_may_be_and_no_more(home: Path, staleness: int, mode: str) -> None:
    name = f"stale-{staleness}"
    words = [f"rollout.max_staleness={staleness}", f"rollout.on_update={mode}", "steps=8"]
    ended = subprocess.run(
        command(name, *words), cwd=home, env=environment(0.02), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = steps_of(home, name)
    found = [row["rollout/staleness_max"] for row in rows]
    assert len(found) == 8 and max(found) == staleness
    assert any(row["rollout/several_versions_share"] > 0 for row in rows)
    fates = fates_of(home, name)
    assert set(fates.values()) == {1} and {fate for fate, _ in fates} == {"trained"} and len(fates) == 16
    assert f"{16 + 2 * staleness} prompts drawn = 16 trained + {2 * staleness} under way" in ended.stdout
