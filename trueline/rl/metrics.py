"""Metrics of a step of reinforcement learning."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from trueline.algorithms.advantages import has_teacher, needs
from trueline.algorithms.importance_sampling import mismatch_metrics
from trueline.algorithms.losses import explained_variance
from trueline.config.rl import RLConfig
from trueline.data.types import ROW_ITEM, Outcome, Sample, episode_metric
from trueline.environments.multi_turn import OWN_METRICS
from trueline.rollout.groups import limit_shares
from trueline.rollout.rollouts import Dropped, Rollouts, largest_gap, part_reward
from trueline.rollout.summary import EpisodeSummary
from trueline.training.samples import SampleNumbers

Metrics = dict[str, float]
AIMS = ("reward/mean", "distill/kl_per_token")  # the first that a run reports is what training should move
EXAMPLE = 512  # tokens that engines and trainer score under the same weights
LATEST = ("learning_rate", "skipped_steps")  # the state after the last update, in place of a mean


def excerpt(sample: Sample, context: int) -> Sample:
    """Cut out what engines of this context can score: sampled tokens, behind as many of those before as have room."""
    room = min(EXAMPLE, context - 1)  # a prompt must leave an engine room for one token
    first = int(sample.mask.nonzero()[0])
    start = max(min(first - room // 2, sample.length() - room), 0)
    return Sample(sample.tokens[start : start + room], sample.mask[start : start + room])


def over_updates(updates: list[Metrics]) -> Metrics:
    """Reduce the metrics of a step's updates to means, but for what is a maximum or the latest state."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    found = {name: [metrics[name] for metrics in updates if name in metrics] for name in names}
    latest = {name: values[-1] for name, values in found.items() if name.removeprefix("critic/") in LATEST}
    largest = {name: max(values) for name, values in found.items() if name.endswith(("_max", "_gib"))}
    return {name: fmean(values) for name, values in found.items()} | largest | latest


def describe_step(
    groups: Sequence[Sequence[EpisodeSummary]], samples: Sequence[SampleNumbers], dropped: Dropped, version: int
) -> Metrics:
    """Return the metrics of rewards, response lengths, outcomes and what was left out."""
    episodes = [episode for group in groups for episode in group]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    scored = [part_reward(episode, dropped.part) for episode in episodes]
    lengths = [episode.sampled for episode in episodes]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/shaped_mean": fmean(sample.reward for sample in samples),
        **describe_spread(groups),
        "reward/failed": dropped.completions,
        "reward/left_out": dropped.left_out,
        "reward/policy_errors": sum(one.outcome is Outcome.POLICY_ERROR for one in episodes),
        "response_length/mean": fmean(lengths),
        "response_length/max": max(lengths),
        **{f"response_length/{name}": share for name, share in limit_shares(episodes).items()},
        "response_length/repeated_share": fmean(one.repeated_share for one in episodes),
        "rollout/staleness_max": max(version - sample.version for sample in samples),
        "rollout/staleness_mean": version
        - sum(one.version_sum for one in episodes) / sum(one.sampled for one in samples),
        "rollout/several_versions_share": fmean(one.oldest_version() < one.newest for one in episodes),
        "rollout/drawn_length_mean": fmean(dropped.lengths or lengths),
        "rollout/too_old": dropped.too_old,
        "rollout/too_long": dropped.too_long,
        "rollout/groups": len(groups),
        "rollout/dropped_groups": dropped.group_count(),
        "speed/tokens": sum(sample.length for sample in samples),
        **describe_uniform(dropped, scored, len(groups)),
        **({} if dropped.length_bias is None else {"rollout/length_bias": dropped.length_bias}),
        **describe_parts([*(one.metrics for one in episodes), *dropped.metrics]),
        **describe_sources(episodes),
    }


def describe_spread(groups: Sequence[Sequence[EpisodeSummary]]) -> Metrics:
    """Return the share of groups in which all rewards are equal; a group of one has no spread that it could lack."""
    uniform = [largest_gap(group) == 0 for group in groups if len(group) > 1]
    return {"reward/uniform_groups_share": fmean(uniform)} if uniform else {}


