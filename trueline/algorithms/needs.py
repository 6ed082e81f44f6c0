"""What the chosen advantage and loss need, and what they cannot work with."""

from trueline.algorithms.advantages import ADVANTAGES
from trueline.algorithms.entries import check_takes, import_entry, is_own, lookup
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError


def needs(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return what the advantage needs: other models, groups, greedy completions."""
    return lookup(ADVANTAGES, config.advantage, "algorithm.advantage").needs


def reads_reward(config: AlgorithmConfig) -> bool:
    """Tell whether rewards are used: a teacher replaces them unless the advantage needs both."""
    return "teacher" not in needs(config) or "reward" in needs(config)


def fresh_logprobs(config: AlgorithmConfig, updates: int, dropout: float) -> bool:
    """Tell whether the update itself computes the old log-probs: completions are used once, and only there."""
    in_reward = config.kl.place == "reward" and config.kl.coefficient > 0
    read = in_reward or "teacher" in needs(config) or is_own(config.advantage)  # user functions may read anything
    return config.old_logprobs == "recompute" and updates == 1 and not dropout and not read


def policy_waits(config: AlgorithmConfig) -> int:
    """Return the number of first steps that train only the critic."""
    return config.critic_warmup_steps if "critic" in needs(config) else 0


def policy_learns(config: AlgorithmConfig, step: int, critic_ready: bool) -> bool:
    """Tell whether the step after this one trains the policy, or only the critic."""
    waits = "critic" in needs(config) and config.critic_warmup_variance is not None
    return step >= policy_waits(config) and (not waits or critic_ready or step >= config.critic_warmup_limit)


def check_needs(config: AlgorithmConfig) -> None:
    """Refuse keys that the chosen functions cannot work with or do not read."""
    import_entry.cache_clear()  # a file may have changed since an earlier run of this process
    name, needed, shaping = config.advantage, needs(config), config.shaping
    shaped = shaping.overlong_factor > 0 or shaping.truncated != "keep"
    if "groups" in needed and config.group_size < 2:
        raise ConfigError(
            f"algorithm.advantage={name} compares completions of one prompt: set algorithm.group_size to 2 or more "
            f"(got {config.group_size})",
            key="algorithm.group_size",
        )
    if "greedy" in needed and shaped:
        raise ConfigError(
            "algorithm.shaping does not change the greedy completion's reward: set overlong_factor=0 and "
            f"truncated=keep, or another advantage than {name}"
        )
    if not reads_reward(config) and (config.kl.place == "reward" or config.dynamic_sampling.enabled or shaped):
        raise ConfigError(
            f"algorithm.advantage={name} uses no reward: set kl.place=loss and dynamic_sampling.enabled=false, and "
            "remove shaping"
        )
    loss = lookup(POLICY_LOSSES, config.loss, "algorithm.loss")
    if is_own(name):
        check_takes(lookup(ADVANTAGES, name, "algorithm.advantage"), "samples", "config")
    if is_own(config.loss):
        check_takes(loss, "logprobs", "batch", "config")
    if "recompute" in loss.needs and config.old_logprobs == "rollout":
        raise ConfigError(
            f"algorithm.old_logprobs=rollout: the engine's rounding exceeds the clip range of loss={config.loss}: set "
            "old_logprobs=recompute"
        )
