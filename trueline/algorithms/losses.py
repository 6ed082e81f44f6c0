"""Losses of supervised tasks, preferences, the critic and routers, and the table of every loss that a worker computes.

Rows 2i and 2i + 1 of a preference batch are the chosen and the rejected completion of a pair. Both have its loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid, relu

from trueline.algorithms.policy_losses import count_tokens, policy_loss
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.supervised import DistillConfig, KTOConfig, PreferenceConfig, RewardModelConfig
from trueline.data.types import Batch, LossOutput, ModelOutput, Sample

Score = Callable[[list[Sample]], list[Tensor]]  # by the trained model
CERTAIN = -1e-6  # a mean log-prob above this is float32's noise around probability one


def sft(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Compute the negative log-likelihood of the tokens to learn."""
    return LossOutput(-output.logprobs)


def process_reward(output: ModelOutput, batch: Batch, config: None) -> LossOutput:
    """Compute the cross-entropy of step labels (arXiv:2305.20050): score 0 is the logit of bad, 1 that of good."""
    logprobs = log_softmax(output.scores.float(), dim=-1)
    bad, good = logprobs.unbind(-1)
    values = -batch.step_labels * good - (1 - batch.step_labels) * bad
    right = (good > bad) == (batch.step_labels > 0.5)
    return LossOutput(values, {"process_reward/accuracy": right.float()})


def distill(output: ModelOutput, batch: Batch, config: DistillConfig) -> LossOutput:
    """Return the divergence of student and teacher (arXiv:1503.02531), which the head computes."""
    return LossOutput(output.divergence)


def value(output: ModelOutput, batch: Batch, config: AlgorithmConfig) -> LossOutput:
    """Compute half the squared gap to the return, pessimistic beyond the clip (PPO's code; arXiv:1811.02553)."""
    values = output.values.float()
    error = (values - batch.returns).square()
    means = {"critic/value": values.detach(), "critic/clip_fraction": torch.zeros_like(error)}
    if config.value_clip > 0:
        near = batch.values + (values - batch.values).clamp(-config.value_clip, config.value_clip)
        clipped_error = (near - batch.returns).square()
        means["critic/clip_fraction"] = (clipped_error > error).float()
        error = torch.maximum(error, clipped_error)
    return LossOutput(0.5 * error, means)


def explained_variance(samples: list[Sample]) -> float:
    """Compute 1 - var(returns - values) / var(returns) over sampled tokens, or 0 where the returns do not vary."""
    returns = torch.cat([sample.returns[sample.mask] for sample in samples]).double()
    values = torch.cat([sample.values[sample.mask] for sample in samples]).double()
    variance = returns.var(correction=0).item()
    return 1 - (returns - values).var(correction=0).item() / variance if variance > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A loss on pairs: the reward [B] of each completion, and the loss of a pair's margin [B/2]."""

    reward: Callable[[ModelOutput, Batch, PreferenceConfig], Tensor]
    value: Callable[[Tensor, PreferenceConfig], Tensor]
    includes_nll: bool = False


def preference(output: ModelOutput, batch: Batch, config: PreferenceConfig) -> LossOutput:
    """Compute the chosen loss, plus the chosen completion's NLL per token (arXiv:2404.19733)."""
    loss = PAIR_LOSSES[config.loss]
    rewards = loss.reward(output, batch, config)
    chosen, rejected = halves(rewards)
    values = loss.value(chosen - rejected, config)
    means = {"preference/chosen_reward": chosen, "preference/rejected_reward": rejected}
    means["preference/chosen_logprob"], means["preference/rejected_logprob"] = halves(batch.sums(output.logprobs))
    coefficient = 1.0 if loss.includes_nll else config.nll_coefficient
    if coefficient > 0:
        means["preference/nll"] = -halves(mean_logprobs(output, batch))[0]
        values = values + coefficient * means["preference/nll"]
    return on_both_rows("preference", values, rewards, means)


def log_ratios(output: ModelOutput, batch: Batch) -> Tensor:
    """Return log(policy / reference) of whole completions, [B]."""
    return batch.sums(output.logprobs.float() - batch.ref_logprobs)