def describe_uniform(dropped: Dropped, rewards: list[float], trained: int) -> Metrics:
    """Return the shares of groups that dynamic sampling dropped: all, those with the highest reward, and the lowest."""
    if not dropped.uniform:
        return {}
    everything = [*rewards, *dropped.uniform]
    drawn = trained + dropped.group_count()
    return {
        "rollout/uniform_share": len(dropped.uniform) / drawn,
        "rollout/uniform_highest_share": sum(one == max(everything) for one in dropped.uniform) / drawn,
        "rollout/uniform_lowest_share": sum(one == min(everything) for one in dropped.uniform) / drawn,
    }


def describe_pools(rollouts: Rollouts) -> Metrics:
    """Return the share of rows in each pool of difficulty, and how often resting ones were skipped for the step."""
    pools, dropped, rows = rollouts.ledger.pools, rollouts.dropped, len(rollouts.prompts)
    if not rollouts.plan.difficulty.enabled:
        return {}
    return {
        "data/easy_share": len(pools.easy) / rows,
        "data/hard_share": len(pools.hard) / rows,
        "data/skipped_easy": dropped.skipped["skipped_easy"],
        "data/skipped_hard": dropped.skipped["skipped_hard"],
        "data/woken": dropped.woken,
    }


def describe_parts(episodes: list[Metrics]) -> Metrics:
    """Return the mean of each reward, where there are several, and of what environments report.

    Where some episodes have not reported a metric, for example before their end, their share is a metric as well.
    """
    names = {name for metrics in episodes for name in metrics if not name.startswith(ROW_ITEM)}
    if {name for name in names if name.startswith("reward/")} == {"reward/reward"}:
        names.remove("reward/reward")  # which is reward/mean
    values = {name: [episode_metric(metrics, name) for metrics in episodes] for name in sorted(names)}
    found = {name: [value for value in given if value is not None] for name, given in values.items()}
    own = {name for name in names if name.startswith(OWN_METRICS) and not name.endswith("/mean")}
    means = {re.sub("^reward/", "reward/part/", name): fmean(given) for name, given in found.items()}
    shares = {f"{name}/reported_share": len(found[name]) / len(episodes) for name in sorted(own)}
    return means | {name: share for name, share in shares.items() if share < 1}


def describe_sources(episodes: Sequence[EpisodeSummary]) -> Metrics:
    """Return the mean reward of each dataset, where there are several."""
    by_source: dict[str, list[float]] = {}
    for one in episodes:
        assert one.reward is not None
        by_source.setdefault(one.source, []).append(one.reward)
    if len(by_source) == 1:
        return {}
    named = source_names(list(by_source))
    return {f"reward/source/{named[path]}": fmean(rewards) for path, rewards in by_source.items()}


def source_names(paths: list[str]) -> dict[str, str]:
    """Name datasets by their files; where those are alike, from where their paths part on, wherever a run is."""
    stems = {path: Path(path).stem for path in paths}
    if len(set(stems.values())) == len(paths):
        return stems
    parts = [Path(path).parts for path in paths]
    shared = next((place for place, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    return {path: "/".join(some[shared:]) for path, some in zip(paths, parts, strict=True)}


def describe_models(samples: list[Sample], config: RLConfig) -> Metrics:
    """Return the engine's mismatch, the critic's explained variance and the KL to the teacher, where there are any."""
    algorithm = config.algorithm
    metrics: Metrics = {}
    if algorithm.old_logprobs == "recompute":
        metrics |= mismatch_metrics(samples)
    if "critic" in needs(algorithm):
        metrics["critic/explained_variance"] = explained_variance(samples)
    if has_teacher(algorithm):
        taught = [one for one in samples if one.taught]
        gaps = [((one.old_logprobs - one.teacher_logprobs) * one.mask).sum().item() for one in taught]
        metrics["distill/kl_per_token"] = sum(gaps) / max(sum(one.sampled_tokens() for one in taught), 1)
        metrics["distill/taught_share"] = len(taught) / len(samples)
    return metrics
