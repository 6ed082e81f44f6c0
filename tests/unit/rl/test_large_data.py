"""Runs on datasets that count as large, whose prompts are read and measured as they are drawn."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import letters_command, rows_of, run_letters
from trueline.cli import main
from trueline.data import prompts as prompts_module
from trueline.data import rows as rows_module
from trueline.files import read_rows

LONG = "x" * 100
PLAIN = ["data.chat_template=never", "rollout.max_prompt_tokens=40", "monitoring.transcripts_per_step=100"]
SAVED = ["checkpoint.every=1", "algorithm.group_size=2", "prompts_per_step=4"]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many rows are not yet many. The sample is three of them, and nothing is measured in the background."""
    monkeypatch.setattr(prompts_module, "SAMPLED", 1)
    monkeypatch.setattr(prompts_module, "LONGEST", 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    return lambda rows: monkeypatch.setattr(rows_module, "LARGE", rows)


def write_prompts(folder: Path, prompts: list[str]) -> str:
    (folder / "some.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return f"data.path={folder}/some.jsonl"


def fates(folder: Path, name: str = "run") -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in read_rows(folder / name / "ledger.jsonl"):
        for fate, numbers in row.items():
            found.setdefault(fate, []).extend(numbers if isinstance(numbers, list) else [])
    return {fate: numbers for fate, numbers in found.items() if numbers}


def drawn(folder: Path) -> list[tuple[int, str]]:
    """The prompt of each group that was trained on, in the order of steps."""
    rows = [row for row in read_rows(folder / "run" / "transcripts.jsonl") if row["purpose"] == "train"]
    return [*dict.fromkeys((row["step"], row["prompt"]) for row in rows)]


def learnt(folder: Path) -> list[Any]:
    return [(row["step"], row.get("loss"), row.get("reward/mean"), row.get("grad_norm")) for row in rows_of(folder)]


def test_a_large_dataset_is_learnt_from_as_a_small_one_also_by_a_run_that_began_before(
    tmp_path: Path, large: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("small", "large", "both")]
    words = [*SAVED, *PLAIN, "prompts_per_step=5"]
    for folder in folders:
        folder.mkdir()
    large(100)
    assert run_letters(folders[0], "grpo", *words, "steps=6") == 0
    assert run_letters(folders[2], "grpo", *words, "steps=2") == 0
    large(10)
    capsys.readouterr()
    assert run_letters(folders[1], "grpo", *words, "steps=2") == 0
    said = capsys.readouterr().out
    assert "data       30 prompts, 0 held out; longest prompt of 3 sampled 3 tokens, others are measured when" in said
    for folder in folders[1:]:
        assert run_letters(folder, "grpo", *words, "steps=6", "--resume") == 0
        assert learnt(folder) == learnt(folders[0]) and drawn(folder) == drawn(folders[0])
        assert fates(folder) == fates(folders[0]) == {"trained": list(range(30))}
    (tmp_path / "large" / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 30)
    changed = [*letters_command(tmp_path / "large", "grpo", *words, "steps=7"), "--resume"]
    (tmp_path / "large" / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 30)
    assert main(changed) != 0
    assert "still has 30 rows, but other ones" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_gets_its_fate_and_another_its_place(
    tmp_path: Path, large: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    large(10)
    prompts = [f"{number}:" if number % 3 else LONG + str(number) for number in range(1, 31)]
    data = write_prompts(tmp_path, prompts)
    words = [*SAVED, *PLAIN, data, "data.too_long=drop"]
    assert run_letters(tmp_path, "grpo", *words, "steps=2") == 0
    assert run_letters(tmp_path, "grpo", *words, "steps=5", "--resume") == 0
    short = [prompt for prompt in prompts if not prompt.startswith("x")]
    assert sorted(prompt for _, prompt in drawn(tmp_path)) == sorted(short)  # each once
    found = fates(tmp_path)
    assert len(found["trained"]) == 20
    assert sorted(found["trained"] + found["too_long"]) == [*range(20 + len(found["too_long"]))]  # and no number twice
    assert sum(row.get("rollout/too_long", 0) for row in rows_of(tmp_path)) == len(found["too_long"])
    assert re.search(rf"prompts sampled: .*\b{len(found['too_long'])} too long", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (json.dumps({"prompt": LONG}), "row 23 of .*some.jsonl has 10. tokens; 1 to rollout.max_prompt_tokens=40"),
        ('{"prompt": ', "some.jsonl, line 23: not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_ends_the_run_with_what_it_has_learnt(
    tmp_path: Path, large: Callable[[int], None], capsys: pytest.CaptureFixture[str], bad: str, words: str
) -> None:
    large(10)
    data = write_prompts(tmp_path, [f"{number}:" for number in range(30)])
    lines = (tmp_path / "some.jsonl").read_text().splitlines()
    (tmp_path / "some.jsonl").write_text("\n".join([*lines[:22], bad, *lines[23:]]))
    run = [*SAVED, *PLAIN, data, "data.shuffle=false", "checkpoint.every=0", "steps=7"]
    assert run_letters(tmp_path, "grpo", *run) == 1
    out = capsys.readouterr().out
    assert re.search(words, out.replace("\n", " "))
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "run" / "checkpoints" / "step_000005").is_dir()
    assert fates(tmp_path) == {"trained": list(range(20))}
    if bad.endswith("}"):
        assert run_letters(tmp_path, "grpo", *run, "--resume", "data.too_long=drop") == 0
        assert fates(tmp_path) == {"trained": [*range(22), *range(23, 29)], "too_long": [22]}


def test_what_is_said_of_a_sample_is_said_of_a_sample(
    tmp_path: Path, large: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    large(10)
    (tmp_path / "some.jsonl").write_text('{"prompt": "a:", "label": "b", "answer": "c"}\n' * 30)
    (tmp_path / "compare.py").write_text(
        "def compare(reply: str, label: str) -> float:\n    return float(reply == label)\n"
    )
    words = [*SAVED, *PLAIN, f"data.path={tmp_path}/some.jsonl", "steps=1", "monitoring.doctor=true"]
    assert run_letters(tmp_path, "grpo", *words, "--reward", f"{tmp_path}/compare.py:compare") == 0
    out = capsys.readouterr().out
    assert "2 of 3 sampled rows (67 %) are duplicates, e.g. row 1 of" in out
    assert "all 3 sampled labels are equal: 'b'" in out
    assert "they differ in 3 of 3 sampled rows" in out
    assert "few_prompts" not in (tmp_path / "run" / "findings.jsonl").read_text()  # there are 30, not 3
