"""Which shortcuts the keys of a run allow, and why not."""

from trueline.algorithms.advantages import fresh_logprobs, has_teacher, needs, needs_batch, policy_waits
from trueline.config.base import ConfigError
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


def check_truncation(config: RLConfig) -> None:
    """Refuse to sample from the likeliest tokens alone where the trainer cannot tell which they were.

    It finds them by its own logits, which are the engine's only in the first update after a sync.
    """
    algorithm, updates, stale = config.algorithm, config.minibatches * config.epochs, config.rollout.max_staleness
    waits = policy_waits(algorithm) > 0 or algorithm.critic_warmup_variance is not None
    kl, answers = algorithm.kl.coefficient, algorithm.observation_loss
    reasons = {
        f"older weights have kept others (rollout.max_staleness={stale}): set it to 0": stale > 0,
        f"later updates keep others (minibatches x epochs = {updates}): set both to 1": updates > 1,
        f"the reference keeps others (algorithm.kl.coefficient={kl:g}): set it to 0": kl > 0,
        f"the teacher keeps others: choose another advantage than {algorithm.advantage}": has_teacher(algorithm),
        f"algorithm.observation_loss={answers:g} learns tokens that nobody has sampled: set it to 0": answers > 0,
        "adapters have dropout in updates: set model.lora.dropout=0": config.model.lora.dropout > 0,
        "steps that train only the critic find none: set algorithm.critic_warmup_steps=0 and "
        "critic_warmup_variance=null": waits and "critic" in needs(algorithm),
        f"algorithm.advantage={algorithm.advantage}, or top_entropy_share, reads what is computed before the update: "
        "choose others": algorithm.old_logprobs == "recompute" and not fresh_old_logprobs(config),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    for name, value in config.rollout.reshaping_keys().items():
        if why:
            raise ConfigError(
                f"rollout.{name}={value} keeps the likeliest tokens alone; the update must find them again, but {why}, "
                f"or remove rollout.{name} (evaluation.{name} is free)",
                key=f"rollout.{name}",
            )


def stream_obstacle(config: RLConfig, kept: str = "") -> str:
    """Return why groups cannot be trained before all of their step are sampled; `kept`: keys that keep gradients."""
    training, updates = config.training, config.minibatches * config.epochs
    taught = has_teacher(config.algorithm) and (
        config.algorithm.distillation.coefficient > 0
        or config.algorithm.distillation.reads_more()
        or bool(config.teacher.paths)
    )
    reasons = {
        f"{needs_batch(config.algorithm)} needs the whole batch": bool(needs_batch(config.algorithm)),
        "a teacher reads whole steps (algorithm.distillation, teacher.paths)": taught,
        f"a step makes {updates} updates (minibatches, epochs)": updates > 1,
        "training.router_aux_loss_coef needs the whole batch": training.router_aux_loss_coef > 0,
        f"rollout.max_staleness={config.rollout.max_staleness} already samples while it trains": bool(
            config.rollout.max_staleness
        ),
        f"training.{kept} cannot discard gradients": bool(kept),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
