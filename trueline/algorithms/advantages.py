"""Turn rewards into advantages: an estimator fills `advantages` of a step's samples, zero where nothing was sampled."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trueline.algorithms.entries import AlgorithmFailure, Entry, entry, lookup, named
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.data.types import Sample, is_filled

Estimator = Entry[[list[Sample], AlgorithmConfig], None]  # its words say what the baseline is
Episode = list[Sample]  # its sequences
Judge = Callable[[Tensor], Tensor]  # rewards [n] that are compared -> advantages [n]

# Estimators that look at single tokens


@entry("the critic's value", needs=("critic",), reads=("gamma", "gae_lambda", "length_adaptive", "credit"))
def gae(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Fill in generalised advantages (arXiv:1506.02438, eq. 16) over tokens or turns, and the critic's `returns`.

    A turn's value is that before its first token. VAPO (arXiv:2504.05118, section 4) has a lambda per completion for
    the policy, and returns with lambda = 1.
    """
    rewards = step_rewards(samples, config)
    values = on_sampled(samples, [sample.values for sample in samples])
    if config.credit == "turn":
        values = on_turns(samples, values, first_of_turns)
    gaps = rewards - values
    gaps[:, :-1] += config.gamma * values[:, 1:]
    advantages = discounted_sums(gaps, config.gamma * policy_lambdas(samples, config))
    returns = advantages + values if config.length_adaptive is None else returns_to_go(rewards, config)
    for sample, advantage, target in zip(samples, advantages, returns, strict=True):
        sample.advantages, sample.returns = on_all(sample, advantage, config), on_all(sample, target, config)