def per_token(sums: Tensor, batch: Batch) -> Tensor:
    return sums / batch.counts().clamp(min=1)  # a filler has no tokens


def mean_logprobs(output: ModelOutput, batch: Batch) -> Tensor:
    return per_token(batch.sums(output.logprobs.float()), batch)


def log_ratio_reward(output: ModelOutput, batch: Batch, config: PreferenceConfig) -> Tensor:
    """Return DPO's implicit reward (arXiv:2305.18290, eq. 5)."""
    return config.beta * log_ratios(output, batch)


def ipo_reward(output: ModelOutput, batch: Batch, config: PreferenceConfig) -> Tensor:
    """Return DPO's reward, or its mean per token, which is what IPO's authors run."""
    rewards = log_ratio_reward(output, batch, config)
    return per_token(rewards, batch) if config.length_normalized else rewards


def simpo_reward(output: ModelOutput, batch: Batch, config: PreferenceConfig) -> Tensor:
    """Return the length-normalised log-prob (SimPO, arXiv:2405.14734, eq. 4)."""
    return config.beta * mean_logprobs(output, batch)


def log_odds(output: ModelOutput, batch: Batch, config: PreferenceConfig) -> Tensor:
    """Return log(p / (1 - p)) of a completion's mean probability per token (ORPO, arXiv:2403.07691, eq. 4)."""
    mean = mean_logprobs(output, batch)
    # Limit only the value: 1 / (1 - p) cancels the softmax's factor 1 - p, so gradients of logits are bounded.
    limited = mean + (mean.clamp(max=CERTAIN) - mean).detach()
    return limited - torch.log(-torch.expm1(limited))


def sigmoid(margin: Tensor, config: PreferenceConfig) -> Tensor:
    """Compute DPO (arXiv:2305.18290, eq. 7); with label smoothing its authors' cDPO, for labels that may be wrong."""
    wrong = config.label_smoothing
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


def hinge(margin: Tensor, config: PreferenceConfig) -> Tensor:
    """Compute SLiC's loss (arXiv:2305.10425) on DPO's margin (RSO, arXiv:2309.06657)."""
    return relu(1 - margin)


def ipo(margin: Tensor, config: PreferenceConfig) -> Tensor:
    """Compute (x - 1 / (2 beta))^2 at margin = beta x (IPO, arXiv:2310.12036, eq. 17)."""
    return ((margin - 0.5) / config.beta).square()


def simpo(margin: Tensor, config: PreferenceConfig) -> Tensor:
    """Compute SimPO (arXiv:2405.14734, eq. 6)."""
    return -logsigmoid(margin - config.gamma)


def orpo(margin: Tensor, config: PreferenceConfig) -> Tensor:
    """Compute ORPO's odds-ratio term (arXiv:2403.07691, eq. 7)."""
    return -config.odds_coefficient * logsigmoid(margin)


def kto(output: ModelOutput, batch: Batch, config: KTOConfig) -> LossOutput:
    """Compute KTO (arXiv:2402.01306); the label is 1 where the completion is desirable, else 0."""
    ratios = log_ratios(output, batch)
    desirable = batch.labels > 0.5
    sign = torch.where(desirable, 1.0, -1.0)
    margin = sign * config.beta * (ratios - batch.statistics["kto/kl"])
    weight = torch.where(desirable, config.desirable_weight, config.undesirable_weight)
    means = {"kto/accuracy": (margin > 0).float(), "kto/margin": margin.detach(), "kto/log_ratio": ratios.detach()}
    return LossOutput(weight * torch.sigmoid(-margin), means, per_sequence=True)


def mismatch_kl(samples: list[Sample], config: KTOConfig, score: Score) -> dict[str, float]:
    """Estimate KTO's z: the KL to the reference on completions of other prompts, at least zero."""
    others = [sample.companion for sample in samples if sample.companion is not None]
    ratios = [
        float(((logprobs - other.ref_logprobs) * other.mask).sum())
        for other, logprobs in zip(others, score(others), strict=True)
    ]
    return {"kto/kl": max(fmean(ratios), 0.0)}


