"""Real child processes throughout: what is promised here is how they live and die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from trueline.config.base import ConfigError
from trueline.config.reward import RewardConfig
from trueline.data.types import Prompt
from trueline.environments.single_turn import reward_call
from trueline.rewards.base import Call, PolicyError, RewardFailure, RewardTimeout
from trueline.rewards.function_reward import FunctionReward, check_function
from trueline.usercode import line
from trueline.usercode.host import MARK

FUNCTIONS = """
import asyncio, ctypes, os, re, subprocess, sys, time
from trueline.rewards.base import PolicyError

def good(reply): return len(reply)
def boolean(reply): return reply == "yes"
def number_of_numpy(reply):
    import numpy
    return numpy.float32(0.25)
def missing_column(reply, level): return level
def default(reply, level=7): return level
def everything(**call): return len(call["reply"]) + call["level"]
def label_and_prompt(reply, label, prompt, messages): return label + len(prompt) + 100 * len(messages)
def process(reply): return os.getpid()
def environment(reply): return float(os.environ[reply])

LOOPS = []
async def same_loop(reply):
    LOOPS.append(asyncio.get_running_loop())
    await asyncio.sleep(0.01)
    return float(all(loop is LOOPS[0] for loop in LOOPS))

def talks(reply):
    print('{"id": 3, "result": [{"reward": 99}]}')
    sys.stdout.flush()
    os.write(1, b'{"id": 3, "result": [{"reward": 98}]}\\n')
    return 2.0

LEAKED = []
def leak():
    while len(LEAKED) < 64:
        LEAKED.append(bytearray(2**26))  # 4 GiB in all

def raise_(error): raise error

def fork_and_die():
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(3)

def fork_and_forget():
    if os.fork() == 0:
        return 99.0  # the copy goes on as if it were the process that was asked
    os.wait()

FAULTS = {
    "good": lambda: 1.0,
    "loops in C": lambda: sum(range(10**12)),
    "catastrophic regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "sleeps": lambda: time.sleep(1000),
    "crashes": lambda: ctypes.string_at(0),
    "leaks": leak,
    "raises": lambda: raise_(KeyError("no such thing")),
    "is cancelled": lambda: raise_(asyncio.CancelledError()),
    "returns nan": lambda: float("nan"),
    "returns infinity": lambda: -float("inf"),
    "returns text": lambda: "1.0",
    "returns nothing": lambda: None,
    "exits": lambda: sys.exit(4),
    "exits at once": lambda: os._exit(3),
    "aborts": os.abort,
    "closes its files": lambda: os.closerange(3, 100),
    "reads input": input,
    "forks and dies": fork_and_die,
    "forks and forgets": fork_and_forget,
}
def fault(reply): return FAULTS[reply]()

