"""All engines of a run as one."""

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate

from trueline.data.types import Completion
from trueline.rollout.engine import RolloutEngine, SamplingParams, in_parts
from trueline.rollout.failures import EngineLost, EnginesDie
from trueline.runtime.actors import Actor, ActorDeath, ActorFailure, Given, RayActor, Result, gone

SILENCE = 10  # a part of timeout_seconds after which an engine that gives no sign of life is started anew
MOST_DEATHS = 3  # within one step, by one cause
NODE_SECONDS = 2.0  # between two looks at the node of an engine that starts


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
        self.drawn: dict[int, Counter[str]] = {}  # tokens so far of groups that are under way, by episode
        self.lost: dict[int, str] = {}  # engines that are gone, and why
        self.trouble = asyncio.Event()  # an engine was lost
        self.there = asyncio.Event()  # an engine can be asked
        self.there.set()
        self.causes: set[str] = set()  # of what was lost since engines were last started again
        self.deaths = Counter[str]()  # how often by each cause, since the last step
        self.tended = False  # lost engines come back

    async def generate(self, tokens: list[int], params: SamplingParams, group: int, request: str) -> Completion:
        with self.kept(group):
            return await in_parts(partial(self._ask, group), tokens, params, request, lambda: True)

    @contextmanager
    def kept(self, group: int) -> Iterator[None]:
        """Let the group's requests go to one engine as long as this lasts, which has computed what came before."""
        self.groups[group] += 1
        try:
            yield
        finally:
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]
                self.homes.pop(group, None)
                self.drawn.pop(group, None)

    async def _ask(self, group: int, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        """Ask an engine; what one that dies had to do, another does."""
        for attempt in itertools.count():
            if not self.there.is_set() and not (self.tended and waits(request)):
                raise EngineLost("; ".join(self.lost.values()))
            await self.there.wait()
            place = self.homes[group] = self._place(group)
            load, name = self.loads[place], f"{request}-again{attempt}" if attempt else request
            try:
                with load.added(len(tokens) + params.max_new_tokens):
                    completion = await self.actors[place].call(RolloutEngine.generate, tokens, params, name)
            except ActorDeath as death:
                self.lose(place, str(death))
                continue
            load.prompts, load.cached = load.prompts + len(tokens), load.cached + completion.cached
            self.drawn.setdefault(group, Counter())[request.rpartition("-")[0]] += len(completion.tokens)
            return completion
        raise AssertionError("unreachable")

    def _place(self, group: int) -> int:
        """Return the engine that the group's other requests went to; if it is full or there is none, the freest one."""
        there = [place for place in range(len(self.loads)) if place not in self.lost]
        freest = min(there, key=lambda place: self.loads[place].tokens)
        home = self.homes.get(group, freest)
        crowded = self.loads[home].requests >= self.room > self.loads[freest].requests
        return freest if crowded or home in self.lost else home

    def lose(self, place: int, cause: str) -> None:
        """Remember that an engine is gone, and let whoever waits for answers know."""
        if place in self.lost:
            return
        self._count(place, cause)
        self.trouble.set()
        if len(self.lost) == len(self.actors):
            self.there.clear()

    def _count(self, place: int, cause: str) -> None:
        self.lost[place] = cause
        self.causes.add(re.sub(r"^\S+: |[0-9]+", "#", cause))

    async def watch(self, seconds: float) -> None:
        """Ask engines again and again for a sign of life; one that gives none for so long is ended, and lost."""
        self.tended = True
        while True:
            await asyncio.sleep(seconds / 4)
            await self._seek_all(seconds)

    async def _seek_all(self, seconds: float) -> None:
        there = [place for place in range(len(self.actors)) if place not in self.lost]
        await asyncio.gather(*(self._seek(place, seconds) for place in there))

    async def _seek(self, place: int, seconds: float) -> None:
        actor = self.actors[place]
        if not isinstance(actor, RayActor):
            return
        try:
            await asyncio.wait_for(actor.alive().awaited(), seconds)
        except ActorDeath as death:
            self.lose(place, str(death))
        except TimeoutError:
            self.lose(place, f"{actor.name} has given no sign of life for {seconds:.0f} s")
            await asyncio.to_thread(actor.kill)

    async def seek(self, seconds: float) -> bool:
        """Tell whether an engine is gone. Then all have to start anew: what was sent to the others may be half."""
        await self._seek_all(seconds)
        if self.lost:
            half = f"was sent half of an update, because {'; '.join(self.lost.values())}"
            self.lost = {place: self.lost.get(place, f"{one.name} {half}") for place, one in enumerate(self.actors)}
            self.there.clear()
        return bool(self.lost)

    async def renew(self, seconds: float) -> None:
        """Start lost engines again and wait for them; refuse where they die again and again of one cause."""
        self.deaths.update(self.causes)
        self.causes.clear()
        ((_, times),) = self.deaths.most_common(1)
        if times >= MOST_DEATHS:
            raise EnginesDie(f"engines died {times} times in one step, at last: {next(iter(self.lost.values()))}")
        for place in self.lost:
            actor = self.actors[place]
            assert isinstance(actor, RayActor), "an engine of this very process cannot be lost"
            await asyncio.to_thread(actor.kill)
            actor.begin()
        for place in self.lost:
            name = self.actors[place].name
            try:
                await asyncio.wait_for(self._ready(place), seconds)
            except ActorDeath as death:
                self._count(place, str(death))
                raise
            except TimeoutError:
                self._count(place, f"{name} was not ready within timeout_seconds={seconds:.0f} of its start")
                raise ActorFailure(self.lost[place]) from None

    async def _ready(self, place: int) -> None:
        """Wait for an engine that was begun; one whose node is gone will never be."""
        actor = self.actors[place]
        starting = asyncio.create_task(actor.call(RolloutEngine.processes))
        while not (await asyncio.wait({starting}, timeout=NODE_SECONDS))[0]:
            if isinstance(actor, RayActor) and await asyncio.to_thread(gone, actor.spot.address):
                starting.cancel()
                raise EnginesDie(f"{actor.name}: node {actor.spot.address} is gone; --resume goes on with what is left")
        await starting

    def found(self) -> None:
        """Let requests go to all engines again, once they have the newest weights."""
        self.lost.clear()
        self.trouble.clear()
        self.there.set()

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


def waits(request: str) -> bool:
    """Tell whether a request may wait for engines to come back: the controller, which starts them, waits for others."""
    return not request.startswith("evaluate")
