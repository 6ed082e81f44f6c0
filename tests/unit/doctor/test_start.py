"""A start looks at what its plan has read: findings are said behind the plan, once, and refuse nothing."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import letters_command, run_letters
from trueline.cli import main

ON, OFF = "monitoring.doctor=true", "monitoring.doctor=false"
DUPLICATES = "doctor     watch: duplicates: 2 of 6 rows (33 %) stand there before; "


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("doctor")]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "twice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + rows[:2]))
    return f"data.path={folder}/twice.jsonl"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are opened to be read, one entry for each time."""
    names: list[str] = []
    before = io.open

    def open_and_tell(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        names.extend([Path(file).name] if isinstance(file, str | Path) and mode.startswith("r") else [])
        return before(file, mode, *args, **named)

    monkeypatch.setattr(io, "open", open_and_tell)
    return names


def test_a_finding_is_said_once_and_rows_are_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], opened: list[str]
) -> None:
    data = write_rows(tmp_path, [{"prompt": f"{number}:"} for number in range(4)])
    words = ["steps=1", "prompts_per_step=2", "algorithm.group_size=2", data]
    assert run_letters(tmp_path, "grpo", *words, ON) == 0
    (line,) = told(capsys)  # nothing of the template, which the plan has named
    assert line.startswith(DUPLICATES) and line.endswith("(data.path)")
    assert opened.count("twice.jsonl") == 1
    assert line in (tmp_path / "run" / "logs" / "run.log").read_text()
    assert run_letters(tmp_path, "grpo", *words, "steps=2", ON, "--resume") == 0
    assert not told(capsys)  # it goes on from a checkpoint
    assert run_letters(tmp_path, "grpo", *words, OFF, "name=other") == 0
    assert not told(capsys)


def test_a_run_without_a_checkpoint_is_looked_at_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path, [{"prompt": f"{number}:"} for number in range(4)])
    words = ["steps=1", "prompts_per_step=2", "algorithm.group_size=2", "checkpoint.save=false", data, ON]
    assert run_letters(tmp_path, "grpo", *words) == 0
    assert run_letters(tmp_path, "grpo", *words, "--resume", "--restart") == 0
    assert len(told(capsys)) == 2


def test_what_is_bad_is_said_and_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = letters_command(tmp_path, "grpo", "steps=1", "prompts_per_step=2", "algorithm.group_size=2", ON)
    rows = [{"prompt": f"{number}:", "answer": str(number)} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def constant(reply: str, label: str) -> float:\n    return 0.5\n")
    assert main([*command, "--reward", f"{tmp_path}/reward.py:constant"]) == 0
    (line,) = told(capsys)
    assert line.startswith("doctor     bad: ") and "gave the same whatever the reply" in line


def test_offline_runs_and_sampling_jobs_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], opened: list[str]
) -> None:
    rows = [{"prompt": f"{number}:", "completion": "a"} for number in range(4)]
    command = letters_command(tmp_path, "sft")
    model, data = command[1:3], ["--data", write_rows(tmp_path, rows).removeprefix("data.path=")]
    local = ["runtime=local", f"folder={tmp_path}", "monitoring.tensorboard=false"]
    trained = ["steps=1", "samples_per_step=2", "training.learning_rate=1e-3", "checkpoint.save=false"]
    assert main(["sft", *model, *data, *local, *trained, "name=sft"]) == 0
    (line,) = told(capsys)
    assert line.startswith(DUPLICATES)
    assert opened.count("twice.jsonl") == 1
    assert main(["generate", *model, *data, *local, "name=generate", "samples=1", "rollout.max_new_tokens=2"]) == 0
    assert [one[: len(DUPLICATES)] for one in told(capsys)] == [DUPLICATES]
    assert opened.count("twice.jsonl") == 2
