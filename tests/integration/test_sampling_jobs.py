"""Sampling jobs and rounds as a user runs them: killed, interrupted and resumed; what they write is trained on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_tiny_model
from trueline.cli import main

ROOT = Path(__file__).resolve().parents[2]
TRUELINE = [sys.executable, "-m", "trueline.cli"]
PROMPTS, SAMPLES = 24, 4
REWARDS = """
import time

def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8

def slow(reply: str) -> float:
    time.sleep(0.05)
    return letters(reply)

def broken(reply: str, prompt: str, before: int = 99) -> float:
    if int(prompt.strip(":")) < before:
        raise ValueError(f"cannot grade {prompt}")
    return letters(reply)
"""
SMALL = ["runtime=local", "rollout.max_new_tokens=8", f"samples={SAMPLES}"]
GENERATE = ["generate", "--model", "model", "--data", "prompts.jsonl", *SMALL]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes eight characters, of which a good third are letters."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"prompt": f"{number}:", "answer": "a"} for number in range(PROMPTS)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS)
    generator = random.Random(0)
    texts = ["".join(generator.choice("abcdefg0123456789") for _ in range(8)) for _ in range(300)]
    taught = [{"prompt": f"{number % PROMPTS}:", "completion": text} for number, text in enumerate(texts)]
    write_rows(folder / "taught.jsonl", taught)
    make_tiny_model(folder / "random", tied=True)
    named = ["--model", str(folder / "random"), "--data", str(folder / "taught.jsonl"), "--name", "taught"]
    small = ["steps=60", "samples_per_step=32", "training.learning_rate=2e-3"]
    quiet = ["monitoring.tensorboard=false", "monitoring.doctor=false"]
    assert main(["sft", *named, *small, *quiet, "runtime=local", f"folder={folder}"]) == 0
    (folder / "taught/checkpoints/step_000060/model").rename(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def start(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*TRUELINE, *words], env=environment, text=True, **pipes)


def finish(*words: str, status: int = 0) -> str:
    process = start(*words)
    said, _ = process.communicate()
    assert process.returncode == status, said
    return said


def wait_for_lines(process: subprocess.Popen[str], file: Path, count: int) -> None:
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None, "the run ended"
        time.sleep(0.005)


def kill_after(lines: int, run: Path, *words: str) -> None:
    process = start(*words)
    wait_for_lines(process, run / "samples.jsonl", lines)
    process.kill()
    process.communicate()


def ordered(run: Path) -> list[dict[str, Any]]:
    return sorted(rows_of(run / "samples.jsonl"), key=lambda row: row["number"])


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The folder of a run that nobody stopped."""
    words = [*GENERATE, "--reward", "rewards.py:letters", "keep=best", "pairs=true", f"folder={home}/runs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main([*words, "--name", "whole"]) == 0
    return home / "runs" / "whole"


def test_every_prompt_is_answered_and_counted(whole: Path) -> None:
    rows = ordered(whole)
    assert sorted(row["id"] for row in rows) == list(range(PROMPTS))
    rewards = [[answer["reward"] for answer in row["completions"]] for row in rows]
    assert {len(group) for group in rewards} == {SAMPLES}
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["prompts"], summary["completions"], summary["failed"]) == (PROMPTS, PROMPTS * SAMPLES, 0)
    assert summary["reward_mean"] == pytest.approx(sum(map(sum, rewards)) / PROMPTS / SAMPLES)
    assert summary["reward_best_mean"] == pytest.approx(sum(map(max, rewards)) / PROMPTS)
    assert summary["tokens_per_second"] > 0
    kept = rows_of(whole / "kept.jsonl")
    assert [row["reward"] for row in kept] == [max(group) for group in rewards]
    assert len(rows_of(whole / "pairs.jsonl")) == summary["pairs"] == sum(max(group) > min(group) for group in rewards)
    assert len({answer["reply"] for row in rows for answer in row["completions"]}) > PROMPTS * SAMPLES * 0.9


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_it_is_the_run_that_nobody_stopped(home: Path, whole: Path) -> None:
    """Three kills at different places, after the second of which the last line is torn as well."""
    run, words = home / "runs" / "killed", [*GENERATE, "--reward", "rewards.py:slow", "keep=best", "pairs=true"]
    words += ["--name", "killed", "rollout.max_sequences=4"]
    kill_after(1, run, *words)
    kill_after(9, run, *words, "--resume")
    file = run / "samples.jsonl"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 40)
    kill_after(17, run, *words, "--resume")
    assert not (run / "summary.json").exists()
    left = file.read_bytes().count(b"\n")
    assert 17 <= left < PROMPTS
    said = finish(*words, "--resume")
    assert f"resumed    {left} of {PROMPTS} prompts are sampled" in said
    assert ordered(run) == ordered(whole)
    for name in ("kept.jsonl", "pairs.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_resume_goes_on(home: Path, whole: Path) -> None:
    words = [*GENERATE, "--reward", "rewards.py:slow", "--name", "stopped", "rollout.max_sequences=4"]
    process = start(*words)
    wait_for_lines(process, home / "runs/stopped/samples.jsonl", 2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "interrupt again to stop at once" in said and "continue with: trueline generate --resume" in said
    assert "Traceback" not in said
    finish("generate", "--resume", "--name", "stopped")
    assert ordered(home / "runs" / "stopped") == ordered(whole)


def test_a_finished_run_can_be_selected_from_again(home: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No engine starts for that."""
    keys = ["keep=threshold", "threshold=0.5", "pairs=false"]
    assert main([*GENERATE, "--reward", "rewards.py:letters", "--name", "again"]) == 0
    capsys.readouterr()
    assert main(["generate", "--resume", "--name", "again", *keys]) == 0
    assert "starting" not in capsys.readouterr().out
    rewards = [answer["reward"] for row in ordered(whole) for answer in row["completions"]]
    assert len(rows_of(home / "runs/again/kept.jsonl")) == sum(reward >= 0.5 for reward in rewards) > 0


@pytest.mark.parametrize(("verb", "file"), [("sft", "kept.jsonl"), ("dpo", "pairs.jsonl"), ("rm", "pairs.jsonl")])
def test_trainers_read_the_files_as_they_are(
    whole: Path, verb: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = len(rows_of(whole / file))
    assert main([verb, "--model", "model", "--data", str(whole / file), "runtime=local", "--dry-run"]) == 0
    assert f"data       {rows} rows" in capsys.readouterr().out


def test_shares_of_several_runs_make_up_the_whole(home: Path, whole: Path) -> None:
    for shard in range(2):
        words = ["--reward", "rewards.py:letters", "--name", f"share-{shard}", "shards=2", f"shard={shard}"]
        assert main([*GENERATE, *words]) == 0
    rows = [row for shard in range(2) for row in rows_of(home / f"runs/share-{shard}/samples.jsonl")]
    assert sorted(rows, key=lambda row: row["number"]) == ordered(whole)


def test_without_a_reward_there_are_answers_alone(home: Path, whole: Path) -> None:
    assert main([*GENERATE, "--name", "unjudged"]) == 0
    replies = [
        [[answer["reply"] for answer in row["completions"]] for row in ordered(run)]
        for run in (home / "runs/unjudged", whole)
    ]
    assert replies[0] == replies[1]
    assert {answer["reward"] for row in ordered(home / "runs/unjudged") for answer in row["completions"]} == {None}
    assert len(rows_of(home / "runs/unjudged/kept.jsonl")) == PROMPTS * SAMPLES


def test_a_few_failures_are_counted_and_never_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All answers to one prompt of 24: four failures, within 5 % of 100."""
    words = ["--reward", "rewards.py:broken", "--name", "few", "keep=best", "pairs=true"]
    assert main([*GENERATE, *words, 'reward.options={"before": 1}']) == 0
    assert "4 failed" in capsys.readouterr().out
    summary = json.loads((home / "runs/few/summary.json").read_text())
    assert (summary["failed"], summary["kept"]) == (4, PROMPTS - 1)
    assert any("cannot grade 0:" in error for error in summary["errors"])
    (lost,) = [row for row in ordered(home / "runs" / "few") if row["id"] == 0]
    assert {(answer["reward"], answer["outcome"]) for answer in lost["completions"]} == {(None, "reward_error")}
    assert [row["prompt"] for row in rows_of(home / "runs/few/kept.jsonl")].count(lost["prompt"]) == 0


def test_too_many_failures_stop_the_run_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--reward", "rewards.py:broken", "reward.probe=false", "--name", "many"]) == 1
    said = capsys.readouterr().out
    assert "reward.max_failure_share=0.05" in said and "cannot grade" in said
    assert "--resume --name many" in said


EVAL = ["eval", "--model", "model", "--reward", "rewards.py:letters", "runtime=local", "rollout.max_new_tokens=8"]


def test_eval_prints_a_table_and_writes_numbers_and_answers(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(home / "few.jsonl", [{"prompt": "77:"}, {"prompt": "88:"}])
    sets = "evaluation.sets={all: prompts.jsonl, few: few.jsonl}"
    keys = ["evaluation.samples=4", "evaluation.temperature=1.0", "evaluation.pass_reward=0.5", "--name", "eval"]
    assert main([*EVAL, sets, *keys]) == 0
    said = capsys.readouterr().out
    written = json.loads((home / "runs/eval/evaluation.json").read_text())
    metrics = written["metrics"]
    assert written["prompts"] == {"all": PROMPTS, "few": 2}
    for column in ("set", "prompts", "mean@4", "pass@4", "maj@4", "failed"):
        assert column in said
    for name in ("all", "few"):
        mean, width = metrics[f"evaluation/{name}/mean@4"], metrics[f"evaluation/{name}/reward_ci95"]
        assert f"{mean:.3f} ± {width:.3f}" in said
        assert metrics[f"evaluation/{name}/pass@1"] < metrics[f"evaluation/{name}/pass@4"] <= 1
    rows = rows_of(home / "runs/eval/transcripts.jsonl")
    rewards = [[answer["reward"] for answer in row["completions"]] for row in rows]
    assert len(rows) == PROMPTS + 2
    assert metrics["evaluation/all/reward"] == pytest.approx(sum(map(sum, rewards[:PROMPTS])) / PROMPTS / 4)
    right = [any(reward >= 0.5 for reward in group) for group in rewards]
    assert metrics["evaluation/few/pass@4"] == pytest.approx(sum(right[PROMPTS:]) / 2)


def test_eval_stops_when_rewards_fail(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--eval-data", "prompts.jsonl", "--reward", "rewards.py:broken", "--name", "eval-fails"]
    assert main([*EVAL, *words, "reward.probe=false"]) == 1
    assert "cannot grade" in capsys.readouterr().out


# Rounds

ROUNDS = [
    *("--model", "model", "--data", "prompts.jsonl", "--eval-data", "prompts.jsonl", "runtime=local", "rounds=2"),
    *("rollout.max_new_tokens=9", "samples=8", "evaluation.temperature=1.0", "evaluation.samples=8"),
    *("training.samples_per_step=8", "training.epochs=4", "monitoring.tensorboard=false", "monitoring.doctor=false"),
]
RAFT = ["raft", *ROUNDS, "training.learning_rate=5e-4"]


def results_of(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "rounds.json").read_text())


@pytest.fixture(scope="module")
def raft(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main([*RAFT, "--reward", "rewards.py:letters", "--name", "raft"]) == 0
    return home / "runs" / "raft"


def test_rounds_of_best_of_n_raise_the_held_out_reward(raft: Path) -> None:
    before, once, twice = [row["evaluation/reward"] for row in results_of(raft)]
    assert before < 0.5
    assert once > before + 0.05
    assert twice > once + 0.05


def test_rounds_leave_a_run_for_every_stage(raft: Path) -> None:
    rows = [rows_of(raft / f"round_{number}/generate/samples.jsonl") for number in (1, 2)]
    assert [sorted(row["id"] for row in part) for part in rows] == [list(range(PROMPTS))] * 2
    assert not {row["number"] for row in rows[0]} & {row["number"] for row in rows[1]}
    assert (raft / "round_2/sft/checkpoints").is_dir() and (raft / "round_2/eval/evaluation.json").is_file()


def test_rounds_of_pairs_raise_the_held_out_reward(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ROUNDS, "--reward", "rewards.py:letters", "--name", "pairs", "training.learning_rate=1e-4"]
    assert main(["iterative_dpo", *words, "prompts_per_round=16"]) == 0
    results = results_of(home / "runs" / "pairs")
    assert results[2]["evaluation/reward"] > results[0]["evaluation/reward"] + 0.1
    assert [row.get("learnt", 16) <= 16 for row in results] == [True] * 3
    said = capsys.readouterr().out
    assert "held-out reward" in said and f"{results[2]['evaluation/reward']:.3f}" in said


@pytest.mark.soak
def test_killed_rounds_go_on_to_the_same_end(home: Path, raft: Path) -> None:
    """Killed while the first round samples, and while the second one trains."""
    run, words = home / "runs" / "raft-killed", [*RAFT, "--reward", "rewards.py:slow", "--name", "raft-killed"]
    process = start(*words)
    wait_for_lines(process, run / "round_1/generate/samples.jsonl", 2)
    process.kill()
    process.communicate()
    process = start("raft", "--resume", "--name", "raft-killed")
    wait_for_lines(process, run / "round_2/sft/metrics.jsonl", 2)
    process.kill()
    process.communicate()
    assert not (run / "rounds.json").exists()
    said = finish("raft", "--resume", "--name", "raft-killed")
    assert "raft round_2/sft" in said and "round_1" not in said.split("raft round_2/sft")[0]
    assert results_of(run) == results_of(raft)


def test_a_round_that_keeps_nothing_says_so_and_can_be_selected_from_again(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RAFT, "--reward", "rewards.py:letters", "--name", "strict", "rounds=1"]
    assert main([*words, "keep=threshold", "threshold=2.0"]) == 1
    assert "has nothing for sft in kept.jsonl" in capsys.readouterr().out
    sampled = (home / "runs/strict/round_1/generate/samples.jsonl").read_bytes()
    assert main(["raft", "--resume", "--name", "strict", "threshold=0.5"]) == 0
    assert (home / "runs/strict/round_1/generate/samples.jsonl").read_bytes() == sampled
    assert results_of(home / "runs" / "strict")[1]["learnt"] > 0


def test_a_preview_takes_the_words_of_a_run_and_makes_none(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((home / "runs").iterdir())
    words = ["--model", "model", "--data", "prompts.jsonl", "--reward", "rewards.py:letters", "--dry-run"]
    assert main(["data", "preview", "grpo", *words, "--name", "previewed", "runtime=local"]) == 0
    assert f"{PROMPTS} prompts of prompts.jsonl" in capsys.readouterr().out
    assert sorted((home / "runs").iterdir()) == before


def test_a_dry_run_tells_the_plan_and_makes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RAFT, "--reward", "rewards.py:letters", "--name", "dry", "--dry-run"]) == 0
    assert (
        f"2 rounds of {PROMPTS} prompts, 8 completions each; every round then runs sft on kept.jsonl"
        in capsys.readouterr().out
    )
    assert not (home / "runs" / "dry").exists()


SHRUNK = {
    "generate": ["--data", "prompts.jsonl", "keep_truncated=true"],
    "eval": ["--eval-data", "prompts.jsonl"],
    "raft": [*ROUNDS, "rounds=1", "prompts_per_round=8", "keep=best", "keep_truncated=true"],
    "iterative_dpo": [*ROUNDS, "rounds=1", "prompts_per_round=8", "keep_truncated=true"],
}


@pytest.mark.parametrize("verb", SHRUNK)
def test_example_runs(verb: str) -> None:
    words = ["--config", str(ROOT / "examples" / f"{verb}.yaml"), "--model", "model", "--name", f"example-{verb}"]
    small = ["runtime=local", "rollout.max_new_tokens=8", "rollout.max_prompt_tokens=32"]
    assert main([verb, *words, "--reward", "rewards.py:letters", *SHRUNK[verb], *small]) == 0
