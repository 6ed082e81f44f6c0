"""What a user types, on the real stack: a run of their own, a stop and a resume, one run after another."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.programs import start
from tests.support.tiny import make_tiny_model
from trueline.cli import main

Screen = pytest.CaptureFixture[str]
TRUELINE = [sys.executable, "-m", "trueline.cli"]
REWARD = """
def digits(reply: str, wanted: str) -> float:
    return sum(character == wanted for character in reply) / max(len(reply), 1)
"""
GRPO = ["grpo", "--model", "my model", "--data", "prompts.jsonl", "--reward", "my_reward.py:digits"]
SMALL = ["prompts_per_step=2", "algorithm.group_size=4", "rollout.max_new_tokens=8", "training.learning_rate=1e-3"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it: a model, prompts with a column of their own, a reward file."""
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "my model", tied=False)
    rows = [{"prompt": f"Say {number}", "wanted": str(number % 10)} for number in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_reward.py").write_text(REWARD)
    return folder


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return os.environ | {"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}


def command(*words: str) -> list[str]:
    return [*TRUELINE, *GRPO, *words]


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen) -> Screen:
    """What is said in this process, which stands where the user does."""
    monkeypatch.chdir(home)
    return capsys


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=home, env=environment(), capture_output=True, text=True, check=False)


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_three_flags_train_then_stop_and_resume(home: Path) -> None:
    """Ctrl-C after the first step leaves a checkpoint and no process; --resume goes on to the end."""
    tested = ["evaluation.data=prompts.jsonl", "evaluation.limit=4"]
    started = start(command("--name", "mine", "steps=100000", *tested, *SMALL), home, environment())
    assert started.stdout is not None
    lines, children = [], []
    for line in started.stdout:
        lines.append(line)
        if re.match(r"mine 1/100000 ", line) and not children:
            children = psutil.Process(started.pid).children(recursive=True)
            started.send_signal(signal.SIGINT)
    assert started.wait() == 130, "".join(lines)
    assert "stopping after the current update" in "".join(lines)
    parts = (
        r"start +\d+ s: libraries \d+, .*Ray \d+, .*; policy \d+ \(.*imports \d+.*\); engine \d+ \(.*imports \d+.*\)"
    )
    assert re.search(parts, "".join(lines)), "".join(lines)
    assert children and wait_until_gone(children)
    folder = home / "runs" / "mine"
    stopped_at = max(row["step"] for row in rows_of(folder / "metrics.jsonl"))
    assert stopped_at >= 1
    resumed = run(home, *command("--name", "mine", "--resume", f"steps={stopped_at + 2}"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"at step {stopped_at}" in resumed.stdout
    check_run_folder(folder, stopped_at + 2)


def title_of(process: psutil.Process) -> str:
    """What Ray calls it, with the method that it works on; nothing where it has just ended."""
    try:
        return "".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=300)
    return not alive


def check_run_folder(folder: Path, steps: int) -> None:
    rows = rows_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    for row in rows[1:]:
        assert row["mismatch/logprob_gap_max"] < 1e-4
        assert row["policy/ratio_deviation_max"] < 1e-4
        assert row["sync/canary_gap"] < 1e-4
        assert row["rollout/staleness_max"] == 0
    assert {"evaluation/reward"} <= set(rows[0]) & set(rows[-1])
    assert {row["outcome"] for row in rows_of(folder / "transcripts.jsonl")} <= {"finished", "truncated"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]["preset"] == "grpo"
    assert list((folder / "tensorboard").glob("events*"))
    newest = folder / "checkpoints" / f"step_{steps:06d}" / "model"
    assert AutoModelForCausalLM.from_pretrained(newest).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(newest).eos_token_id == 2


@pytest.mark.soak
def test_steps_are_saved_when_an_engine_dies_again_and_again(home: Path) -> None:
    """It is started anew, in vain; the trainer lives on in its own process, and nothing that it has trained is lost."""
    words = ["steps=100000", "rollout.engine=hf", "checkpoint.every=0"]
    started = start(command("--name", "killed", *words, *SMALL), home, environment())
    assert started.stdout is not None
    lines = []
    for line in started.stdout:
        lines.append(line)
        if re.match(r"killed 2/", line):
            (engine,) = engines_of(family := psutil.Process(started.pid).children(recursive=True))
            assert engine.nice() == 0  # another busy program leaves it its share of the cores
            threading.Thread(target=kill_engines, args=[started], daemon=True).start()
    said = "".join(lines)
    assert started.wait() == 1, said
    assert said.count("the engine is started again") >= 2
    assert "engines died 3 times in one step" in said and "engine-0" in said and "its process died" in said
    folder = home / "runs" / "killed"
    reached = max(row["step"] for row in rows_of(folder / "metrics.jsonl"))
    assert (folder / "checkpoints" / f"step_{reached:06d}" / "training.safetensors").is_file(), said
    assert wait_until_gone(family)


def engines_of(family: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in family if title_of(one).startswith("ray::AsyncActorHost")]


def kill_engines(run: subprocess.Popen[str]) -> None:
    """End each engine as soon as it can be seen."""
    while run.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for engine in engines_of(psutil.Process(run.pid).children(recursive=True)):
                engine.kill()
        time.sleep(0.2)


def test_the_resolved_tree_is_valid_input(home: Path, here: Screen) -> None:
    assert main([*GRPO, "--dry-run", *SMALL]) == 0
    tree, _, plan = here.readouterr().out.partition("\nmachine")
    (home / "resolved.yaml").write_text(tree)
    assert main(["grpo", "--config", "resolved.yaml", "--dry-run"]) == 0
    assert yaml.safe_load(here.readouterr().out.partition("\nmachine")[0]) == yaml.safe_load(tree)
    assert "2 prompts x 4 completions = 8 per step" in plan
    assert not (home / "runs" / yaml.safe_load(tree)["name"]).exists()


def test_a_run_is_the_model_or_the_reward_of_the_next(home: Path, here: Screen) -> None:
    (home / "both.jsonl").write_text('{"prompt": "Say 5", "completion": "5", "chosen": "5", "rejected": "6"}\n' * 4)
    local = ["runtime=local", "steps=1", "checkpoint.every=0", "monitoring.tensorboard=false"]
    offline = ["--data", "both.jsonl", "samples_per_step=2", *local]
    assert main(["sft", "--model", "my model", "--name", "first", *offline]) == 0
    assert main(["rm", "--model", "runs/first", "--name", "judge", *offline]) == 0
    last = ["grpo", "--model", "runs/judge/../first", "--reward", "runs/judge", "--name", "last", *SMALL, *local]
    assert main([*last, "--data", "prompts.jsonl"]) == 0
    said = here.readouterr().out
    assert "model.path=runs/first: step_000001, the newest checkpoint" in " ".join(said.split())
    tree = yaml.safe_load((home / "runs" / "last" / "config.yaml").read_text())
    models = {name: home / "runs" / name / "checkpoints/step_000001/model" for name in ("first", "judge")}
    assert (tree["model"]["path"], tree["reward"]["function"]) == (str(models["first"]), str(models["judge"]))
    assert main(["data", "preview", "--model", "runs/first", "--data", "both.jsonl", "data.format=completion"]) == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"port={taken.getsockname()[1]}"
        assert main(["serve-reward", "--model", "runs/judge", "runtime=local", port]) == 2  # told after its model
        assert port in here.readouterr().err


@pytest.mark.slow
def test_an_offline_task_starts_ranks_and_resumes_on_fewer(home: Path) -> None:
    """Two ranks share each sequence at ZeRO 3; after --resume one rank at ZeRO 1 goes on."""
    pairs = [{"prompt": f"Say {number}", "chosen": "yes", "rejected": f"no {number}"} for number in range(20)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    named = ["--model", "my model", "--data", "pairs.jsonl", "--name", "pairs"]
    wide = ["training.ranks=2", "model.context_parallel=2", "training.deepspeed.zero_stage=3"]
    few = ["evaluation.share=0.2", "samples_per_step=4", "steps=2", "training.learning_rate=1e-3"]
    first = run(home, *TRUELINE, "dpo", *named, *wide, *few)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "format     preference (columns prompt, chosen, rejected)" in first.stdout
    assert "held out   4 rows" in first.stdout
    narrow = ["training.ranks=1", "model.context_parallel=1", "training.deepspeed.zero_stage=1", "steps=4"]
    second = run(home, *TRUELINE, "dpo", "--resume", "--name", "pairs", *narrow)
    assert second.returncode == 0, second.stdout + second.stderr
    rows = rows_of(home / "runs" / "pairs" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["evaluation/loss"] < rows[0]["evaluation/loss"]
    AutoModelForCausalLM.from_pretrained(home / "runs" / "pairs" / "checkpoints" / "step_000004" / "model")


def test_data_preview_marks_what_is_learnt(home: Path, here: Screen) -> None:
    row = {"messages": [{"role": "user", "content": "Say 5"}, {"role": "assistant", "content": "5"}]}
    (home / "chat.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["data", "preview", "--model", "my model", "--data", "chat.jsonl"]) == 0
    shown = here.readouterr().out
    assert "format     messages (column messages)" in shown
    assert "⟦5" in shown and "row 1: " in shown
