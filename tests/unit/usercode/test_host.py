"""A process that one event loop has started, and another one takes over."""

import asyncio
import gc
from pathlib import Path

import pytest

from trueline.config.reward import RewardConfig
from trueline.rewards.base import RewardFailure
from trueline.rewards.function_reward import FunctionReward, LoadedFunction, check_function
from trueline.rewards.scoring import RewardCode
from trueline.usercode.host import ChildProcess, Host

FUNCTION = """
import os, time
print("at import")
def pid(reply):
    print("in a call")
    return os.getpid() if reply != "sleeps" else time.sleep(1000)
"""


@pytest.fixture
def config(tmp_path: Path) -> RewardConfig:
    (tmp_path / "mine.py").write_text(FUNCTION)
    return RewardConfig(function=f"{tmp_path}/mine.py:pid", timeout_seconds=2, processes=2)


def load(config: RewardConfig) -> tuple[LoadedFunction, int, Path]:
    loaded = check_function(config, config, {})
    assert loaded.process.process is not None
    return loaded, loaded.process.process.pid, loaded.process.log


async def score(config: RewardConfig, log: Path, loaded: LoadedFunction, *replies: str) -> list[float]:
    reward = FunctionReward(config, config, log, loaded)
    try:
        return await asyncio.gather(*(reward.score({"reply": reply}) for reply in replies))
    finally:
        await reward.stop()


def test_a_run_goes_on_with_the_process_of_its_check(config: RewardConfig, tmp_path: Path) -> None:
    loaded, pid, log = load(config)
    assert pid in asyncio.run(score(config, tmp_path / "reward.log", loaded, *["x"] * 4))
    assert "at import" in (tmp_path / "reward.log").read_text() and "in a call" in (tmp_path / "reward.log").read_text()
    assert not log.exists() and not loaded.process.is_running()


def test_a_process_that_was_taken_over_is_killed_at_its_deadline_and_replaced(
    config: RewardConfig, tmp_path: Path
) -> None:
    loaded, pid, _ = load(config)
    one = config.with_keys({"processes": 1})
    with pytest.raises(RewardFailure, match="a call took more than 2 s"):
        asyncio.run(score(one, tmp_path / "reward.log", loaded, "sleeps"))
    assert pid not in asyncio.run(score(one, tmp_path / "reward.log", loaded, "x"))


def test_a_check_that_nobody_uses_ends_its_process(config: RewardConfig) -> None:
    loaded, _, log = load(config)
    loaded.close()
    assert not loaded.process.is_running() and not log.exists()
    loaded, _, log = load(config)
    process = loaded.process.process
    assert process is not None
    del loaded
    gc.collect()
    assert process.wait(10) != 0 and not log.exists()


def test_a_busy_process_is_not_handed_over(config: RewardConfig, tmp_path: Path) -> None:
    async def release() -> ChildProcess:
        (host, _) = FunctionReward(config, config, tmp_path / "log").hosts
        call = asyncio.create_task(host.call(RewardCode.score, {"calls": [{"reply": "sleeps"}]}))
        while not host._at_work() or host.about is None:
            await asyncio.sleep(0.01)
        released = await host.release()
        await asyncio.wait([call])
        return released

    assert not asyncio.run(release()).is_running()


def test_a_host_takes_no_process_that_has_ended(config: RewardConfig, tmp_path: Path) -> None:
    loaded, _, _ = load(config)
    loaded.close()
    code = FunctionReward(config, config, tmp_path / "log").hosts[0].code
    assert Host(code, tmp_path / "log", loaded.process).child is not loaded.process
