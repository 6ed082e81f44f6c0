"""Policy losses of each token, with the KL to the reference; the batch's weights average them.

`batch.old_logprobs` are the denominator of the ratio: the trainer's before the update, or the engine's.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trueline.algorithms.divergences import DIVERGENCES
from trueline.algorithms.entries import AlgorithmFailure, Entry, entry, lookup, table_of
from trueline.algorithms.importance_sampling import clamp_log_ratio, importance_weights, sequence_means
from trueline.config.algorithm import AlgorithmConfig, DistillationConfig, KLConfig
from trueline.data.types import NO_TARGET, Batch, LossOutput, ModelOutput, Sample

PolicyLoss = Entry[[Tensor, Batch, AlgorithmConfig], LossOutput]  # [N] log-probs, with gradient

SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05  # temperatures by the sign of the advantage
GMPO_CLIP = 0.4  # of a token's log-ratio
K3_LINEAR_BELOW = -2.6108686381  # the log-ratio at which k3 is 10
OFF_POLICY_LIMIT = 10.0
SMALLEST_REST = 1e-7  # of 1 - p in float32
OBSERVATION = "policy/observation_loss"
CLIPPED = "clipped to [1 - {0.clip_low:g}, 1 + {0.clip_high:g}]"


@entry(f"ratio {CLIPPED}", reads=("clip_low", "clip_high", "dual_clip"))
def ppo_clip(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Clip PPO's surrogate (arXiv:1707.06347, eq. 7), with clip-higher (arXiv:2503.14476), dual clip (1912.09729)."""
    loss = clipped_surrogate(ratios(logprobs, batch), batch, config)
    if config.dual_clip is None:
        return loss
    bound = -config.dual_clip * batch.advantages
    beyond = (batch.advantages < 0) & (loss.values > bound)
    share = loss.means["policy/clip_fraction"] + beyond  # PPO's own clip never applies there
    return LossOutput(torch.where(beyond, bound, loss.values), {"policy/clip_fraction": share})


