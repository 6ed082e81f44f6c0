"""How good the policy is on prompts it does not train on."""

from collections.abc import Callable
from statistics import fmean

from trueline.config.rl import EvaluationConfig
from trueline.data.types import Prompt, Trajectory, reported
from trueline.rollout.groups import Group, GroupSampler, limit_shares
from trueline.rollout.pass_at_k import Scored, set_metrics
from trueline.runtime.event_loop import EventLoop

UNDER_WAY = 4096  # completions of one engine, which queues what it cannot take at once
PART = "reward/"


class Evaluator:
    """Sample a group for every held-out prompt. Failed rewards are counted apart, never as zeros."""

    def __init__(
        self, sampler: GroupSampler, sets: dict[str, list[Prompt]], config: EvaluationConfig, loop: EventLoop
    ) -> None:
        self.sampler, self.sets, self.config, self.loop = sampler, sets, config, loop
        self.under_way = UNDER_WAY * len(sampler.episodes.pool.actors)

    def run(self, told: Callable[[Group], object] = lambda group: None) -> tuple[dict[str, float], list[Trajectory]]:
        """Return metrics by name, and completions in order of sets, prompts and seeds; `told` is given each group."""
        prompts = [numbered for prompts in self.sets.values() for numbered in enumerate(prompts)]
        groups: dict[int, Group] = {}
        for place, group in self.sampler.each(prompts, self.loop, under_way=self.under_way):
            groups[place] = group
            told(group)
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
        """Return the metrics of one set of prompts."""
        everything = [one for group in groups for one in group]
        return {
            **mean_over_prompts(groups, environment_names(groups)),
            **set_metrics([scored(group) for group in groups], self.config.samples, self.config.pass_reward),
            **limit_shares(everything),
            "response_length": fmean(one.sampled_tokens() for one in everything),
            "failed_share": fmean(one.reward is None for one in everything),
            **part_means(groups),
        }


def prefix_of(name: str) -> str:
    """Return what the metrics of a set begin with; the only set of a run has no name."""
    return f"evaluation/{name}/" if name else "evaluation/"


def scored(group: Group) -> Scored:
    scored = [(one.reply, one.reward) for one in group if one.reward is not None]
    return Scored([reply for reply, _ in scored], [reward for _, reward in scored])


def part_means(groups: list[Group]) -> dict[str, float]:
    """Return the mean over prompts of every reward that makes up the task reward, where there are several."""
    names = sorted({name for group in groups for one in group for name in one.metrics if name.startswith(PART)})
    means = mean_over_prompts(groups, names) if len(names) > 1 else {}
    return {name.replace(PART, "part/", 1): value for name, value in means.items()}


def environment_names(groups: list[Group]) -> list[str]:
    """Return the names of what environments report of an episode, besides rewards."""
    return sorted({name for group in groups for one in group for name in one.metrics if not name.startswith(PART)})


def mean_over_prompts(groups: list[Group], names: list[str]) -> dict[str, float]:
    means = {}
    for name in names:
        values = [[reported(one.metrics, name) for one in group] for group in groups]
        present = [[value for value in given if value is not None] for given in values]
        means[name] = fmean(map(fmean, filter(None, present)))
    return means