@entry("none", reads=("gamma", "credit"))
def reinforce(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Fill in returns-to-go: REINFORCE (Williams, 1992), as in REINFORCE++ (arXiv:2501.03262)."""
    rewards = step_rewards(samples, config)
    for sample, advantage in zip(samples, returns_to_go(rewards, config), strict=True):
        sample.advantages = on_all(sample, advantage, config)


@entry("none; the teacher's log-prob minus the policy's, token by token", needs=("teacher",))
def teacher(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Score a sampled token by how much likelier the teacher finds it: on-policy distillation (arXiv:2306.13649)."""
    for sample in samples:
        sample.advantages = (sample.teacher_logprobs - sample.old_logprobs) * sample.mask


# Estimators that compare whole episodes, or their turns


@entry("the group's mean, divided by its deviation", needs=("groups",), reads=("credit",))
def group_norm(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean and divide by its sample standard deviation: GRPO (arXiv:2402.03300, eq. 3)."""
    compare(groups_of(samples), config, lambda rewards: (rewards - rewards.mean()) / (rewards.std() + 1e-6))


@entry("the group's mean", needs=("groups",), reads=("credit",))
def group_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean from the reward: Dr. GRPO (arXiv:2503.20783, section 3.2)."""
    compare(groups_of(samples), config, lambda rewards: rewards - rewards.mean())


@entry("the mean of the group's other answers", needs=("groups",), reads=("credit",))
def leave_one_out(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the mean of the others in the group from the reward: RLOO (arXiv:2402.14740, eq. 8)."""
    compare(groups_of(samples), config, lambda rewards: rewards - (rewards.sum() - rewards) / (len(rewards) - 1))


@entry("the mean of the step's answers", reads=("credit",))
def batch_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the batch's mean from the reward: REINFORCE with a baseline (Williams, 1992), for single completions."""
    compare([episodes_of(samples)], config, lambda rewards: rewards - rewards.mean())


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
    if estimator.key:
        check_advantages(samples, estimator.key)
    if "critic" in estimator.needs and not is_filled(samples[0], "returns"):
        raise ConfigError(f"algorithm.advantage={config.advantage} gives its critic nothing to learn: fill `returns`")
    if config.whiten:
        whiten(samples)


def check_advantages(samples: list[Sample], key: str) -> None:
    """Refuse what a user's own function has left in the samples, unless it is a finite number for every token."""
    for number, sample in enumerate(samples):
        if not is_filled(sample, "advantages"):
            raise AlgorithmFailure(
                f"{key} left sample {number} without advantages: set sample.advantages of all of them"
            )
        found, wanted = sample.advantages, sample.mask.shape
        if not isinstance(found, torch.Tensor) or found.shape != wanted:
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise AlgorithmFailure(
                f"{key} gave sample {number} advantages of shape {shape}, and one number for each of its tokens is "
                f"wanted, {list(wanted)}: multiply by sample.mask"
            )
        if not found.isfinite().all():
            raise AlgorithmFailure(
                f"{key} gave sample {number} (reward {sample.reward:g}) advantages that are not finite: see to "
                "divisions by zero, such as by the deviation of equal rewards"
            )


def whiten(samples: list[Sample]) -> None:
    """Whiten advantages: mean 0 and variance 1 over the tokens in the loss (arXiv:2501.03262: over the whole batch)."""
    in_loss = [sample.advantages.masked_select(sample.mask) for sample in samples if not sample.filtered]
    if not in_loss:
        return
    tokens = torch.cat(in_loss).double()
    mean, deviation = tokens.mean().item(), (tokens.var(correction=0) + 1e-8).sqrt().item()
    for sample in samples:
        sample.advantages = (sample.advantages - mean) / deviation * sample.mask


def groups_of(samples: list[Sample]) -> list[list[Episode]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [episodes_of(members) for members in groups.values()]


def episodes_of(samples: list[Sample]) -> list[Episode]:
    """Return the sequences of each episode."""
    episodes: dict[int, Episode] = {}
    for sample in samples:
        episodes.setdefault(sample.whose(), []).append(sample)
    return list(episodes.values())


def compare(groups: list[list[Episode]], config: AlgorithmConfig, judge: Judge) -> None:
    """Put on every sampled token what `judge` says of its episode's reward among those of its group.

    Under `credit=turn` it is the return from its turn on, among those of the same turn; a turn that no other episode
    has is compared with their whole rewards.
    """
    for episodes in groups:
        rewards = [episode[0].reward for episode in episodes]
        if config.credit == "turn":
            compare_turns(episodes, rewards, [turn_returns(episode, config) for episode in episodes], judge)
            continue
        for episode, advantage in zip(episodes, judged(rewards, judge), strict=True):
            for sample in episode:
                sample.advantages = advantage * sample.mask


def compare_turns(episodes: list[Episode], rewards: list[float], returns: list[list[float]], judge: Judge) -> None:
    for place, episode in enumerate(episodes):
        advantages = []
        for turn, own in enumerate(returns[place]):
            others = [one[turn] for at, one in enumerate(returns) if at != place and len(one) > turn]
            among = others or [reward for at, reward in enumerate(rewards) if at != place]
            advantages.append(judged([own, *among], judge)[0])
        fill_turns(episode, advantages)


def judged(rewards: list[float], judge: Judge) -> list[float]:
    """Return what `judge` says in float64, so that order cannot matter, or exactly zero where all rewards are equal."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    found: list[float] = judge(torch.tensor(rewards, dtype=torch.float64)).tolist()
    return found


def turn_returns(episode: Episode, config: AlgorithmConfig) -> list[float]:
    """Return G of every turn of an episode, over its sequences; what later ones earn is in each one's last turn."""
    rewards = step_rewards(episode, config)
    rows = zip(returns_to_go(rewards, config), episode, strict=True)
    return [value for row, sample in rows for value in row[: turn_count(sample)].tolist()]


def fill_turns(episode: Episode, advantages: list[float]) -> None:
    for sample in episode:
        own, advantages = advantages[: turn_count(sample)], advantages[turn_count(sample) :]
        sample.advantages = torch.zeros(sample.length())
        sample.advantages[sample.mask] = torch.tensor(own)[turn_numbers(sample)]


# Sums along the sampled tokens, or the turns, of many completions at once


def policy_lambdas(samples: list[Sample], config: AlgorithmConfig) -> Tensor:
    """Return the decay [B] of each completion's trace."""
    if config.length_adaptive is None:
        return torch.full((len(samples),), config.gae_lambda, dtype=torch.float64)
    lengths = torch.tensor([step_count(sample, config) for sample in samples], dtype=torch.float64)
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


def on_all(sample: Sample, row: Tensor, config: AlgorithmConfig) -> Tensor:
    """Spread a row of `on_sampled`, or of `on_turns`, over [T], with zero on tokens that were not sampled."""
    own = row[turn_numbers(sample)] if config.credit == "turn" else row
    return torch.zeros(sample.length()).masked_scatter_(sample.mask, own)


def step_rewards(samples: list[Sample], config: AlgorithmConfig) -> Tensor:
    """Return the rewards [B, L] of sampled tokens, or of turns."""
    rewards = on_sampled(samples, [sample.token_rewards for sample in samples])
    return rewards if config.credit == "token" else on_turns(samples, rewards, sum_of_turns)


def step_count(sample: Sample, config: AlgorithmConfig) -> int:
    return sample.sampled_tokens() if config.credit == "token" else turn_count(sample)


def turn_numbers(sample: Sample) -> Tensor:
    """Return the turn of each sampled token, from 0: tokens that follow each other are one turn."""
    places = sample.mask.nonzero()[:, 0]
    return (places.diff(prepend=places[:1]) > 1).cumsum(0)


def turn_count(sample: Sample) -> int:
    return int(turn_numbers(sample)[-1]) + 1


def sum_of_turns(row: Tensor, turns: Tensor) -> Tensor:
    return torch.zeros(int(turns[-1]) + 1, dtype=row.dtype).index_add_(0, turns, row[: len(turns)])


def first_of_turns(row: Tensor, turns: Tensor) -> Tensor:
    return row[: len(turns)][turns.diff(prepend=turns[:1] - 1) > 0]


def on_turns(samples: list[Sample], rows: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce rows [B, L] of sampled tokens to [B, K] of turns."""
    reduced = [reduce(row, turn_numbers(sample)) for row, sample in zip(rows, samples, strict=True)]
    return pad_sequence(reduced, batch_first=True)
