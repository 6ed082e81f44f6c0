"""Runs over several Ray nodes, each with an address of its own, on the real Ray, vLLM and DeepSpeed."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import Nodes, forbidden, nodes
from tests.support.programs import start
from tests.support.reward_models import make_reward_model
from tests.support.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(bool(forbidden()), reason=forbidden())

LETTERS = """
from pathlib import Path

import psutil

HERE = [one.address for found in psutil.net_if_addrs().values() for one in found if one.address.startswith("10.77.")]


def letters(reply: str) -> float:
    Path(__file__).with_name(f"scored-{'-'.join(HERE) or 'alone'}").touch()
    return sum("a" <= character <= "z" for character in reply) / 8
"""
GAME = """
from pathlib import Path

from reward import HERE


class Once:
    def reset(self, prompt):
        return None

    def step(self, reply):
        Path(__file__).with_name(f"played-{'-'.join(HERE) or 'alone'}").touch()
        return {"messages": "", "reward": 0.25, "done": True}
"""
SMALL = ["rollout.max_new_tokens=16", "prompts_per_step=2", "algorithm.group_size=4", "steps=3"]
SPREAD = ["training.ranks=2", "training.deepspeed.zero_stage=3", "training.learning_rate=1e-3"]
FSDP2 = ["training.engine=fsdp2", "training.ranks=2", "training.learning_rate=1e-3"]
GRPO = ["--reward", "reward.py:letters", "--environment", "game.py:Once", "rollout.max_prompt_tokens=32", *SMALL]
PPO = ["--reward", "reward_model", *SMALL, "rollout.max_prompt_tokens=32", "critic.learning_rate=1e-3"]
SLOTS = (0, 1, 2)  # of each node; runs are started on the first


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "policy", tied=True)
    make_reward_model(folder / "reward_model", "reward")
    rows = [{"prompt": f"{number}:"} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{number}:", "chosen": "abc", "rejected": f"{number}"} for number in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "reward.py").write_text(LETTERS)
    (folder / "game.py").write_text(GAME)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes(tmp_path_factory.mktemp("n"), SLOTS) as found:
        yield found


def begin(home: Path, verb: str, name: str, words: list[str], cluster: Nodes | None) -> Any:
    """Start a run on a node of the cluster, or on this machine alone."""
    data = "pairs.jsonl" if verb == "dpo" else "prompts.jsonl"
    command = [sys.executable, "-m", "trueline.cli", verb, "--model", "policy", "--data", data, "--name", name, *words]
    alone = Nodes(home, ()).environment()
    del alone["RAY_ADDRESS"]
    if cluster:
        return start(cluster.inside(0, *command), home, cluster.environment())
    return start(command, home, alone)


def ended(run: Any) -> str:
    said, _ = run.communicate()
    assert run.returncode == 0, said
    return str(said)


def run_alone(home: Path, verb: str, words: list[str]) -> str:
    """Train with DeepSpeed on this machine, once, and return the run's name."""
    name = f"{verb}-alone"
    if not (home / "runs" / name).exists():
        ended(begin(home, verb, name, [*words, *SPREAD], None))
    return name


def steps_of(home: Path, name: str) -> list[dict[str, Any]]:
    lines = (home / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def compare(home: Path, one: str, other: str, *names: str) -> None:
    both = list(zip(steps_of(home, one), steps_of(home, other), strict=True))
    assert len(both) == 3
    for ours, theirs in both:
        for name in ("loss", "grad_norm", *names):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), (ours["step"], name)


@pytest.mark.slow
def test_grpo_spans_nodes_and_learns_what_one_machine_learns(home: Path, cluster: Nodes) -> None:
    """The driver is on a node without slots; the policy's ranks are on both others, the engine is on the second.

    Both have a rollout worker, play episodes and score completions.
    """
    said = ended(begin(home, "grpo", "grpo-spread", [*GRPO, *SPREAD], cluster))
    assert "workers    2 for rollouts" in said
    assert "node       10.77.0.2: policy 0; reference 0; rollouts 0\n" in said
    assert "node       10.77.0.3: policy 1; reference 1; engine 0; rollouts 1\n" in said
    for work in ("played", "scored"):
        assert {f"{work}-10.77.0.2", f"{work}-10.77.0.3"} <= {file.name for file in home.glob(f"{work}-*")}
    assert "Weight sync verified" in said
    compare(home, "grpo-spread", run_alone(home, "grpo", GRPO), "reward/mean", "response_length/mean", "policy/kl")
    wire = [row["sync/wire_gb"] for row in steps_of(home, "grpo-spread")]
    assert min(wire) > 0 and max(row["sync/wire_gb"] for row in steps_of(home, "grpo-alone")) == 0


@pytest.mark.slow
def test_a_streamed_step_spans_nodes_too(home: Path, cluster: Nodes) -> None:
    """The engine samples one group at a time, so every group but the last is trained before the step is complete."""
    words = [
        "--reward",
        "reward.py:letters",
        "rollout.max_prompt_tokens=32",
        *SMALL,
        *SPREAD,
        "training.deepspeed.zero_stage=2",
    ]
    words += ["prompts_per_step=3", "rollout.max_sequences=4"]
    said = ended(begin(home, "grpo", "stream-spread", [*words, "training.stream=true"], cluster))
    assert "gradient of the streamed first step differs" in said and "steps are not streamed" not in said
    assert all(row["rollout/streamed_share"] > 0 for row in steps_of(home, "stream-spread"))
    ended(begin(home, "grpo", "stream-alone", [*words, "training.stream=false"], None))
    compare(home, "stream-spread", "stream-alone", "reward/mean", "response_length/mean", "policy/kl")


