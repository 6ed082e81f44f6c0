"""A reward model served as a user serves it: a process, a token, the same rewards, and nothing left behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.reward_models import local_group, make_reward_model
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.reward import RemoteConfig, RewardPartConfig
from trueline.config.sampling import ServingConfig
from trueline.jobs.serve_reward import plan_serving
from trueline.models.loading import load_chat
from trueline.rewards.base import Reward
from trueline.rewards.model import ModelReward
from trueline.rewards.remote import ScorerReward

ROOT = Path(__file__).resolve().parents[2]
CALLS = [
    {"reply": reply, "prompt": "2+3=", "messages": [{"role": "user", "content": "2+3="}], "label": "5"}
    for reply in ("5", "it is\nfive", "")
]
VARIABLE = "TRUELINE_REWARD_TOKEN"


class Served:
    """A server in a process of its own, read up to the line that says where it listens."""

    def __init__(self, folder: Path, words: tuple[str, ...], token: str | None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({VARIABLE: token} if token else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trueline.cli", "serve-reward", "--model", str(folder), "port=0", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("listening"):
                break
        self.address = self.after("listening")

    def after(self, word: str) -> str:
        found = re.search(rf"^{word} +(.*)$", "".join(self.lines), flags=re.MULTILINE)
        assert found, "".join(self.lines)
        return found[1]

    def stop(self, number: int) -> str:
        """Ends it by a signal; all that it said."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        rest, _ = self.process.communicate()
        _, alive = psutil.wait_procs(family, timeout=300)
        assert not alive
        return "".join(self.lines) + rest


@contextmanager
def serving(folder: Path, *words: str, token: str | None = None) -> Iterator[Served]:
    served = Served(folder, words, token)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def rewards(reward: Reward) -> list[float]:
    async def ask() -> list[float]:
        found = await asyncio.gather(*(reward.score(call) for call in CALLS))
        await reward.stop()
        return list(found)

    return asyncio.run(ask())


def over_http(address: str, token: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setenv(VARIABLE, token)
    part = RewardPartConfig(function=address, remote=RemoteConfig(token_variable=VARIABLE))
    return rewards(ScorerReward(address, part, 30, batch=64))


def in_process(folder: Path, head: str, template: str = "auto") -> list[float]:
    chat = load_chat(ModelConfig(path=str(folder)), template)
    part = RewardPartConfig(function=str(folder), steps="mean")
    return rewards(ModelReward(local_group(folder, head).score, chat, part, max_tokens=64, batch=64))


def test_serves_the_same_rewards_until_it_is_told_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_reward_model(tmp_path / "model", "reward")
    with serving(folder) as served:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/score", served.address)
        token = served.after("token")
        assert len(token) > 40
        health = httpx.get(served.address.replace("/score", "/health"), trust_env=False)
        assert health.json() == {"status": "ok", "model": str(folder)}
        assert httpx.post(served.address, json={"calls": CALLS}, trust_env=False).status_code == 401
        found = over_http(served.address, token, monkeypatch)
        said = served.stop(signal.SIGTERM)
        assert served.process.returncode == 0
    assert found == pytest.approx(in_process(folder, "reward"), abs=1e-6)
    assert said.count(token) == 1
    assert said.endswith("stopped\n") and "Traceback" not in said


@pytest.mark.slow
def test_a_process_reward_model_with_a_token_and_template_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, template = make_reward_model(tmp_path / "model", "steps"), tmp_path / "chat.jinja"
    template.write_text("[{{ messages[0].content }}]")
    with serving(folder, "steps=mean", f"chat_template={template}", token="my-own-token") as served:
        found = over_http(served.address, "my-own-token", monkeypatch)
        said = served.stop(signal.SIGINT)
        assert served.process.returncode == 0
    assert found == pytest.approx(in_process(folder, "steps", str(template)), abs=1e-6)
    assert found != pytest.approx(in_process(folder, "steps"), abs=1e-3)
    assert "my-own-token" not in said and f"environment variable {VARIABLE}" in said


@pytest.mark.slow
def test_ranks_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two DeepSpeed ranks share the replies; one that dies ends the server, which says so."""
    folder = make_reward_model(tmp_path / "model", "reward")
    words = ("runtime=ray", "ranks.ranks=2", f"logs={tmp_path / 'logs'}")
    with serving(folder, *words, token="my-own-token") as served:
        found = over_http(served.address, "my-own-token", monkeypatch)
        assert found == pytest.approx(in_process(folder, "reward"), abs=1e-5)
        children = psutil.Process(served.process.pid).children(recursive=True)
        rank = next(child for child in children if child.name().startswith("ray::ActorHost"))
        rank.kill()
        headers = {"Authorization": "Bearer my-own-token"}
        answer = httpx.post(served.address, json={"calls": CALLS}, headers=headers, trust_env=False)
        assert answer.status_code == 500
        assert served.process.wait() == 1
        assert served.process.stdout is not None and "error: reward_model-" in served.process.stdout.read()
        _, alive = psutil.wait_procs(children, timeout=300)
        assert not alive


def test_refused_before_anything_is_loaded(tmp_path: Path, model_folder: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "reward")
    wrong: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM in its config.json is no reward model": {"model": {"path": str(model_folder)}},
        "model.path is empty": {},
        "normalize=true": {"model": {"path": str(folder)}, "normalize": True},
        "max_tokens=65 is more than 64": {"model": {"path": str(folder)}, "max_tokens": 65},
    }
    for message, tree in wrong.items():
        with pytest.raises(ConfigError, match=message):
            plan_serving(ServingConfig.parse(tree))
    assert plan_serving(ServingConfig.parse({"model": {"path": str(folder)}})).max_tokens == 64
