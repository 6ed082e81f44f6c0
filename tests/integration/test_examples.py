"""Every example runs, shrunk to a tiny model and one step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.config.algorithm import PRESETS
from trueline.verbs import TASK_VERBS

ROOT = Path(__file__).resolve().parents[2]
TRAINING = [file for file in sorted((ROOT / "examples").glob("*.yaml")) if file.stem in {*PRESETS, *TASK_VERBS}]
TINY_ROLLOUT = ["rollout.max_new_tokens=8", "rollout.max_prompt_tokens=200", "data.prompt_column=prompt"]
TINY_RL = ["prompts_per_step=2", "algorithm.group_size=2", "minibatches=1", *TINY_ROLLOUT]
TINY_TASK = ["samples_per_step=2", "max_tokens=128", "evaluation.share=0.5"]
OF_VERB = {  # what one step of a random model with two completions per prompt needs
    "dapo": ["algorithm.dynamic_sampling.enabled=false"],  # no completion is right, so every group has one reward
    "vapo": ["algorithm.critic_warmup_steps=0"],
    "on_policy_distill": ["teacher.path={model}"],
    "distill": ["distill.teacher={model}"],
    "sdpo": ["algorithm.distillation.rewarded=0"],
}
COLUMNS = {  # verb -> columns besides the prompt
    **dict.fromkeys(TASK_VERBS, ("chosen", "rejected")),
    **dict.fromkeys(("sft", "distill"), ("completion",)),
    "kto": ("completion", "label"),
    "sdft": ("demonstration",),
    "opsd": ("solution",),
    "prm": ("completions", "labels"),
}


def write_data(file: Path, verb: str) -> None:
    wanted, lines = ("prompt", *COLUMNS.get(verb, ("answer",))), []
    for number in range(8):
        right, even = str(number + 1), number % 2 == 0
        row = {"prompt": f"{number}+1=", "rejected": str(number), "label": even, "labels": [True, even]}
        row |= dict.fromkeys(("answer", "completion", "chosen", "demonstration", "solution"), right) | {
            "completions": ["I add one", right]
        }
        lines.append(json.dumps({name: row[name] for name in wanted}) + "\n")
    file.write_text("".join(lines))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each example leaves the model folder of its checkpoint, under its verb."""
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("example", TRAINING, ids=lambda example: example.stem)
def test_example_runs(example: Path, tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    make_tiny_model(tmp_path / "model", tied=True)
    data, task = tmp_path / "data.jsonl", example.stem in TASK_VERBS
    write_data(data, example.stem)
    words = ["--config", str(example), "--model", str(tmp_path / "model"), "--data", str(data), "--name", "run"]
    words += [f"folder={tmp_path}", "runtime=local", "steps=1"]
    held_out = [f"evaluation.data={data}"] if "evaluation" in example.read_text() and not task else []
    own = [word.format(model=tmp_path / "model") for word in OF_VERB.get(example.stem, [])]
    assert main([example.stem, *words, *(TINY_TASK if task else TINY_RL), *held_out, *own]) == 0
    (tmp_path / "run/checkpoints/step_000001/model").rename(saved / example.stem)


OPEN = """
import sys
from pathlib import Path
import torch, transformers

heads = {"rm": "SequenceClassification", "prm": "TokenClassification"}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    kind = getattr(transformers, "AutoModelFor" + heads.get(folder.name, "CausalLM"))
    model = kind.from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("1+1=", return_tensors="pt")["input_ids"]
    assert model(tokens).logits.isfinite().all(), folder
    print(folder.name)
assert "trueline" not in sys.modules
"""


def test_every_checkpoint_opens_in_a_fresh_process_with_plain_transformers(saved: Path, tmp_path: Path) -> None:
    """After the examples above have run, in the order of this file."""
    program = [sys.executable, "-c", OPEN, str(saved)]
    opened = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert opened.returncode == 0, opened.stderr
    assert set(opened.stdout.split()) == {example.stem for example in TRAINING}
