"""The calculator's bounds, Python's state and limits, and the ranking of search."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from trueline.environments.tools.built_in import calculator
from trueline.environments.tools.calls import ToolMistake
from trueline.environments.tools.interpreter import LONGEST_OUTPUT
from trueline.environments.tools.toolbox import Toolbox
from trueline.rewards import sandbox

# Calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("-(2 - 5) ** 2", "-9"),
        ("7 // 2 + 7 % 4", "6"),
        ("6 / 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 0.5", "1.4142135623731"),
        ("2 ** -2", "0.25"),
        ("10 ** 30", "1" + "0" * 30),
        ("sqrt(16) + abs(-1) + max(1, 2, 3)", "8"),
        ("round(pi, 2)", "3.14"),
        ("round(1234, -2)", "1200"),
        ("round(2.6)", "3"),
        ("round(5, -10**100)", "0"),  # and in no time
        (" 1e300 * 1e-300 ", "1"),
        ("-" * 400 + "1", "1"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression).startswith(value)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("9**9**9", "too large"),
        ("-9**9**9", "too large"),
        ("9.0**9.0**9.0", "Numerical result out of range"),
        ("(10**1000 * 10**1000)", "too large"),
        ("1e308 * 10", "infinity"),
        ("1e400", "infinity"),
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", "math domain error"),
        ("sqrt()", "argument"),
        ("1 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("(" * 300 + "1" + ")" * 300, "characters"),
        ("(" * 240 + "1" + ")" * 240, "no arithmetic expression"),
        ("1\0", "no arithmetic expression|null"),
        ("2 ^ 3", r"does not know '2 \^ 3': it knows numbers, \+ - \* / // % \*\*"),
        ("1 << 99999999", "does not know"),
        ("True + 1", "does not know"),
        ("'a' * 9", "does not know"),
        ("2j", "does not know"),
        ("x", "does not know 'x'"),
        ("open('/etc/passwd')", "does not know"),
        ("().__class__", "does not know"),
        ("max(*[1])", "does not know"),
        ("round(1, ndigits=1)", "does not know"),
        ("[1 for a in (1,)]", "does not know"),
    ],
)
def test_what_the_calculator_refuses(expression: str, said: str) -> None:
    with pytest.raises(ToolMistake, match=said):
        calculator(expression)


# Python


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def with_python(play: Callable[[Toolbox], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Play with a toolbox that has Python; nothing may be left of it."""
    before = children()
    asyncio.run(play(Toolbox(["python"], options)))
    assert not [process for process in children() - before if process.is_running()]


def python(box: Toolbox, code: str, episode: str = "one") -> Coroutine[Any, Any, str]:
    return box.call(episode, "python", {"code": code})


def test_python_keeps_its_state_within_an_episode_only() -> None:
    async def play(box: Toolbox) -> None:
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

    with_python(play)


def test_what_a_cell_answers() -> None:
    async def play(box: Toolbox) -> None:
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
        await box.close("one")

    with_python(play)


def test_long_output_is_cut_in_its_middle_and_full_files_do_not_end_python() -> None:
    async def play(box: Toolbox) -> None:
        long = await python(box, "x = 1\nprint('a' + 'b' * 100_000 + 'c')")
        assert long.startswith("ab") and long.endswith("bc")
        assert "\n[90003 characters left out]\n" in long
        assert len(long) < LONGEST_OUTPUT + 100
        full = await python(box, "while True: print('y' * 100_000)")
        assert full.endswith("OSError: [Errno 27] File too large")
        assert await python(box, "x") == "1"
        await box.close("one")

    with_python(play)


def test_a_cell_that_does_not_end_is_ended_and_the_next_one_starts_anew() -> None:
    async def play(box: Toolbox) -> None:
        said = await python(box, "x = 1\nprint('begun', flush=True)\nwhile True: pass")
        assert said == "begun\nThe code took longer than 2 seconds and was ended; what it had defined is lost."
        assert "NameError" in await python(box, "x")
        await box.close("one")

    with_python(play, seconds=2)


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
        await box.close("one")

    with_python(play)


def test_python_is_kept_from_files_network_processes_and_memory() -> None:
    async def play(box: Toolbox) -> None:
        for code in (
            "open('/etc/passwd')",
            "open('/proc/self/environ')",
            "open('/tmp/escaped', 'w')",
            "os.listdir('/')",
        ):
            assert "PermissionError" in await python(box, f"import os\n{code}")
        assert "PermissionError" in await python(box, "import socket\nsocket.socket()")
        assert "PermissionError" in await python(box, "import os\nos.fork()")
        assert "MemoryError" in await python(box, "bytearray(2**30)")
        assert await python(box, "1 + 1") == "2"
        await box.close("one")

    with_python(play, memory_gib=0.5)


def test_a_call_that_nobody_waits_for_ends_its_python() -> None:
    async def play(box: Toolbox) -> None:
        await python(box, "x = 1")
        waiting = asyncio.create_task(python(box, "while True: pass"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert "NameError" in await python(box, "x")
        await box.close("one")

    with_python(play)


def test_a_folder_is_removed_with_its_python() -> None:
    async def play(box: Toolbox) -> None:
        folder = Path(eval(await python(box, "import os\nos.getcwd()")))
        assert folder.is_dir()
        await box.stop()
        assert not folder.exists()

    with_python(play)


def test_a_sandbox_that_cannot_be_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.landlock, "version", lambda: 0)

    async def play(box: Toolbox) -> None:
        with pytest.raises(RuntimeError, match=r"environment\.options\.files=true"):
            await python(box, "1")

    with_python(play)


def test_python_that_does_not_start_is_no_answer() -> None:
    async def play(box: Toolbox) -> None:
        with pytest.raises(RuntimeError, match="Python does not start in the sandbox"):
            await python(box, "1")

    with_python(play, memory_gib=0.005)


# Search


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "bees.md").write_text("# Bees\n\nBees make honey. A bee dances to tell where flowers are.")
    (tmp_path / "deeper" / "bears.txt").write_text("Bears like honey, and honey is what the bears look for. " * 2)
    (tmp_path / "whales.txt").write_text("Whales sing.\n\n" + "They swim far. " * 200 + "\n\nThe calf drinks milk.")
    (tmp_path / "code.py").write_text("honey = 'bees'")
    return tmp_path


def search(documents: Path, query: str) -> str:
    return asyncio.run(Toolbox(["search"], {"documents": str(documents)}).call("one", "search", {"query": query}))


def test_search_ranks_passages(documents: Path) -> None:
    honey = search(documents, "honey")
    assert honey.index("[deeper/bears.txt]") < honey.index("[bees.md]")
    assert "whales" not in honey and "code.py" not in honey
    rare = search(documents, "which honey do dances tell of")  # rare words count for more
    assert rare.index("[bees.md]") < rare.index("[deeper/bears.txt]")
    assert search(documents, "BEARS?").startswith("[deeper/bears.txt]\nBears like honey")


def test_search_returns_passages_and_not_whole_files(documents: Path) -> None:
    milk = search(documents, "milk")
    assert milk.startswith("[whales.txt]") and milk.endswith("The calf drinks milk.")
    assert "sing" not in milk
    assert search(documents, "swim").count("[whales.txt]") == 2
    assert search(documents, "zebra") == search(documents, "") == "No passage holds any of these words."


def test_search_needs_documents(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.txt or \.md file in the folder documents="):
        Toolbox(["search"], {"documents": str(tmp_path / "none")})
