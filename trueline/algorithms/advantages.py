"""Advantage estimators: each fills `advantages` of a step's samples, zero on tokens that were not sampled."""

from collections.abc import Callable

import torch
from torch import Tensor

from trueline.algorithms.entries import (
    AlgorithmFailure,
    Entry,
    check_takes,
    entry,
    import_entry,
    is_own,
    lookup,
    table_of,
)
from trueline.algorithms.episodes import (
    Episode,
    by_role,
    episodes_of,
    groups_of,
    on_all,
    on_sampled,
    on_turns,
    over_episodes,
    step_rewards,
    turn_count,
    turn_numbers,
)
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.data.types import Sample, is_filled

Estimator = Entry[[list[Sample], AlgorithmConfig], None]  # its words describe the baseline
GroupBaseline = Callable[[Tensor], Tensor]  # rewards [n] of a group -> advantages [n]

# Estimators over single tokens


@entry("critic's value", needs=("critic",), reads=("gamma", "gae_lambda", "length_adaptive", "credit"))
def gae(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Fill in GAE (arXiv:1506.02438, eq. 16) or VAPO's (arXiv:2504.05118, section 4), and the critic's `returns`."""
    rewards = step_rewards(samples, config)
    values = on_sampled(samples, [sample.values for sample in samples])
    if config.credit == "turn":
        # The value of a turn is that before its first token.
        values = on_turns(samples, values, lambda row, turns: row[: len(turns)][turns.diff(prepend=turns[:1] - 1) > 0])
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


@entry("none; teacher log-prob minus policy log-prob of each token", needs=("teacher", "old_logprobs"))
def teacher(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Score a sampled token by how much likelier the teacher finds it: on-policy distillation (arXiv:2306.13649)."""
    for sample in samples:
        sample.advantages = (sample.teacher_logprobs - sample.old_logprobs) * sample.mask


@entry("none; only algorithm.distillation teaches", needs=("teacher",))
def none(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Fill in zeros: the divergence from a teacher is the whole loss."""
    for sample in samples:
        sample.advantages = torch.zeros(sample.length())


# Estimators that compare episodes, or their turns


@entry("group mean, divided by the group's deviation", needs=("groups",), reads=("credit",))
def group_norm(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean and divide by its sample standard deviation: GRPO (arXiv:2402.03300, eq. 3)."""
    compare(groups_of(samples), config, standard_scores)


@entry("group mean of each reward, divided by its deviation in the group; these are added up", needs=("groups",))
def gdpo(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Normalize each reward within the group, and add them up by weight: GDPO (arXiv:2601.05242).

    What else a reward holds (of turns, shaping, KL) is one more part, of weight 1.
    """
    for episodes in groups_of(samples):
        scores = torch.zeros(len(episodes), dtype=torch.float64)
        for part in zip(*(weighted_parts(episode[0]) for episode in episodes), strict=True):
            found = estimate_group([value for _, value in part], standard_scores)
            scores += part[0][0] * torch.tensor(found, dtype=torch.float64)
        for episode, score in zip(episodes, scores.tolist(), strict=True):
            for sample in episode:
                sample.advantages = score * sample.mask


@entry("group mean", needs=("groups",), reads=("credit",))
def group_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean from the reward: Dr. GRPO (arXiv:2503.20783, section 3.2)."""
    compare(groups_of(samples), config, lambda rewards: rewards - rewards.mean())


@entry("group mean, divided by that mean", needs=("groups", "nonnegative"), reads=("credit",))
def maxrl(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the group's mean and divide by it: MaxRL (arXiv:2602.02710), which follows the log of the success rate.

    Without a success, as with successes alone, advantages are 0.
    """
    compare(groups_of(samples), config, over_mean)


@entry(
    "group mean of the returns from the same token on, weighted by how open the policy's choices were up to it",
    needs=("groups", "squares"),
    reads=("gamma",),
)
def otb(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the baseline that varies least at each token: OTB (arXiv:2602.07078).

    Where only one completion is left, nothing is subtracted: its own return would be no baseline.
    """
    rewards = on_sampled(samples, [sample.token_rewards for sample in samples])
    for sample, row in zip(samples, returns_to_go(rewards, config), strict=True):
        sample.advantages = torch.zeros(sample.length()).masked_scatter_(sample.mask, row)
    for episodes in groups_of(samples):
        returns, norms, present = (
            over_episodes(episodes, read) for read in (lambda one: one.advantages, score_norms, lambda one: one.mask)
        )
        weights, highest = norms.cumsum(1) * present, returns.masked_fill(present == 0, -torch.inf).amax(0)
        # As a distance from the highest return, it is exact where all are equal.
        below = (weights * (highest - returns)).sum(0) / weights.sum(0).clamp(min=1e-12)
        baseline = (highest - below) * (present.sum(0) > 1)
        for episode, row in zip(episodes, (returns - baseline).float(), strict=True):
            parts = row[: sum(map(Sample.sampled_tokens, episode))].split([one.sampled_tokens() for one in episode])
            for sample, part in zip(episode, parts, strict=True):
                sample.advantages = torch.zeros(sample.length()).masked_scatter_(sample.mask, part)


@entry("mean of the group's other completions", needs=("groups",), reads=("credit",))
def leave_one_out(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the mean of the others in the group from the reward: RLOO (arXiv:2402.14740, eq. 8)."""
    compare(groups_of(samples), config, lambda rewards: rewards - (rewards.sum() - rewards) / (len(rewards) - 1))


@entry("mean of the step's completions", needs=("batch",), reads=("credit",))
def batch_mean(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the batch's mean from the reward: REINFORCE with a baseline (Williams, 1992), for single completions."""
    compare([episodes_of(own) for own in by_role(samples)], config, lambda rewards: rewards - rewards.mean())


@entry("moving average of the role's rewards in the steps before", reads=("baseline_decay",))
def moving_average(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the moving average of the role's rewards: role-conditioned advantages, as SPIRAL (arXiv:2506.24119).

    Here it is the average before the step, so that no completion is part of its own baseline.
    """
    greedy_baseline.function(samples, config)  # the controller has put either of them into `baseline`


@entry("reward of the greedy completion", needs=("greedy",))
def greedy_baseline(samples: list[Sample], config: AlgorithmConfig) -> None:
    """Subtract the reward of the greedy completion of the same prompt: ReMax (arXiv:2310.10505, section 3)."""
    for sample in samples:
        sample.advantages = (sample.reward - sample.baseline) * sample.mask


ADVANTAGES: dict[str, Estimator] = table_of(
    gae,
    reinforce,
    group_norm,
    gdpo,
    group_mean,
    maxrl,
    otb,
    leave_one_out,
    greedy_baseline,
    batch_mean,
    moving_average,
    teacher,
    none,
)


def assign_advantages(samples: list[Sample], config: AlgorithmConfig) -> None:
    estimator = lookup(ADVANTAGES, config.advantage, "algorithm.advantage")
    estimator(samples, config)
    if estimator.key:
        check_advantages(samples, estimator.key)
    if "critic" in estimator.needs and not is_filled(samples[0], "returns"):
        raise ConfigError(f"algorithm.advantage={config.advantage} needs a critic but sets no targets: fill `returns`")
    if config.whiten:
        for own in by_role(samples):
            whiten(own)
    if config.needs_entropy():
        keep_uncertain(samples, config.top_entropy_share)


def check_advantages(samples: list[Sample], key: str) -> None:
    """Refuse results of a user's function that are not a finite number for every token."""
    for number, sample in enumerate(samples):
        if not is_filled(sample, "advantages"):
            raise AlgorithmFailure(f"{key} gave sample {number} no advantages: set sample.advantages of every sample")
        found, wanted = sample.advantages, sample.mask.shape
        if not isinstance(found, torch.Tensor) or found.shape != wanted:
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise AlgorithmFailure(
                f"{key} gave sample {number} advantages of shape {shape}, not one number for each of its tokens, "
                f"{list(wanted)}: multiply by sample.mask"
            )
        if not found.isfinite().all():
            raise AlgorithmFailure(
                f"{key} gave sample {number} (reward {sample.reward:g}) advantages that are not finite: avoid "
                "divisions by zero, such as by the deviation of equal rewards"
            )


def whiten(samples: list[Sample]) -> None:
    """Normalize advantages to mean 0 and variance 1 over the tokens in the loss (arXiv:2501.03262)."""
    if not (in_loss := [sample.advantages.masked_select(sample.mask) for sample in samples if not sample.filtered]):
        return
    tokens = torch.cat(in_loss).double()
    mean, deviation = tokens.mean().item(), (tokens.var(correction=0) + 1e-8).sqrt().item()
    for sample in samples:
        sample.advantages = (sample.advantages - mean) / deviation * sample.mask


def keep_uncertain(samples: list[Sample], share: float) -> None:
    """Set advantages to 0 but for this share of the tokens in the loss: those of highest entropy (arXiv:2506.01939)."""
    if not (in_loss := [sample.entropy.masked_select(sample.mask) for sample in samples if not sample.filtered]):
        return
    entropies = torch.cat(in_loss)
    least = entropies.topk(max(1, round(share * len(entropies)))).values[-1]
    for sample in samples:
        sample.advantages = sample.advantages * (sample.entropy >= least)


def compare(groups: list[list[Episode]], config: AlgorithmConfig, estimate: GroupBaseline) -> None:
    """Put the estimate of an episode's reward, among those of its group, on all its sampled tokens.

    With `credit=turn`, compare the return from a turn on with those of the same turn; a turn that no other episode has
    is compared with their whole rewards.
    """
    for episodes in groups:
        rewards = [episode[0].reward for episode in episodes]
        if config.credit == "turn":
            compare_turns(episodes, rewards, config, estimate)
            continue
        for episode, advantage in zip(episodes, estimate_group(rewards, estimate), strict=True):
            for sample in episode:
                sample.advantages = advantage * sample.mask


def compare_turns(
    episodes: list[Episode], rewards: list[float], config: AlgorithmConfig, estimate: GroupBaseline
) -> None:
    returns = [turn_returns(episode, config) for episode in episodes]
    for place, episode in enumerate(episodes):
        advantages = []
        for turn, own in enumerate(returns[place]):
            others = [one[turn] for at, one in enumerate(returns) if at != place and len(one) > turn]
            among = others or [reward for at, reward in enumerate(rewards) if at != place]
            advantages.append(estimate_group([own, *among], estimate)[0])
        for sample in episode:
            own_turns, advantages = advantages[: turn_count(sample)], advantages[turn_count(sample) :]
            sample.advantages = torch.zeros(sample.length())
            sample.advantages[sample.mask] = torch.tensor(own_turns)[turn_numbers(sample)]


def estimate_group(rewards: list[float], estimate: GroupBaseline) -> list[float]:
    """Return advantages, computed in float64 so that order cannot matter; exactly zero where all rewards are equal."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    found: list[float] = estimate(torch.tensor(rewards, dtype=torch.float64)).tolist()
    return found


def weighted_parts(sample: Sample) -> list[tuple[float, float]]:
    """Return weight and value of each reward of a sample, and of the rest of its reward."""
    return [*sample.parts, (1.0, sample.reward - sum((weight * value for weight, value in sample.parts), 0.0))]


def standard_scores(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def over_mean(rewards: Tensor) -> Tensor:
    if (least := rewards.min().item()) < 0:
        raise ConfigError(
            f"algorithm.advantage=maxrl divides by mean rewards, and a completion has {least:g}: use rewards from 0 "
            "on, or another advantage"
        )
    return rewards / rewards.mean() - 1


def score_norms(sample: Sample) -> Tensor:
    """Return the squared norm of each token's score, d log p / d logits = onehot - p."""
    return (1 - 2 * sample.old_logprobs.exp() + sample.squares).clamp(min=0)


def turn_returns(episode: Episode, config: AlgorithmConfig) -> list[float]:
    """Return the return of every turn of an episode; rewards of later sequences are in each one's last turn."""
    rows = zip(returns_to_go(step_rewards(episode, config), config), episode, strict=True)
    return [value for row, sample in rows for value in row[: turn_count(sample)].tolist()]


# Sums over the sampled tokens, or the turns, of many completions at once


def policy_lambdas(samples: list[Sample], config: AlgorithmConfig) -> Tensor:
    """Return each completion's lambda, [B]."""
    if config.length_adaptive is None:
        return torch.full((len(samples),), config.gae_lambda, dtype=torch.float64)
    count = Sample.sampled_tokens if config.credit == "token" else turn_count
    lengths = torch.tensor([count(sample) for sample in samples], dtype=torch.float64)
    return (1 - 1 / (config.length_adaptive * lengths)).clamp(0, 1)


def returns_to_go(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1}, [B, L], of rewards [B, L]."""
    return discounted_sums(rewards, torch.full((len(rewards),), config.gamma, dtype=torch.float64))


def discounted_sums(values: Tensor, decay: Tensor) -> Tensor:
    """Compute x_t = values_t + decay * x_{t+1} along the rows of [B, L], with a decay [B].

    A sum over n tokens and the one that begins n later make a sum over 2n: log2(L) rounds instead of L steps.
    """
    sums, reach = values.clone(), 1
    while reach < values.shape[1]:
        sums[:, :-reach] += (decay[:, None] ** reach).to(values.dtype) * sums[:, reach:]
        reach *= 2
    return sums


# What the chosen advantage and loss need, and what they cannot work with


def needs(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return what the advantage needs: other models, groups, greedy completions."""
    return lookup(ADVANTAGES, config.advantage, "algorithm.advantage").needs


def reads_reward(config: AlgorithmConfig) -> bool:
    """Tell whether rewards are used: a teacher replaces them unless the advantage needs both."""
    return "teacher" not in needs(config) or "reward" in needs(config)


def has_teacher(config: AlgorithmConfig) -> bool:
    return "teacher" in needs(config) or config.distillation.coefficient > 0


def fresh_logprobs(config: AlgorithmConfig, updates: int, dropout: float) -> bool:
    """Tell whether the update itself computes the old log-probs: completions are used once, and only there."""
    in_reward = config.kl.place == "reward" and config.kl.coefficient > 0
    read = in_reward or "old_logprobs" in needs(config) or is_own(config.advantage)  # user functions may read anything
    read = read or config.needs_entropy() or "squares" in needs(config)
    return config.old_logprobs == "recompute" and updates == 1 and not dropout and not read


def needs_batch(config: AlgorithmConfig) -> str:
    """Return the key for which all completions of a step must be there before one is trained, or nothing."""
    if config.whiten:
        return "algorithm.whiten=true"
    if config.needs_entropy():
        return f"algorithm.top_entropy_share={config.top_entropy_share:g}"
    if is_own(config.advantage) or {"batch", "critic"} & {*needs(config)}:
        return f"algorithm.advantage={config.advantage}"
    means = {"positive_nll": config.positive_nll, "observation_loss": config.observation_loss}  # of their own tokens
    return next((f"algorithm.{name}={weight:g}" for name, weight in means.items() if weight), "")


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
    shaped = shaping.overlong_factor > 0 or shaping.truncated != "keep" or shaping.cosine_correct is not None
    if "groups" in needed and config.group_size < 2:
        raise ConfigError(
            f"algorithm.advantage={name} compares completions of one prompt: set algorithm.group_size to 2 or more "
            f"(got {config.group_size})",
            key="algorithm.group_size",
        )
    if "greedy" in needed and shaped:
        raise ConfigError(
            "algorithm.shaping does not change the greedy completion's reward: set overlong_factor=0, truncated=keep "
            f"and cosine_correct=null, or another advantage than {name}"
        )
    if name == none.function.__name__ and not config.distillation.coefficient:
        raise ConfigError("algorithm.advantage=none: nothing would be learnt; set algorithm.distillation.coefficient=1")
    if not reads_reward(config) and (config.kl.place == "reward" or config.dynamic_sampling.enabled or shaped):
        raise ConfigError(
            f"algorithm.advantage={name} uses no reward: set kl.place=loss and dynamic_sampling.enabled=false, and "
            "remove shaping"
        )
    in_reward = config.kl.place == "reward" and config.kl.coefficient > 0
    if "nonnegative" in needed and (in_reward or shaping.overlong_factor > 0):
        raise ConfigError(
            f"algorithm.advantage={name} needs rewards from 0 on: set kl.place=loss and shaping.overlong_factor=0"
        )
    if "squares" in needed and config.old_logprobs == "rollout":
        raise ConfigError(
            f"algorithm.advantage={name} needs the trainer's distributions, which engines do not report: set "
            "algorithm.old_logprobs=recompute"
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
