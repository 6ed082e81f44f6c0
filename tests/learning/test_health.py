"""Sabotaged runs are BAD within twenty steps, and sound ones never: through the real loop, in one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import rows_of, run_letters
from trueline.algorithms.advantages import assign_advantages
from trueline.rl import trainer
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

    monkeypatch.setattr(trainer, "assign_advantages", flipped)
    assert run_letters(tmp_path, "grpo", "steps=20", "prompts_per_step=16") == 0
    assert "health/reward" in rules(tmp_path)


def test_weights_that_never_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = WeightSync.publish
    monkeypatch.setattr(WeightSync, "publish", lambda self, version: publish(self, version) if version == 0 else {})
    assert run_letters(tmp_path, "grpo", "steps=20", "sync.check=false") == 0
    assert "health/staleness" in rules(tmp_path)


def test_a_reward_that_says_one_thing(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text("def reward(reply):\n    return 0.5\n")
    words = ["steps=20", f"reward.function={tmp_path}/constant.py:reward", "monitoring.health=stop"]
    assert run_letters(tmp_path, "grpo", *words) == 1
    assert "health/equal_rewards" in rules(tmp_path) and len(levels(tmp_path)) < 20


@pytest.mark.parametrize("verb", ["grpo", "ppo", "rloo", "dapo"])
def test_sound_runs_are_not_bad(verb: str, tmp_path: Path) -> None:
    words = ["critic.learning_rate=1e-3"] if verb == "ppo" else []
    words += ["algorithm.shaping.overlong_factor=0.2"] if verb == "dapo" else []
    assert run_letters(tmp_path, verb, "steps=24", *words) == 0
    assert max(levels(tmp_path)) < 2
