"""Every example runs, shrunk to a tiny model and one step."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.config.supervised import TASK_VERBS

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
TINY_TASK = ["samples_per_step=2", "max_tokens=128", "evaluation.share=0.5"]
COLUMNS = {  # verb -> columns beside the prompt
    **dict.fromkeys(TASK_VERBS, ("chosen", "rejected")),
    **dict.fromkeys(("sft", "distill"), ("completion",)),
    "kto": ("completion", "label"),
    "prm": ("completions", "labels"),
}


def write_data(file: Path, verb: str) -> None:
    rows = [
        {
            "prompt": f"{number}+1=",
            "answer": str(number + 1),
            "completion": str(number + 1),
            "chosen": str(number + 1),
            "rejected": str(number),
            "label": number % 2 == 0,
            "completions": ["I add one", str(number + 1)],
            "labels": [True, number % 2 == 0],
        }
        for number in range(8)
    ]
    wanted = ("prompt", *COLUMNS.get(verb, ("answer",)))
    file.write_text("".join(json.dumps({name: row[name] for name in wanted}) + "\n" for row in rows))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the end, and what it saves opens in plain transformers."""
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp_path / "model", tied=True)
    data, task = tmp_path / "data.jsonl", example.stem in TASK_VERBS
    write_data(data, example.stem)
    words = ["--config", str(example), "--model", str(tmp_path / "model"), "--data", str(data), "--name", "run"]
    words += [f"folder={tmp_path}", "runtime=local", "steps=1"]
    held_out = [f"evaluation.data={data}"] if "evaluation" in example.read_text() and not task else []
    teacher = [f"distill.teacher={tmp_path / 'model'}"] if example.stem == "distill" else []
    assert main([example.stem, *words, *(TINY_TASK if task else TINY_RL), *held_out, *teacher]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    opened = OPENED_BY.get(example.stem, AutoModelForCausalLM).from_pretrained(tmp_path / "exported")
    assert opened(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


OPENED_BY = {"rm": AutoModelForSequenceClassification, "prm": AutoModelForTokenClassification}
