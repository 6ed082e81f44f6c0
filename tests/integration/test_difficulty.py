"""A run whose rows rest, killed at random moments, has the pools, ledger and numbers of one that nobody killed."""

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_kill import course_of, is_beyond, kill_when, newest_of
from tests.support import programs
from tests.support.known_difficulty import RESTING, known_command
from trueline.files import read_rows

STEPS = 24
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    keys = [RESTING, "algorithm.group_size=4", f"steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2", *words]
    command = [sys.executable, "-m", "trueline.cli", *known_command(folder, *keys)]
    return programs.start(command, folder, os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True)


def finish(folder: Path, *words: str) -> str:
    process = start(folder, *words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def end_of(folder: Path) -> tuple[Any, list[Any], list[dict[str, Any]]]:
    run = folder / "run"
    ledger = json.loads((run / "checkpoints" / f"step_{STEPS:06d}" / "state.json").read_text())["ledger"]
    rows = [{name: row[name] for name in row if not name.startswith(("sync/", "engine/"))} for row in course_of(run)]
    return ledger, [*read_rows(run / "ledger.jsonl")], rows


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.soak)])
@pytest.mark.parametrize("words", [[], ["algorithm.dynamic_sampling.enabled=true"]])
def test_kills_at_random_moments_change_neither_pools_nor_ledger(tmp_path: Path, kills: int, words: list[str]) -> None:
    chance, run = random.Random(kills), tmp_path / "killed" / "run"
    finish(tmp_path / "whole", *words)
    for number in range(kills):
        process = start(tmp_path / "killed", *words, *["--resume"] * bool(number))
        kill_when(process, run / "checkpoints", partial(is_beyond, newest_of(run)), chance.uniform(0, 0.5))
    assert "resumed from" in finish(tmp_path / "killed", *words, "--resume")
    found = end_of(tmp_path / "whole")
    assert end_of(tmp_path / "killed") == found
    assert min(found[0]["fates"].get(f"skipped_{name}", 0) for name in ("easy", "hard")) > 10
