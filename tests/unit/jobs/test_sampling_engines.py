"""An engine that only samples is one row: it serves `generate` and `eval`, and is refused for training by name."""

import json
from pathlib import Path

import pytest

from tests.support.letters import letters_command
from tests.support.sampling_only import ROW
from trueline.cli import main
from trueline.rollout.engines import ROLLOUT_ENGINES


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLOUT_ENGINES, "only", ROW)


def words(folder: Path, verb: str, *more: str) -> list[str]:
    made = letters_command(folder, verb, "rollout.engine=only", *more)
    training = ("prompts_per_step", "training.", "checkpoint.")
    return [word for word in made if verb == "grpo" or not word.startswith(training)]


def test_it_serves_jobs_that_sample(tmp_path: Path) -> None:
    assert main(words(tmp_path, "generate", "samples=2", "limit=4")) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert [one["reply"] for row in rows for one in row["completions"]] == [
        f"{row['id']}:" for row in rows for _ in range(2)
    ]


def test_training_with_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "grpo")) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "rollout.engine=only only samples, and takes no new weights: set rollout.engine=vllm or" in said
