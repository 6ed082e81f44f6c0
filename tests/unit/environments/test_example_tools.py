"""The tools of examples/tools: the calculator's bounds, and the ranking of search."""

from pathlib import Path

import pytest

from tests.support.tool_calls import CALCULATOR
from trueline.usercode.failures import PolicyError
from trueline.usercode.loading import load_function

SEARCH = CALCULATOR.replace("calculator", "search")
calculator = load_function(CALCULATOR, {}, guest=True)

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
    with pytest.raises(PolicyError, match=said):
        calculator(expression)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCUMENTS", str(documents))
        return load_function(SEARCH, {}, guest=True)(query)


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
    with pytest.raises(FileNotFoundError, match=r"no \.txt or \.md file in the folder DOCUMENTS="):
        search(tmp_path / "none", "bees")
