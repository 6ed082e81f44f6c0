"""Rows that rest, seen from whole runs in this process: what is trained, and what a resumed run does."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.known_difficulty import RESTING, known_command
from tests.support.letters import rows_of
from trueline.cli import main
from trueline.files import read_rows


def run(folder: Path, *words: str) -> None:
    assert main(known_command(folder, *words)) == 0


def course(folder: Path) -> tuple[Any, list[Any], list[Any]]:
    """Return the last ledger with its pools, the ledger's rows, and what the run reports of its data and rewards."""
    last = max((folder / "run" / "checkpoints").glob("step_*"))
    ledger = json.loads((last / "state.json").read_text())["ledger"]
    named = ("data/", "reward/", "loss", "grad_norm", "rollout/")
    rows = [{name: row[name] for name in sorted(row) if name.startswith(named)} for row in rows_of(folder)]
    return ledger, [*read_rows(folder / "run" / "ledger.jsonl")], rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_pools_halve_the_share_of_groups_with_equal_rewards(tmp_path: Path, seed: int) -> None:
    shares = []
    for enabled in ("false", "true"):
        folder = tmp_path / enabled
        run(folder, "steps=40", f"data.difficulty.enabled={enabled}", f"seed={seed}")
        shares.append(fmean(row["reward/uniform_groups_share"] for row in rows_of(folder)[1:]))
    assert 0.6 < shares[0] < 0.8 and shares[1] <= shares[0] / 2, shares
    last = rows_of(tmp_path / "true")[-1]
    assert (last["data/easy_share"], last["data/woken"]) == (pytest.approx(1 / 3), 0)


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["algorithm.dynamic_sampling.enabled=true"], marks=pytest.mark.slow),
        pytest.param(["rollout.max_staleness=1", "rollout.oversample=0.5"], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_pools_and_the_ledger_of_one_that_never_stopped(tmp_path: Path, words: list[str]) -> None:
    words = [RESTING, "algorithm.group_size=4", "checkpoint.every=1", *words]
    run(tmp_path / "whole", "steps=8", *words)
    run(tmp_path / "again", "steps=4", *words)
    run(tmp_path / "again", "steps=8", *words, "--resume")
    (ledger, _, rows), (again, *_) = whole, resumed = course(tmp_path / "whole"), course(tmp_path / "again")
    if not any("staleness" in word for word in words):  # there, the order in which groups end decides
        assert resumed == whole
    for one in (ledger, again):
        skipped = [one["fates"].get(f"skipped_{name}", 0) for name in ("easy", "hard")]
        assert all(skipped) and one["fates"]["trained"] == 32
        assert one["drawn"] == sum(one["fates"].values()) + len(one["under_way"])
        assert {*"0369"} <= set(one["pools"]["easy"]) and {"1", "4", "7", "10"} <= set(one["pools"]["hard"])
    counted = sum(row["data/skipped_easy"] + row["data/skipped_hard"] for row in rows[1:])
    assert counted <= sum(ledger["fates"].get(f"skipped_{name}", 0) for name in ("easy", "hard"))
    assert counted > 0
