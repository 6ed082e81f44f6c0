"""Self-play through the real loop: metrics, baselines and transcripts of each role, and the example that learns."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.integration.test_agents import commands, prepare
from tests.support.architectures import ARCHITECTURES
from tests.support.letters import rows_of
from tests.support.self_play import race_command
from trueline.cli import main


def test_every_role_is_reported_and_a_resumed_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards add up to 0, so neither the mean of all nor groups that are equal in it can stand for what is learnt."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    held_out = [f"evaluation.data={whole}/prompts.jsonl", "evaluation.limit=4"]
    keys = ["monitoring.transcripts_per_step=16", "monitoring.tokens=true", "algorithm.baseline_decay=0.9"]
    assert main(race_command(whole, "steps=3", *keys, *held_out)) == 0
    assert "roles      first, second: each has its own conversation, reward and baseline" in capsys.readouterr().out
    rows = rows_of(whole)
    for row in rows[1:]:
        assert row["role/first/reward"] == row["reward/mean"] == -row["role/second/reward"] != 0
        assert row["episode/turns"] == 3 and row["episode/sequences"] == 2
    assert rows[-1]["evaluation/role/second/reward"] == pytest.approx(-rows[-1]["evaluation/reward"])
    check_averages(whole, [row["reward/mean"] for row in rows[1:]])
    check_transcripts(whole)

    assert main(race_command(parts, "steps=2", *keys)) == 0
    assert main(["dr_grpo", "--resume", "--name", "run", f"folder={parts}", "steps=3"]) == 0
    for key in ("reward/mean", "loss", "grad_norm"):
        # Groups are trained in the order in which they end, so sums may be rounded otherwise.
        assert [row[key] for row in rows[1:]] == pytest.approx([row[key] for row in rows_of(parts)[1:]], rel=1e-3)


def check_averages(folder: Path, rewards: list[float]) -> None:
    """The checkpoint has the moving averages of 16 episodes a step."""
    state = json.loads((folder / "run" / "checkpoints" / "step_000003" / "state.json").read_text())
    average, kept = 0.0, 0.9**16
    for reward in rewards:
        average = kept * average + (1 - kept) * reward
    assert state["averages"] == pytest.approx({"first": average, "second": -average})


def check_transcripts(folder: Path) -> None:
    """The advantage of each role is its reward above its average before the step."""
    shown = [json.loads(line) for line in (folder / "run" / "transcripts.jsonl").read_text().splitlines()]
    first = [row for row in shown if row["purpose"] == "train" and row["step"] == 1]  # averages are 0 before
    assert len(first) == 16
    for row in first:
        assert [one["role"] for one in row["conversations"]] == ["first", "second"]
        assert [len(one["turns"]) for one in row["conversations"]] == [1, 3]
        assert [one["role"] for one in row["tokens"]] == ["first", "second"]
        for sequence in row["tokens"]:
            if sequence["sampled"] == [len(sequence["text"])] and isinstance(sequence["advantage"], float):
                assert sequence["advantage"] == pytest.approx(row[f"role/{sequence['role']}/reward"], abs=1e-3)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_roles_of_other_models_wait_for_an_update(kind: str, tmp_path: Path) -> None:
    words = ["rollout.max_staleness=1", "steps=3", "algorithm.advantage=group_norm", *ARCHITECTURES[kind].words]
    assert main(race_command(tmp_path, *words, kind=kind)) == 0
    rows = rows_of(tmp_path)[1:]
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert all(row["role/first/reward"] == -row["role/second/reward"] and row["grad_norm"] > 0 for row in rows)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("self_play")
    prepare("self_play", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_solver_learns_from_sums_that_it_poses(seed: int, taught: Path) -> None:
    """Its teacher forgot most carries, so greedy it solves little more than half of all sums at first."""
    name = f"seed_{seed}"
    words = ["runtime=local", f"name={name}", f"seed={seed}", "steps=30", "monitoring.doctor=false"]
    assert main([*commands("self_play", taught)[-1][1:], *words]) == 0
    rows = [json.loads(line) for line in (taught / name / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["evaluation/role/solver/reward"] < 0.65
    assert rows[-1]["evaluation/role/solver/reward"] > 0.9
    assert fmean(row["environment/posed"] for row in rows[-5:]) > 0.95  # and the proposer stays within the rules
