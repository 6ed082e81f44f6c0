"""The effective algorithm in five lines, after preset, files and overrides."""

from trueline.algorithms.advantages import ADVANTAGES
from trueline.algorithms.entries import lookup
from trueline.algorithms.loss_aggregation import AGGREGATIONS
from trueline.algorithms.needs import fresh_logprobs
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.rl import RLConfig


def describe_recipe(config: RLConfig) -> str:
    algorithm = config.algorithm
    advantage = lookup(ADVANTAGES, algorithm.advantage, "algorithm.advantage")
    loss = lookup(POLICY_LOSSES, algorithm.loss, "algorithm.loss")
    return "\n".join(
        [
            f"advantage  {algorithm.advantage}: baseline is {advantage.words.format(algorithm)}"
            + describe_trace(algorithm, advantage.reads)
            + ("; over turns" if algorithm.credit == "turn" else "")
            + ("; whitened over the step's tokens" if algorithm.whiten else ""),
            f"loss       {algorithm.loss}: {loss.words.format(algorithm)}" + describe_terms(algorithm),
            f"averaging  {algorithm.loss_aggregation}: {AGGREGATIONS[algorithm.loss_aggregation].words}",
            f"KL         {describe_kl(algorithm)}",
            f"importance {algorithm.importance_sampling.mode} (engine against trainer); old log-probs: "
            + describe_old_logprobs(config)
            + "; draws are "
            + (f"not tested: {untested_draws(config)}" if untested_draws(config) else "tested"),
        ]
    )


def fresh_old_logprobs(config: RLConfig) -> bool:
    return fresh_logprobs(config.algorithm, config.minibatches * config.epochs, config.model.lora.dropout)


def describe_old_logprobs(config: RLConfig) -> str:
    if fresh_old_logprobs(config):
        return "those of the update, which is the only one"
    return "computed again by the trainer" if config.algorithm.old_logprobs == "recompute" else "the engine's"


def untested_draws(config: RLConfig) -> str:
    """Return why the trainer cannot test what an engine draws, or nothing."""
    reasons = {
        "answers may be of older weights": config.rollout.max_staleness > 0,
        "dynamic sampling selects answers by their rewards": config.algorithm.dynamic_sampling.enabled,
        "adapters have dropout in updates": config.model.lora.dropout > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def describe_trace(algorithm: AlgorithmConfig, reads: tuple[str, ...]) -> str:
    adaptive = algorithm.length_adaptive
    trace = f"lambda 1 - 1/({adaptive:g} x length)" if adaptive else f"lambda {algorithm.gae_lambda:g}"
    gamma = f"; gamma {algorithm.gamma:g}" if "gamma" in reads else ""
    return gamma + (f", {trace}" if "gae_lambda" in reads else "")


def describe_terms(algorithm: AlgorithmConfig) -> str:
    terms = {
        "dual clip": algorithm.dual_clip,
        "entropy bonus": algorithm.entropy_coefficient,
        "NLL of good answers": algorithm.positive_nll,
        "overlong punishment": algorithm.shaping.overlong_factor,
    }
    said = [f"{name} {value:g}" for name, value in terms.items() if value]
    if algorithm.shaping.overlong_filter:
        said.append("truncated answers left out")
    if algorithm.dynamic_sampling.enabled:
        said.append("dynamic sampling")
    return "".join(f"; {word}" for word in said)


def describe_kl(algorithm: AlgorithmConfig) -> str:
    kl = algorithm.kl
    if kl.coefficient == 0:
        return "none, so no reference model is loaded"
    adaptive = f", adapting to {kl.target:g} nats per answer" if kl.target else ""
    kind = "k1 off every token's reward" if kl.place == "reward" else f"{kl.estimator} as a term of the loss"
    return f"{kind}, coefficient {kl.coefficient:g}{adaptive}"
