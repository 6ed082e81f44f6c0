"""The rewards of a run: checked before the start, opened with the models they need, and files about failed ones."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.config.base import ConfigError
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.single_turn import reward_call
from trueline.models.loading import load_chat
from trueline.rewards.base import Call, Reward
from trueline.rewards.combined import REWARD_KINDS, CombinedReward, kind_of
from trueline.rewards.functions import REWARDS
from trueline.rewards.model import ModelReward
from trueline.rewards.replay import write_failure
from trueline.rollout.failures import Report
from trueline.runs.roles import RoleModel, reward_model_name

if TYPE_CHECKING:  # it brings all that trains; a plan checks rewards without
    from trueline.training.group import ModelGroup


def check_rewards(config: RewardConfig, example: Prompt, *, required: bool = True) -> list[str]:
    """Check whatever can be told of the rewards before anything starts; return warnings."""
    parts, warnings = config.named_parts(), []
    if required and not parts:
        raise ConfigError(
            "reward.function is empty: give --reward math, exact, regex or another built-in, file.py:function, "
            "package.module:function, the folder of a reward model, or the http:// address of a scorer"
        )
    for name, part in parts.items():
        try:
            takes = REWARD_KINDS[kind_of(part)].check(part, config, list(example.columns), example.label is not None)
        except ConfigError as error:
            raise ConfigError(f"reward.parts.{name}: {error}" if config.parts else str(error)) from error
        if "label" in (takes or []) and part.function not in REWARDS and (remark := label_remark(example.label)):
            warnings.append(f"reward.function={part.function} of {example.source}: {remark}")
    return warnings


def label_remark(label: Any) -> str:
    """Say of a label that is no text what a comparison with a reply then gives; nothing of one that is."""
    if label is None or isinstance(label, str):
        return ""
    return (
        f"the label {label!r:.40} is of type {type(label).__name__} and replies are texts, so `reply == label` is "
        "never true: compare with str(label)"
    )


def open_rewards(
    config: RewardConfig, roles: list[RoleModel], groups: "dict[str, ModelGroup]", logs: Path
) -> CombinedReward:
    """Open the rewards of a run; `groups` are its models by the names of their roles."""
    models = {role.name: role for role in roles}

    def opened(name: str, part: RewardPartConfig) -> Reward:
        role, log = reward_model_name(name, config), logs / (f"reward-{name}.log" if config.parts else "reward.log")
        loaded = lambda: model_reward(part, config, models[role], groups[role])  # noqa: E731
        return REWARD_KINDS[kind_of(part)].open(part, config, log, loaded)

    parts = {name: (opened(name, part), part) for name, part in config.named_parts().items()}
    return CombinedReward(parts, config.policy_error, config.processes)


def model_reward(part: RewardPartConfig, config: RewardConfig, role: RoleModel, group: "ModelGroup") -> ModelReward:
    """Make the reward of a reward model, which reads messages through its own tokenizer and template."""
    chat = load_chat(role.model, part.chat_template)
    longest = min(role.facts.context, role.ranks.tokens_per_pass() * role.model.context_parallel)
    return ModelReward(group.score, chat, part, max_tokens=longest, batch=config.batch)


def failure_files(config: RewardConfig, folder: Path) -> Report:
    """Return what writes, below a run folder, a file for each of some failed completions, and names those that can be
    run again.
    """

    def write(failed: list[Trajectory]) -> list[Path]:
        files = []
        for number, trajectory in enumerate(failed, 1):
            played = trajectory.outcome == Outcome.ENVIRONMENT_ERROR
            part = None if played else failed_part(config, trajectory.error)
            file = folder / "failures" / f"{number}.json"
            if played or part is not None:
                with suppress(OSError):  # a full disk must not hide why the run stops
                    write_failure(file, part, failed_call(trajectory), trajectory.error)
                    files += [file] * (not played)
        return files

    return write


def failed_call(trajectory: Trajectory) -> Call:
    return reward_call(trajectory.prompt, trajectory.reply, trajectory.talk)


def failed_part(config: RewardConfig, error: str) -> RewardPartConfig | None:
    """Return the reward function whose name begins the error (a single one has none); others cannot be run again."""
    for name, part in config.named_parts().items():
        if kind_of(part) == "function" and (not config.parts or error.startswith(f"{name}: ")):
            return part
    return None
