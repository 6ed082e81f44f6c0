from pathlib import Path

import pytest

from tests.support.disk import files_up_to
from trueline.config.reward import RewardConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.rollout.failures import FailureBudget, RolloutFailure
from trueline.trainers.rewards import failure_files


def failed() -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "1:"}])
    return Trajectory(prompt, 0, [], [], [], [], [], outcome=Outcome.REWARD_ERROR, error="cannot grade this")


def stopped(folder: Path) -> str:
    with pytest.raises(RolloutFailure) as caught:
        FailureBudget(0.0, 1, failure_files(RewardConfig(function="reward.py:f"), folder)).add([failed()])
    return str(caught.value)


def test_a_failed_call_is_written_below_the_run_folder(tmp_path: Path) -> None:
    assert f"python -m trueline.rewards.replay {tmp_path}/failures/1.json" in stopped(tmp_path)
    assert "cannot grade this" in (tmp_path / "failures" / "1.json").read_text()


def test_a_full_disk_does_not_hide_why_a_run_stops(tmp_path: Path) -> None:
    with files_up_to(5):
        said = stopped(tmp_path)
    assert "cannot grade this" in said and "replay" not in said
