"""All engines of a run as one."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate

from trueline.data.types import Completion
from trueline.rollout.engine import RolloutEngine, SamplingParams, in_parts
from trueline.runtime.actors import Actor, Given, Result


@dataclass(slots=True)
class Load:
    """What one engine has to do, and what it has done since that was last reported."""

    requests: int = 0  # under way
    tokens: int = 0  # of these, prompts and all that may be sampled
    most: int = 0
    served: int = 0
    prompts: int = 0  # tokens that were asked about
    cached: int = 0  # of these, computed before

    @contextmanager
    def added(self, tokens: int) -> Iterator[None]:
        self.requests, self.tokens, self.served = self.requests + 1, self.tokens + tokens, self.served + 1
        self.most = max(self.most, self.tokens)
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - 1, self.tokens - tokens


class EnginePool:
    """Completions of one prompt come from one engine, which then computes the prompt once, while it has room."""

    def __init__(self, actors: Sequence[Actor[RolloutEngine]], room: int = 2**31) -> None:
        self.actors, self.room = list(actors), room  # requests that an engine works on at a time
        self.loads = [Load() for _ in actors]
        self.homes: dict[int, int] = {}  # engine of each group that has requests under way
        self.groups = Counter[int]()

    async def generate(self, tokens: list[int], params: SamplingParams, group: int, request: str) -> Completion:
        self.groups[group] += 1
        try:
            return await in_parts(partial(self._ask, group), tokens, params, request, lambda: True)
        finally:
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]
                self.homes.pop(group, None)

    async def _ask(self, group: int, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        place = self.homes[group] = self._place(group)
        load = self.loads[place]
        with load.added(len(tokens) + params.max_new_tokens):
            completion = await self.actors[place].call(RolloutEngine.generate, tokens, params, request)
        load.prompts, load.cached = load.prompts + len(tokens), load.cached + completion.cached
        return completion

    def _place(self, group: int) -> int:
        """Return the engine that the group's other requests went to; if it is full or there is none, the freest one."""
        freest = min(range(len(self.loads)), key=lambda place: self.loads[place].tokens)
        home = self.homes.get(group, freest)
        crowded = self.loads[home].requests >= self.room > self.loads[freest].requests
        return freest if crowded else home

    def metrics(self) -> dict[str, float]:
        """Return what each engine has done since the last call."""
        found: dict[str, float] = {}
        for place, load in enumerate(self.loads):
            cached = load.cached / max(load.prompts, 1)
            values = {"requests": load.served, "tokens_under_way_max": load.most, "cached_share": cached}
            found |= {f"engine/{place}/{name}": value for name, value in values.items()}
            load.served = load.prompts = load.cached = 0
            load.most = load.tokens
        return found

    async def call(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> list[Result]:
        """Make the same call on every engine, and return the results in their order."""
        return list(await asyncio.gather(*(actor.call(method, *args, **named) for actor in self.actors)))

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()