def starts(reply, note):
    def write(pid):
        with open(note, "a") as file:
            file.write(f"{pid}\\n")
    write(subprocess.Popen(["sleep", "1000"]).pid)
    write(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            write(os.getpid())
            time.sleep(1000)
        os._exit(0)
    while len(open(note).readlines()) < 3:
        time.sleep(0.01)
    return FAULTS[reply]()

def at_fault(reply): raise PolicyError(f"{reply} does not end")

def sizes(replies, label): return [len(replies) + 100 * (len(label) == len(replies))] * len(replies)
def sums(replies, level, factor, pattern): return [len(r) + factor * n + len(pattern) for r, n in zip(replies, level)]
def half(replies): return [1.0] * (len(replies) // 2)
def single_number(replies): return 1.0
def some_places(replies): return [{"nan": float("nan"), "text": "1"}.get(reply, 1.0) for reply in replies]
def batch_raises(replies): raise KeyError("no such thing")
async def batch_later(replies):
    await asyncio.sleep(0.01)
    return [len(reply) for reply in replies]

def one_culprit(replies, calls):
    with open(calls, "a") as file:
        file.write(f"{len(replies)} {replies}\\n")
    return [FAULTS[reply]() for reply in replies]

def one_at_fault(replies):
    if "bad" in replies:
        raise PolicyError("bad")
    return [1.0] * len(replies)
"""

Use = Callable[[FunctionReward], Awaitable[Any]]
RUNNER = asyncio.Runner()  # one loop for all tests, as in a run: subprocess transports outlive a test by a moment


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def config_of(file: Path, name: str, **settings: Any) -> RewardConfig:
    return RewardConfig(**({"function": f"{file}:{name}", "processes": 1} | settings))


def with_pool(config: RewardConfig, log: Path, use: Use) -> Any:
    """Whatever happens in `use`, nothing is left of the pool's processes and of what they started."""
    pool = FunctionReward(config, config, log)

    async def run() -> Any:
        try:
            return await use(pool)
        finally:
            await pool.stop()

    try:
        return RUNNER.run(run())
    finally:
        left = processes_of({host.child.mark for host in pool.hosts})
        for process in left:
            process.kill()
        assert not left


def processes_of(marks: set[str]) -> list[psutil.Process]:
    """What still runs; a process that was just killed is given a moment to go."""
    deadline = time.monotonic() + 60
    while (left := find_processes(marks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def find_processes(marks: set[str]) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(MARK) in marks]


def score(functions: Path, name: str, call: dict[str, Any], **settings: Any) -> float:
    log = functions.parent / "reward.log"
    return with_pool(config_of(functions, name, **settings), log, lambda pool: pool.score(call))


def score_all(functions: Path, name: str, calls: list[dict[str, Any]], **settings: Any) -> list[Any]:
    async def use(pool: FunctionReward) -> list[Any]:
        return await asyncio.gather(*(pool.score(call) for call in calls), return_exceptions=True)

    return with_pool(config_of(functions, name, **settings), functions.parent / "reward.log", use)


def test_a_number_comes_back(functions: Path) -> None:
    cases = [("good", "four", 4.0), ("boolean", "yes", 1.0), ("boolean", "no", 0.0), ("number_of_numpy", "", 0.25)]
    for name, reply, reward in [*cases, ("default", "", 7.0)]:
        assert score(functions, name, {"reply": reply}) == reward


def test_parameters_are_filled_by_name(functions: Path) -> None:
    call = {"reply": "four", "label": 2, "prompt": "abc", "messages": [{}, {}], "level": 5, "unused": None}
    assert score(functions, "label_and_prompt", call) == 2 + 3 + 200
    assert score(functions, "missing_column", call) == 5
    assert score(functions, "default", call) == 5
    assert score(functions, "everything", call) == 4 + 5
    assert score(functions, "everything", call, options={"level": 6}) == 4 + 6
    assert score(functions, "default", {"reply": ""}, options={"level": 6}) == 6


def test_the_pattern_reaches_the_built_in(tmp_path: Path) -> None:
    config = RewardConfig(function="regex", pattern=r"^\d+$", processes=1)

    async def use(pool: FunctionReward) -> list[float]:
        return [await pool.score({"reply": reply}) for reply in ("12", "x12")]

    assert with_pool(config, tmp_path / "log", use) == [1.0, 0.0]


def test_calls_of_an_async_function_share_a_loop(functions: Path) -> None:
    assert score_all(functions, "same_loop", [{"reply": ""}] * 3) == [1.0] * 3


def test_functions_see_the_environment(functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALF", "0.5")
    assert score(functions, "environment", {"reply": "HALF"}) == 0.5


# Faults


@pytest.mark.parametrize(
    ("fault", "kind", "reasons"),
    [
        ("loops in C", RewardTimeout, ["a call took more than 1 s (reward.timeout_seconds) and was killed"]),
        ("catastrophic regex", RewardTimeout, ["more than 1 s"]),
        ("sleeps", RewardTimeout, ["more than 1 s"]),
        ("crashes", RewardFailure, ["SIGSEGV"]),
        ("aborts", RewardFailure, ["SIGABRT"]),
        ("leaks", RewardFailure, ["MemoryError", "reward.memory_gib=0.5", "in leak"]),
        ("raises", RewardFailure, ["KeyError: 'no such thing'", "in raise_"]),
        ("is cancelled", RewardFailure, ["CancelledError"]),
        ("returns nan", RewardFailure, ["finite number, got nan"]),
        ("returns infinity", RewardFailure, ["finite number, got -inf"]),
        ("returns text", RewardFailure, ["'1.0' of type str"]),
        ("returns nothing", RewardFailure, ["of type NoneType"]),
        ("exits", RewardFailure, ["SystemExit: 4"]),
        ("exits at once", RewardFailure, ["exit status 3"]),
        ("closes its files", RewardFailure, ["its process"]),
        ("reads input", RewardFailure, ["EOFError"]),
        ("forks and dies", RewardFailure, ["exit status 3"]),
        ("forks and forgets", RewardFailure, ["of type NoneType"]),
    ],
)
def test_a_fault_names_its_function_and_the_next_call_works(
    functions: Path, fault: str, kind: type[RewardFailure], reasons: list[str]
) -> None:
    async def use(pool: FunctionReward) -> tuple[RewardFailure, float]:
        assert await pool.score({"reply": "good"}) == 1.0
        with pytest.raises(RewardFailure) as caught:
            await pool.score({"reply": fault})
        return caught.value, await pool.score({"reply": "good"})

    config = config_of(functions, "fault", timeout_seconds=1.0 if kind is RewardTimeout else 60.0, memory_gib=0.5)
    failure, reward = with_pool(config, functions.parent / "reward.log", use)
    assert type(failure) is kind
    for reason in (f"reward.function={functions}:fault", *reasons):
        assert reason in str(failure)
    assert "scoring.py" not in str(failure) and "child.py" not in str(failure)  # lines of ours are no help
    assert reward == 1.0


@pytest.mark.parametrize("reply", ["good", "sleeps", "exits at once"])
def test_what_a_function_started_ends_with_it(functions: Path, tmp_path: Path, reply: str) -> None:
    """A child, one in a session of its own, and a daemon."""
    note = tmp_path / "pids"
    settings = {"timeout_seconds": 6.0 if reply == "sleeps" else 60.0, "options": {"note": str(note)}}
    (result,) = score_all(functions, "starts", [{"reply": reply}], **settings)
    assert result == 1.0 if reply == "good" else isinstance(result, RewardFailure)
    started = [int(pid) for pid in note.read_text().split()]
    assert len(started) == 3
    while any(is_running(pid) for pid in started):  # a kill takes effect when the process has its turn
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_exception_does_not_cost_the_process(functions: Path) -> None:
    async def use(pool: FunctionReward) -> set[int]:
        seen = set()
        for fault in ("raises", "exits", "returns nan"):
            with pytest.raises(RewardFailure):
                await pool.score({"reply": fault})
            seen |= {host.child.process.pid for host in pool.hosts if host.child.process is not None}
        return seen

    assert len(with_pool(config_of(functions, "fault"), functions.parent / "log", use)) == 1


def test_a_process_that_dies_between_calls_costs_no_call(functions: Path) -> None:
    async def use(pool: FunctionReward) -> set[float]:
        first = await pool.score({"reply": ""})
        (host,) = pool.hosts
        assert host.child.process is not None
        os.kill(int(first), signal.SIGKILL)
        host.child.process.wait()
        return {first, await pool.score({"reply": ""})}

    assert len(with_pool(config_of(functions, "process"), functions.parent / "log", use)) == 2


def test_what_a_reward_prints_goes_to_the_log(functions: Path) -> None:
    assert score(functions, "talks", {"reply": ""}) == 2.0
    text = (functions.parent / "reward.log").read_text()
    assert '{"reward": 99}' in text
    assert '{"reward": 98}' in text


def test_an_answer_at_fault_is_no_failure_of_the_reward(functions: Path) -> None:
    with pytest.raises(PolicyError, match=r"^the code does not end$"):
        score(functions, "at_fault", {"reply": "the code"})


def test_an_answer_too_long_to_be_read_fails_its_call(functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError) as raised:
        score(functions, "at_fault", {"reply": "x" * 10**6})
    assert str(raised.value) == "x" * 20_000
    monkeypatch.setattr(line, "LONGEST_LINE", 1000)
    with pytest.raises(RewardFailure, match="its reply cannot be read"):
        score(functions, "at_fault", {"reply": "x" * 10**4})


def test_a_value_that_json_cannot_hold_arrives_as_its_text(functions: Path) -> None:
    assert score(functions, "default", {"reply": "", "level": 3, "place": functions}) == 3
    with pytest.raises(RewardFailure, match="cannot be sent as JSON"):
        score(functions, "default", {"reply": "", "table": {(1, 2): 3}})


def test_calls_are_spread_over_the_processes(functions: Path) -> None:
    pids = score_all(functions, "process", [{"reply": ""}] * 8, processes=2)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


def test_stopping_fails_the_calls_under_way(functions: Path) -> None:
    async def use(pool: FunctionReward) -> list[Any]:
        asking = [asyncio.create_task(pool.score({"reply": "sleeps"})) for _ in range(2)]  # one is asked, one waits
        await asyncio.sleep(0.5)
        await pool.stop()
        with pytest.raises(RewardFailure, match="were stopped"):
            await pool.score({"reply": "good"})
        return await asyncio.gather(*asking, return_exceptions=True)

    for result in with_pool(config_of(functions, "fault"), functions.parent / "log", use):
        assert isinstance(result, RewardFailure)


def test_a_busy_process_dies_with_the_trainer(functions: Path) -> None:
    config = config_of(functions, "fault", timeout_seconds=1000)
    program = f"""
import asyncio, pathlib
from trueline.config.reward import RewardConfig
from trueline.rewards.function_reward import FunctionReward
config = RewardConfig.parse({config.model_dump()!r})
pool = FunctionReward(config, config, pathlib.Path({str(functions.parent / "reward.log")!r}))
async def main():
    await pool.score({{"reply": "good"}})
    print(pool.hosts[0].child.mark, flush=True)
    await pool.score({{"reply": "loops in C"}})
asyncio.run(main())
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    mark = trainer.stdout.readline().strip()
    time.sleep(0.3)
    assert find_processes({mark})
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    left = processes_of({mark})
    for process in left:
        process.kill()
    assert not left


# Batches


def test_waiting_calls_are_asked_about_together(functions: Path) -> None:
    calls = [{"reply": "", "label": 1}] * 9
    assert score_all(functions, "sizes", calls, batch=4) == [104] * 8 + [101]
    assert score_all(functions, "sizes", calls) == [109] * 9


def test_columns_are_lists_and_settings_are_not(functions: Path) -> None:
    calls = [{"reply": "a", "level": 1}, {"reply": "bb", "level": 2}]
    settings = {"options": {"factor": 10}, "pattern": "1234"}
    assert score_all(functions, "sums", calls, **settings) == [1 + 10 + 4, 2 + 20 + 4]
    assert score_all(functions, "batch_later", calls) == [1, 2]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("half", "it returned 0 rewards for 1 replies"),
        ("single_number", "returns a list of numbers, got 1.0"),
        ("batch_raises", "KeyError: 'no such thing'"),
    ],
)
def test_a_batch_that_fails_fails_all_its_calls(functions: Path, name: str, reason: str) -> None:
    for failure in score_all(functions, name, [{"reply": ""}] * 4):
        assert type(failure) is RewardFailure
        assert f"reward.function={functions}:{name}" in str(failure)
        assert reason in str(failure)


def test_a_place_that_is_no_number_fails_alone(functions: Path) -> None:
    results = score_all(functions, "some_places", [{"reply": reply} for reply in ("a", "nan", "b", "text")])
    assert [results[0], results[2]] == [1.0, 1.0]
    assert "got nan" in str(results[1]) and "of type str" in str(results[3])
    assert {type(results[1]), type(results[3])} == {RewardFailure}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param("sleeps", RewardTimeout, marks=pytest.mark.slow),
        ("exits at once", RewardFailure),
        ("raises", RewardFailure),
    ],
)
def test_a_culprit_does_not_take_innocents_with_it(
    functions: Path, tmp_path: Path, fault: str, kind: type[RewardFailure]
) -> None:
    calls = [{"reply": reply} for reply in ("good", fault, "good")]
    asked = tmp_path / "asked"
    timeout = 4.0 if kind is RewardTimeout else 60.0
    results = score_all(functions, "one_culprit", calls, timeout_seconds=timeout, options={"calls": str(asked)})
    assert [results[0], results[2]] == [1.0, 1.0]
    assert type(results[1]) is kind
    assert [line[0] for line in asked.read_text().splitlines()] == ["3", "1", "1", "1"]  # of one, it is not repeated


def test_an_answer_at_fault_is_found_in_its_batch(functions: Path) -> None:
    results = score_all(functions, "one_at_fault", [{"reply": reply} for reply in ("a", "bad", "b")])
    assert [results[0], results[2]] == [1.0, 1.0]
    assert type(results[1]) is PolicyError


# Before the start


def example(columns: list[str], labelled: bool) -> dict[str, Call]:
    row = Prompt(0, [{"role": "user", "content": "1:"}], "2" if labelled else None, columns=dict.fromkeys(columns, "x"))
    return {"rows.jsonl": reward_call(row, "")}


def refused(config: RewardConfig, columns: list[str], labelled: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        check_function(config, config, example(columns, labelled))
    return str(caught.value)


def accepted(config: RewardConfig, columns: list[str], labelled: bool) -> None:
    check_function(config, config, example(columns, labelled)).close()


def test_a_reward_that_can_be_called_passes_the_check(functions: Path) -> None:
    accepted(config_of(functions, "missing_column"), ["level"], labelled=False)
    accepted(config_of(functions, "missing_column", options={"level": 1}), [], labelled=False)
    accepted(config_of(functions, "everything", options={"level": 1}), [], labelled=False)
    accepted(config_of(functions, "default"), [], labelled=False)
    accepted(config_of(functions, "sizes"), [], labelled=True)
    accepted(RewardConfig(function="exact"), [], labelled=True)


def test_a_parameter_without_a_value_is_named_with_what_there_is(functions: Path) -> None:
    message = refused(config_of(functions, "missing_column"), ["difficulty", "topic"])
    assert "'level'" in message
    for name in ("reply", "prompt", "messages", "label", "difficulty", "topic"):
        assert name in message


def test_built_ins_ask_for_their_settings_and_for_labels() -> None:
    message = refused(RewardConfig(function="math"), ["prompt"], labelled=False)
    assert "'label'" in message and "data.label_column" in message
    assert "'pattern'" in refused(RewardConfig(function="regex"), [])
    accepted(RewardConfig(function="regex", pattern="x"), [], labelled=False)
    assert "'maximum'" in refused(RewardConfig(function="length"), [])
    accepted(RewardConfig(function="length", options={"maximum": 100}), [], labelled=False)


def test_code_must_end_before_its_reward_does() -> None:
    code = {"function": "code", "timeout_seconds": 10.0}
    assert "reward.options.seconds=10 must be below reward.timeout_seconds=10" in refused(RewardConfig(**code), [])
    accepted(RewardConfig(**code, options={"seconds": 9}), [], labelled=True)


def test_code_does_not_reach_the_process_of_its_reward(tmp_path: Path) -> None:
    """The files of its parent in /proc, which belong to root, are opened for writing and for reading."""
    program = """
import os
for name, mode in {"mem": "r+b", "environ": "rb", "maps": "rb"}.items():
    try:
        open(f"/proc/{os.getppid()}/{name}", mode)
    except PermissionError:
        print(name)
"""
    call = {"reply": program, "label": [{"input": "", "output": "mem\nenviron\nmaps"}]}
    assert with_pool(RewardConfig(function="code"), tmp_path / "log", lambda pool: pool.score(call)) == 1.0


def test_code_is_tried_before_the_start() -> None:
    no_memory = RewardConfig(function="code", options={"memory_gib": 0.001})
    assert refused(no_memory, []).startswith("reward.function=code: RuntimeError: Python does not start in the sandbox")


def test_an_option_that_nobody_asks_for_is_refused(functions: Path) -> None:
    message = refused(RewardConfig(function="length", options={"maximum": 9, "minimun": 1}), [])
    assert "'minimun'" in message
    assert "maximum, minimum, unit" in message
    assert "'reply'" in refused(config_of(functions, "everything", options={"reply": "x"}), [])


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("", "reward.function is empty"),
        ("maths", "math"),  # a misspelt built-in: the names are listed
        ("no_such_module_here:f", "no_such_module_here"),
        ("none.py:f", "none.py"),
        ("FILE:absent", "functions.py has no function 'absent'"),
        ("json:no_such_function", "no_such_function"),
    ],
)
def test_what_cannot_be_found_is_named(functions: Path, function: str, part: str) -> None:
    message = refused(RewardConfig(function=function.replace("FILE", str(functions))), [])
    assert "reward.function" in message
    assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("def f(:", "SyntaxError"),
        ("import no_such_module_here", "no_such_module_here"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(2)", "SystemExit: 2"),
    ],
)
def test_a_file_that_cannot_be_imported_shows_why(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    message = refused(config_of(tmp_path / "broken.py", "f"), [])
    assert part in message
    assert "broken.py" in message


def test_a_file_that_ends_its_process_at_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import os, sys\nsys.stderr.write('farewell')\nsys.stderr.flush()\nos._exit(1)"
    )
    message = refused(config_of(tmp_path / "leaving.py", "f"), [])
    assert "died with exit status 1" in message
    assert "farewell" in message


def test_the_process_starts_without_torch() -> None:
    program = (
        "import json, sys, trueline.usercode.child, trueline.rewards.scoring; print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert not {"torch", "numpy", "math_verify"} & set(loaded)
