"""Runs with `deterministic=true`, repeated: the same weights and the same tokens, bit for bit.

Covers `trueline.plan.findings`.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.demo.material import make_tokenizer
from trueline.rollout.hf_engine import HFEngine

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8

def rarely(reply: str) -> float:
    return float("a" <= reply[:1] <= "z")
"""
QUEUE = HFEngine._queue
QUIET = ["steps=3", "training.learning_rate=1e-3", "monitoring.tensorboard=false", "monitoring.doctor=false"]
GROUPS = ["prompts_per_step=4", "algorithm.group_size=4", "rollout.max_new_tokens=12"]
GRPO = ["grpo", "--model", "model", "--data", "prompts.jsonl", *GROUPS]
GRPO += ["monitoring.transcripts_per_step=16"]
EVALUATED = ["--eval-data", "held_out.jsonl", "evaluation.every=1", "evaluation.temperature=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model", tied=True)
    make_judge(folder / "scorer", folder / "model")
    numbers = [number for length in (1, 12, 123, 1234) for number in range(length, length + 6)]
    write_rows(folder / "prompts.jsonl", [{"prompt": f"{number}:"} for number in numbers])
    write_rows(folder / "held_out.jsonl", [{"prompt": f"{number}="} for number in range(4)])
    write_rows(
        folder / "talk.jsonl", [{"prompt": f"{number} + 1 =", "completion": str(number + 1)} for number in numbers]
    )
    pairs = [{"prompt": f"{number}:", "chosen": "a" * (number % 7 + 1), "rejected": str(number)} for number in numbers]
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "reward.py").write_text(REWARD)
    return folder


def make_judge(folder: Path, like: Path) -> None:
    torch.manual_seed(3)
    judge = AutoConfig.from_pretrained(like, num_labels=1)
    LlamaForSequenceClassification(judge).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@pytest.fixture
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.use_deterministic_algorithms(False)  # for other tests in this process


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def disturb(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let requests reach the engine late and in another order, so that others share their batch."""
    queue, drawn = QUEUE, random.Random(seed)

    async def later(self: HFEngine, *given: Any) -> Any:
        await asyncio.sleep(drawn.random() * 0.03)
        return await queue(self, *given)

    monkeypatch.setattr(HFEngine, "_queue", later)


def weights_of(run: Path) -> str:
    (folder,) = sorted(run.glob("checkpoints/*"))[-1:]
    return sha256(b"".join(file.read_bytes() for file in sorted((folder / "model").glob("*.safetensors")))).hexdigest()


def samples_of(run: Path) -> list[Any]:
    """Everything that transcripts tell of completions, tokens with their log-probs among it."""
    return [json.loads(line) for line in (run / "transcripts.jsonl").read_text().splitlines()]


def run_twice(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[list[str], list[list[Any]]]:
    """Run a command as two runs whose requests are disturbed differently; return weights and samples of both."""
    for name in ("first", "second"):
        disturb(monkeypatch, len(name))
        assert main([*words, "runtime=local", "--name", name]) == 0
    runs = [Path("runs") / name for name in ("first", "second")]
    return [weights_of(run) for run in runs], [samples_of(run) for run in runs]


SELECTED = ["algorithm.dynamic_sampling.enabled=true", "algorithm.kl.coefficient=0"]  # groups end in any order


@pytest.mark.parametrize(
    "words",
    [
        ["reward.py:letters", *EVALUATED],
        pytest.param(["scorer", *EVALUATED], marks=pytest.mark.slow),
        pytest.param(["reward.py:rarely", *SELECTED], marks=pytest.mark.slow),
    ],
)
def test_two_runs_have_the_same_weights_and_tokens(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    words = [*GRPO, *QUIET, "deterministic=true", "--reward", *words]
    weights, samples = run_twice(monkeypatch, *words)
    assert torch.are_deterministic_algorithms_enabled()
    assert weights[0] == weights[1]
    assert samples[0] == samples[1] and len(samples[0]) >= 3 * 16


def test_the_same_runs_differ_without_the_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else what disturbs them would prove nothing."""
    weights, _ = run_twice(monkeypatch, *GRPO, *QUIET, "--reward", "reward.py:letters")
    assert weights[0] != weights[1]


@pytest.mark.parametrize("asked", ["false", "true"])
@pytest.mark.parametrize(("verb", "data"), [("sft", "talk.jsonl"), ("dpo", "pairs.jsonl")])
def test_offline_runs_use_operations_that_add_in_one_order(home: Path, verb: str, data: str, asked: str) -> None:
    """A later run in the same process that does not ask for it does not get it."""
    words = [verb, "--model", "model", "--data", data, "samples_per_step=8", *QUIET, "runtime=local"]
    assert main([*words, "--name", "first", "deterministic=true"]) == 0
    assert torch.are_deterministic_algorithms_enabled()
    assert main([*words, "--name", "second", f"deterministic={asked}"]) == 0
    assert torch.are_deterministic_algorithms_enabled() is (asked == "true")
    assert weights_of(Path("runs/first")) == weights_of(Path("runs/second"))


def test_sampled_data_has_the_same_rows(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["generate", "--model", "model", "--data", "prompts.jsonl", "--reward", "scorer", "samples=3", "pairs=true"]
    for name in ("first", "second"):
        disturb(monkeypatch, len(name))
        long = ["rollout.max_new_tokens=12", "runtime=local", "deterministic=true"]
        assert main([*words, *long, "--name", name]) == 0
    assert torch.are_deterministic_algorithms_enabled()  # in the reward model
    for file in ("samples.jsonl", "kept.jsonl", "pairs.jsonl"):
        lines = [Path("runs", name, file).read_text().splitlines() for name in ("first", "second")]
        assert sorted(lines[0]) == sorted(lines[1]) if file == "samples.jsonl" else lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_ranks_and_engines_of_their_own_repeat_themselves(home: Path, engine: str) -> None:
    """Nor does it matter in which order Python's sets have their strings."""
    words = [*GRPO, *QUIET, "--reward", "scorer", "deterministic=true", "rollout.engine=hf", "rollout.engines=2"]
    words += [f"training.engine={engine}", "training.ranks=2", "reward_model.engine=torch", "minibatches=2"]
    for name in ("first", "second"):
        command = [sys.executable, "-m", "trueline.cli", *words, "--name", name]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(len(name))}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    runs = [Path("runs/first"), Path("runs/second")]
    assert weights_of(runs[0]) == weights_of(runs[1])
    assert samples_of(runs[0]) == samples_of(runs[1])
