"""A start looks at what its plan has read: findings are said behind the plan, once, and refuse nothing."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import letters_command, run_letters
from trueline.cli import main
from trueline.monitoring.findings import BAD
from trueline.monitoring.run_folder import RunFolder

ON, OFF = "monitoring.doctor=true", "monitoring.doctor=false"
DUPLICATES = "warning: 2 of 6 rows (33 %) are duplicates, e.g. "


def doctor_codes(folder: Path) -> list[str]:
    """The codes of all starts that only the doctor finds."""
    codes = [finding.code for _, finding in RunFolder(folder).read_findings()]
    return [code for code in codes if code in ("repeated_rows", "constant_reward")]


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
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith(DUPLICATES)]
    assert line.endswith("(data.path)") and out.count("no chat template") == 1  # which the plan reports
    assert opened.count("twice.jsonl") == 2  # to find the lines, and to read them
    assert line in (tmp_path / "run" / "logs" / "run.log").read_text()
    assert doctor_codes(tmp_path / "run") == ["repeated_rows"]
    assert run_letters(tmp_path, "grpo", *words, "steps=2", ON, "--resume") == 0
    assert doctor_codes(tmp_path / "run") == ["repeated_rows"]  # it continues from a checkpoint
    assert run_letters(tmp_path, "grpo", *words, OFF, "name=other") == 0
    assert doctor_codes(tmp_path / "other") == []


def test_a_run_without_a_checkpoint_is_looked_at_again(tmp_path: Path) -> None:
    data = write_rows(tmp_path, [{"prompt": f"{number}:"} for number in range(4)])
    words = ["steps=1", "prompts_per_step=2", "algorithm.group_size=2", "checkpoint.save=false", data, ON]
    assert run_letters(tmp_path, "grpo", *words) == 0
    assert run_letters(tmp_path, "grpo", *words, "--resume", "--restart") == 0
    assert doctor_codes(tmp_path / "run") == ["repeated_rows"] * 2


def test_what_is_bad_is_reported_and_starts(tmp_path: Path) -> None:
    command = letters_command(tmp_path, "grpo", "steps=1", "prompts_per_step=2", "algorithm.group_size=2", ON)
    rows = [{"prompt": f"{number}:", "answer": str(number)} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def constant(reply: str, label: str) -> float:\n    return 0.5\n")
    assert main([*command, "--reward", f"{tmp_path}/reward.py:constant"]) == 0
    bad = [finding for _, finding in RunFolder(tmp_path / "run").read_findings() if finding.level == BAD]
    assert [(one.code, one.key) for one in bad] == [("constant_reward", "reward.function")]


def test_offline_runs_and_sampling_jobs_are_looked_at(tmp_path: Path, opened: list[str]) -> None:
    rows = [{"prompt": f"{number}:", "completion": "a"} for number in range(4)]
    command = letters_command(tmp_path, "sft")
    model, data = command[1:3], ["--data", write_rows(tmp_path, rows).removeprefix("data.path=")]
    local = ["runtime=local", f"folder={tmp_path}", "monitoring.tensorboard=false"]
    trained = ["steps=1", "samples_per_step=2", "training.learning_rate=1e-3", "checkpoint.save=false"]
    assert main(["sft", *model, *data, *local, *trained, "name=sft"]) == 0
    assert doctor_codes(tmp_path / "sft") == ["repeated_rows"]
    assert opened.count("twice.jsonl") == 2  # to find the lines, and to read them
    assert main(["generate", *model, *data, *local, "name=generate", "samples=1", "rollout.max_new_tokens=2"]) == 0
    assert doctor_codes(tmp_path / "generate") == ["repeated_rows"]
    assert opened.count("twice.jsonl") == 4