@pytest.mark.slow
def test_grpo_on_fsdp2_spans_nodes_and_learns_what_deepspeed_learns(home: Path, cluster: Nodes) -> None:
    said = ended(begin(home, "grpo", "grpo-fsdp2", [*GRPO, *FSDP2], cluster))
    assert "policy     2 x fsdp2 rank, fully sharded" in said and "reference  2 x fsdp2 rank" in said
    assert "node       10.77.0.3: policy 1; reference 1; engine 0; rollouts 1\n" in said
    assert "Weight sync verified" in said
    compare(home, "grpo-fsdp2", run_alone(home, "grpo", GRPO), "reward/mean", "response_length/mean", "policy/kl")


@pytest.mark.soak
@pytest.mark.parametrize("keys", [SPREAD, FSDP2], ids=["deepspeed", "fsdp2"])
@pytest.mark.parametrize(("verb", "words"), [("ppo", PPO), ("dpo", ["steps=3", "samples_per_step=4"])])
def test_four_models_and_offline_tasks_span_nodes_too(
    home: Path, cluster: Nodes, verb: str, words: list[str], keys: list[str]
) -> None:
    name = f"{verb}-{'fsdp2' if keys is FSDP2 else 'spread'}"
    said = ended(begin(home, verb, name, [*words, *keys], cluster))
    for node in (2, 3):
        assert f"node       10.77.0.{node}: policy {node - 2}" in said
    compare(home, name, run_alone(home, verb, words), *["critic/loss"] * (verb == "ppo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["training.ranks=4"],
            "training.ranks=4 needs 4 CPU slots: 10.77.0.1 has 0 of 0 left, 10.77.0.2 has 0 of 1 left",
        ),
        (
            ["rollout.tensor_parallel=3"],
            "rollout.tensor_parallel=3 needs 3 CPU slots on one node: 10.77.0.1 has 0 of 0",
        ),
        (["training.ranks=1", "rollout.cpu_cache_gib=900"], "GiB are free on 10.77.0.3: "),
        (["cluster.address=ray://10.77.0.1:10001"], "start on a node"),
    ],
)
def test_what_no_node_can_hold_is_refused_before_anything_starts(
    home: Path, cluster: Nodes, words: list[str], said: str
) -> None:
    run = begin(home, "grpo", "refused", ["--reward", "reward.py:letters", *SMALL, *words], cluster)
    output, _ = run.communicate()
    assert run.returncode == 2 and said in output, output
    assert not (home / "runs" / "refused").exists()


@pytest.mark.slow
def test_a_node_that_cannot_write_the_runs_folder_is_named(home: Path, cluster: Nodes, tmp_path: Path) -> None:
    """A folder on a disk of one node's own, and a model that it does not see."""
    aside = home / "aside"
    aside.mkdir()
    raylet = next(one for one in cluster.processes(2) if one.name() == "raylet")
    hide = ["nsenter", f"--mount=/proc/{raylet.pid}/ns/mnt", "mount", "-t", "tmpfs", "none", str(aside)]
    subprocess.run(hide, check=True)
    words = ["--reward", "reward.py:letters", *SMALL, *SPREAD, f"folder={aside}"]
    run = begin(home, "grpo", "hidden", words, cluster)
    output, _ = run.communicate()
    assert run.returncode == 2 and f"node 10.77.0.3 does not write into {aside}/hidden" in output, output
    make_tiny_model(aside / "model", tied=True)
    run = begin(home, "grpo", "unseen", [*words[:-1], f"model.path={aside}/model"], cluster)
    output, _ = run.communicate()
    assert run.returncode == 2 and f"node 10.77.0.3 cannot read {aside}/model" in output, output


@pytest.mark.soak
def test_a_node_that_is_lost_is_named_and_the_run_goes_on_with_what_is_left(home: Path, tmp_path: Path) -> None:
    """The engine's node dies: what is trained is saved, and another run on the rest goes on from there."""
    words = ["--reward", "reward.py:letters", *SMALL, "steps=400", "training.ranks=1", "checkpoint.every=0"]
    (tmp_path / "n").mkdir()
    with nodes(tmp_path / "n", (1, 1)) as cluster:
        run = begin(home, "grpo", "lost", words, cluster)
        metrics = home / "runs" / "lost" / "metrics.jsonl"
        while not metrics.exists() or len(steps_of(home, "lost")) < 3:
            assert run.poll() is None, run.stdout.read()
            time.sleep(0.2)
        cluster.kill(1)
        said, _ = run.communicate()
        assert run.returncode == 1 and "node 10.77.0.2 is gone" in said, said
        assert "saved      step_" in said
        done = len(steps_of(home, "lost"))
        cluster.slots = (2, 1)  # the first node, with room for both
        again = begin(home, "grpo", "lost", ["--resume", f"steps={done + 1}", "rollout.engines=1"], None)
        assert f"done: step {done + 1}" in ended(again)
