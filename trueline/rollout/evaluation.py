"""Evaluation on held-out prompts: mean@k, pass@k, maj@k, and confidence intervals."""

import math
from collections import Counter
from collections.abc import Callable
from statistics import fmean, stdev

from trueline.config.rl import EvaluationConfig
from trueline.data.types import ROW_ITEM, Prompt, Trajectory, episode_metric
from trueline.rewards.functions import final_answer
from trueline.rollout.groups import Group, Sampler, limit_shares, sample_each
from trueline.runtime.event_loop import EventLoop

IN_FLIGHT = 4096  # completions per engine, which queues the rest
PART = "reward/"
BOXED = "\\boxed{"
NORMAL_95 = 1.96  # standard errors on each side of a mean, for 95 %

Scored = list[tuple[str, float]]  # reply and reward of each completion of a prompt that has a reward, in seed order


class Evaluator:
    """Sample a group for every held-out prompt. Failed rewards are counted, never taken as zeros."""

    def __init__(
        self, sampler: Sampler, sets: dict[str, list[Prompt]], config: EvaluationConfig, loop: EventLoop
    ) -> None:
        self.sampler, self.sets, self.config, self.loop = sampler, sets, config, loop
        self.in_flight = IN_FLIGHT * len(sampler.pool.actors)

    def run(self, on_group: Callable[[Group], object] = lambda _: None) -> tuple[dict[str, float], list[Trajectory]]:
        """Return metrics, and completions in the order of sets, prompts and seeds; `on_group` gets each group."""
        prompts = [numbered for prompts in self.sets.values() for numbered in enumerate(prompts)]
        groups: dict[int, Group] = {}
        for place, group in sample_each(self.sampler, prompts, self.loop, in_flight=self.in_flight):
            groups[place] = group
            on_group(group)
        ordered = iter(groups[place] for place in range(len(prompts)))
        metrics: dict[str, float] = {}
        for name, members in self.sets.items():
            found = self.describe([next(ordered) for _ in members])
            metrics |= {f"{prefix_of(name)}{metric}": value for metric, value in found.items()}
        if rewards := [metrics[key] for name in self.sets if (key := f"{prefix_of(name)}reward") in metrics]:
            metrics["evaluation/reward"] = fmean(rewards)
        return metrics, [trajectory for place in range(len(prompts)) for trajectory in groups[place]]

    def describe(self, groups: list[Group]) -> dict[str, float]:
        everything = [one for group in groups for one in group]
        scored = [[(one.reply, one.reward) for one in group if one.reward is not None] for group in groups]
        parts = sorted({name for one in everything for name in one.metrics if name.startswith(PART)})
        part_means = mean_over_prompts(groups, parts if len(parts) > 1 else [])
        return {
            **mean_over_prompts(groups, environment_names(groups)),
            **set_metrics(scored, self.config.samples, self.config.pass_reward),
            **limit_shares(everything),
            "response_length": fmean(one.sampled_tokens() for one in everything),
            "failed_share": fmean(one.reward is None for one in everything),
            **{name.replace(PART, "part/", 1): value for name, value in part_means.items()},
        }


def prefix_of(name: str) -> str:
    """Return the prefix of a set's metrics; the only set of a run has no name."""
    return f"evaluation/{name}/" if name else "evaluation/"


def environment_names(groups: list[Group]) -> list[str]:
    names = {name for group in groups for one in group for name in one.metrics}
    return sorted(name for name in names if not name.startswith((PART, ROW_ITEM)))


def mean_over_prompts(groups: list[Group], names: list[str]) -> dict[str, float]:
    means = {}
    for name in names:
        values = [[episode_metric(one.metrics, name) for one in group] for group in groups]
        present = [[value for value in given if value is not None] for given in values]
        means[name] = fmean(map(fmean, filter(None, present)))
    return means


def set_metrics(prompts: list[Scored], samples: int, pass_reward: float) -> dict[str, float]:
    """Return means over prompts with at least one reward; pass@k also skips prompts with fewer than k rewards.

    The mean reward has half the width of its 95 % interval (normal approximation), unless it is of one prompt.
    """
    if not (rewards := [[reward for _, reward in prompt] for prompt in prompts if prompt]):
        return {}
    means = list(map(fmean, rewards))
    metrics = {"reward": fmean(means)}
    if len(means) > 1:
        metrics["reward_ci95"] = NORMAL_95 * stdev(means) / math.sqrt(len(means))
    if samples == 1:
        return metrics
    metrics[f"mean@{samples}"] = metrics["reward"]
    for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
        if right := [(sum(reward >= pass_reward for reward in own), len(own)) for own in rewards if len(own) >= k]:
            metrics[f"pass@{k}"] = fmean(pass_at_k(count, of, k) for count, of in right)
    metrics[f"maj@{samples}"] = fmean(majority_reward(prompt) for prompt in prompts if prompt)
    return metrics


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Return the probability that one of k of the n completions is right: 1 - C(n-c, k) / C(n, k).

    It is unbiased for k fresh completions (Chen et al. 2021, arXiv 2107.03374). n is `samples` and c is `right`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions is undefined: choose k from 1 to {samples}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_reward(prompt: Scored) -> float:
    """Return the reward of the most frequent final answer; of equally frequent ones, the first."""
    keys = [answer_key(reply) for reply, _ in prompt]
    votes = Counter(keys)  # in the order of first occurrence, which `max` keeps
    return prompt[keys.index(max(votes, key=votes.__getitem__))][1]


def answer_key(reply: str) -> str:
    """Return the final answer as the reward `math` sees it, to compare replies; of a closed box, its content."""
    answer, depth = final_answer(reply), 1
    begin = answer.rfind(BOXED) + len(BOXED)
    for at in range(begin, len(answer)) if BOXED in answer else ():
        depth += {"{": 1, "}": -1}.get(answer[at], 0)
        if depth == 0:
            return (answer[begin:at] or answer).strip()
    return answer.strip()
