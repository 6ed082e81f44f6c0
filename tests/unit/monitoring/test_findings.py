"""The table of findings: each code that the package emits has a row, each row is emitted, and the docs show them."""

import ast
from pathlib import Path

from tests.support.generated_docs import PAGES, ROOT, render
from trueline.monitoring import limits
from trueline.monitoring.findings import CODES
from trueline.monitoring.health import RULES
from trueline.monitoring.limits import Limits

EMITTING = ("Finding", "TrainingFailure")


def emitted_codes() -> set[str]:
    """The codes of all findings and failures; in a file that has some in a variable, any text may be one."""
    codes: set[str] = set()
    for file in (ROOT / "trueline").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        named = [one.args[1] for one in calls if ast.unparse(one.func) in EMITTING and len(one.args) > 1]
        codes |= {one.value for one in named if isinstance(one, ast.Constant)}
        if any(isinstance(one, ast.Name) for one in named):
            codes |= {one.value for one in nodes if isinstance(one, ast.Constant) and one.value in CODES}
    return codes


def test_every_emitted_code_is_documented_and_every_documented_code_is_emitted() -> None:
    emitted = emitted_codes() | set(RULES)
    assert emitted - set(CODES) == set()
    assert set(CODES) - emitted == set()


def test_thresholds_show_the_limits_that_the_rules_read() -> None:
    assert CODES["clipping"].threshold() == "watch: above 30% of the tokens; bad: above 60%"
    assert [code for code, row in CODES.items() if "{" in row.threshold()] == []
    assert [Limits(1, 2).above(value) for value in (1, 1.5, 2, 2.5)] == ["fine", "watch", "watch", "bad"]
    assert [Limits(2, 1).below(value) for value in (2, 1.5, 1, 0.5)] == ["fine", "watch", "watch", "bad"]
    assert limits.STREAK == 10


def test_generated_pages_are_up_to_date() -> None:
    for page in PAGES:
        text = Path(ROOT / page).read_text()
        assert render(page, text) == text, f"{page} is stale: run `make docs`"
