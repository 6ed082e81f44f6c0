"""What a real run records: who did what in each step, beside its times, and the tokens of its transcripts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import rows_of, run_letters
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.monitoring.beats import WORK

CLOCKS_DIFFER = 1.0  # seconds, where a busy machine comes between reading one and reading the other


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def phases_of(event: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for who, what, since, ended in event["spans"]:
        if who == "run":
            found[f"time/{what}"] = found.get(f"time/{what}", 0.0) + ended - since
    return found


def compare(events: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in events] == [row["step"] for row in metrics]
    for event, row in zip(events, metrics, strict=True):
        times = {name: seconds for name, seconds in row.items() if name.startswith("time/") and name != "time/step"}
        assert phases_of(event) == pytest.approx(times, abs=CLOCKS_DIFFER)
        assert event["seconds"] == pytest.approx(row["time/step"], abs=CLOCKS_DIFFER)
        assert all(0 <= span[2] <= span[3] <= event["seconds"] for span in event["spans"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    evaluated = [f"evaluation.data={folder}/prompts.jsonl", "evaluation.every=2"]
    assert run_letters(folder, "grpo", "steps=3", "minibatches=2", *evaluated) == 0
    return folder


def test_events_have_a_row_for_every_step_whose_phases_are_its_times(run: Path) -> None:
    events = read(run / "run" / "events.jsonl")
    compare(events, rows_of(run))
    for event in events[1:]:
        called = {(who, what) for who, what, *_ in event["spans"]}
        assert {("engine", "generate"), ("policy", "update"), ("rewards", "reward")} <= called
    assert events[1]["start"] == pytest.approx(events[0]["start"] + events[0]["seconds"], abs=0.002)  # no time is lost
    assert events[0]["memory"]["run"] > 0.1
    assert WORK.recorder is None


def test_tokens_of_transcripts_are_the_reply(run: Path) -> None:
    rows = read(run / "run" / "transcripts.jsonl")
    trained, others = ([row for row in rows if (row["purpose"] == "train") is wanted] for wanted in (True, False))
    assert len(trained) == 12 and others and not any("tokens" in row for row in others)
    for row in trained:
        (sequence,) = row["tokens"]
        assert "".join(sequence["text"]).removesuffix("</s>") == row["reply"]
        assert sequence["sampled"] == [len(sequence["text"])]
        assert {"logprob", "log_ratio", "advantage", "entropy"} <= set(sequence)
    advantages = {row["reward"]: row["tokens"][0]["advantage"] for row in trained if row["step"] == 1}
    assert len(advantages) > 1 and sorted(advantages.values()) == [advantages[one] for one in sorted(advantages)]


def test_tokens_are_kept_only_where_they_are_wanted(tmp_path: Path) -> None:
    assert run_letters(tmp_path, "grpo", "steps=1", "monitoring.tokens=false") == 0
    rows = read(tmp_path / "run" / "transcripts.jsonl")
    assert rows and not any("tokens" in row for row in rows)


def test_a_run_on_given_rows_records_as_well(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}:", "completion": "abc"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--model", str(make_tiny_model(tmp_path / "model", tied=True)), "--data", f"{tmp_path}/rows.jsonl"]
    named += ["--eval-data", f"{tmp_path}/rows.jsonl", "--name", "run", f"folder={tmp_path}", "runtime=local"]
    small = ["steps=2", "samples_per_step=4", "checkpoint.save=false", "monitoring.tensorboard=false"]
    assert main(["sft", *named, *small, "training.learning_rate=1e-3"]) == 0
    timed = [row for row in rows_of(tmp_path) if "time/step" in row]
    assert [row["step"] for row in timed] == [1, 2]
    compare(read(tmp_path / "run" / "events.jsonl"), timed)
