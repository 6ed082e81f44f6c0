"""What a real run records: who did what in each step, beside its times, and the tokens of its transcripts."""

import json
import re
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest

from tests.support.letters import rows_of, run_letters
from tests.support.tiny import make_tiny_model
from trueline.api import Run
from trueline.cli import main
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.run_folder import RunFolder
from trueline.report.digest import describe
from trueline.report.runs import ReportedRun

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
        assert {("engine", "generate_group"), ("policy", "update"), ("rewards", "reward")} <= called
    assert events[1]["start"] == pytest.approx(events[0]["start"] + events[0]["seconds"], abs=0.002)  # no time is lost
    assert events[0]["memory"]["run"] > 0.1
    assert WORK.recorder is None


def test_tokens_of_transcripts_are_the_reply(run: Path) -> None:
    rows = read(run / "run" / "transcripts.jsonl")
    trained, others = ([row for row in rows if (row["purpose"] == "train") is wanted] for wanted in (True, False))
    assert trained and others and not any("tokens" in row for row in others)
    for row in trained:
        (sequence,) = row["tokens"]
        assert re.sub("</?s>", "", "".join(sequence["text"])) == row["reply"]
        assert sequence["sampled"] == [len(sequence["text"])]
        assert {"logprob", "log_ratio", "advantage", "entropy"} <= set(sequence)
    advantages = {row["reward"]: row["tokens"][0]["advantage"] for row in trained if row["step"] == 1}
    assert len(advantages) > 1 and sorted(advantages.values()) == [advantages[one] for one in sorted(advantages)]


def groups_of(rows: list[dict[str, Any]], step: int) -> dict[int, list[dict[str, Any]]]:
    """Return the training transcripts of a step by their prompt, in the order of the file."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if (row["step"], row["purpose"]) == (step, "train"):
            found.setdefault(row["group"], []).append(row)
    return found


def spread(group: list[dict[str, Any]]) -> float:
    return pstdev(row["reward"] for row in group)


def test_transcripts_are_whole_groups_of_which_one_has_the_widest_spread(run: Path, tmp_path: Path) -> None:
    rows = read(run / "run" / "transcripts.jsonl")
    assert {step for step in range(4) if groups_of(rows, step)} == {1, 3}  # 4 a step: 2 groups of 8 in every 4th
    for step in (1, 3):
        groups = groups_of(rows, step)
        assert [len(group) for group in groups.values()] == [8, 8]
        assert all(len({row["prompt"] for row in group}) == 1 for group in groups.values())
    assert run_letters(tmp_path, "grpo", "steps=1", "monitoring.transcripts_per_step=64") == 0
    everything = groups_of(read(tmp_path / "run" / "transcripts.jsonl"), 1)
    assert [len(group) for group in everything.values()] == [8] * 8
    widest = max(everything, key=lambda number: spread(everything[number]))
    assert next(iter(groups_of(rows, 1))) == widest
    assert {number: [row["reply"] for row in group] for number, group in groups_of(rows, 1).items()}.items() <= {
        number: [row["reply"] for row in group] for number, group in everything.items()
    }.items()


def test_tokens_read_from_python_are_arrays(run: Path) -> None:
    transcripts = Run(run / "run").transcripts
    raw = read(run / "run" / "transcripts.jsonl")
    assert len(transcripts) == len(raw) and [row["reply"] for row in transcripts] == [row["reply"] for row in raw]
    row = next(row for row in transcripts if "tokens" in row)
    (sequence,) = row["tokens"]
    count = len(sequence["text"])
    assert sequence["sampled"].dtype == bool and sequence["sampled"].tolist() == [True] * count
    for name in ("logprob", "log_ratio", "advantage", "entropy"):
        assert isinstance(sequence[name], np.ndarray) and sequence[name].shape == (count,), name
    assert (sequence["logprob"] < 0).all() and (sequence["entropy"] > 0).all()
    advantages = [
        one["tokens"][0]["advantage"] for one in transcripts if one["step"] == 1 and one["purpose"] == "train"
    ]
    rewards = [one["reward"] for one in transcripts if one["step"] == 1 and one["purpose"] == "train"]
    first = rewards[:8]  # of one group, whose advantages are its rewards, normalised
    wanted = [(reward - fmean(first)) / pstdev(first) for reward in first]
    assert [one[0] for one in advantages[:8]] == pytest.approx(wanted, rel=0.1)


def test_a_run_without_pictures_names_none(run: Path) -> None:
    assert not any("images" in row for row in read(run / "run" / "transcripts.jsonl"))
    assert not (run / "run" / "pictures").exists()
    (shown,) = describe([ReportedRun("run", RunFolder(run / "run")).read()])["runs"]
    assert shown["pictures"] == {}


def test_tokens_are_kept_only_where_they_are_wanted(tmp_path: Path) -> None:
    assert run_letters(tmp_path, "grpo", "steps=1", "monitoring.tokens=false") == 0
    rows = read(tmp_path / "run" / "transcripts.jsonl")
    assert rows and not any("tokens" in row for row in rows)


TWO_AGENTS = """
def main(prompt, policy):
    plan = policy([{"role": "system", "content": "plan"}, {"role": "user", "content": prompt}])
    check = policy([{"role": "system", "content": "check"}, {"role": "user", "content": "is it right?"}])
    return float(len(plan) > len(check))
"""


def test_every_conversation_of_an_episode_is_in_its_transcript_and_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(TWO_AGENTS)
    agents = [f"environment.agent={tmp_path}/agents.py:main", "environment.processes=1", "reward.function="]
    assert run_letters(tmp_path, "grpo", *agents, "steps=1", "prompts_per_step=2", "algorithm.group_size=2") == 0
    rows = list(Run(tmp_path / "run").transcripts)
    (shown,) = describe([ReportedRun("run", RunFolder(tmp_path / "run")).read()])["runs"]
    assert len(rows) == 4 and [row["conversations"] for row in rows] == [
        row["conversations"] for row in shown["transcripts"]
    ]
    for row in rows:
        assert [one["number"] for one in row["conversations"]] == [1, 2] and len(row["tokens"]) == 2
        openings = [one["prompt"][0]["content"] for one in row["conversations"]]
        assert openings == ["plan", "check"]
        assert [len(one["turns"]) for one in row["conversations"]] == [1, 1]
        assert row["conversations"][1]["turns"][0]["content"] == row["reply"]


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
