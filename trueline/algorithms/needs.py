"""What the named advantage and loss ask of a run, and what they cannot work with."""

from trueline.algorithms.advantages import ADVANTAGES
from trueline.algorithms.entries import check_takes, imported, is_own, lookup
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError


def needs(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return what the advantage needs: models beside the policy, groups, greedy completions."""
    return lookup(ADVANTAGES, config.advantage, "algorithm.advantage").needs


def reads_reward(config: AlgorithmConfig) -> bool:
    """Tell whether a reward is read: a teacher takes its place, unless the advantage asks for both."""
    return "teacher" not in needs(config) or "reward" in needs(config)


def fresh_logprobs(config: AlgorithmConfig, updates: int, dropout: float) -> bool:
    """Tell whether the update itself brings the log-probs before it: its completions are used once, so ratios are 1.

    Not where rewards or advantages read them, nor where training and scoring see different functions.
    """
    in_reward = config.kl.place == "reward" and config.kl.coefficient > 0
    read = in_reward or "teacher" in needs(config) or is_own(config.advantage)  # one's own may read anything
    return config.old_logprobs == "recompute" and updates == 1 and not dropout and not read


def policy_waits(config: AlgorithmConfig) -> int:
    """Return the number of first steps in which only the critic learns."""
    return config.critic_warmup_steps if "critic" in needs(config) else 0


def policy_learns(config: AlgorithmConfig, step: int, critic_ready: bool) -> bool:
    """Tell whether the policy learns in the step behind this one, or waits for its critic."""
    waits = "critic" in needs(config) and config.critic_warmup_variance is not None
    return step >= policy_waits(config) and (not waits or critic_ready or step >= config.critic_warmup_limit)


def check_needs(config: AlgorithmConfig) -> None:
    """Refuse keys that the named functions could not work with, or would not read as they sound."""
    imported.cache_clear()  # a file may have changed since an earlier run of this process
    name, asked, shaping = config.advantage, needs(config), config.shaping
    shaped = shaping.overlong_factor > 0 or shaping.truncated != "keep"
    if "groups" in asked and config.group_size < 2:
        raise ConfigError(
            f"algorithm.advantage={name} compares answers to one prompt: "
            f"set algorithm.group_size to 2 or more (got {config.group_size})"
        )
    if "greedy" in asked and shaped:
        raise ConfigError(
            "algorithm.shaping changes rewards but not that of the greedy answer: set overlong_factor=0 and "
            f"truncated=keep, or another advantage than {name}"
        )
    if not reads_reward(config) and (config.kl.place == "reward" or config.dynamic_sampling.enabled or shaped):
        raise ConfigError(
            f"algorithm.advantage={name} reads no reward: set kl.place=loss, dynamic_sampling.enabled=false and "
            "no shaping"
        )
    loss = lookup(POLICY_LOSSES, config.loss, "algorithm.loss")
    if is_own(name):
        check_takes(lookup(ADVANTAGES, name, "algorithm.advantage"), "samples", "config")
    if is_own(config.loss):
        check_takes(loss, "logprobs", "batch", "config")
    if "recompute" in loss.needs and config.old_logprobs == "rollout":
        raise ConfigError(
            f"algorithm.old_logprobs=rollout: the engine's rounding alone exceeds the clip of loss={config.loss}; "
            "set old_logprobs=recompute"
        )
