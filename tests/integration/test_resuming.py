"""--resume as a user types it: which run it takes, from where, on which data; and disks that refuse to be written.

Covers `trueline.monitoring.user_files`.
"""

import json
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.disk import files_up_to
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.config.base import ConfigError
from trueline.config.run import RunConfig
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.runs.launch import Job, Start, launch

REWARD = """
def letters(reply: str, learnable: bool) -> float:
    return sum("a" <= character <= "z" for character in reply) if learnable else 0.0
"""
SFT = ["sft", "--model", "model", "--data", "rows.jsonl", "runtime=local", "samples_per_step=4"]
QUICK = ["training.learning_rate=1e-3", "monitoring.tensorboard=false", "monitoring.doctor=false"]
GRPO = ["grpo", "--model", "model", "--data", "prompts.jsonl", "runtime=local", "rollout.max_new_tokens=8"]
GROUPS = ["prompts_per_step=2", "algorithm.group_size=4", "training.learning_rate=1e-3"]
Screen = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_tiny_model(tmp_path / "model", tied=True)
    write_rows(tmp_path / "rows.jsonl", [sum_of(number) for number in range(20)])
    write_rows(tmp_path / "prompts.jsonl", [prompt(number) for number in range(20)])
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sum_of(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} + 1 =", "completion": str(number + 1)}


def prompt(number: int) -> dict[str, Any]:
    """The first eight teach nothing: every answer to them has one reward."""
    return {"prompt": f"{number}:", "learnable": number >= 8}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps_of(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def age(run: Path, seconds: int) -> None:
    for path in (*run.rglob("*"), run):
        os.utime(path, (10_000 - seconds, 10_000 - seconds))


# Which run, and from where


def test_the_run_touched_last_goes_on_by_its_name_and_loses_no_row(home: Path, capsys: Screen) -> None:
    """It has a name of the user's, and is older than another of this verb and one of another verb."""
    for name in ("mine", "sft-20250101-000000"):
        assert main([*SFT, *QUICK, "--name", name, "steps=3", "checkpoint.every=2"]) == 0
    runs = home / "runs"
    (runs / "rm-later").mkdir()
    (runs / "rm-later" / "config.yaml").write_text("# trueline rm\n")
    age(runs / "sft-20250101-000000", 50)
    age(runs / "mine", 40)
    last = runs / "mine" / "checkpoints" / "step_000003"
    last.rename(home / "lost")  # as if a kill had come before it was whole
    capsys.readouterr()
    assert main(["sft", "--resume"]) == 0
    said = capsys.readouterr()
    assert f"resume     {runs}/mine, the latest sft run" in said.err
    assert "metrics.jsonl: 1 rows after step 2 moved to metrics.after_step_000002.jsonl" in said.out
    assert steps_of(runs / "mine" / "metrics.jsonl") == [1, 2, 3]
    assert steps_of(runs / "mine" / "metrics.after_step_000002.jsonl") == [3]
    assert not list((runs / "sft-20250101-000000").glob("*after_step*"))


def test_a_run_without_a_checkpoint_starts_over_only_where_that_is_asked_for(home: Path, capsys: Screen) -> None:
    words = [*SFT, *QUICK, "--name", "mine", "steps=2", "evaluation.share=0.2"]
    assert main([*words, "--restart"]) == 2
    assert "--restart needs --resume, which finds the run to start over" in capsys.readouterr().err
    assert main(words) == 0
    run = home / "runs" / "mine"
    (run / "checkpoints" / "step_000002").rename(run / "checkpoints" / "step_000002.unfinished")
    before = (run / "metrics.jsonl").read_bytes()
    assert main([*words, "--resume"]) == 2
    said = capsys.readouterr().err
    assert f"{run} has no checkpoint yet: add --restart to start it over at step 0" in said
    assert (run / "metrics.jsonl").read_bytes() == before
    assert main([*words, "--resume", "--restart"]) == 0
    assert "no checkpoint yet: starts over at step 0" in capsys.readouterr().out
    assert steps_of(run / "metrics.jsonl") == [0, 1, 2]
    assert (run / "metrics.after_step_000000.jsonl").read_bytes() == before
    assert main([*words, "--resume", "--restart"]) == 2
    assert f"{run} has a checkpoint to resume from: drop --restart" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_before_anything_is_trained(home: Path, capsys: Screen) -> None:
    words = [*SFT, *QUICK, "--name", "mine", "steps=2"]
    assert main(words) == 0
    saved = home / "runs" / "mine" / "checkpoints" / "step_000002"
    for file in (saved / "training.safetensors", saved / "model" / "tokenizer.json"):
        content = file.read_bytes()
        file.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))  # of the same size
        assert main([*words, "steps=4", "--resume"]) == 2
        said = f"{saved}: {file.relative_to(saved)} is missing or has changed; remove the folder"
        assert said in capsys.readouterr().err
        file.write_bytes(content)
    assert main([*words, "steps=4", "--resume"]) == 0


