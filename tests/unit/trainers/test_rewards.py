"""Rewards as a run opens them."""

from pathlib import Path

from tests.support.reward_models import local_group, make_reward_model
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardConfig
from trueline.config.roles import FrozenConfig
from trueline.trainers.rewards import model_reward
from trueline.trainers.roles import reward_models

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


def test_a_reward_model_takes_a_template_file(tmp_path: Path) -> None:
    folder, file = make_reward_model(tmp_path / "model", "reward"), tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    config = RewardConfig(function=str(folder), chat_template=str(file))
    (role,) = reward_models(config, FrozenConfig(engine="torch"), ModelConfig(path=str(folder)), 1)
    reward = model_reward(config, config, role, local_group(folder, "reward"))
    assert reward.chat.templated and reward.chat.tokenizer.chat_template == TEMPLATE
