"""A group is all completions of a prompt; groups of many prompts are sampled with bounded concurrency."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Any, Protocol

from trueline.data.types import Prompt, Trajectory
from trueline.environments.base import Environment
from trueline.monitoring.health import CUT_BY
from trueline.monitoring.heartbeat import WORK
from trueline.rollout.engine import SamplingParams, derive_seed
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.summary import Episode
from trueline.runtime.event_loop import EventLoop

Group = list[Trajectory]
Numbered = tuple[int, Prompt]  # the seeds of its completions depend on the number


def limit_shares(group: Sequence[Episode]) -> dict[str, float]:
    limits = Counter(one.limit for one in group if one.truncated and one.limit)
    by = {f"{CUT_BY}{key}": count / len(group) for key, count in limits.items()}
    return {"truncated_share": fmean(one.truncated for one in group), **by}


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """How the groups of one purpose are sampled."""

    params: SamplingParams
    size: int  # completions of a prompt
    seed: int | None  # None: sampling is not reproducible
    purpose: str  # prefix of request names
    greedy: bool = False  # sample one more, greedy completion of each prompt as a baseline


class Sampler(Protocol):
    """Sample groups here, or through rollout workers."""

    spec: SamplerSpec

    @property
    def size(self) -> int:
        return self.spec.size

    @property
    def purpose(self) -> str:
        return self.spec.purpose

    @property
    def pool(self) -> EnginePool: ...

    async def sample(self, numbered: Numbered, place: int) -> list[Any]:
        """Sample the group of one prompt; `place` is unique among the groups of this sampler."""

    async def partial_lengths(self, groups: Collection[int]) -> list[int]:
        """Return how many tokens of unfinished groups are sampled, where updates have interrupted them."""

    def begin_step(self) -> None:
        """Forget the deaths of processes in the step before."""


@dataclass(frozen=True, slots=True)
class GroupSampler(Sampler):
    """Sample the completions of every prompt in this process."""

    episodes: Episodes
    environment: Callable[[], Environment]
    spec: SamplerSpec

    @property
    def pool(self) -> EnginePool:
        return self.episodes.pool

    async def sample(self, numbered: Numbered, place: int) -> Group:
        (number, prompt), spec = numbered, self.spec
        seeds = [derive_seed(spec.seed, number, index) for index in range(spec.size)]
        keys = [RolloutKey(place, index, seed, spec.purpose) for index, seed in enumerate(seeds)]
        runs = [self.episodes.run(self.environment(), prompt, key, spec.params) for key in keys]
        if spec.greedy:
            params = replace(spec.params, temperature=0.0, experts=False)
            key = RolloutKey(place, 0, None, "greedy")
            runs.append(self.episodes.run(self.environment(), prompt, key, params))
        with WORK.doing("group", spec.purpose):
            group = list(await asyncio.gather(*runs))
        if not spec.greedy:
            return group
        greedy = group.pop()
        for trajectory in group:
            trajectory.baseline = greedy.reward
            if not greedy.outcome.is_scored:
                trajectory.outcome, trajectory.error, trajectory.reward = greedy.outcome, greedy.error, None
        return group

    async def partial_lengths(self, groups: Collection[int]) -> list[int]:
        parts = [part for group in groups for part in self.pool.sampled.get(group, {}).items()]
        return [tokens for key, tokens in parts if key.purpose == self.purpose]

    def begin_step(self) -> None:
        self.pool.deaths.clear()


def sample_each(
    sampler: Sampler, prompts: Iterable[Numbered], loop: EventLoop, *, in_flight: int
) -> Iterator[tuple[int, Group]]:
    """Yield the position of each prompt and its group, in the order in which they finish.

    At most `in_flight` completions are sampled at a time, but at least one group. The timeout applies to the next
    group, not to all of them.
    """
    waiting = enumerate(prompts)
    most = max(in_flight // sampler.size, 1)
    running: set[asyncio.Task[tuple[int, Group]]] = set()

    async def sample_at(place: int, numbered: Numbered) -> tuple[int, Group]:
        return place, await sampler.sample(numbered, place)

    async def next_groups() -> list[tuple[int, Group]]:
        for place, numbered in islice(waiting, most - len(running)):
            running.add(asyncio.create_task(sample_at(place, numbered)))
        if not running:
            return []
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        running.difference_update(done)
        return [task.result() for task in done]

    while groups := loop.run(next_groups(), f"sampling {sampler.size} completions of one of {most} prompts"):
        yield from groups


@dataclass(slots=True)
class Cohort:
    """The groups that begin with a policy version, and the completions that its step takes: on the long run as many."""

    open: int = 0  # groups that have not ended
    drawn: list[int] = field(default_factory=list)  # lengths of completions of those that have
    taken: list[int] = field(default_factory=list)  # lengths

    def bias(self) -> float | None:
        return fmean(self.taken) / fmean(self.drawn) - 1 if self.taken and any(self.drawn) else None


class LengthBias:
    """Whether steps take shorter completions than are drawn. They do if they take the first to end and drop the rest;
    if the rest follows, its length makes up for it. A cohort is known by its groups' last version.
    """

    def __init__(self) -> None:
        self.cohorts = defaultdict[int, Cohort](Cohort)

    def begin(self, version: int) -> None:
        self.cohorts[version].open += 1

    def end(self, version: int, lengths: list[int]) -> None:
        """Note that a group has ended, or was dropped with so much of it sampled."""
        self.cohorts[version].open -= 1
        self.cohorts[version].drawn += lengths

    def take(self, version: int, lengths: list[int]) -> None:
        self.cohorts[version].taken += lengths

    def settle(self, version: int) -> float | None:
        """Return by how much completions that steps took are longer than those drawn (-0.5: half as long).

        It is the mean of the cohorts before this one that have ended since the last call.
        """
        ended = [one for one, cohort in self.cohorts.items() if one < version and not cohort.open]
        found = [bias for one in ended if (bias := self.cohorts.pop(one).bias()) is not None]
        return fmean(found) if found else None