def test_jobs_without_checkpoints_have_no_restart(capsys: Screen) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--resume", "--restart"])
    assert "unknown option --restart" in capsys.readouterr().err


def test_a_run_that_another_process_runs_is_left_alone_by_all_that_write_to_it(home: Path, capsys: Screen) -> None:
    assert main([*SFT, *QUICK, "--name", "mine", "steps=1"]) == 0
    run = home / "runs" / "mine"
    bare = home / "runs" / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("checkpoints"))
    before = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    with RunFolder(run).hold_lock(), RunFolder(bare).hold_lock():
        for words in (["mine"], ["mine", "--restart"], ["bare"], ["bare", "--restart"]):
            assert main(["sft", "--resume", "steps=2", "--name", *words]) == 2
            said = capsys.readouterr().err
            assert f"{words[0]} is being run by process {os.getpid()} on {socket.gethostname()} since" in said
        assert main(["explain", "runs/mine"]) == 0
        assert "The run is being planned and has not started." in capsys.readouterr().out
        assert main(["report", "runs/mine", "--out", "page.html"]) == 0
        assert main(["export", "runs/mine", "out"]) == 0
    assert (run / "metrics.jsonl").read_bytes() == before
    assert main(["sft", "--resume", "--name", "mine", "steps=2"]) == 0


def test_a_run_holds_its_lock_while_it_works(home: Path) -> None:
    """From before a resumed run is planned, as planning repairs its checkpoint, to the end of the work."""
    seen: list[str] = []

    def look(when: str) -> None:
        try:
            RunFolder(home / "runs" / "mine").check_idle()
        except ConfigError:
            seen.append(when)

    def work(folder: RunFolder, progress: Progress) -> int:
        look("work")
        return 0

    def prepare(config: RunConfig, start: Start) -> Job:
        look("plan")
        return Job(config, "", 1, work)

    config = RunConfig(name="mine", runtime="local")
    assert launch(config, "sft", prepare) == 0
    assert launch(config, "sft", prepare, resume=True) == 0
    assert launch(config, "sft", prepare, resume=True, dry_run=True) == 0
    assert seen == ["work", "plan", "work"]
    look("after")
    assert "after" not in seen


