"""Whole runs with environments and data by name: groups of several episodes, in step with training and ahead of it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clinic import change
from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TEMPLATE
from trueline.cli import main
from trueline.demo.material import make_tokenizer

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[1] / "support"
SMALL = ["runtime=local", "rollout.engine=hf", "steps=2", "prompts_per_step=2", "algorithm.group_size=4"]
SHORT = ["rollout.max_new_tokens=24", "environment.max_turn_tokens=4", "environment.processes=1"]
QUIET = [
    "monitoring.tensorboard=false",
    "monitoring.doctor=false",
    "checkpoint.save=false",
    "folder=runs",
    "name=played",
]
GUESSES = [{"prompt": f"Guess {number}.", "seed": number, "highest": 9} for number in range(8)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    make_tiny_model(tmp_path / "model", tied=True)
    change(tmp_path / "model" / "config.json", max_position_embeddings=4096)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "model")


def train(model: str, monkeypatch: pytest.MonkeyPatch, standin: str, *words: str) -> list[dict[str, Any]]:
    """Train for two steps, and return the transcripts."""
    places = [SUPPORT.parents[1], SUPPORT / "worlds", SUPPORT / "standins" / standin]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    assert main(["grpo", "--model", model, *words, *SMALL, *SHORT, *QUIET]) == 0
    lines = [json.loads(line) for line in Path("runs/played/transcripts.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and {line["outcome"] for line in lines} <= {"finished", "truncated"}
    return lines


def test_a_run_plays_an_environment_of_openenv(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GUESSES))
    words = ["--data", "rows.jsonl", "--environment", "openenv:guessing:app", "rollout.max_staleness=1"]
    played = train(model, monkeypatch, "server", *words)
    assert all([turn["role"] for turn in one["turns"]].count("assistant") == 3 for one in played)


def test_a_run_plays_an_environment_of_verifiers_on_its_own_rows(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", f"verifiers:counting?python={sys.executable}", "--environment", "verifiers:counting"]
    played = train(model, monkeypatch, "classic", *words, f"environment.python={sys.executable}")
    assert all({"environment/right", "environment/size"} <= one.keys() for one in played)
    assert {one["label"] for one in played} <= {"1", "2", "3"}
