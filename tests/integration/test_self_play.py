"""Roles through rollout workers in Ray processes: every number of a run in one process."""

from pathlib import Path

import pytest

from tests.integration.test_rollout_workers import APART, SMALL, WHOLE, check_equal, rows_in, warm  # noqa: F401
from tests.support.self_play import race_command
from tests.support.warm import WarmProcesses
from trueline.cli import main


@pytest.mark.slow
def test_roles_with_workers_are_those_of_one_process(warm: WarmProcesses, tmp_path: Path) -> None:  # noqa: F811
    for name, own in (("apart", APART), ("alone", SMALL)):
        assert main(race_command(tmp_path, *own, *WHOLE, "steps=3", f"name={name}")) == 0
    check_equal(tmp_path / "apart", tmp_path / "alone", 3)
    assert all(row["role/first/reward"] == -row["role/second/reward"] for row in rows_in(tmp_path / "apart")[1:])
