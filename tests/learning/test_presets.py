"""Every preset learns a small task through the real loop, in one process."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.config.algorithm import PRESETS

STEPS = 16
REWARD = """
def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8
"""


def train(folder: Path, preset: str, *words: str) -> list[dict[str, float]]:
    make_tiny_model(folder / "model", tied=True)
    rows = [{"prompt": f"{number}:"} for number in range(30)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    named = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/prompts.jsonl",
        "--reward",
        f"{folder}/reward.py:letters",
    ]
    small = ["groups_per_step=8", "rollout.max_new_tokens=8", "training.learning_rate=1e-3", "checkpoint.every=0"]
    local = ["runtime=local", f"folder={folder}", "name=run", f"steps={STEPS}", "monitoring.tensorboard=false"]
    assert main([preset, *named, *small, *local, *words]) == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_preset_learns(preset: str, tmp_path: Path) -> None:
    """Of 259 bytes 26 are letters, so a random policy earns about 0.1."""
    rows = train(tmp_path, preset)
    assert rows[0]["reward/mean"] < 0.2
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + 0.25
    assert all(row["policy/ratio_deviation_max"] < 1e-4 for row in rows)


def test_staleness_is_bounded_and_still_learns(tmp_path: Path) -> None:
    rows = train(tmp_path, "dr_grpo", "rollout.max_staleness=1")
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + 0.2


def test_adapters_learn_and_are_their_own_reference(tmp_path: Path) -> None:
    """The engine gets merged weights (each publishing is checked); the reference is the policy without adapters."""
    rows = train(tmp_path, "grpo", "model.lora.rank=8", "training.learning_rate=1e-2")
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + 0.25
    assert rows[0]["policy/kl"] < 1e-6 < rows[-1]["policy/kl"]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    first, again = (train(tmp_path / name, "grpo", "steps=3", "seed=4") for name in ("first", "again"))
    for key in ("reward/mean", "loss", "grad_norm"):
        assert [row[key] for row in first] == [row[key] for row in again]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Two steps and two more after --resume are four steps, to the last digit."""
    whole = train(tmp_path / "whole", "grpo", "steps=4")
    train(tmp_path / "parts", "grpo", "steps=2")
    assert main(["grpo", "--resume", "--name", "run", f"folder={tmp_path}/parts", "steps=4"]) == 0
    lines = (tmp_path / "parts" / "run" / "metrics.jsonl").read_text().splitlines()
    parts = [json.loads(line) for line in lines][1:]
    for key in ("reward/mean", "loss", "grad_norm", "policy/kl", "mismatch/logprob_gap_mean"):
        assert [row[key] for row in whole] == [row[key] for row in parts]
