"""Answers to many prompts, a bounded number of them under way."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trueline.data.types import Prompt
from trueline.environments.base import Environment
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes, Ticket
from trueline.rollout.rollouts import Group
from trueline.runtime.event_loop import EventLoop

Numbered = tuple[int, Prompt]  # the number is what the seeds of its answers depend on


@dataclass(frozen=True, slots=True)
class Answers:
    """`samples` answers to every prompt."""

    episodes: Episodes
    environment: Callable[[], Environment]
    params: SamplingParams
    loop: EventLoop
    samples: int
    purpose: str

    def to(self, prompts: Iterable[Numbered], *, seed: int | None, under_way: int) -> Iterator[tuple[int, Group]]:
        """Each prompt's place among `prompts` and its answers, in the order in which they are done.

        At most `under_way` answers are sampled at a time, at least one prompt's. The wait for the next prompt to be
        done is bounded, not that for all of them.
        """
        waiting = enumerate(prompts)
        most = max(under_way // self.samples, 1)
        running: set[asyncio.Task[tuple[int, Group]]] = set()

        async def finished() -> list[tuple[int, Group]]:
            for place, numbered in islice(waiting, most - len(running)):
                running.add(asyncio.create_task(self._sample(place, numbered, seed)))
            if not running:
                return []
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running.difference_update(done)
            return [task.result() for task in done]

        while groups := self.loop.run(finished(), f"sampling {self.samples} answers to one of {most} prompts"):
            yield from groups

    async def _sample(self, place: int, numbered: Numbered, seed: int | None) -> tuple[int, Group]:
        number, prompt = numbered
        tickets = [
            Ticket(place, index, seed if seed is None else answer_seed(seed, number, index), self.purpose)
            for index in range(self.samples)
        ]
        runs = [self.episodes.run(self.environment(), prompt, ticket, self.params) for ticket in tickets]
        return place, list(await asyncio.gather(*runs))


def answer_seed(seed: int, number: int, index: int) -> int:
    """Depends on nothing else: neither on the order of sampling nor on how often it was interrupted."""
    return int(np.random.SeedSequence([seed, number, index]).generate_state(1)[0]) >> 1
