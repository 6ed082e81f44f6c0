"""All completions of a prompt are a group: one group, or those of many prompts with a bounded number under way."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

import numpy as np

from trueline.data.types import Prompt, Trajectory
from trueline.environments.base import Environment
from trueline.monitoring.beats import WORK
from trueline.monitoring.health import CUT_BY
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.session import Ticket
from trueline.runtime.event_loop import EventLoop

Group = list[Trajectory]
Numbered = tuple[int, Prompt]  # the number is what the seeds of its completions depend on


def limit_shares(group: Group) -> dict[str, float]:
    """Return the share of completions that were cut off, of all and by each limit."""
    limits = Counter(one.limit for one in group if one.truncated and one.limit)
    by = {f"{CUT_BY}{key}": count / len(group) for key, count in limits.items()}
    return {"truncated_share": fmean(one.truncated for one in group), **by}


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Sample `size` completions of every prompt."""

    episodes: Episodes
    environment: Callable[[], Environment]
    params: SamplingParams
    size: int
    seed: int | None  # None: nobody can repeat what is sampled
    purpose: str  # names the requests
    greedy: bool = False  # one more completion of each prompt, the likeliest one, as a baseline

    async def sample(self, numbered: Numbered, place: int) -> Group:
        """Sample the group of one prompt; `place` tells it from all others that this sampler makes."""
        with WORK.doing("group", self.purpose):
            return await self._sample(numbered, place)

    async def _sample(self, numbered: Numbered, place: int) -> Group:
        number, prompt = numbered
        seeds = [completion_seed(self.seed, number, index) for index in range(self.size)]
        tickets = [Ticket(place, index, seed, self.purpose) for index, seed in enumerate(seeds)]
        runs = [self.episodes.run(self.environment(), prompt, ticket, self.params) for ticket in tickets]
        if not self.greedy:
            return list(await asyncio.gather(*runs))
        likeliest = replace(self.params, temperature=0.0, experts=False)
        extra = self.episodes.run(self.environment(), prompt, Ticket(place, 0, None, "greedy"), likeliest)
        *group, greedy = await asyncio.gather(*runs, extra)
        for trajectory in group:
            trajectory.baseline = greedy.reward
            if not greedy.outcome.scored:
                trajectory.outcome, trajectory.error, trajectory.reward = greedy.outcome, greedy.error, None
        return list(group)

    def each(self, prompts: Iterable[Numbered], loop: EventLoop, *, under_way: int) -> Iterator[tuple[int, Group]]:
        """Yield each prompt's place among `prompts` and its group, in the order in which they are done.

        At most `under_way` completions are sampled at a time, at least one prompt's. The wait for the next prompt to
        be done is bounded, not that for all of them.
        """
        waiting = enumerate(prompts)
        most = max(under_way // self.size, 1)
        running: set[asyncio.Task[tuple[int, Group]]] = set()

        async def placed(place: int, numbered: Numbered) -> tuple[int, Group]:
            return place, await self.sample(numbered, place)

        async def finished() -> list[tuple[int, Group]]:
            for place, numbered in islice(waiting, most - len(running)):
                running.add(asyncio.create_task(placed(place, numbered)))
            if not running:
                return []
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running.difference_update(done)
            return [task.result() for task in done]

        while groups := loop.run(finished(), f"sampling {self.size} answers to one of {most} prompts"):
            yield from groups


def completion_seed(seed: int | None, number: int, index: int) -> int | None:
    """Return a seed that nothing else changes: neither the order of sampling nor how often it was interrupted."""
    return None if seed is None else int(np.random.SeedSequence([seed, number, index]).generate_state(1)[0]) >> 1
