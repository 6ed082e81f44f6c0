"""Rewards as a run opens them."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.disk import files_up_to
from tests.support.reward_models import local_group, make_reward_model
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.reward import RewardConfig
from trueline.config.roles import FrozenConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.rewards.base import Call
from trueline.rewards.combined import REWARD_KINDS, RewardKind
from trueline.rewards.model import ModelReward
from trueline.rewards.pool import FunctionReward
from trueline.rewards.remote import JudgeReward, ScorerReward
from trueline.rollout.failures import FailureBudget, RolloutFailure
from trueline.runs.rewards import check_rewards, failure_files, model_reward, open_rewards
from trueline.runs.roles import reward_models


def failed(outcome: Outcome = Outcome.REWARD_ERROR) -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "1:"}])
    return Trajectory(prompt, 0, outcome=outcome, error="cannot grade this")


def stopped(folder: Path, outcome: Outcome = Outcome.REWARD_ERROR) -> str:
    with pytest.raises(RolloutFailure) as caught:
        FailureBudget(0.0, 1, failure_files(RewardConfig(function="reward.py:f"), folder)).add([failed(outcome)])
    return str(caught.value)


def test_an_episode_whose_environment_failed_is_kept_and_not_offered_for_replay(tmp_path: Path) -> None:
    """Its reward function was never asked, so asking it now would show a number and no fault."""
    assert "replay" not in stopped(tmp_path, Outcome.ENVIRONMENT_ERROR)
    kept = json.loads((tmp_path / "failures" / "1.json").read_text())
    assert (kept["episode"], kept["error"], kept["call"]["prompt"]) == ("failed", "cannot grade this", "1:")
    assert "function" not in kept


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


def test_every_kind_is_opened_with_the_keys_of_the_run(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "reward")
    judge = {"url": "http://127.0.0.1:1/v1", "model": "judge"}
    config = RewardConfig.parse(
        {
            "parts": {
                "right": {"function": "exact"},
                "asked": {"function": "http://127.0.0.1:1/score", "remote": {"concurrency": 3}},
                "graded": {"function": "judge", "judge": judge},
                "learnt": {"function": str(folder)},
            },
            "batch": 7,
            "timeout_seconds": 5,
        }
    )
    roles = reward_models(config, FrozenConfig(engine="torch"), ModelConfig(path=str(folder)))
    groups = {"reward_model-learnt": local_group(folder, "reward")}
    opened = {name: reward for name, (reward, _) in open_rewards(config, roles, groups, tmp_path).parts.items()}
    right, asked, graded, learnt = (opened[name] for name in config.parts)
    assert isinstance(right, FunctionReward) and right.config is config
    assert {child.log for child in right.children} == {tmp_path / "reward-right.log"}
    assert isinstance(asked, ScorerReward) and (asked.batch, asked.endpoint.timeout_seconds) == (7, 5)
    assert isinstance(graded, JudgeReward) and (graded.batch, graded.endpoint.timeout_seconds) == (1, 5)
    assert isinstance(learnt, ModelReward) and learnt.batch == 7


class Constant:
    def __init__(self, value: str) -> None:
        self.value = float(value)

    async def score(self, call: Call) -> float:
        return self.value

    async def stop(self) -> None: ...


def check_constant(*given: object) -> None:
    raise ConfigError(f"checked with {given[2]} and {given[3]}")


def test_a_row_is_all_that_a_new_kind_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RewardKind(
        lambda part: part.function.startswith("constant "),
        check_constant,
        lambda part, *_: Constant(part.function.split()[1]),
    )
    function = REWARD_KINDS["function"]
    monkeypatch.delitem(REWARD_KINDS, "function")  # which takes all that the rows before it leave
    monkeypatch.setitem(REWARD_KINDS, "constant", own)
    monkeypatch.setitem(REWARD_KINDS, "function", function)
    config = RewardConfig(function="constant 0.5")
    row = Prompt(0, [{"role": "user", "content": "1:"}], label="2", columns={"level": 3})
    with pytest.raises(ConfigError, match=r"checked with \['level'\] and True"):
        check_rewards(config, row)
    verdict = asyncio.run(open_rewards(config, [], {}, tmp_path).verdict({"reply": "x"}))
    assert verdict.reward == 0.5
