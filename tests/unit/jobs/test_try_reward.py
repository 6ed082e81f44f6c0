"""`trueline reward try`: what a reward is given, and what it says."""

import json
from pathlib import Path

import pytest

from trueline.cli import main

FUNCTIONS = """
def wanted(reply, wanted, bonus=0.0):
    return float(reply == wanted) + bonus


def equal(reply, label):
    return float(reply == label)


def long(reply):
    raise ValueError("too long") if len(reply) > 1 else KeyError("short")
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"ask {n}", "wanted": str(n), "response": str(n % 2), "note": "x" * 999} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "numbers.jsonl").write_text('{"prompt": "2+2=", "label": 4}\n')
    return file


def test_calls_and_verdicts_are_shown(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["reward", "try", "--data", "rows.jsonl"]
    assert main([*named, "--reward", "mine.py:wanted"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("row ") == 3
    assert 'prompt   "ask 2"\n  reply    "0" (column response)\n  wanted   "2"' in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("  reward")] == ["1", "1", "0"]
    assert "x" * 301 not in shown and "(1001 characters)" in shown
    words = ["--reply", "4", "--rows", "5", "reward.options={bonus: 2}"]
    assert main([*named, "--reward", "mine.py:wanted", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count('reply    "4" (--reply)') == 5
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("  reward")] == ["2", "2", "2", "2", "3"]
    assert main([*named, "--reward", "mine.py:long", "--reply", "ab", "--rows", "1"]) == 1
    shown = capsys.readouterr().out
    assert "  reward   none: ValueError: too long (mine.py, line 11)" in shown
    assert main([*named, "--rows", "1", "reward.parts={a: {function: exact}, b: {function: length}}"]) == 2
    assert "reward.parts.a: " in capsys.readouterr().err


def test_a_label_that_is_no_text_is_pointed_out_where_it_is_compared(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["reward", "try", "--data", "numbers.jsonl", "--reward"]
    for function, warned, reward in (("mine.py:equal", True, "0"), ("exact", False, "1")):
        assert main([*named, function]) == 0
        shown = capsys.readouterr().out
        assert 'reply    "4" (the row\'s label)\n  label    4\n' in shown
        assert f"  reward   {reward}\n" in shown
        assert ("the label 4 is of type int and replies are texts" in shown) == warned
