"""The reward of code: the code of a reply runs with the tests of its row, in a sandbox."""

import functools
import json
import re
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trueline.usercode.failures import PolicyError
from trueline.usercode.sandbox import CODE_SECONDS, START_SECONDS, ProgramLimits, run_python

LONGEST_ERROR = 300  # characters
TRIAL = {"reply": "pass", "tests": "pass"}  # a call that passes wherever code can run
# The token shows that the tests ran to their end: leaving early, even with status 0, does not pass them. Code written
# to cheat can find it, because it is in the same interpreter.
RUN_TESTS = """
import json, os, sys, types

def run(code, tests, token):
    module = sys.modules["solution"] = types.ModuleType("solution")
    for text, name in ((code, "code"), (tests, "tests")):
        exec(compile(text, name, "exec"), module.__dict__)
    os.write(1, token.encode())
    os._exit(0)

task = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
run(task.pop("code"), task.pop("tests"), task.pop("token"))
"""
Case = dict[str, str]  # `tests`: text of Python; or `input` and `output` of a program


def code(  # noqa: PLR0913  (each is filled from the row or from reward.options)
    reply: str,
    tests: str | list[str] | None = None,
    label: Any = None,
    partial: bool = False,
    seconds: float = CODE_SECONDS,
    memory_gib: float = 1.0,
    network: bool = False,
    files: bool = False,
) -> float:
    """Return 1 if the reply's code passes all tests of the row; with `partial`, the share that it passes."""
    limits = ProgramLimits(seconds, memory_gib, network, files)
    check_sandbox(replace(limits, seconds=START_SECONDS))
    source, cases, deadline, passed = code_of(reply), cases_of(tests, label), time.monotonic() + seconds, 0
    for case in cases:
        if passes(source, case, replace(limits, seconds=max(deadline - time.monotonic(), 0.0))):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(cases)


@functools.cache
def check_sandbox(limits: ProgramLimits) -> None:
    """Refuse a sandbox in which no program can run, so that no program is blamed for it."""
    ended = run_python("", "", limits)
    if ended.status != 0:
        error = " ".join(ended.error.split())[-LONGEST_ERROR:]
        raise RuntimeError(f"Python does not start in the sandbox (status {ended.status}): {error}")


def code_of(reply: str) -> str:
    """Return the last block of Python, or the last one that names no language, or the whole reply."""
    blocks = re.findall(r"^[ \t]*```(\w*)[^\n]*\n(.*?)^[ \t]*```", reply, re.DOTALL | re.MULTILINE)
    for languages in (("python", "py", "python3"), ("",)):
        if found := [text for language, text in blocks if language.lower() in languages]:
            return found[-1]
    return reply


def cases_of(tests: Any, label: Any) -> list[Case]:
    if tests:
        return [{"tests": text} for text in ([tests] if isinstance(tests, str) else tests)]
    with suppress(KeyError, TypeError, json.JSONDecodeError):
        cases = json.loads(label) if isinstance(label, str) else label
        if read := [{"input": str(case["input"]), "output": str(case["output"])} for case in cases]:
            return read
    raise ValueError(
        "the row has no tests: the reward code needs a column `tests` with Python text, or as label a list of "
        f'{{"input": ..., "output": ...}}, got {label!r:.200}'
    )


def passes(source: str, case: Case, limits: ProgramLimits) -> bool:
    """Return whether the code passes a case, or raise PolicyError where it ended itself instead of being wrong."""
    program, given, token = source, case.get("input", ""), secrets.token_hex(16)
    if "tests" in case:
        program, given = RUN_TESTS, json.dumps({"code": source, "tests": case["tests"], "token": token})
    ended = run_python(program, given, limits)
    if ended.status is None:
        raise PolicyError("the code and its tests took too long (reward.options.seconds for all of them)")
    if ended.status < 0:
        raise PolicyError(f"the code was ended by {signal.Signals(-ended.status).name}")
    if "MemoryError" in ended.error.rstrip().rpartition("\n")[2]:
        raise PolicyError(f"the code needs more than {limits.memory_gib:g} GiB (reward.options.memory_gib)")
    if "tests" in case:
        return token in ended.output
    found, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (ended.output, case["output"]))
    return ended.status == 0 and found == wanted
