"""Real programs in the real sandbox."""

import errno
import json
import resource
import signal
from pathlib import Path

import pytest

from trueline.rewards.base import PolicyError
from trueline.rewards.code import code, code_of
from trueline.usercode import sandbox
from trueline.usercode.sandbox import FILE_BYTES, ProgramLimits, ProgramResult, run_python

ADD = "def add(a, b):\n    return a + b\n"
DATACLASS = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"
DOUBLE = "print(2 * int(input()))"
CASES = [{"input": "1\n", "output": "2\n"}, {"input": "-3", "output": "-6"}]
ODD_IS_WRONG = "n = int(input())\nprint(n if n % 2 else 2 * n)"


def run(source: str, seconds: float = 10.0, memory_gib: float = 1.0, stdin: str = "", **allowed: bool) -> ProgramResult:
    return run_python(source, stdin, ProgramLimits(seconds, memory_gib, **allowed))


# Grading


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (ADD, 1.0),
        (f"Here it is:\n```python\n{ADD}```\nIt adds.", 1.0),
        (SUBTRACT, 0.0),
        (f"```python\n{ADD}```\nor rather\n```python\n{SUBTRACT}```", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
        ("raise ValueError('no')", 0.0),
        ("import sys\nsys.exit(0)", 0.0),  # leaving before the tests is no way to pass them
        ("import os\nos._exit(0)", 0.0),
        (ADD + "if __name__ == '__main__':\n    input()", 1.0),
        (ADD + "print('chatter')", 1.0),
        (DATACLASS + ADD, 1.0),
    ],
)
def test_code_is_run_against_the_tests_of_its_row(reply: str, reward: float) -> None:
    assert code(reply, tests=TESTS) == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [(DOUBLE, 1.0), ("print(input())", 0.0), (ODD_IS_WRONG, 0.0), (DOUBLE + "\nraise SystemExit(1)", 0.0)],
)
def test_programs_are_compared_by_what_they_print(reply: str, reward: float) -> None:
    assert code(reply, label=CASES) == reward
    assert code(reply, label=json.dumps(CASES)) == reward


def test_the_share_of_passed_cases() -> None:
    cases = [{"input": str(number), "output": str(2 * number)} for number in (1, 2, 4, 3)]
    assert code(ODD_IS_WRONG, label=cases, partial=True) == 2 / 4
    assert code(ADD, tests=["assert add(1, 1) == 2", "assert add(1, 1) == 3"], partial=True) == 1 / 2
    assert code(ADD, tests=["assert add(1, 1) == 2", "assert add(1, 1) == 3"]) == 0.0


@pytest.mark.parametrize("label", [None, "", "42", 42, "no JSON", [], [{"input": "1"}], ["1"]])
def test_a_row_without_tests_is_an_error_and_not_a_zero(label: object) -> None:
    with pytest.raises(ValueError, match="the row has no tests"):
        code(ADD, label=label)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nb\n```", "a\n"),
        ("```bash\nb\n```\ntext\n```py\na\n```", "a\n"),
        ("```\na\n```\n```json\nb\n```", "a\n"),
        ("no block", "no block"),
        ("```bash\nb\n```", "```bash\nb\n```"),
        ("  ```Python\n  a\n  ```", "  a\n"),
    ],
)
def test_the_last_block_of_python_is_the_code(reply: str, text: str) -> None:
    assert code_of(reply) == text


# Limits


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("while True: pass", "too long"),
        ("import time\ntime.sleep(1000)", "too long"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ],
)
def test_code_that_does_not_end_well_is_at_fault_itself(reply: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        code(reply, tests=TESTS, seconds=1.0 if reason == "too long" else 60.0)


def test_a_memory_bomb_is_at_fault_itself() -> None:
    bomb = "held = []\nwhile True: held.append(bytearray(2**24))"
    with pytest.raises(PolicyError, match=r"more than 0\.25 GiB"):
        code(bomb, tests=TESTS, memory_gib=0.25)
    assert "MemoryError" in run("bytearray(2**30)").error  # 1 GiB on top of the interpreter


def test_time_is_shared_by_all_cases() -> None:
    cases = [{"input": "", "output": ""}] * 10
    with pytest.raises(PolicyError, match=r"reward\.options\.seconds"):
        code("import time\ntime.sleep(0.3)", label=cases, seconds=1.0)


def test_a_fork_bomb_does_not_go_off() -> None:
    bomb = "import os\nfor _ in range(5): os.fork()"  # a small one, should it go off
    ended = run(bomb)
    assert ended.status == 1
    assert "PermissionError" in ended.error
    assert "PermissionError" in run("import subprocess\nsubprocess.run(['true'])").error
    assert run("import threading\nthreading.Thread(target=print, args=('works',)).start()").output == "works\n"


def test_output_is_capped() -> None:
    ended = run("while True: print('y' * 100_000)")
    assert ended.status == 1
    assert "File too large" in ended.error
    assert len(ended.output) <= FILE_BYTES
    assert code("while True: print('y' * 100_000)", tests=TESTS) == 0.0


def test_the_death_signal_cannot_be_lifted() -> None:
    """prctl 1 is PR_SET_PDEATHSIG; others, such as the thread's name (15), stay."""
    call = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.prctl({}, {}), ctypes.get_errno())"
    assert run(call.format(1, "0, 0, 0, 0")).output == f"-1 {errno.EPERM}\n"
    assert run(call.format(15, "b'name', 0, 0, 0")).output == "0 0\n"
    show = "import ctypes\nsent = ctypes.c_int()\nctypes.CDLL(None).prctl(2, ctypes.byref(sent))\nprint(sent.value)"
    assert run(show).output == f"{signal.SIGKILL.value}\n"


def test_more_memory_than_the_process_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = resource.getrlimit
    few = lambda kind: (2**31, 2**31) if kind == resource.RLIMIT_AS else own(kind)  # noqa: E731
    monkeypatch.setattr(sandbox.resource, "getrlimit", few)
    with pytest.raises(RuntimeError, match=r"reward.options.memory_gib=3 is more than the 2.00 GiB.*reward.memory_gib"):
        run("", memory_gib=3)
    assert run("", memory_gib=2).status == 0


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    ended = run("import os\nprint(sorted(os.environ))\nprint(open('/proc/self/environ').read())", files=True)
    assert ended.status == 0
    assert "SECRET_TOKEN" not in ended.output
    assert "hidden" not in ended.output
    assert "PATH" in ended.output


def test_the_folder_is_its_own_and_removed() -> None:
    ended = run("import os\nopen('note', 'w').write('x')\nprint(os.getcwd())\nprint(sorted(os.listdir()))")
    folder, files = ended.output.splitlines()
    assert files == "['note', 'program.py']"
    assert not Path(folder).exists()


def test_text_of_all_languages_passes() -> None:
    assert run("print(input()[::-1])", stdin="äß漢").output == "漢ßä\n"
    assert run("print('\ud800')").status == 0  # half a character, as a tokenizer may cut it
