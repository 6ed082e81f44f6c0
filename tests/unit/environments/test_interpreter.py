"""Python's state and limits as a tool."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from trueline.environments.tools.interpreter import LONGEST_OUTPUT
from trueline.environments.tools.toolbox import Toolbox
from trueline.usercode import sandbox


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


Play = Callable[[Toolbox], Coroutine[Any, Any, None]]


def use_python(play: Play, **options: Any) -> None:
    """Play with a toolbox that has Python; nothing may be left of it."""

    async def play_and_close(box: Toolbox) -> None:
        await play(box)
        await box.close("one")

    before = children()
    asyncio.run(play_and_close(Toolbox(["python"], options)))
    assert not [process for process in children() - before if process.is_running()]


def with_python(**options: Any) -> Callable[[Play], Callable[[], None]]:
    """Make a test of a function that plays with such a toolbox."""
    return lambda play: lambda: use_python(play, **options)


def python(box: Toolbox, code: str, episode: str = "one") -> Coroutine[Any, Any, str]:
    return box.call(episode, "python", {"code": code})


@with_python()
async def test_python_keeps_its_state_within_an_episode_only(box: Toolbox) -> None:
    assert await python(box, "import math\ndef twice(x):\n    return 2 * x\nx = 21") == "(no output)"
    assert await python(box, "print('so')\ntwice(x)") == "so\n42"
    assert "NameError: name 'x' is not defined" in await python(box, "x", "other")
    assert await python(box, "x = 1\nx", "other") == "1"
    assert await asyncio.gather(python(box, "x += 1\nx"), python(box, "x += 1\nx")) == ["22", "23"]
    assert await python(box, "open('note.txt', 'w').write('kept')\nopen('note.txt').read()") == "'kept'"
    await box.close("one")
    assert "NameError" in await python(box, "x")
    assert await python(box, "x", "other") == "1"
    for episode in ("one", "other", "never seen", "one"):
        await box.close(episode)


@with_python()
async def test_what_a_cell_answers(box: Toolbox) -> None:
    assert await python(box, "None") == "(no output)"
    assert await python(box, "'ä'") == "'ä'"
    assert await python(box, "import os, sys\nif os.write(1, b'raw'): print('err', file=sys.stderr)") == "rawerr"
    assert await python(box, "def f(x):\n    return 1 / x") == "(no output)"
    failed = await python(box, "print('before')\nf(0)")
    assert failed.startswith("before\nTraceback")
    assert 'File "cell 4", line 2, in f\n    return 1 / x' in failed
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert "program.py" not in failed
    assert "SyntaxError" in await python(box, "1 +")
    assert (await python(box, "def deep(): deep()\ndeep()")).endswith(
        "RecursionError: maximum recursion depth exceeded"
    )
    assert "EOFError" in await python(box, "input()")
    assert "ValueError: \\ud800" in await python(box, "raise ValueError('\\ud800')")
    assert "SystemExit" in await python(box, "exit()")
    assert await python(box, "import io\nsys.stdout = io.StringIO()\nprint('lost')") == "(no output)"
    assert await python(box, "print('found')") == "found"


@with_python()
async def test_long_output_is_cut_in_its_middle_and_full_files_do_not_end_python(box: Toolbox) -> None:
    long = await python(box, "x = 1\nprint('a' + 'b' * 100_000 + 'c')")
    assert long.startswith("ab") and long.endswith("bc")
    assert "\n[90003 characters left out]\n" in long
    assert len(long) < LONGEST_OUTPUT + 100
    full = await python(box, "while True: print('y' * 100_000)")
    assert full.endswith("OSError: [Errno 27] File too large")
    assert await python(box, "x") == "1"


@with_python(seconds=2)
async def test_a_cell_that_does_not_end_is_ended_and_the_next_one_starts_anew(box: Toolbox) -> None:
    said = await python(box, "x = 1\nprint('begun', flush=True)\nwhile True: pass")
    assert said == "begun\nThe code took longer than 2 seconds and was ended; what it had defined is lost."
    assert "NameError" in await python(box, "x")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os\nos._exit(0)", "Python was ended; what"),
        ("import ctypes\nctypes.string_at(0)", "Python was ended by SIGSEGV; what"),
        ("import os\nos.closerange(0, 100)\nwhile True: pass", "Python was ended; what"),
    ],
)
def test_a_cell_that_ends_python(code: str, said: str) -> None:
    async def play(box: Toolbox) -> None:
        assert said in await python(box, code)
        assert await python(box, "1 + 1") == "2"

    use_python(play)


@with_python(memory_gib=0.5)
async def test_python_is_kept_from_files_network_processes_and_memory(box: Toolbox) -> None:
    for code in ("open('/etc/passwd')", "open('/proc/self/environ')", "open('/tmp/escaped', 'w')", "os.listdir('/')"):
        assert "PermissionError" in await python(box, f"import os\n{code}")
    assert "PermissionError" in await python(box, "import socket\nsocket.socket()")
    assert "PermissionError" in await python(box, "import os\nos.fork()")
    assert "MemoryError" in await python(box, "bytearray(2**30)")
    assert await python(box, "1 + 1") == "2"


@with_python()
async def test_a_call_that_nobody_waits_for_ends_its_python(box: Toolbox) -> None:
    await python(box, "x = 1")
    waiting = asyncio.create_task(python(box, "while True: pass"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert "NameError" in await python(box, "x")


@with_python()
async def test_a_folder_is_removed_with_its_python(box: Toolbox) -> None:
    folder = Path(eval(await python(box, "import os\nos.getcwd()")))
    assert folder.is_dir()
    await box.close("one")
    assert not folder.exists()


def test_a_sandbox_that_cannot_be_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.linux, "landlock_version", lambda: 0)

    async def play(box: Toolbox) -> None:
        with pytest.raises(RuntimeError, match=r"environment\.options\.files=true"):
            await python(box, "1")

    use_python(play)


@with_python(memory_gib=0.005)
async def test_python_that_does_not_start_is_no_answer(box: Toolbox) -> None:
    with pytest.raises(RuntimeError, match="Python does not start in the sandbox"):
        await python(box, "1")
