"""Real child processes throughout: what is promised here is how they live and die."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.data import RewardConfig
from trueline.rewards.base import RewardFailure, RewardTimeout
from trueline.rewards.pool import RewardPool, check_reward
from trueline.rollout.rollouts import EventLoop

FUNCTIONS = """
import asyncio, os, subprocess, sys, time

def good(reply): return len(reply)
def raises(reply): raise KeyError("no such thing as " + reply)
def nan(reply): return float("nan")
def infinite(reply): return -float("inf")
def text(reply): return "1.0"
def nothing(reply): pass
def boolean(reply): return reply == "yes"
def number_of_numpy(reply):
    import numpy
    return numpy.float32(0.25)
def leaves(reply): sys.exit(4)
def missing_column(reply, level): return level
def default(reply, level=7): return level
def everything(**call): return len(call["reply"]) + call["level"]
def label_and_prompt(reply, label, prompt, messages): return label + len(prompt) + 100 * len(messages)

async def slow_and_fine(reply):
    await asyncio.sleep(0.01)
    return 0.5

def sleeps(reply):
    if reply == "sleep":
        time.sleep(1000)
    return 1.0

def dies(reply):
    if reply == "die":
        os._exit(3)
    return 1.0

def talks(reply):
    print('{"reward": 99}')
    sys.stdout.flush()
    os.write(1, b'{"reward": 98}\\n')
    return 2.0

def greedy(reply):
    return float(len(bytearray(2 * 2**30)))

def own_child(reply):
    child = subprocess.Popen(["sleep", "1000"])
    with open(reply, "w") as file:
        file.write(str(child.pid))
    child.wait()

