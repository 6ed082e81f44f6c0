"""Evaluation on held-out prompts: mean@k, pass@k, maj@k, and confidence intervals."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev

from trueline.config.rl import EvaluationConfig
from trueline.data.types import Prompt, Trajectory, episode_metric
from trueline.rewards.functions import final_answer
from trueline.rollout.groups import Group, GroupSampler, limit_shares
from trueline.runtime.event_loop import EventLoop

IN_FLIGHT = 4096  # completions per engine, which queues the rest
PART = "reward/"
BOXED = "\\boxed{"
NORMAL_95 = 1.96  # standard errors on each side of a mean, for 95 %


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The completions of one prompt that have a reward, in seed order."""

    replies: list[str]
    rewards: list[float]


class Evaluator:
    """Sample a group for every held-out prompt. Failed rewards are counted, never taken as zeros."""

    def __init__(
        self, sampler: GroupSampler, sets: dict[str, list[Prompt]], config: EvaluationConfig, loop: EventLoop
    ) -> None:
        self.sampler, self.sets, self.config, self.loop = sampler, sets, config, loop
        self.in_flight = IN_FLIGHT * len(sampler.episodes.pool.actors)

    def run(self, on_group: Callable[[Group], object] = lambda _: None) -> tuple[dict[str, float], list[Trajectory]]:
        """Return metrics, and completions in the order of sets, prompts and seeds; `on_group` gets each group."""
        prompts = [numbered for prompts in self.sets.values() for numbered in enumerate(prompts)]
        groups: dict[int, Group] = {}
        for place, group in self.sampler.each(prompts, self.loop, in_flight=self.in_flight):
            groups[place] = group
            on_group(group)
        ordered = iter(groups[place] for place in range(len(prompts)))
        metrics: dict[str, float] = {}
        for name, members in self.sets.items():
            found = self.describe([next(ordered) for _ in members])
            metrics |= {f"{prefix_of(name)}{metric}": value for metric, value in found.items()}
        rewards = [metrics[key] for name in self.sets if (key := f"{prefix_of(name)}reward") in metrics]
        if rewards:
            metrics["evaluation/reward"] = fmean(rewards)
        return metrics, [trajectory for place in range(len(prompts)) for trajectory in groups[place]]

    def describe(self, groups: list[Group]) -> dict[str, float]:
        everything = [one for group in groups for one in group]
        return {
            **mean_over_prompts(groups, environment_names(groups)),
            **set_metrics([scored_prompt(group) for group in groups], self.config.samples, self.config.pass_reward),
            **limit_shares(everything),
            "response_length": fmean(one.sampled_tokens() for one in everything),
            "failed_share": fmean(one.reward is None for one in everything),
            **part_means(groups),
        }


def prefix_of(name: str) -> str:
    """Return the prefix of a set's metrics; the only set of a run has no name."""
    return f"evaluation/{name}/" if name else "evaluation/"


def scored_prompt(group: Group) -> ScoredPrompt:
    scored = [(one.reply, one.reward) for one in group if one.reward is not None]
    return ScoredPrompt([reply for reply, _ in scored], [reward for _, reward in scored])


def part_means(groups: list[Group]) -> dict[str, float]:
    """Return the mean over prompts of every part of the task reward, if there are several."""
    names = sorted({name for group in groups for one in group for name in one.metrics if name.startswith(PART)})
    means = mean_over_prompts(groups, names) if len(names) > 1 else {}
    return {name.replace(PART, "part/", 1): value for name, value in means.items()}


def environment_names(groups: list[Group]) -> list[str]:
    return sorted({name for group in groups for one in group for name in one.metrics if not name.startswith(PART)})


def mean_over_prompts(groups: list[Group], names: list[str]) -> dict[str, float]:
    means = {}
    for name in names:
        values = [[episode_metric(one.metrics, name) for one in group] for group in groups]
        present = [[value for value in given if value is not None] for given in values]
        means[name] = fmean(map(fmean, filter(None, present)))
    return means


def set_metrics(prompts: list[ScoredPrompt], samples: int, pass_reward: float) -> dict[str, float]:
    """Return means over prompts with at least one reward; pass@k also skips prompts with fewer than k rewards."""
    scored = [prompt for prompt in prompts if prompt.rewards]
    if not scored:
        return {}
    means = [fmean(prompt.rewards) for prompt in scored]
    metrics = {"reward": fmean(means)}
    half_width = confidence_half_width(means)
    if half_width is not None:
        metrics["reward_ci95"] = half_width
    if samples == 1:
        return metrics
    metrics[f"mean@{samples}"] = metrics["reward"]
    for k in pass_sizes(samples):
        passes = [
            pass_at_k(sum(reward >= pass_reward for reward in prompt.rewards), len(prompt.rewards), k)
            for prompt in scored
            if len(prompt.rewards) >= k
        ]
        if passes:
            metrics[f"pass@{k}"] = fmean(passes)
    metrics[f"maj@{samples}"] = fmean(majority_reward(prompt) for prompt in scored)
    return metrics


def pass_sizes(samples: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Return the probability that one of k of the n completions is right: 1 - C(n-c, k) / C(n, k).

    It is unbiased for k fresh completions (Chen et al. 2021, arXiv 2107.03374). n is `samples` and c is `right`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions is undefined: choose k from 1 to {samples}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_reward(prompt: ScoredPrompt) -> float:
    """Return the reward of the most frequent final answer; of equally frequent ones, the first."""
    keys = [answer_key(reply) for reply in prompt.replies]
    votes = Counter(keys)  # in the order of first occurrence, which `max` keeps
    return prompt.rewards[keys.index(max(votes, key=votes.__getitem__))]


def answer_key(reply: str) -> str:
    """Return the final answer as the reward `math` sees it, to compare replies."""
    answer = final_answer(reply)
    return (last_boxed(answer) or answer).strip()


def last_boxed(reply: str) -> str:
    """Return the content of the last box, or nothing if there is none or it is not closed."""
    start = reply.rfind(BOXED)
    if start < 0:
        return ""
    begin, depth = start + len(BOXED), 1
    for at in range(begin, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[at], 0)
        if depth == 0:
            return reply[begin:at]
    return ""


def confidence_half_width(values: list[float]) -> float | None:
    """Return half the width of the mean's 95 % interval (normal approximation), or None for one value."""
    return NORMAL_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
