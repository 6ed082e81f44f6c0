"""Ten ways to hang, with real processes: the first line of the report names the culprit."""

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.stuck import ENGINE, RANK, Engine, Rank
from trueline.cli import main
from trueline.config.reward import RewardConfig
from trueline.config.run import CheckpointConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Completion, Prompt
from trueline.environments.base import Environment, EpisodeResult, Policy
from trueline.monitoring.heartbeat import BEAT, WORK, read_beat
from trueline.monitoring.timing import Timer
from trueline.monitoring.watch import Watch, explain
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.groups import GroupSampler, SamplerSpec
from trueline.rollout.pool import EnginePool
from trueline.rollout.session import EpisodeLimits
from trueline.runs.processes import open_loop, open_rewards
from trueline.runtime import actors
from trueline.runtime.actors import Placement, RayActor, wait_all
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.training.checkpoints import Checkpoints, PollSave

LONG = 600.0  # seconds; no deadline may come before a report
HANGING = """
import pathlib, time
def score(reply, file):
    while not pathlib.Path(file).exists():
        time.sleep(0.05)
    return 1.0
"""

First = Callable[[], str]


@contextmanager
def watched(logs: Path, timeout_seconds: float = 10.0) -> Iterator[First]:
    """Watch this process and what beats into `logs`; give what tells the first line of the report, when it comes."""
    logs.mkdir(exist_ok=True)
    said: queue.Queue[str] = queue.Queue()
    with Watch(timeout_seconds, said.put) as watch:
        # Not by `move`, nor to the end: what processes tell that live longer than this shall stay.
        watch.logs, WORK.moved = logs, time.time()
        yield lambda: said.get(timeout=LONG).splitlines()[0]
        watch.logs = watch.aside


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with open_loop(LONG) as loop:
        yield loop


# Rewards, environments, data and checkpoints, in this process


def rewards_of(folder: Path, config: dict[str, Any]) -> CombinedReward:
    return open_rewards(RewardConfig.parse({"timeout_seconds": LONG, **config}), [], {}, folder)


def score_all(loop: EventLoop, rewards: CombinedReward, calls: int) -> Any:
    async def ask() -> None:
        await asyncio.gather(*(rewards.score({"reply": "a"}) for _ in range(calls)))

    return asyncio.run_coroutine_threadsafe(ask(), loop.loop)


@pytest.mark.parametrize(("calls", "said"), [(1, "1 call waits on"), (30, "30 calls wait on")])
def test_a_reward_function_that_sleeps_or_a_line_that_is_full(
    tmp_path: Path, loop: EventLoop, calls: int, said: str
) -> None:
    (tmp_path / "reward.py").write_text(HANGING)
    function = f"{tmp_path}/reward.py:score"
    part = {"slow": {"function": function, "options": {"file": str(tmp_path / "go on")}}}
    rewards = rewards_of(tmp_path, {"parts": part, "processes": 1})
    with watched(tmp_path / "logs") as first:
        asked = score_all(loop, rewards, calls)
        line = first()
        (tmp_path / "go on").touch()
        asked.result(LONG)  # it was told, not ended
    loop.run(rewards.stop(), "stop")
    assert line.startswith("stuck: reward `slow` has not answered for ")
    assert line.endswith(f"{said} {function}, in 1 processes")


