"""The deep part: a run's own processes, one step, findings of its numbers, and nothing left behind."""

import json
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.clinic import diagnosed
from tests.support.letters import letters_command
from trueline.cli import main
from trueline.data.types import Sample
from trueline.monitoring.findings import Finding
from trueline.runs.guard import UpdateMonitor

REWARD = """

def picky(reply: str) -> float:
    if any("a" <= character <= "m" for character in reply):
        raise KeyError("a letter")
    return 0.5


def same(reply: str) -> float:
    return 1.0
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def deep(command: list[str]) -> dict[str, Finding]:
    """The findings of the deep part, by their keys."""
    found = diagnosed(" ".join([*command, "--deep"]))
    first = next(at for at, one in enumerate(found) if one.code in ("weight_sync", "trial_step"))
    return {one.key: one for one in found[first:]}


def test_a_step_of_reinforcement_learning_is_tried(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, update = [], UpdateMonitor.update

    def counted(self: UpdateMonitor, samples: list[Sample], *args: Any) -> dict[str, float]:
        updates.append(len(samples))
        return update(self, samples, *args)

    monkeypatch.setattr(UpdateMonitor, "update", counted)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    found = deep(letters_command(tmp_path, "grpo", "steps=50", "algorithm.group_size=2", "minibatches=8"))
    levels = {key: one.level for key, one in found.items()}
    assert levels.pop("rollout.max_new_tokens") in ("watch", "bad")  # a random model hardly ends
    assert set(levels.values()) == {"fine"}, found
    assert updates == [32]  # one of all samples, however many minibatches the run has
    assert "verified" in found["sync.check"].what
    assert "raise rollout.max_new_tokens=8" in found["rollout.max_new_tokens"].why
    assert "32 rewards from 0 to" in found["reward.function"].what
    assert "of 16 groups" in found["algorithm.group_size"].what
    assert "differ by" in found["rollout.dtype"].what
    assert "loss" in found["training.learning_rate"].what
    assert "for 50 steps" in found["prompts_per_step"].what and "of 8 prompts" in found["prompts_per_step"].why
    assert not list(scratch.iterdir()) and not (tmp_path / "run").exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_what_would_teach_nothing_or_stop_the_run_is_bad(tmp_path: Path, scratch: Path) -> None:
    command = letters_command(tmp_path, "grpo", "steps=1", "algorithm.group_size=2", prompts=5)
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + REWARD)
    found = diagnosed(" ".join([*command, "--reward", f"{tmp_path}/reward.py:picky", "--deep"]))
    (failed,) = [one for one in found if one.code == "failed_rewards"]
    assert failed.level == "bad" and "of 10 completions" in failed.what and "KeyError: 'a letter'" in failed.what
    assert not list(scratch.iterdir())
    found = diagnosed(" ".join([*command, "--reward", f"{tmp_path}/reward.py:same", "--deep"]))
    (same,) = [one for one in found if one.what.startswith("10 rewards from 1 to 1")]
    assert (same.level, same.key) == ("bad", "reward.function")
    assert [one.level for one in found if one.code == "trial_step"] == ["watch"]  # no gradient
    assert [one.level for one in found if one.key == "algorithm.group_size"] == ["watch"]


def test_a_failure_of_the_trial_is_a_finding(tmp_path: Path, scratch: Path) -> None:
    command = letters_command(tmp_path, "grpo", "steps=1", "algorithm.group_size=2", "sync.tolerance=1e-12")
    found = diagnosed(" ".join([*command, "--deep"]))
    (failed,) = [one for one in found if "yet their log-probs differ" in one.what]
    assert (failed.level, failed.code) == ("bad", "failed")
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_a_step_of_an_offline_task_is_tried(tmp_path: Path, scratch: Path, verb: str) -> None:
    model = letters_command(tmp_path, verb)[1:3]
    rows = [{"prompt": f"{number}:", "completion": "a", "chosen": "a", "rejected": "b"} for number in range(8)]
    columns = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected")}[verb]
    lines = [json.dumps({name: row[name] for name in columns}) + "\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    keys = ["samples_per_step=4", "steps=30", "training.learning_rate=1e-3", f"folder={tmp_path}", "name=run"]
    found = deep([verb, *model, "--data", f"{tmp_path}/rows.jsonl", *keys])
    assert {one.level for one in found.values()} == {"fine"}, found
    assert "gradient norm" in found["training.learning_rate"].what and "GiB" in found["training.learning_rate"].what
    assert "1 passes of up to" in found["training.micro_batch_tokens"].what
    assert "for 30 steps" in found["samples_per_step"].what
    assert not list(scratch.iterdir()) and not (tmp_path / "run").exists()


def test_verbs_without_a_deep_part_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "eval", "--model", f"{tmp_path}", "--deep"]) == 2
    assert "doctor eval --deep: eval trains no model" in capsys.readouterr().err


def test_nothing_is_tried_of_a_run_that_would_not_start(tmp_path: Path) -> None:
    found = diagnosed(" ".join([*letters_command(tmp_path, "grpo", "minibatches=7"), "--deep"]))
    assert found[0].level == "refused" and not [one for one in found if one.key == "sync.check"]
