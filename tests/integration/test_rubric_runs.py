"""Whole runs whose reward is a rubric, with a local server as the judge that knows each prompt by its number."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripted import Scripted, Serve, grader
from tests.support.scripted import serve as serve
from tests.support.tiny import make_tiny_model
from trueline.cli import main

ITEMS = [
    {"name": "even", "criterion": "The number is even.", "points": 3},
    {"name": "fourth", "criterion": "The number is a multiple of four.", "points": -1},
    {"name": "first", "criterion": "This criterion is the first.", "points": 1},
]
# Of numbers 0 to 7: 0 and 4 get 3 - 1 points, 2 and 6 get 3; in one of two gradings `first` adds 1; of 4 at the most.
BY_NUMBER = [(3 * (number % 2 == 0) - (number % 4 == 0) + 0.5) / 4 for number in range(8)]


def is_met(criterion: str, place: int, prompt: str) -> bool:
    number = int(re.search(r'"content": "(\d+):"', prompt)[1])  # type: ignore[index]
    return {"even": number % 2 == 0, "four": number % 4 == 0, "first": place == 1}[criterion.rstrip(".").split()[-1]]


@pytest.fixture
def judge(serve: Serve) -> Scripted:
    return serve(grader(is_met))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_tiny_model(tmp_path / "model", tied=True)
    rows = [{"prompt": f"{number}:", "own": ITEMS[:2]} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, keys in {
        "rubric": {"items": ITEMS, "gradings": 2},
        "rows": {"items": ITEMS[2:], "column": "own"},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")  # tables and lines are not folded
    return tmp_path


def words_of(judge: Scripted, rubric: str = "rubric.yaml") -> list[str]:
    asked = [f"reward.judge.url={judge.url}/v1", "reward.judge.model=wise", "reward.remote.backoff_seconds=0.01"]
    quiet = ["runtime=local", "monitoring.tensorboard=false", "rollout.max_new_tokens=2"]
    return ["--model", "model", "--name", "run", "--reward", rubric, *asked, *quiet]


def train(judge: Scripted, *words: str, rubric: str = "rubric.yaml") -> int:
    step = ["prompts_per_step=8", "algorithm.group_size=2", "steps=1", "data.shuffle=false", "checkpoint.every=0"]
    whole = ["monitoring.transcripts_per_step=16", "monitoring.doctor=false"]
    return main(["dr_grpo", "--data", "prompts.jsonl", *words_of(judge, rubric), *step, *whole, *words])


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_items_are_in_metrics_and_transcripts(home: Path, judge: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(judge) == 0
    said = capsys.readouterr().out
    assert "rubric     rubric.yaml: 3 items of 4 points, weighted_sum, graded twice, by wise" in " ".join(
        said.split("\n")
    )
    step = rows_of(home / "runs/run/metrics.jsonl")[1]
    assert {name: value for name, value in step.items() if name.startswith("rubric/")} == {
        "rubric/item/even": 0.5,
        "rubric/item/fourth": 0.25,
        "rubric/item/first": 0.5,
        "rubric/disagreement": pytest.approx(1 / 3),
    }
    assert step["reward/mean"] == pytest.approx(sum(BY_NUMBER) / 8) and step["reward/failed"] == 0
    transcripts = rows_of(home / "runs/run/transcripts.jsonl")
    assert len(transcripts) == 16
    for one in transcripts:
        number = int(one["prompt"].rstrip(":"))
        assert one["reward"] == pytest.approx(BY_NUMBER[number])
        assert (one["rubric/item/even"], one["rubric/item/fourth"]) == (number % 2 == 0, number % 4 == 0)
        assert (one["rubric/item/first"], one["rubric/disagreement"]) == (0.5, pytest.approx(1 / 3))
    assert len([asked for asked in judge.asked if "messages" in asked]) == 2 * (1 + 16)  # the trial, and the step


def test_items_of_rows_are_in_transcripts_alone(home: Path, judge: Scripted) -> None:
    assert train(judge, rubric="rows.yaml") == 0
    step = rows_of(home / "runs/run/metrics.jsonl")[1]
    assert [name for name in step if name.startswith("rubric/")] == ["rubric/item/first"]
    for one in rows_of(home / "runs/run/transcripts.jsonl"):
        number = int(one["prompt"].rstrip(":"))
        assert (one["rubric/row_item/1 even"], one["rubric/row_item/2 fourth"]) == (number % 2 == 0, number % 4 == 0)


def test_a_judge_that_leaves_an_item_out_gives_no_zeros(
    home: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every fourth number, whose groups leave; the others keep their rewards, and the cause is told."""
    whole = grader(is_met)

    def answer(body: dict[str, Any], number: int) -> Any:
        text = json.dumps(body)
        if any(f'\\"{one}:\\"' in text for one in (0, 4)) and number > 2:
            body = {"messages": [{"content": body["messages"][0]["content"].replace("\n2. ", "\n")}]}
        return whole(body, number)

    words = ["reward.max_failure_share=1", "prompts_per_step=6", "reward.remote.attempts=2", "steps=1"]
    assert train(serve(answer), *words) == 0
    step = rows_of(home / "runs/run/metrics.jsonl")[1]
    kept = [BY_NUMBER[number] for number in range(8) if number % 4]
    assert step["reward/failed"] >= 2 and step["reward/mean"] == pytest.approx(sum(kept) / 6)
    assert (step["rubric/item/even"], step["rubric/item/fourth"]) == (pytest.approx(1 / 3), 0)
    said = " ".join(capsys.readouterr().out.split())
    assert "completions got no reward" in said and "no verdict, true or false, on item 2 (fourth) (2 tries)" in said


