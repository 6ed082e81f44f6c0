"""Sampling while training, through Ray, vLLM and DeepSpeed: how stale tokens are, and what becomes of every prompt."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.programs import start
from tests.support.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROWS = 24
LETTERS = """
def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "policy", tied=True)
    rows = [{"prompt": f"{number}:"} for number in range(ROWS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(LETTERS)
    return folder


def command(name: str, *words: str) -> list[str]:
    named = ["--model", "policy", "--data", "prompts.jsonl", "--reward", "reward.py:letters", "--name", name]
    small = ["rollout.max_new_tokens=16", "prompts_per_step=2", "algorithm.group_size=4", "training.learning_rate=1e-3"]
    return [sys.executable, "-m", "tests.support.slow_run", "grpo", *named, *small, *words]


def environment(seconds_per_token: float) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "SECONDS_PER_TOKEN": str(seconds_per_token)}


def steps_of(home: Path, name: str) -> list[dict[str, Any]]:
    lines = (home / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def fates_of(home: Path, name: str) -> Counter[tuple[str, int]]:
    """Count what became of each prompt's number, as the rows of the ledger tell it."""
    rows = [json.loads(line) for line in (home / "runs" / name / "ledger.jsonl").read_text().splitlines()]
    return Counter((fate, number) for row in rows for fate in row if fate != "step" for number in row[fate])


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "mode"), [(1, "interrupt"), pytest.param(3, "keep", marks=pytest.mark.soak)])
def test_tokens_are_as_stale_as_they_may_be_and_no_more(home: Path, staleness: int, mode: str) -> None:
    name = f"stale-{staleness}"
    words = [f"rollout.max_staleness={staleness}", f"rollout.on_update={mode}", "steps=8"]
    ended = subprocess.run(
        command(name, *words), cwd=home, env=environment(0.02), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = steps_of(home, name)
    found = [row["rollout/staleness_max"] for row in rows]
    assert len(found) == 8 and max(found) == staleness
    assert any(row["rollout/several_versions_share"] > 0 for row in rows)
    numerics = [row["mismatch/numerics"] for row in rows]  # of one completion, which may be a single token
    assert min(numerics) >= 0 and 0 < max(numerics) < 1e-4
    assert max(row["mismatch/staleness"] for row in rows) > 100 * max(numerics)
    fates = fates_of(home, name)
    assert set(fates.values()) == {1} and {fate for fate, _ in fates} == {"trained"} and len(fates) == 16
    assert f"{16 + 2 * staleness} prompts sampled: 16 trained, {2 * staleness} in flight" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["training.ranks=2"], ["rollout.workers=1", "algorithm.loss_aggregation=token_mean"]]
)
def test_a_streamed_run_of_real_processes_trains_what_a_whole_one_does(home: Path, words: list[str]) -> None:
    """Lengths are heavy-tailed, so some groups are complete long before others."""
    words = ["steps=3", "prompts_per_step=4", "rollout.max_new_tokens=96", "checkpoint.save=false", *words]
    found = []
    for stream in ("true", "false"):
        name = f"stream-{stream}-{len(words[-1])}"
        ended = subprocess.run(
            command(name, *words, f"training.stream={stream}"),
            cwd=home,
            env=environment(0.03) | {"HEAVY_TAIL": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ("gradient of the streamed first step differs" in ended.stdout) == (stream == "true")
        found.append(steps_of(home, name))
        assert set(fates_of(home, name).values()) == {1}
    for streamed, whole in zip(*found, strict=True):
        for key in ("loss", "grad_norm", "policy/entropy", "reward/mean", "mismatch/sampler_z_run"):
            assert streamed[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key
    assert any(row.get("rollout/streamed_share", 0) > 0 for row in found[0])


def engines_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        one for one in psutil.Process(run.pid).children(recursive=True) if title(one).startswith("ray::AsyncActorHost")
    ]


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        return " ".join(process.cmdline())
    return ""


def wait_for(run: subprocess.Popen[str], condition: Callable[[], Any]) -> Any:
    while run.poll() is None:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"the run ended with {run.returncode} before that: {run.stdout and run.stdout.read()}")


def harm(run: subprocess.Popen[str], home: Path, name: str, harms: list[tuple[int, float]]) -> None:
    """Send engines signals, each a while after the step that follows the one before."""
    metrics = home / "runs" / name / "metrics.jsonl"
    for number, (sent, seconds) in enumerate(harms):
        done = len(steps_of(home, name)) if metrics.exists() else 0
        wait_for(run, lambda done=done: metrics.exists() and len(steps_of(home, name)) > done)
        time.sleep(seconds)
        engines = wait_for(run, lambda: len(engines_of(run)) == 2 and engines_of(run))
        engines[number % 2].send_signal(sent)


def started(home: Path, name: str, *words: str) -> subprocess.Popen[str]:
    return start(command(name, *words), home, environment(0.02))


def harmed_run(home: Path, name: str, steps: int, harms: list[tuple[int, float]], *words: str) -> str:
    more = ["rollout.max_staleness=1", "rollout.engines=2", f"steps={steps}", "timeout_seconds=120", *words]
    with started(home, name, *more) as run:
        harm(run, home, name, harms)
        said, _ = run.communicate()
    assert run.returncode == 0, said
    assert len(steps_of(home, name)) == steps
    fates = fates_of(home, name)
    assert set(fates.values()) == {1} and {number for _, number in fates} == set(range(2 * steps)), said
    assert f"sampled: {2 * steps} trained, 2 in flight" in said
    return said


@pytest.mark.slow
def test_engines_that_die_or_hang_are_started_again_and_no_prompt_is_lost(home: Path) -> None:
    harms = [(signal.SIGKILL, 0.1), (signal.SIGSTOP, 0.3), (signal.SIGKILL, 0.6)]
    said = harmed_run(home, "harmed", 10, harms, "rollout.on_update=interrupt")
    assert said.count("the engine is restarted") >= 3
    assert "its process died" in said and "no heartbeat" in said


@pytest.mark.soak
def test_an_engine_that_hangs_in_its_second_start_is_started_once_more(home: Path) -> None:
    more = ["rollout.max_staleness=1", "rollout.engines=2", "steps=6", "timeout_seconds=60"]
    with started(home, "harmed-twice", *more) as run:
        harm(run, home, "harmed-twice", [(signal.SIGKILL, 0.1)])
        before = {one.pid for one in engines_of(run)}
        renewed = wait_for(run, lambda: [one for one in engines_of(run) if one.pid not in before])
        renewed[0].suspend()
        said, _ = run.communicate()
    assert run.returncode == 0, said
    assert "was not ready within timeout_seconds=60 of its start; the engine is restarted" in said
    assert set(fates_of(home, "harmed-twice").values()) == {1}


@pytest.mark.slow
def test_the_only_engine_is_killed_twice_at_once_and_the_run_goes_on(home: Path) -> None:
    """The second time while it is started again."""
    words = ["rollout.max_staleness=1", "rollout.on_update=keep", "rollout.engines=1"]
    with started(home, "twice", *words, "steps=6", "timeout_seconds=240") as run:
        metrics = home / "runs" / "twice" / "metrics.jsonl"
        wait_for(run, lambda: metrics.exists() and len(steps_of(home, "twice")) > 1)
        (engine,) = engines_of(run)
        engine.kill()
        (again,) = wait_for(run, lambda: [one for one in engines_of(run) if one.pid != engine.pid])
        again.kill()
        said, _ = run.communicate()
    assert run.returncode == 0, said
    assert said.count("the engine is restarted") == 2, said
    assert len(steps_of(home, "twice")) == 6 and set(fates_of(home, "twice").values()) == {1}


VICTIMS = {
    "driver": "",
    "rank": "ray::ActorHost",
    "engine": "ray::AsyncActorHost",
}  # by the first words of its processes


def kill_one(run: subprocess.Popen[str], victim: str) -> None:
    """End a process of the run, and wait for what the run makes of it."""
    family = psutil.Process(run.pid).children(recursive=True)
    wanted = VICTIMS[victim]
    named = [one for one in family if wanted and title(one).split(".")[0] == wanted]
    (named[0] if named else psutil.Process(run.pid)).kill()
    run.communicate()
    for one in family:  # a driver that is killed leaves its cluster behind for a moment
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["driver", "rank"])
def test_after_a_kill_every_prompt_of_an_epoch_is_trained_once(home: Path, victim: str) -> None:
    kill_and_resume(home, victim, f"killed-{victim}", 0.4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
def test_engines_that_die_or_hang_at_random_moments(home: Path, seed: int) -> None:
    chance = random.Random(seed)
    harms = [(chance.choice([signal.SIGKILL, signal.SIGSTOP]), chance.uniform(0, 2)) for _ in range(10)]
    harmed_run(home, f"soak-{seed}", 40, harms, f"rollout.on_update={chance.choice(['wait', 'interrupt', 'keep'])}")


@pytest.mark.soak
@pytest.mark.parametrize("moment", range(10))
@pytest.mark.parametrize("victim", list(VICTIMS))
def test_after_kills_at_random_moments(home: Path, victim: str, moment: int) -> None:
    kill_and_resume(home, victim, f"soak-{victim}-{moment}", random.Random(moment).uniform(0, 3))


def kill_and_resume(home: Path, victim: str, name: str, seconds: float) -> None:
    words = ["rollout.max_staleness=1", "rollout.on_update=keep", f"steps={ROWS // 2}", "checkpoint.every=2"]
    words += ["data.shuffle=true", "rollout.engines=1"]
    with started(home, name, *words) as run:
        checkpoints = home / "runs" / name / "checkpoints"
        wait_for(run, lambda: checkpoints.exists() and list(checkpoints.glob("step_*/state.json")))
        time.sleep(seconds)
        if victim == "engine":
            engines_of(run)[0].kill()
            run.communicate()
        else:
            kill_one(run, victim)
    again = [sys.executable, "-m", "tests.support.slow_run", "grpo", "--resume", "--name", name]
    if run.returncode:
        ended = subprocess.run(again, cwd=home, env=environment(0.02), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (run.returncode == 0) is (victim == "engine")
    fates = fates_of(home, name)
    assert fates == Counter({("trained", number): 1 for number in range(ROWS)})