def reward_model(output: ModelOutput, batch: Batch, config: RewardModelConfig) -> LossOutput:
    """Compute Bradley-Terry with a margin (Llama 2, arXiv:2307.09288, eq. 2) and centring (arXiv:2312.09244)."""
    rewards = batch.last_of(output.scores[:, 0]).float()
    chosen, rejected = halves(rewards)
    margin, _ = halves(batch.labels)
    values = -logsigmoid(chosen - rejected - margin) + config.centering * (chosen + rejected).square()
    means = {"reward_model/chosen": chosen, "reward_model/rejected": rejected}
    return on_both_rows("reward_model", values, rewards, means)


def reward_scale(samples: list[Sample], config: RewardModelConfig, score: Score) -> dict[str, float]:
    """Return the scores' mean and deviation, saved with a reward model to normalize its rewards."""
    scores = [float(scores[-1, 0]) for scores in score(samples)]
    return {"reward_mean": fmean(scores), "reward_std": pstdev(scores)}


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split [B] into [B/2] of the chosen and [B/2] of the rejected."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def on_both_rows(name: str, values: Tensor, rewards: Tensor, means: dict[str, Tensor]) -> LossOutput:
    """Repeat [B/2] to [B]: the weights of a pair's two rows add up to the pair's."""
    chosen, rejected = halves(rewards)
    means = {f"{name}/accuracy": (chosen > rejected).float(), f"{name}/margin": chosen - rejected, **means}
    rows = {name: mean.detach().repeat_interleave(2) for name, mean in means.items()}
    return LossOutput(values.repeat_interleave(2), rows, per_sequence=True)


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(log_ratio_reward, sigmoid),
    "hinge": PairLoss(log_ratio_reward, hinge),
    "ipo": PairLoss(ipo_reward, ipo),
    "simpo": PairLoss(simpo_reward, simpo),
    "orpo": PairLoss(log_odds, orpo, includes_nll=True),
}


def routing(logits: Sequence[Tensor], top_k: int) -> dict[str, Tensor]:
    """Return the router fields of ModelOutput from each layer's router logits [N, E]."""
    probabilities = [layer.float().softmax(-1) for layer in logits]
    sent = [torch.zeros_like(layer).scatter_(-1, layer.topk(top_k).indices, 1.0) for layer in probabilities]
    return {"expert_counts": torch.stack(sent).sum(0), "router_probs": torch.stack(probabilities).sum(0)}


def over_learnt(values: Tensor, batch: Batch) -> Tensor:
    """Sum over the tokens of all sequences except fillers and filtered ones, [N, E] -> [E]."""
    return values[batch.spread(batch.shares) > 0].sum(0)


def router_loss(output: ModelOutput, batch: Batch, counts: list[float], top_k: int) -> Tensor:
    """Return this pass's part of the load-balancing loss of Switch Transformer (arXiv:2101.03961, eq. 4-6).

    Over all tokens and layers: E * sum over E experts of (share of tokens sent there) * (mean probability). The shares
    have no gradient; they come from `counts` [E] of the whole minibatch, so each pass sums over its own tokens.
    """
    rows = sum(counts) / top_k  # tokens x layers
    factors = torch.tensor([len(counts) * count / rows**2 for count in counts], device=batch.shares.device)
    return (factors * over_learnt(output.router_probs, batch)).sum()


Numbers = Callable[[list[Sample], Any, Score], dict[str, float]]  # Any: the section of the configuration


@dataclass(frozen=True, slots=True)
class Loss:
    compute: Callable[[ModelOutput, Batch, Any], LossOutput]
    prepare: Numbers = lambda *_: {}  # statistics of the whole minibatch, before the loss
    facts: Numbers = lambda *_: {}  # saved with the model after an evaluation
    entropy: bool = False  # whether it reads the entropy, which costs a pass over the logits
    observes: Callable[[Any], bool] = lambda section: False  # whether it reads log-probs of environments' tokens


LOSSES: dict[str, Loss] = {
    "policy": Loss(policy_loss, count_tokens, entropy=True, observes=lambda config: config.observation_loss > 0),
    "value": Loss(value),
    "sft": Loss(sft),
    "preference": Loss(preference),
    "kto": Loss(kto, prepare=mismatch_kl),
    "reward_model": Loss(reward_model, facts=reward_scale),
    "process_reward": Loss(process_reward),
    "distill": Loss(distill),
}
