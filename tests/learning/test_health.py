"""Sabotaged runs are bad within twenty steps, and sound ones never: through the real loop, in one process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import rows_of, run_letters
from tests.support.tiny import make_tiny_model
from trueline.algorithms.advantages import assign_advantages
from trueline.cli import main
from trueline.rl import build, step
from trueline.runs.processes import Sampling, open_sampling
from trueline.sync.weights import WeightSync

pytestmark = pytest.mark.slow


def levels(folder: Path) -> list[float]:
    return [row["health/level"] for row in rows_of(folder)[1:]]


def rules(folder: Path) -> set[str]:
    return {name for row in rows_of(folder) for name, value in row.items() if name.startswith("health/") and value == 2}


def test_a_rate_a_hundred_times_too_high(tmp_path: Path) -> None:
    assert run_letters(tmp_path, "grpo", "steps=20", "training.learning_rate=0.1") == 0
    assert max(levels(tmp_path)) == 2


def test_advantages_of_the_wrong_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(samples: list[Any], config: Any) -> None:
        assign_advantages(samples, config)
        for sample in samples:
            sample.advantages = -sample.advantages

    monkeypatch.setattr(step, "assign_advantages", flipped)
    assert run_letters(tmp_path, "grpo", "steps=20", "prompts_per_step=16") == 0
    assert "health/reward" in rules(tmp_path)


def test_weights_that_never_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = WeightSync.publish
    monkeypatch.setattr(WeightSync, "publish", lambda self, version: publish(self, version) if version == 0 else {})
    assert run_letters(tmp_path, "grpo", "steps=20", "sync.check=false") == 0
    assert "health/staleness" in rules(tmp_path)


def test_a_reward_that_says_one_thing(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text("def reward(reply):\n    return 0.5\n")
    words = ["steps=20", f"reward.function={tmp_path}/constant.py:reward", "health.action=stop"]
    assert run_letters(tmp_path, "grpo", *words) == 1
    assert "health/equal_rewards" in rules(tmp_path) and len(levels(tmp_path)) < 20


def test_answers_that_cannot_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop tokens are lost on the way, and only what ends is praised."""
    (tmp_path / "ended.py").write_text("def reward(reply):\n    return float(len(reply) < 6) + len(set(reply)) / 80\n")

    @contextmanager
    def open_endless(*given: Any) -> Iterator[Sampling]:
        with open_sampling(*given) as sampling:
            yield replace(sampling, stops=())

    monkeypatch.setattr(build, "open_sampling", open_endless)
    assert run_letters(tmp_path, "grpo", "steps=20", f"reward.function={tmp_path}/ended.py:reward") == 0
    assert "health/truncation" in rules(tmp_path)


def test_going_back_rescues_a_rate_a_hundred_times_too_high(tmp_path: Path) -> None:
    words = ["steps=40", "prompts_per_step=16", "training.learning_rate=0.1", "health.action=roll_back"]
    assert run_letters(tmp_path, "grpo", *words) == 0
    rows = rows_of(tmp_path)[1:]
    assert [row["step"] for row in rows] == list(range(1, 41)) and max(levels(tmp_path)) < 2
    assert rows[-1]["learning_rate"] < 0.1 and rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.2
    assert f"learning_rate: {rows[-1]['learning_rate']}" in (tmp_path / "run" / "config.yaml").read_text()
    said = (tmp_path / "run" / "logs" / "run.log").read_text()
    balance = said.partition("ledger     ")[2].splitlines()[0]
    assert "Rolled back from step" in said and " rolled back" in balance
    told: dict[str, list[int]] = {}
    for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines():
        for fate, numbers in json.loads(line).items():
            told.setdefault(fate, []).extend(numbers if fate != "step" else [])
    assert all(f"{len(told[fate])} {fate.replace('_', ' ')}" in balance for fate in ("trained", "rolled_back"))
    everything = [number for numbers in told.values() for number in numbers]
    assert len(set(everything)) == len(everything)


def test_a_sound_offline_run_is_not_bad(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", tied=True)
    pairs = [{"prompt": f"{number}:", "chosen": "abc", "rejected": "123"} for number in range(64)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    named = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/pairs.jsonl", f"folder={tmp_path}", "name=run"]
    assert main(["dpo", *named, "runtime=local", "steps=24", "samples_per_step=8", "training.learning_rate=1e-3"]) == 0
    assert max(levels(tmp_path)) < 2


SOUND = ["grpo", "ppo", *(pytest.param(verb, marks=pytest.mark.soak) for verb in ("dapo", "rloo"))]


@pytest.mark.parametrize("verb", SOUND)
def test_sound_runs_are_not_bad(verb: str, tmp_path: Path) -> None:
    words = ["critic.learning_rate=1e-3"] if verb == "ppo" else []
    words += ["algorithm.shaping.overlong_factor=0.2"] if verb == "dapo" else []
    assert run_letters(tmp_path, verb, "steps=24", *words) == 0
    assert max(levels(tmp_path)) < 2