def test_eval_generate_and_try_show_the_items(home: Path, judge: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--eval-data", "prompts.jsonl", *words_of(judge), "evaluation.samples=1"]) == 0
    metrics = json.loads((home / "runs/run/evaluation.json").read_text())["metrics"]
    assert metrics["evaluation/reward"] == pytest.approx(sum(BY_NUMBER) / 8)
    assert (metrics["evaluation/rubric/item/even"], metrics["evaluation/rubric/item/fourth"]) == (0.5, 0.25)
    assert metrics["evaluation/rubric/disagreement"] == pytest.approx(1 / 3)
    assert main(["generate", "--data", "prompts.jsonl", *words_of(judge), "--name", "sampled", "samples=1"]) == 0
    for row in rows_of(home / "runs/sampled/samples.jsonl"):
        number, (one,) = int(row["prompt"][-1]["content"].rstrip(":")), row["completions"]
        assert one["reward"] == pytest.approx(BY_NUMBER[number])
        verdicts = {"item/even": number % 2 == 0, "item/fourth": number % 4 == 0, "item/first": 0.5}
        assert one["rubric"] == verdicts | {"disagreement": pytest.approx(1 / 3)}
    capsys.readouterr()
    keys = [word for word in words_of(judge) if word.startswith("reward.")]
    assert main(["reward", "try", "--reward", "rubric.yaml", "--data", "prompts.jsonl", "--reply", "x", *keys]) == 0
    shown = "rubric/item/even 1, rubric/item/fourth 1, rubric/item/first 0.5, rubric/disagreement 0.333333"
    assert f"reward   0.625 ({shown})" in capsys.readouterr().out


def test_the_doctor_has_the_judge_grade_once(home: Path, judge: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "prompts.jsonl", *[word for word in words_of(judge) if word not in ("--name", "run")]]
    assert main(["doctor", "dr_grpo", *words, "rollout.max_new_tokens=64"]) in (0, 1)
    said = capsys.readouterr().out
    assert "constant_reward" not in said and "not called" not in said
    assert len([asked for asked in judge.asked if "messages" in asked]) == 2
    (home / "rubric.yaml").write_text(yaml.safe_dump({"items": [{**ITEMS[0], "points": "many"}]}))
    assert main(["doctor", "dr_grpo", *words]) != 0
    assert "item 1: points: input should be a valid number" in " ".join(capsys.readouterr().out.split())