def test_a_run_goes_on_from_another_folder_and_from_where_it_was_moved(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    (home / "exact").mkdir()  # a folder with the name of a built-in
    reward = ["reward.parts.own.function=reward.py:letters", "reward.parts.right.function=exact"]
    words = [*GRPO, *GROUPS, *QUICK, *reward, "--name", "mine", "steps=1", "data.label_column=prompt"]
    assert main([*words, "evaluation.sets.held=prompts.jsonl", "evaluation.limit=1"]) == 0
    kept = yaml.safe_load((home / "runs" / "mine" / "config.yaml").read_text())
    assert (kept["folder"], kept["model"]["path"]) == (f"{home}/runs", f"{home}/model")
    assert kept["reward"]["parts"]["own"]["function"] == f"{home}/reward.py:letters"
    assert kept["reward"]["parts"]["right"]["function"] == "exact"
    assert kept["data"]["path"] == kept["evaluation"]["sets"]["held"] == f"{home}/prompts.jsonl"
    (elsewhere := home / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["grpo", "--resume", "--name", "mine", f"folder={home}/runs", "steps=2"]) == 0
    assert main(["grpo", "--resume", "--name", "../runs/mine", "steps=3"]) == 0
    (home / "runs" / "mine").rename(elsewhere / "moved")
    assert main(["grpo", "--resume", "--name", "moved", "folder=.", "steps=4"]) == 0
    (project := home / "project").mkdir()
    for name in ("model", "prompts.jsonl", "reward.py"):
        (home / name).rename(project / name)
    (project / "runs").mkdir()
    (elsewhere / "moved").rename(project / "runs" / "mine")
    capsys.readouterr()
    assert main(["grpo", "--resume", "--name", f"{project}/runs/mine", "steps=5"]) == 0
    said = capsys.readouterr()
    assert "has changed" not in said.out + said.err
    assert steps_of(project / "runs" / "mine" / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_changed_code_and_held_out_data_are_named_once(home: Path, capsys: Screen) -> None:
    (home / "reward.py").write_text(f"from lengths import LONGEST\n{REWARD}")
    (home / "lengths.py").write_text("LONGEST = 8\n")
    (home / "own.py").write_text(
        "def f(samples, config):\n    for one in samples:\n        one.advantages = one.mask * 1.0\n"
    )
    write_rows(home / "held.jsonl", [prompt(9)])
    words = [*GRPO, *GROUPS, *QUICK, "--reward", "reward.py:letters", "--eval-data", "held.jsonl"]
    assert main([*words, "--name", "mine", "steps=1", "algorithm.advantage=own:f"]) == 0

    def warnings(steps: int) -> list[str]:
        capsys.readouterr()
        assert main(["grpo", "--resume", "--name", "mine", f"steps={steps}"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]

    assert warnings(2) == []
    (home / "lengths.py").write_text("LONGEST = 9\n")
    (home / "own.py").write_text((home / "own.py").read_text() + "# other\n")
    write_rows(home / "held.jsonl", [prompt(10)])
    advantage, held, reward = sorted(warnings(3), key=lambda line: line.rpartition("(")[2])
    assert (
        f"warning: {home}/own.py changed" in advantage
        and advantage.endswith("(algorithm.advantage)")
        and "updates before" in advantage
    )
    assert (
        f"warning: {home}/held.jsonl changed" in held
        and held.endswith("(evaluation.data)")
        and "evaluations before" in held
    )
    assert (
        f"warning: {home}/lengths.py changed" in reward
        and reward.endswith("(reward.function)")
        and "rewards before" in reward
    )
    assert warnings(4) == []


# On which data


@pytest.mark.parametrize("verb", ["sft", "grpo"])
def test_other_data_than_a_run_began_with_is_refused_before_anything_starts(
    home: Path, verb: str, capsys: Screen
) -> None:
    words = {"sft": SFT, "grpo": [*GRPO, *GROUPS, "--reward", "reward.py:letters"]}[verb]
    file, row = {"sft": (home / "rows.jsonl", sum_of), "grpo": (home / "prompts.jsonl", prompt)}[verb]
    assert main([*words, *QUICK, "--name", "mine", "steps=1"]) == 0
    write_rows(file, [row(number) for number in range(21)])
    metrics = (home / "runs" / "mine" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main([verb, "--resume", "--name", "mine", "steps=2"]) == 2
    said = capsys.readouterr()
    newest = home / "runs/mine/checkpoints/step_000001"
    assert (
        f"{newest}: the data is not what this run has learnt from: {file.name} had 20 rows and now has 21" in said.err
    )
    assert f"start a new run with --model {newest}/model" in said.err
    assert "starting" not in said.out
    write_rows(file, [row(number) for number in range(20)])
    assert main([verb, "--resume", "--name", "mine", "steps=2", "seed=1"]) == 2
    assert "seed changed from 0 to 1" in capsys.readouterr().err
    assert (home / "runs" / "mine" / "metrics.jsonl").read_bytes() == metrics
    assert main([verb, "--resume", "--name", "mine", "steps=2"]) == 0


def test_a_run_goes_on_behind_the_prompts_that_taught_nothing(home: Path, capsys: Screen) -> None:
    """Four groups are tried for a step and eight prompts teach nothing: the third attempt finds the others."""
    words = [*GRPO, *GROUPS, *QUICK, "--reward", "reward.py:letters", "--name", "mine", "steps=2", "data.shuffle=false"]
    dynamic = ["algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.max_batches=2"]
    assert main([*words, *dynamic]) == 1
    said = capsys.readouterr().out
    assert "none of 4 groups has completions with different rewards" in said and "--resume --name mine" in said
    assert groups_of(home, 0) == 4
    assert main(["grpo", "--resume"]) == 1
    assert groups_of(home, 0) == 8
    assert main(["grpo", "--resume"]) == 0
    assert groups_of(home, 2) == 12
    trained = [json.loads(line) for line in (home / "runs/mine/transcripts.jsonl").read_text().splitlines()]
    assert {line["prompt"] for line in trained} == {"8:", "9:", "10:", "11:"}  # of both steps


def groups_of(home: Path, step: int) -> int:
    """Return how many prompts have had their fate."""
    state = json.loads((home / f"runs/mine/checkpoints/step_{step:06d}/state.json").read_text())
    return sum(state["ledger"]["fates"].values())


# Disks


@pytest.mark.parametrize("verb", ["sft", "grpo"])
def test_a_full_disk_costs_what_was_not_written_and_not_the_run(home: Path, verb: str, capsys: Screen) -> None:
    """Files take 12,000 bytes: the configuration fits, some steps' numbers do, no checkpoint does."""
    words = {"sft": SFT, "grpo": [*GRPO, *GROUPS, "--reward", "reward.py:letters"]}[verb]
    total = {"sft": 60, "grpo": 12}[verb]
    with files_up_to(12_000):
        status = main([*words, "training.learning_rate=1e-3", "--name", "mine", f"steps={total}", "checkpoint.every=6"])
    assert status == 1  # for the last step is not saved
    said = capsys.readouterr().out
    assert f"mine {total}/{total}" in said
    steps = steps_of(home / "runs" / "mine" / "metrics.jsonl")
    first = 0 if verb == "grpo" else 1
    assert steps[0] == first and steps == sorted(set(steps))  # a shorter row may find room after a longer one did not
    assert 1 < len(steps) < total
    for name in ("metrics.jsonl", "tensorboard"):
        assert said.count(f"warning: {name} cannot be written ([Errno 27] File too large)") == 1
    lost = total + 1 - first - len(steps)
    assert f"warning: {lost} rows of metrics.jsonl were lost" in said
    failed = [f"warning: step_{step:06d} could not be saved (rank 0: [Errno 27]" for step in range(6, total + 1, 6)]
    assert all(one in said for one in failed)
    assert f"error: step {total} is trained but not saved" in said


def test_a_job_whose_samples_cannot_be_written_goes_on_once_there_is_room(home: Path, capsys: Screen) -> None:
    words = ["generate", "--model", "model", "--data", "prompts.jsonl", "runtime=local", "rollout.max_new_tokens=8"]
    with files_up_to(6000):
        assert main([*words, "--name", "mine", "samples=4"]) == 1
    said = capsys.readouterr().out
    assert "samples.jsonl cannot be written: [Errno 27] File too large" in said
    assert "--resume --name mine" in said
    assert main(["generate", "--resume"]) == 0
    assert "of 20 prompts are sampled" in capsys.readouterr().out
    rows = [json.loads(line) for line in (home / "runs/mine/samples.jsonl").read_text().splitlines()]
    assert sorted(row["number"] for row in rows) == list(range(20))
    with files_up_to(500):
        assert main(["generate", "--resume"]) == 1
    said = capsys.readouterr().err
    assert "kept.jsonl cannot be written: File too large: free disk space" in said and "--resume" in said


@pytest.mark.parametrize("command", [SFT, [*GRPO, "--reward", "reward.py:letters"]], ids=["sft", "grpo"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    home: Path, command: list[str], capsys: Screen
) -> None:
    (home / "taken").write_text("")
    assert main([*command, "folder=taken", "--name", "mine"]) == 2
    said = capsys.readouterr()
    assert f"error: folder=taken: {home}/taken/mine cannot be written (Not a directory)" in said.err
    assert said.out == ""


def test_a_run_is_closed_to_others(home: Path) -> None:
    """One closed folder closes all that is in it; nothing of the run lies outside."""
    before = set(home.iterdir())
    assert main([*SFT, *QUICK, "--name", "mine", "steps=1"]) == 0
    assert set(home.iterdir()) - before == {home / "runs"}
    assert [path.name for path in (home / "runs").iterdir()] == ["mine"]
    assert stat.S_IMODE((home / "runs" / "mine").stat().st_mode) == 0o700
