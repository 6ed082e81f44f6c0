"""Rewards as a run opens them."""

from pathlib import Path

import pytest

from tests.support.disk import files_up_to
from tests.support.reward_models import local_group, make_reward_model
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardConfig
from trueline.config.roles import FrozenConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.rollout.failures import FailureBudget, RolloutFailure
from trueline.runs.rewards import failure_files, model_reward
from trueline.runs.roles import reward_models


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


TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


def test_a_reward_model_takes_a_template_file(tmp_path: Path) -> None:
    folder, file = make_reward_model(tmp_path / "model", "reward"), tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    config = RewardConfig(function=str(folder), chat_template=str(file))
    (role,) = reward_models(config, FrozenConfig(engine="torch"), ModelConfig(path=str(folder)))
    reward = model_reward(config, config, role, local_group(folder, "reward"))
    assert reward.chat.templated and reward.chat.tokenizer.chat_template == TEMPLATE
