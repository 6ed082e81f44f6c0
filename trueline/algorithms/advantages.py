"""Turn rewards into advantages: an estimator fills `advantages` of a step's samples, zero where nothing was sampled."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trueline.algorithms.entries import Entry, entry, lookup, named
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.data.types import Sample, is_filled

Estimator = Entry[[list[Sample], AlgorithmConfig], None]  # its words say what the baseline is

# Estimators that look at single tokens


@entry("the critic's value", needs=("critic",), reads=("gamma", "gae_lambda", "length_adaptive"))
def gae(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Fill in generalised advantages (arXiv:1506.02438, eq. 16) over sampled tokens, and the critic's `returns`.

    VAPO (arXiv:2504.05118, section 4) has a lambda per completion for the policy, and returns with lambda = 1.
    """
    rewards = on_sampled(samples, [sample.token_rewards for sample in samples])
    values = on_sampled(samples, [sample.values for sample in samples])
    gaps = rewards - values
    gaps[:, :-1] += config.gamma * values[:, 1:]
    advantages = discounted_sums(gaps, config.gamma * policy_lambdas(samples, config))
    returns = advantages + values if config.length_adaptive is None else returns_to_go(rewards, config)
    for sample, advantage, target in zip(samples, advantages, returns, strict=True):
        sample.advantages, sample.returns = on_all(sample, advantage), on_all(sample, target)


@entry("none", reads=("gamma",))
def reinforce(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Fill in returns-to-go: REINFORCE (Williams, 1992), as in REINFORCE++ (arXiv:2501.03262)."""
    rewards = on_sampled(samples, [sample.token_rewards for sample in samples])
    for sample, advantage in zip(samples, returns_to_go(rewards, config), strict=True):
        sample.advantages = on_all(sample, advantage)


@entry("none; the teacher's log-prob minus the policy's, token by token", needs=("teacher",))
def teacher(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Score a sampled token by how much likelier the teacher finds it: on-policy distillation (arXiv:2306.13649)."""
    for sample in samples:
        sample.advantages = (sample.teacher_logprobs - sample.old_logprobs) * sample.mask


# Estimators that look at whole completions


@entry("the group's mean, divided by its deviation", needs=("groups",))
def group_norm(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean and divide by its sample standard deviation: GRPO (arXiv:2402.03300, eq. 3)."""
    for members, rewards in by_group(samples):
        spread(members, (rewards - rewards.mean()) / (rewards.std() + 1e-6))


@entry("the group's mean", needs=("groups",))
def group_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean from the reward: Dr. GRPO (arXiv:2503.20783, section 3.2)."""
    for members, rewards in by_group(samples):
        spread(members, rewards - rewards.mean())


@entry("the mean of the group's other answers", needs=("groups",))
def leave_one_out(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the mean of the others in the group from the reward: RLOO (arXiv:2402.14740, eq. 8)."""
    for members, rewards in by_group(samples):
        others = (rewards.sum() - rewards) / (len(members) - 1)
        spread(members, rewards - others)


@entry("the mean of the step's answers")
def batch_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the batch's mean from the reward: REINFORCE with a baseline (Williams, 1992), for single completions."""
    rewards = rewards_of(samples)
    spread(samples, rewards - rewards.mean())


@entry("the reward of the greedy answer", needs=("greedy",))
def greedy_baseline(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the reward of the greedy completion of the same prompt: ReMax (arXiv:2310.10505, section 3)."""
    for sample in samples:
        sample.advantages = (sample.reward - sample.baseline) * sample.mask


ADVANTAGES: dict[str, Estimator] = named(
    gae, reinforce, group_norm, group_mean, leave_one_out, greedy_baseline, batch_mean, teacher
)


def assign_advantages(samples: list[Sample], config: AlgorithmConfig) -> None:
    estimator = lookup(ADVANTAGES, config.advantage, "algorithm.advantage")
    estimator(samples, config)
    if "critic" in estimator.needs and not is_filled(samples[0], "returns"):
        raise ConfigError(f"algorithm.advantage={config.advantage} gives its critic nothing to learn: fill `returns`")
    if config.whiten:
        whiten(samples)


def whiten(samples: list[Sample]) -> None:
    """Whiten advantages: mean 0 and variance 1 over the tokens in the loss (arXiv:2501.03262: over the whole batch)."""
    in_loss = [sample.advantages.masked_select(sample.mask) for sample in samples if not sample.filtered]
    if not in_loss:
        return
    tokens = torch.cat(in_loss).double()
    mean, deviation = tokens.mean().item(), (tokens.var(correction=0) + 1e-8).sqrt().item()
    for sample in samples:
        sample.advantages = (sample.advantages - mean) / deviation * sample.mask


def by_group(samples: list[Sample]) -> Iterator[tuple[list[Sample], Tensor]]:
    """Yield the members of each group and their rewards."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    for members in groups.values():
        yield members, rewards_of(members)


def rewards_of(samples: list[Sample]) -> Tensor:
    """Return the rewards [B] in float64, so that order cannot matter."""
    return torch.tensor([sample.reward for sample in samples], dtype=torch.float64)


def spread(members: list[Sample], advantages: Tensor) -> None:
    """Put one number per completion on each of its sampled tokens, or exactly zero where all rewards are equal."""
    equal = len({member.reward for member in members}) == 1
    for sample, advantage in zip(members, advantages.tolist(), strict=True):
        sample.advantages = (0.0 if equal else advantage) * sample.mask


# Sums along the sampled tokens of many completions at once


def policy_lambdas(samples: list[Sample], config: AlgorithmConfig) -> Tensor:
    """Return the decay [B] of each completion's trace."""
    if config.length_adaptive is None:
        return torch.full((len(samples),), config.gae_lambda, dtype=torch.float64)
    lengths = torch.tensor([sample.sampled_tokens() for sample in samples], dtype=torch.float64)
    return (1 - 1 / (config.length_adaptive * lengths)).clamp(0, 1)


def returns_to_go(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, [B, L], of rewards [B, L]."""
    return discounted_sums(rewards, torch.full((len(rewards),), config.gamma, dtype=torch.float64))


def discounted_sums(values: Tensor, decay: Tensor) -> Tensor:
    """Compute x_t = values_t + decay * x_{t+1} along the rows of [B, L], with a decay [B].

    A sum over n tokens and the one that begins n later make a sum over 2n: log2(L) rounds in place of L steps.
    """
    sums, reach = values.clone(), 1
    while reach < values.shape[1]:
        sums[:, :-reach] += (decay[:, None] ** reach).to(values.dtype) * sums[:, reach:]
        reach *= 2
    return sums


def on_sampled(samples: list[Sample], fields: list[Tensor]) -> Tensor:
    """Gather a field [T] of each sample into [B, L]: on its sampled tokens alone, and zero after them."""
    rows = [field.masked_select(sample.mask) for sample, field in zip(samples, fields, strict=True)]
    return pad_sequence(rows, batch_first=True)


def on_all(sample: Sample, row: Tensor) -> Tensor:
    """Spread a row of `on_sampled` over [T], with zero on tokens that were not sampled."""
    return torch.zeros(sample.length()).masked_scatter_(sample.mask, row)