def process(reply): return os.getpid()
"""

Use = Callable[[RewardPool], Awaitable[Any]]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def config_of(file: Path, name: str, **settings: Any) -> RewardConfig:
    return RewardConfig(**({"function": f"{file}:{name}", "processes": 1} | settings))


# One loop for all tests, as in a run: subprocess transports complain when theirs is closed under them.
LOOP = EventLoop(timeout_seconds=30)


def with_pool(config: RewardConfig, log: Path, use: Use) -> Any:
    async def run() -> Any:
        pool = RewardPool(config, log)
        try:
            return await use(pool)
        finally:
            await pool.stop()

    return LOOP.run(run(), "a reward test")


def score(functions: Path, name: str, call: dict[str, Any], **settings: Any) -> float:
    log = functions.parent / "reward.log"
    return with_pool(config_of(functions, name, **settings), log, lambda pool: pool.score(call))


@pytest.mark.parametrize(
    ("name", "reply", "reward"),
    [
        ("good", "four", 4.0),
        ("boolean", "yes", 1.0),
        ("boolean", "no", 0.0),
        ("number_of_numpy", "", 0.25),
        ("slow_and_fine", "", 0.5),
        ("default", "", 7.0),
    ],
)
def test_a_number_comes_back(functions: Path, name: str, reply: str, reward: float) -> None:
    assert score(functions, name, {"reply": reply}) == reward


def test_parameters_are_filled_by_name(functions: Path) -> None:
    call = {"reply": "four", "label": 2, "prompt": "abc", "messages": [{}, {}], "level": 5, "unused": None}
    assert score(functions, "label_and_prompt", call) == 2 + 3 + 200
    assert score(functions, "missing_column", call) == 5
    assert score(functions, "default", call) == 5
    assert score(functions, "everything", call) == 4 + 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'no such thing as four'"),
        ("nan", "finite number"),
        ("infinite", "finite number"),
        ("text", "of type str"),
        ("nothing", "of type NoneType"),
        ("missing_column", "level"),
        ("leaves", "exit status 4"),
    ],
)
def test_what_is_no_number_is_a_failure_with_its_reason(functions: Path, name: str, reason: str) -> None:
    with pytest.raises(RewardFailure) as caught:
        score(functions, name, {"reply": "four"})
    assert reason in str(caught.value)
    assert not isinstance(caught.value, RewardTimeout)


def test_an_exception_does_not_cost_the_process(functions: Path) -> None:
    async def use(pool: RewardPool) -> set[int]:
        seen = set()
        for _ in range(2):
            with pytest.raises(RewardFailure):
                await pool.score({"reply": "x"})
            seen |= {child.process.pid for child in pool.children}
        return seen

    assert len(with_pool(config_of(functions, "raises"), functions.parent / "log", use)) == 1


def test_a_call_that_hangs_is_killed_and_the_next_one_works(functions: Path) -> None:
    async def use(pool: RewardPool) -> tuple[float, float, int]:
        await pool.score({"reply": "warm"})
        (hanging,) = pool.children
        start = time.monotonic()
        with pytest.raises(RewardTimeout, match=r"0\.3 s"):
            await pool.score({"reply": "sleep"})
        seconds = time.monotonic() - start
        reward = await pool.score({"reply": "again"})
        return seconds, reward, await hanging.process.wait()

    config = config_of(functions, "sleeps", timeout_seconds=0.3)
    seconds, reward, status = with_pool(config, functions.parent / "log", use)
    assert 0.3 <= seconds < 5
    assert reward == 1.0
    assert status == -9


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_a_killed_call_had_started_dies_with_it(functions: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(RewardTimeout):
        score(functions, "own_child", {"reply": str(note)}, timeout_seconds=1.0)
    pid = int(note.read_text())
    try:
        deadline = time.monotonic() + 2
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, 9)


def test_a_process_that_dies_is_replaced(functions: Path) -> None:
    async def use(pool: RewardPool) -> float:
        with pytest.raises(RewardFailure, match="exit status 3"):
            await pool.score({"reply": "die"})
        return await pool.score({"reply": "live"})

    assert with_pool(config_of(functions, "dies"), functions.parent / "log", use) == 1.0


def test_what_a_reward_prints_goes_to_the_log(functions: Path) -> None:
    assert score(functions, "talks", {"reply": ""}) == 2.0
    text = (functions.parent / "reward.log").read_text()
    assert '{"reward": 99}' in text
    assert '{"reward": 98}' in text


def test_memory_is_limited(functions: Path) -> None:
    with pytest.raises(RewardFailure, match="MemoryError"):
        score(functions, "greedy", {"reply": ""}, memory_gib=0.5)


def test_calls_are_spread_over_the_processes(functions: Path) -> None:
    async def use(pool: RewardPool) -> list[float]:
        return list(await asyncio.gather(*(pool.score({"reply": ""}) for _ in range(8))))

    pids = with_pool(config_of(functions, "process", processes=2), functions.parent / "log", use)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


def test_stopping_leaves_no_process(functions: Path) -> None:
    async def use(pool: RewardPool) -> int:
        return int(await pool.score({"reply": ""}))

    assert not is_running(with_pool(config_of(functions, "process"), functions.parent / "log", use))


def test_the_pattern_reaches_the_built_in(functions: Path) -> None:
    config = RewardConfig(function="regex", pattern=r"^\d+$", processes=1)

    async def use(pool: RewardPool) -> list[float]:
        return [await pool.score({"reply": reply}) for reply in ("12", "x12")]

    assert with_pool(config, functions.parent / "log", use) == [1.0, 0.0]


def refused(config: RewardConfig, columns: list[str], labelled: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        check_reward(config, columns, labelled)
    return str(caught.value)


def test_a_reward_that_can_be_called_passes_the_check(functions: Path) -> None:
    check_reward(config_of(functions, "missing_column"), ["level"], labelled=False)
    check_reward(config_of(functions, "everything"), [], labelled=False)
    check_reward(config_of(functions, "default"), [], labelled=False)
    check_reward(RewardConfig(function="exact"), [], labelled=True)


def test_a_parameter_without_a_value_is_named_with_what_there_is(functions: Path) -> None:
    message = refused(config_of(functions, "missing_column"), ["difficulty", "topic"])
    assert "'level'" in message
    for name in ("reply", "prompt", "messages", "label", "difficulty", "topic"):
        assert name in message


def test_a_label_that_the_data_does_not_have_is_missed_at_once() -> None:
    message = refused(RewardConfig(function="math"), ["prompt"], labelled=False)
    assert "'label'" in message
    assert "data.label_column" in message


def test_regex_needs_a_pattern() -> None:
    assert "'pattern'" in refused(RewardConfig(function="regex"), [])
    check_reward(RewardConfig(function="regex", pattern="x"), [], labelled=False)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("", "reward.function is empty"),
        ("maths", "math"),  # a misspelt built-in: the names are listed
        ("no_such_module_here:f", "no_such_module_here"),
        ("none.py:f", "none.py"),
        ("json:no_such_function", "no_such_function"),
    ],
)
def test_what_cannot_be_found_is_named(function: str, part: str) -> None:
    message = refused(RewardConfig(function=function), [])
    assert "reward.function" in message
    assert part in message


def test_a_missing_function_of_a_file_is_named(functions: Path) -> None:
    message = refused(config_of(functions, "absent"), [])
    assert "'absent'" in message
    assert str(functions) in message


@pytest.mark.parametrize(
    ("text", "part"),
    [("def f(:", "SyntaxError"), ("import no_such_module_here", "no_such_module_here"), ("1 / 0", "ZeroDivisionError")],
)
def test_a_file_that_cannot_be_imported_shows_why(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    assert part in refused(config_of(tmp_path / "broken.py", "f"), [])


def test_a_file_that_ends_its_process_at_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import os, sys\nsys.stderr.write('farewell')\nsys.stderr.flush()\nos._exit(1)"
    )
    message = refused(config_of(tmp_path / "leaving.py", "f"), [])
    assert "died" in message
    assert "farewell" in message