def test_a_judge_that_answers_nothing(tmp_path: Path, loop: EventLoop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        rewards = rewards_of(tmp_path, {"function": "judge", "judge": {"url": url, "model": "m", "prompt": "{reply}"}})
        with watched(tmp_path / "logs") as first:
            asked = score_all(loop, rewards, 3)
            line = first()
            asked.cancel()
        loop.run(rewards.stop(), "stop")
    assert "reward `reward` has not answered for" in line and f"3 calls wait on {url}" in line


class Deadlocked(Environment):
    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        await policy.reply(prompt.messages)
        await asyncio.Event().wait()
        raise AssertionError


class Answering:
    async def call(self, method: Callable[..., Any], *args: Any) -> Completion:
        return Completion.of([5, 6], [-1.0, -1.0], 0, "length")


def test_an_environment_that_never_returns(tmp_path: Path, loop: EventLoop, tokenizer: PreTrainedTokenizerFast) -> None:
    engine: Any = Answering()
    episodes = Episodes(EnginePool([engine]), ChatFormat(tokenizer, use_template=False), EpisodeLimits(512))
    sampler = GroupSampler(episodes, Deadlocked, SamplerSpec(SamplingParams(1.0, 8, (2,)), 2, 0, "train"))
    prompt = Prompt(0, [{"role": "user", "content": "2+2="}])
    with watched(tmp_path / "logs") as first:
        asked = asyncio.run_coroutine_threadsafe(sampler.sample((0, prompt), 0), loop.loop)
        line = first()
        asked.cancel()
    assert "environment Deadlocked has not returned from `play` for" in line and "2 episodes wait" in line


def test_a_checkpoint_that_is_never_written(tmp_path: Path) -> None:
    pipe = tmp_path / "disk"
    os.mkfifo(pipe)

    def write(folder: Path) -> PollSave:
        pipe.write_text("blocks until somebody reads")
        raise OSError(28, "No space left on device")

    def save() -> None:
        with Timer().phase("save"):
            Checkpoints(tmp_path, CheckpointConfig(), print).save(1, {}, write)

    with watched(tmp_path / "logs") as first:
        thread = threading.Thread(target=save)
        thread.start()
        line = first()
        pipe.read_text()
        thread.join()
    assert line.startswith("stuck: a checkpoint is being written since") and str(tmp_path) in line


def test_data_that_never_come(tmp_path: Path, model_folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a run folder, the report goes to the screen."""
    (tmp_path / "data").mkdir()
    pipe = tmp_path / "data" / "rows.jsonl"
    os.mkfifo(pipe)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = Watch._report

    def feed(watch: Watch, text: str) -> None:
        report(watch, text)
        pipe.write_text('{"text": "one"}\n' * 8)

    monkeypatch.setattr(Watch, "_report", feed)
    words = [f"model.path={model_folder}", f"data.path={tmp_path / 'data'}", "runtime=local", "timeout_seconds=10"]
    assert main(["sft", "--dry-run", f"folder={tmp_path}", *words]) == 0
    first = capfd.readouterr().err.splitlines()[0]
    assert first.startswith("stuck: the data is being read since ") and first.endswith(f": data.path={tmp_path}/data")


@pytest.mark.slow
def test_a_whole_run_explains_itself_and_goes_on(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of a run hangs; its report comes, another terminal is told the same, and the run comes to its end."""
    (tmp_path / "reward.py").write_text(HANGING)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+2="}\n' * 4)
    run, report, asked, terminals = tmp_path / "run", Watch._report, [], []

    def ask() -> None:
        command = [sys.executable, "-m", "trueline.cli", "explain", str(run)]
        asked.append(subprocess.run(command, capture_output=True, text=True).stdout)
        (tmp_path / "go on").touch()

    def release(watch: Watch, text: str) -> None:
        report(watch, text)
        if text.startswith("reward "):  # not of a start that is slow
            terminals.append(threading.Thread(target=ask))
            terminals[-1].start()

    monkeypatch.setattr(Watch, "_report", release)
    words = ["--model", str(model_folder), "--data", f"{tmp_path}/prompts.jsonl", "--name", "run", f"folder={tmp_path}"]
    words += ["runtime=local", "steps=1", "prompts_per_step=2", "algorithm.group_size=2", "rollout.max_new_tokens=2"]
    words += [f"reward.function={tmp_path}/reward.py:score", f'reward.options={{"file": "{tmp_path}/go on"}}']
    words += [
        "timeout_seconds=40",
        "reward.timeout_seconds=600",
        "monitoring.tensorboard=false",
        "monitoring.doctor=false",
    ]
    assert main(["grpo", *words]) == 0
    for terminal in terminals:  # of a later report, on a slow machine, too
        terminal.join()
    reports = [file.read_text() for file in sorted((run / "logs").glob("stuck-*.txt"))]
    said = next(text for text in reports if text.startswith("reward "))
    for text in (said, asked[0]):
        assert text.startswith("reward `reward` has not answered for ")
        assert "== stacks of run" in text and "rollouts.py" in text
    assert "stuck: reward `reward` has not answered for " in (run / "logs" / "run.log").read_text()
    assert explain(run).startswith("The run has ended. Last log line: done: step 1 of 1")


# Ranks and engines, in processes of their own


@pytest.fixture(scope="module")
def ray_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ray_cluster(machine_at_hand()):
        (logs := tmp_path_factory.mktemp("run") / "logs").mkdir()
        yield logs


@pytest.fixture(scope="module")
def ranks(ray_logs: Path) -> list[RayActor[Rank]]:
    actors = [RayActor(f"policy-{rank}", RANK, [rank], spot(), ray_logs / f"policy-{rank}.log") for rank in range(2)]
    address = actors[0].submit(Rank.listen).result(LONG)
    wait_all([actor.submit(Rank.start, address) for actor in actors], LONG)
    return actors


def spot() -> Placement:
    root = str(Path(__file__).resolve().parents[2])
    return Placement(environment={"PYTHONPATH": root})


@pytest.mark.slow
def test_a_rank_that_skips_a_collective(ray_logs: Path, ranks: list[RayActor[Rank]]) -> None:
    with watched(ray_logs, 30.0) as first:
        calls = [actor.submit(Rank.update, "", skips=rank == 1) for rank, actor in enumerate(ranks)]
        calls.pop().result(LONG)
        line = first()
        calls.append(ranks[1].submit(Rank.update, ""))
        assert wait_all(calls, LONG) == [2.0, 2.0]
    assert "policy rank 1 has no call to work on, while policy rank 0 waits in a collective (all_reduce)" in line


@pytest.mark.slow
def test_a_rank_that_is_slow(ray_logs: Path, ranks: list[RayActor[Rank]], tmp_path: Path) -> None:
    with watched(ray_logs, 30.0) as first:
        calls = [actor.submit(Rank.update, str(tmp_path / "go on") * rank) for rank, actor in enumerate(ranks)]
        line = first()
        (tmp_path / "go on").touch()
        wait_all(calls, LONG)
    assert line.startswith("stuck: policy rank 1 is in the optimizer step of `update` since ")
    assert "while policy rank 0 waits in a collective (all_reduce)" in line


@pytest.mark.slow
def test_an_engine_that_is_stopped_and_then_one_that_is_dead(ray_logs: Path) -> None:
    engine = RayActor("engine-0", ENGINE, [], spot(), ray_logs / "engine-0.log")
    assert asyncio.run(engine.call(Engine.generate)) == 1
    beat = read_beat(ray_logs / f"engine-0{BEAT}")
    assert beat is not None
    os.kill(beat.pid, signal.SIGSTOP)
    with watched(ray_logs, 30.0) as first:
        call = engine._call("generate", {})
        line, asked = first(), explain(ray_logs.parent)
        victim = psutil.Process(beat.pid)
        victim.kill()
        victim.wait()  # a process that is dying is still there
        WORK.moved += 1e-3  # one report for each silence
        line_of_dead = first()
        del call
    assert line.startswith("stuck: engine-0 is stopped (state T)")
    assert asked.startswith("engine-0 is stopped (state T)")  # from another terminal, the same
    assert line_of_dead.startswith("stuck: engine-0's process is gone")


@pytest.mark.slow
def test_an_engine_whose_slots_are_all_taken_is_alive_and_can_be_told_to_pause(
    ray_logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests take all slots and queue for more; what the run tells its engine does not wait behind them."""
    monkeypatch.setattr(actors, "CONCURRENT_CALLS", 2)
    engine = RayActor("engine-full", ENGINE, [], spot(), ray_logs / "engine-full.log")

    async def ask() -> list[int]:
        requests = [asyncio.ensure_future(engine.call(Engine.wait)) for _ in range(8)]
        await asyncio.wait_for(engine.ping().async_result(), LONG)
        assert await asyncio.wait_for(engine.call(Engine.let_go, 2), LONG) == 2  # in the loop of those who wait
        return list(await asyncio.gather(*requests))

    assert asyncio.run(ask()) == [2] * 8
    engine.stop()
