"""Policy, critic, reference and reward model as groups of their own under Ray, sampling by vLLM."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.demo.material import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "integration-test-token"
LETTERS = """
def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TRUELINE_REWARD_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "policy", tied=True)
    make_reward_model(folder / "reward_model", folder / "policy")
    rows = [{"prompt": f"{number}:"} for number in range(30)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(LETTERS)
    return folder


def make_reward_model(folder: Path, like: Path) -> None:
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(like, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def trueline(home: Path, verb: str, reward: str, *words: str) -> list[dict[str, Any]]:
    """The steps of a whole run in processes of its own; `words` name it first."""
    named = ["--model", "policy", "--data", "prompts.jsonl", "--reward", reward, "--name", words[0]]
    small = ["rollout.max_new_tokens=8", "training.learning_rate=1e-3", "critic.learning_rate=1e-3"]
    command = [sys.executable, "-m", "trueline.cli", verb, *named, *small, *words[1:]]
    ended = subprocess.run(command, cwd=home, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (home / "runs" / words[0] / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


def rewards(home: Path, reward: str, name: str, *words: str) -> list[tuple[str, float]]:
    """Of completions to all prompts, sampled and rated in this process; the seed decides which ones."""
    named = ["--model", "policy", "--data", "prompts.jsonl", "--reward", reward, "--name", name]
    assert main(["generate", *named, "runtime=local", "rollout.max_new_tokens=8", "samples=1", *words]) == 0
    rows = [json.loads(line) for line in (home / "runs" / name / "samples.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["number"])
    return [(one["reply"], one["reward"]) for row in rows for one in row["completions"]]


@contextmanager
def served(home: Path) -> Iterator[str]:
    """The address at which `trueline serve-reward` answers."""
    command = [sys.executable, "-m", "trueline.cli", "serve-reward", "--model", "reward_model", "--port", "0"]
    with subprocess.Popen(
        command, cwd=home, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"http://\S+/score", line) for line in server.stdout)
            yield next(address[0] for address in found if address)
        finally:
            family = psutil.Process(server.pid).children(recursive=True)
            server.terminate()
            assert server.wait() is not None
            _, alive = psutil.wait_procs(family, timeout=300)
            assert not alive


@pytest.mark.slow
def test_four_models_train_side_by_side(home: Path) -> None:
    rows = trueline(
        home, "ppo", "reward_model", "local", "prompts_per_step=16", "steps=2", "algorithm.kl.coefficient=0.05"
    )
    for role in ("policy", "critic", "reference", "reward_model", "engine"):
        assert (home / "runs" / "local" / "logs" / f"{role}-0.log").is_file()
    assert rows[0]["policy/sequence_kl"] == pytest.approx(0, abs=1e-4) != rows[1]["policy/sequence_kl"]
    assert all(row["sync/canary_gap"] < 1e-4 and row["critic/grad_norm"] > 0 for row in rows)
    checkpoint = home / "runs" / "local" / "checkpoints" / "step_000002"
    critic = LlamaForSequenceClassification.from_pretrained(checkpoint / "critic" / "model")
    start = LlamaForSequenceClassification.from_pretrained(home / "reward_model")
    assert not torch.equal(critic.score.weight, start.score.weight)  # it started there, and learnt


@pytest.mark.slow
def test_a_server_gives_the_same_rewards(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("TRUELINE_REWARD_TOKEN", TOKEN)
    local = rewards(home, "reward_model", "rated-here")
    with served(home) as address:
        token = "reward.remote.token_variable=TRUELINE_REWARD_TOKEN"
        remote = rewards(home, address, "rated-there", token)
    assert len(local) == 30
    assert [reply for reply, _ in local] == [reply for reply, _ in remote]
    assert [reward for _, reward in local] == pytest.approx([reward for _, reward in remote], abs=1e-5)
    assert len({round(reward, 4) for _, reward in local}) > 10


@pytest.mark.soak
@pytest.mark.parametrize(
    ("preset", "words"),
    [("ppo", ["prompts_per_step=64"]), ("dapo", ["prompts_per_step=4", "algorithm.shaping.overlong_factor=0.2"])],
)
def test_it_learns_through_ray_and_vllm(home: Path, preset: str, words: list[str]) -> None:
    rows = trueline(home, preset, "reward.py:letters", f"learns-{preset}", "steps=16", *words)
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + 0.25
    assert all(row["mismatch/logprob_gap_max"] < 1e-4 for row in rows)
