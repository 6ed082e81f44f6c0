"""Every example runs, shrunk to a tiny model and one step."""

import json
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_model
from trueline.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TINY_RL = [
    "groups_per_step=2",
    "algorithm.group_size=2",
    "minibatches=1",
    "rollout.max_new_tokens=8",
    "rollout.max_prompt_tokens=200",
    "data.prompt_column=prompt",
]
TINY_SFT = ["samples_per_step=2", "max_tokens=128"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp_path / "model", tied=True)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "completion": str(number + 1)} for number in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--config", str(example), "--model", str(tmp_path / "model"), "--data", str(data), "--name", "run"]
    words += [f"folder={tmp_path}", "runtime=local", "steps=1"]
    tiny = TINY_SFT if example.stem == "sft" else TINY_RL
    held_out = [f"evaluation.data={data}"] if "evaluation" in example.read_text() else []
    assert main([example.stem, *words, *tiny, *held_out]) == 0
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "model" / "model.safetensors").is_file()
