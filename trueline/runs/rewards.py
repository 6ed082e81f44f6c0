"""Open the rewards of a run with their models, and write failed calls to files."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.types import Outcome, Trajectory
from trueline.environments.single_turn import reward_call
from trueline.models.loading import load_chat
from trueline.plan.roles import RoleModel, reward_model_name
from trueline.rewards.base import Call, Reward
from trueline.rewards.combined import REWARD_KINDS, CombinedReward, kind_of
from trueline.rewards.model import ModelReward
from trueline.rewards.replay import write_failure
from trueline.rollout.failures import Report

if TYPE_CHECKING:  # it brings all that trains; a plan checks rewards without
    from trueline.training.group import ModelGroup

from trueline.plan.rewards import RewardCheck


def open_rewards(
    config: RewardConfig,
    roles: list[RoleModel],
    groups: "dict[str, ModelGroup]",
    logs: Path,
    checked: RewardCheck | None = None,
) -> CombinedReward:
    """Open the rewards of a run, with the processes of functions that a check has loaded.

    `groups` are the models of the run by the names of their roles.
    """
    models = {role.name: role for role in roles}
    functions = checked.functions if checked else {}
    rewards: dict[str, tuple[Reward, RewardPartConfig]] = {}
    for name, part in config.named_parts().items():
        role, log = reward_model_name(name, config), logs / (f"reward-{name}.log" if config.parts else "reward.log")
        load_model = partial(lambda part, role: model_reward(part, config, models[role], groups[role]), part, role)
        opened = REWARD_KINDS[kind_of(part)].open(part, config, log, functions.pop(name, None), load_model)
        rewards[name] = opened, part
    return CombinedReward(rewards, config.policy_error, config.processes)


def model_reward(part: RewardPartConfig, config: RewardConfig, role: RoleModel, group: "ModelGroup") -> ModelReward:
    """Make the reward of a reward model, which reads messages through its own tokenizer and template."""
    chat = load_chat(role.model, part.chat_template)
    longest = min(role.facts.context, role.ranks.tokens_per_pass() * role.model.context_parallel)
    return ModelReward(group.score, chat, part, max_tokens=longest, batch=config.batch)


def failure_files(config: RewardConfig, folder: Path) -> Report:
    """Return a function that writes the call of a failed completion into a run folder, and returns how to see it."""

    def write(number: int, trajectory: Trajectory) -> str:
        part: RewardPartConfig | None = None
        if trajectory.outcome is not Outcome.ENVIRONMENT_ERROR:
            part = config.named_parts().get(trajectory.failed_reward, config)
        file = folder / "failures" / f"{number}.json"
        try:
            write_failure(file, part, failed_call(trajectory), trajectory.error)
        except OSError:  # a full disk must not hide why the run stops
            return ""
        runs_again = part is not None and part.function and kind_of(part) == "function"
        return f"python -m trueline.rewards.replay {file}" if runs_again else str(file)

    return write


def failed_call(trajectory: Trajectory) -> Call:
    return reward_call(trajectory.prompt, trajectory.reply, trajectory.talk)
