"""Which shortcuts the keys of a run allow, and why not."""

from trueline.algorithms.advantages import fresh_logprobs, needs_batch
from trueline.config.rl import RLConfig


def fresh_old_logprobs(config: RLConfig) -> bool:
    return fresh_logprobs(config.algorithm, config.minibatches * config.epochs, config.model.lora.dropout)


def untested_draws(config: RLConfig) -> str:
    """Return why the trainer cannot test what an engine draws, or nothing."""
    reasons = {
        "completions may come from older weights": config.rollout.max_staleness > 0,
        "dynamic sampling selects completions by their rewards": config.algorithm.dynamic_sampling.enabled,
        "adapters have dropout in updates": config.model.lora.dropout > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def stream_obstacle(config: RLConfig, kept: str = "") -> str:
    """Return why groups cannot be trained before all of their step are sampled; `kept`: keys that keep gradients."""
    training, updates = config.training, config.minibatches * config.epochs
    reasons = {
        f"{needs_batch(config.algorithm)} needs the whole batch": bool(needs_batch(config.algorithm)),
        f"a step makes {updates} updates (minibatches, epochs)": updates > 1,
        "training.router_aux_loss_coef needs the whole batch": training.router_aux_loss_coef > 0,
        f"rollout.max_staleness={config.rollout.max_staleness} already samples while it trains": bool(
            config.rollout.max_staleness
        ),
        f"training.{kept} cannot discard gradients": bool(kept),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