@entry(f"ratio of the whole completion {CLIPPED}", needs=("recompute",), reads=("clip_low", "clip_high"))
def gspo(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute GSPO (arXiv:2507.18071, eq. 7) in its token form (section 4.3): each token has the completion's ratio,
    and the gradient of its own log-prob."""
    sequence_ratios = clamp_log_ratio(sequence_means(logprobs.detach() - batch.old_logprobs, batch)).exp()
    return clipped_surrogate(batch.spread(sequence_ratios) * (logprobs - logprobs.detach()).exp(), batch, config)


@entry("ratio capped at {0.ratio_cap:g}; every token keeps its gradient", reads=("ratio_cap",))
def cispo(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4-5): ratios are capped weights; all tokens have gradients."""
    ratio = ratios(logprobs, batch).detach()
    values = -ratio.clamp(max=config.ratio_cap) * batch.advantages * logprobs
    return LossOutput(values, {"policy/clip_fraction": (ratio > config.ratio_cap).float()})


@entry("ratio capped at {0.ratio_cap:g}", reads=("ratio_cap",))
def reinforce(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute REINFORCE (Williams, 1992): -A log p on-policy, where the ratio is 1; off-policy it is CISPO."""
    return cispo(logprobs, batch, config)


@entry(
    "tokens that moved too far are dropped ({0.divergence} above {0.clip_low:g} down, {0.clip_high:g} up)",
    reads=("clip_low", "clip_high", "ratio_cap", "divergence"),
)
def dppo(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute DPPO (arXiv:2602.04879, eq. 11): tokens outside the trust region may only move back."""
    change = TOKEN_DIVERGENCES[config.divergence](logprobs.detach(), batch.old_logprobs)
    up = batch.advantages > 0
    onward = torch.where(up, logprobs > batch.old_logprobs, logprobs < batch.old_logprobs)
    dropped = onward & (change > torch.where(up, config.clip_high, config.clip_low))
    values = cispo(logprobs, batch, config).values.masked_fill(dropped, 0.0)
    return LossOutput(values, {"policy/clip_fraction": dropped.float()})


@entry("soft gate around ratio 1")
def sapo(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute SAPO (arXiv:2511.20347, eq. 5-6): a sigmoid replaces the clip, steeper where the advantage is <= 0."""
    temperature = torch.where(batch.advantages > 0, SAPO_POSITIVE, SAPO_NEGATIVE)
    gate = torch.sigmoid(temperature * (ratios(logprobs, batch) - 1))
    return LossOutput(-4 / temperature * gate * batch.advantages)


@entry("geometric mean of the completion's clipped ratios")
def gmpo(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute GMPO (arXiv:2507.20673, section 3) on each token: the geometric mean of a completion's clipped ratios."""
    free = clamp_log_ratio(logprobs - batch.old_logprobs)
    upper = torch.where(batch.advantages > 0, GMPO_CLIP, torch.inf)
    lower = torch.where(batch.advantages < 0, -GMPO_CLIP, -torch.inf)
    clipped = free.clamp(lower, upper)
    values = -batch.spread(sequence_means(clipped, batch).exp()) * batch.advantages
    return LossOutput(values, {"policy/clip_fraction": (clipped != free).float()})


POLICY_LOSSES: dict[str, PolicyLoss] = table_of(ppo_clip, gspo, cispo, reinforce, sapo, gmpo, dppo)


def policy_loss(output: ModelOutput, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute the chosen loss, corrected for engine mismatch, plus the KL, entropy and likelihood terms."""
    logprobs = output.logprobs if batch.observed is None else output.logprobs.where(batch.mask, 0.0)
    ratio = ratios(logprobs, batch)
    chosen = lookup(POLICY_LOSSES, config.loss, "algorithm.loss")
    loss = chosen(logprobs, batch, config)
    if chosen.key:
        check_loss(loss, ratio, chosen.key)
    weights, corrected = importance_weights(logprobs, batch, config)
    loss.values = loss.values * weights
    loss.means["policy/corrected_share"] = corrected.float()
    loss.means["policy/entropy"] = output.entropy.detach()
    loss.means["policy/ratio"] = ratio.detach()
    loss.maxima["policy/ratio_deviation_max"] = (ratio.detach() - 1).abs()
    coefficient = batch.statistics.get("kl_coefficient", config.kl.coefficient)
    if config.kl.place == "loss" and coefficient > 0:
        kl = estimate_kl(logprobs - batch.ref_logprobs, ratio, config.kl)
        loss.values = loss.values + coefficient * kl
        loss.means["policy/kl"] = kl.detach()
    if config.distillation.coefficient > 0:
        divergence = to_teacher(output, batch, config.distillation)
        loss.values = loss.values + config.distillation.coefficient * divergence
        loss.means["distill/divergence"] = divergence.detach()
    if config.entropy_coefficient > 0:
        loss.values = loss.values - config.entropy_coefficient * output.entropy
    if config.positive_nll > 0:
        loss.values = loss.values + config.positive_nll * positive_nll(logprobs, batch)
    if batch.observed is not None:
        loss.totals[OBSERVATION] = observation_nll(output.logprobs, batch)
        loss.added = config.observation_loss * loss.totals[OBSERVATION]
    return loss


def to_teacher(output: ModelOutput, batch: Batch, config: DistillationConfig) -> Tensor:
    """Return each token's divergence from the teacher, [N]: of the teacher's likeliest tokens, and all others as one.

    It is 0 where a token has no teacher; the teacher's side has no gradient.
    """
    found = DIVERGENCES[config.divergence](batch.target_logprobs.detach(), output.target_logprobs)
    return torch.where(batch.target_ids[:, 0] == NO_TARGET, 0.0, found)


def count_tokens(samples: list[Sample], config: AlgorithmConfig, score: object) -> dict[str, float]:
    """Count the tokens of the whole minibatch that `positive_nll` and `observation_loss` average over."""
    found: dict[str, float] = {}
    if config.positive_nll > 0:
        for sample in samples:
            sample.label = float(sample.task_reward > 0)
        found["positive_tokens"] = sum(one.sampled_tokens() for one in samples if one.label and one.weight)
    if config.observation_loss > 0:
        found["observed_tokens"] = sum(one.observed_tokens() for one in samples if one.weight)
    return found


def positive_nll(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute VAPO's NLL (arXiv:2504.05118, section 4): a mean over tokens with label 1, so weights are divided out."""
    weights = batch.token_weights()
    shares = torch.where(weights > 0, batch.spread(batch.labels) / weights, 0.0)
    return -logprobs * shares / max(batch.statistics["positive_tokens"], 1.0)


def observation_nll(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return this pass's part of the mean NLL of what environments answered: ECHO (arXiv:2605.24517)."""
    assert batch.observed is not None
    learnt = batch.observed & (batch.spread(batch.shares) > 0)  # without fillers and filtered completions
    return -logprobs.where(learnt, 0.0).sum() / max(batch.statistics["observed_tokens"], 1.0)


def clipped_surrogate(ratio: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    free = ratio * batch.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    return LossOutput(-torch.minimum(free, clipped), {"policy/clip_fraction": (clipped < free).float()})


def ratios(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return the ratio [N] of each token's probability to that before the update."""
    return clamp_log_ratio(logprobs - batch.old_logprobs).exp()


def check_loss(loss: LossOutput, ratio: Tensor, key: str) -> None:
    """Refuse the result of a user's loss unless it has a value for every token."""
    values = loss.values if isinstance(loss, LossOutput) else None
    if values is None or values.shape != ratio.shape or loss.per_sequence:
        found = type(loss).__name__ if values is None else f"values of shape {list(values.shape)}"
        raise AlgorithmFailure(
            f"{key} returned {found}: return LossOutput(values) with one value per token, here {list(ratio.shape)}"
        )


# Divergences of whether a token is drawn, by its log-probs now and before


def total_variation(now: Tensor, before: Tensor) -> Tensor:
    return (now.exp() - before.exp()).abs()


def binary_kl(now: Tensor, before: Tensor) -> Tensor:
    """Return KL(before || now)."""
    rest, rest_before = (-torch.expm1(one).clamp(max=-SMALLEST_REST) for one in (now, before))
    return before.exp() * (before - now) + rest_before * (rest_before / rest).log()


TOKEN_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"tv": total_variation, "kl": binary_kl}


# Estimators of each token's KL to the reference: of its log-ratio to the reference, and its ratio


def k2(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return l^2 / 2, whose gradient is that of KL(policy || reference) at the token (arXiv:2510.01555)."""
    return off_policy(ratio) * log_ratio.square() / 2


def k3(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return exp(-l) - 1 + l (GRPO, arXiv:2402.03300, eq. 4), with the gradient of the forward KL(reference || policy).

    Above 10, where the policy gave a token up, it continues linearly, so that its slope is bounded and never zero.
    """
    near = log_ratio.clamp(min=K3_LINEAR_BELOW)
    slope = 1 - math.exp(-K3_LINEAR_BELOW)
    return torch.exp(-near) - 1 + near + slope * (log_ratio - near)


def k3_plus(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2."""
    return with_gradient_of(off_policy(ratio) * k3(log_ratio, ratio), k2(log_ratio, ratio))


def unbiased_k3(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return k3 times the ratio with its gradient, rho l (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): unbiased for
    KL(policy || reference) off-policy too. The gradient is written out, as k3 is partly linear and ratios are clamped.
    """
    return with_gradient_of(ratio * k3(log_ratio, ratio), ratio.detach() * log_ratio.square() / 2)


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    return value.detach() + (other - other.detach())


def off_policy(ratio: Tensor) -> Tensor:
    """Return the importance weight of a token sampled before the update."""
    return ratio.detach().clamp(max=OFF_POLICY_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3, "k3+": k3_plus}


def estimate_kl(log_ratio: Tensor, ratio: Tensor, config: KLConfig) -> Tensor:
    """Return the configured estimate [N]; `log_ratio` is to the reference, `ratio` to the policy that sampled."""
    is_unbiased = config.unbiased and config.estimator == "k3"
    return (unbiased_k3 if is_unbiased else KL_ESTIMATORS[config.estimator])(log_ratio, ratio)
