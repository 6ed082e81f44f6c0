"""What a user types, on the real stack: a run of their own, a stop and a resume, and mistakes that end early."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    started = subprocess.Popen(
        command("--name", "mine", "steps=4", "evaluation.data=prompts.jsonl", "evaluation.limit=4", *SMALL),
        cwd=home,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    lines = []
    for line in started.stdout:
        lines.append(line)
        if re.match(r"mine 1/4 ", line):
            children = psutil.Process(started.pid).children(recursive=True)
            started.send_signal(signal.SIGINT)
    assert started.wait() == 130, "".join(lines)
    assert "stopping after this step" in "".join(lines)
    assert children and wait_until_gone(children)
    folder = home / "runs" / "mine"
    stopped_at = max(row["step"] for row in rows_of(folder / "metrics.jsonl"))
    assert 1 <= stopped_at < 4
    resumed = run(home, *command("--name", "mine", "--resume"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"at step {stopped_at}" in resumed.stdout
    check_run_folder(folder)


def title_of(process: psutil.Process) -> str:
    """What Ray calls it, with the method that it works on; nothing where it has just ended."""
    try:
        return "".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=300)
    return not alive


def check_run_folder(folder: Path) -> None:
    rows = rows_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row["mismatch/logprob_gap_max"] < 1e-4
        assert row["policy/ratio_deviation_max"] < 1e-4
        assert row["sync/canary_gap"] < 1e-4
        assert row["rollout/staleness_max"] == 0
    assert {"evaluation/reward"} <= set(rows[0]) & set(rows[4])
    assert {row["outcome"] for row in rows_of(folder / "transcripts.jsonl")} <= {"finished", "truncated"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]["preset"] == "grpo"
    assert list((folder / "tensorboard").glob("events*"))
    newest = folder / "checkpoints" / "step_000004" / "model"
    assert AutoModelForCausalLM.from_pretrained(newest).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(newest).eos_token_id == 2


def test_steps_are_saved_when_an_engine_is_killed(home: Path) -> None:
    """The trainer lives on in its own process; nothing that it has trained is lost."""
    started = subprocess.Popen(
        command("--name", "killed", "steps=100000", "rollout.engine=hf", "checkpoint.every=0", *SMALL),
        cwd=home,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    lines = []
    for line in started.stdout:
        lines.append(line)
        if re.match(r"killed 2/", line):
            family = psutil.Process(started.pid).children(recursive=True)
            (engine,) = [one for one in family if title_of(one).startswith("ray::AsyncHost")]
            assert engine.nice() == 0  # another busy program leaves it its share of the cores
            engine.kill()
    said = "".join(lines)
    assert started.wait() == 1, said
    assert "engine-0" in said and "its process died" in said
    folder = home / "runs" / "killed"
    reached = max(row["step"] for row in rows_of(folder / "metrics.jsonl"))
    assert (folder / "checkpoints" / f"step_{reached:06d}" / "training.safetensors").is_file(), said
    assert wait_until_gone(family)


def test_the_resolved_tree_is_valid_input(home: Path, here: Screen) -> None:
    assert main([*GRPO, "--dry-run", *SMALL]) == 0
    tree, _, plan = here.readouterr().out.partition("\nmachine")
    (home / "resolved.yaml").write_text(tree)
    assert main(["grpo", "--config", "resolved.yaml", "--dry-run"]) == 0
    assert yaml.safe_load(here.readouterr().out.partition("\nmachine")[0]) == yaml.safe_load(tree)
    assert "2 prompts x 4 answers = 8 per step" in plan
    assert not (home / "runs" / yaml.safe_load(tree)["name"]).exists()


MISTAKES = {
    "misspelt key": (
        ["rollout.max_new_token=8"],
        r"unknown key 'rollout.max_new_token'; did you mean 'rollout.max_new_tokens'",
    ),
    "missing file": (["data.path=nowhere.jsonl"], r"data.path=nowhere.jsonl: there is no such file"),
    "empty dataset": (["data.path=empty.jsonl"], r"data.path=empty.jsonl: the dataset is empty"),
    "missing column": (
        ["data.prompt_column=quest"],
        r"data.prompt_column=quest: .*prompts.jsonl, line 1 has no such column",
    ),
    "no such reward": (["reward.function=my_reward.py:digit"], r"my_reward.py has no function 'digit'"),
    "wrong signature": (["reward.function=wrong.py:f"], r"no value for its parameter 'solution'"),
    "does not import": (["reward.function=broken.py:f"], r"ModuleNotFoundError: No module named 'nonsense'"),
    "no tokenizer": (["model.path=bare"], r"model.path=bare: no tokenizer"),
    "too many ranks": (["training.ranks=400"], r"needs about .* GiB of memory .*training.ranks"),
    "existing name": (["name=taken"], r"taken exists: add --resume"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_early_and_says_the_way_out(home: Path, mistake: str, here: Screen) -> None:
    words, message = MISTAKES[mistake]
    prepare_mistakes(home)
    assert main([*GRPO, *words]) == 2
    said = here.readouterr().err
    assert re.search(message, said, re.DOTALL), said
    assert "Traceback" not in said or mistake == "does not import"


def prepare_mistakes(home: Path) -> None:
    (home / "empty.jsonl").write_text("")
    (home / "wrong.py").write_text("def f(reply, solution):\n    return 0.0\n")
    (home / "broken.py").write_text("import nonsense\n")
    (home / "runs" / "taken").mkdir(parents=True, exist_ok=True)
    bare = home / "bare"
    bare.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((home / "my model" / name).read_bytes())


def test_an_offline_task_starts_ranks_and_resumes_on_fewer(home: Path) -> None:
    """Two ranks share each sequence at ZeRO 3; after --resume one rank at ZeRO 1 goes on."""
    pairs = [{"prompt": f"Say {number}", "chosen": "yes", "rejected": f"no {number}"} for number in range(20)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    named = ["--model", "my model", "--data", "pairs.jsonl", "--name", "pairs"]
    wide = [
        "training.ranks=2",
        "model.context_parallel=2",
        "training.zero_stage=3",
        "evaluation.share=0.2",
        "samples_per_step=4",
    ]
    first = run(home, *TRUELINE, "dpo", *named, *wide, "steps=2", "training.learning_rate=1e-3")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "format     preference (columns prompt, chosen, rejected)" in first.stdout
    assert "held out   4 rows" in first.stdout
    narrow = ["training.ranks=1", "model.context_parallel=1", "training.zero_stage=1", "steps=4"]
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
