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
from trueline.runtime.actors import CONCURRENT_CALLS, Actor, ActorDeath, Given, RayActor, Result, gone

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
        self.slots = [asyncio.Semaphore(CONCURRENT_CALLS) for _ in actors]
        self.incarnations = [0 for _ in actors]  # what an earlier process of an engine tells late counts no more
        self.homes: dict[int, int] = {}  # engine of each group that has requests under way
        self.groups = Counter[int]()
        self.drawn: dict[int, Counter[str]] = {}  # tokens so far of groups that are under way, by episode
        self.lost: dict[int, str] = {}  # engines not to be asked, and why; replaced, not changed: threads read it
        self.renewed: set[int] = set()  # of these, started again, and without the newest weights
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
            name = f"{request}-again{attempt}" if attempt else request
            completion = await self._generate(place, tokens, params, name)
            if completion is not None:
                self.drawn.setdefault(group, Counter())[request.rpartition("-")[0]] += len(completion.tokens)
                return completion
        raise AssertionError("unreachable")

    async def _generate(self, place: int, tokens: list[int], params: SamplingParams, request: str) -> Completion | None:
        """Ask one engine, once it has a slot; return nothing where it is lost before it answers."""
        load = self.loads[place]
        with load.added(len(tokens) + params.max_new_tokens):
            async with self.slots[place]:
                incarnation = self.incarnations[place]
                if place in self.lost:
                    return None
                try:
                    completion = await self.actors[place].call(RolloutEngine.generate, tokens, params, request)
                except ActorDeath as death:
                    self.lose(place, str(death), incarnation)
                    return None
        load.prompts, load.cached = load.prompts + len(tokens), load.cached + completion.cached
        return completion

    def _place(self, group: int) -> int:
        """Return the engine that the group's other requests went to; if it is full or there is none, the freest one."""
        there = [place for place in range(len(self.loads)) if place not in self.lost]
        freest = min(there, key=lambda place: self.loads[place].tokens)
        home = self.homes.get(group, freest)
        crowded = self.loads[home].requests >= self.room > self.loads[freest].requests
        return freest if crowded or home in self.lost else home

    def gone(self) -> dict[int, str]:
        """Return engines that are lost and not started again, and why."""
        return {place: cause for place, cause in self.lost.items() if place not in self.renewed}

    def lose(self, place: int, cause: str, incarnation: int) -> None:
        """Remember that an engine is gone, and let whoever waits for answers know."""
        if incarnation != self.incarnations[place] or place in self.gone():
            return
        self._count(place, cause)
        self.trouble.set()
        if len(self.lost) == len(self.actors):
            self.there.clear()

    def _count(self, place: int, cause: str) -> None:
        self.lost = self.lost | {place: cause}
        self.renewed.discard(place)
        self.causes.add(re.sub(r"^\S+: |[0-9]+", "#", cause))

    async def watch(self, seconds: float) -> None:
        """Ask engines again and again for a sign of life; one that gives none for so long is ended, and lost."""
        self.tended = True
        while True:
            await asyncio.sleep(seconds / 4)
            await self._seek_all(seconds)

    async def _seek_all(self, seconds: float) -> None:
        await asyncio.gather(*(self._seek(place, seconds) for place in self._there()))

    def _there(self) -> list[int]:
        gone = self.gone()
        return [place for place in range(len(self.actors)) if place not in gone]

    async def _seek(self, place: int, seconds: float) -> None:
        actor, incarnation = self.actors[place], self.incarnations[place]
        if not isinstance(actor, RayActor):
            return
        try:
            await asyncio.wait_for(actor.alive().awaited(), seconds)
        except ActorDeath as death:
            self.lose(place, str(death), incarnation)
        except TimeoutError:
            if incarnation == self.incarnations[place]:
                self.lose(place, f"{actor.name} has given no sign of life for {seconds:.0f} s", incarnation)
                await asyncio.to_thread(actor.kill)

    async def seek(self, seconds: float) -> bool:
        """Tell whether an engine is gone. Then all have to start anew: what was sent to the others may be half."""
        await self._seek_all(seconds)
        gone = self.gone()
        if gone:
            half = f"was sent half of an update, because {'; '.join(gone.values())}"
            self.lost = {place: gone.get(place, f"{one.name} {half}") for place, one in enumerate(self.actors)}
            self.renewed.clear()
            self.there.clear()
        return bool(gone)

    async def renew(self, seconds: float) -> None:
        """Start engines that are gone again and wait for them; one that dies in that is gone as before.

        Refuse where they die again and again of one cause.
        """
        gone = self.gone()
        self.deaths.update(self.causes)
        self.causes.clear()
        ((_, times),) = self.deaths.most_common(1)
        if times >= MOST_DEATHS:
            raise EnginesDie(f"engines died {times} times in one step, at last: {next(iter(gone.values()))}")
        await asyncio.gather(*(self._start(place, seconds) for place in gone))

    async def _start(self, place: int, seconds: float) -> None:
        actor = self.actors[place]
        assert isinstance(actor, RayActor), "an engine of this very process cannot be lost"
        await asyncio.to_thread(actor.kill)
        self.incarnations[place] += 1
        actor.begin()
        try:
            await asyncio.wait_for(self._ready(actor), seconds)
        except ActorDeath as death:
            self._count(place, str(death))
        except TimeoutError:
            self._count(place, f"{actor.name} was not ready within timeout_seconds={seconds:.0f} of its start")
        else:
            self.renewed.add(place)

    async def _ready(self, actor: RayActor[RolloutEngine]) -> None:
        """Wait for an engine that was begun; one whose node is gone will never be."""
        starting = asyncio.create_task(actor.call(RolloutEngine.processes))
        try:
            while not (await asyncio.wait({starting}, timeout=NODE_SECONDS))[0]:
                if await asyncio.to_thread(gone, actor.spot.address):
                    where = f"{actor.name}: node {actor.spot.address} is gone"
                    raise EnginesDie(f"{where}; --resume goes on with what is left")
            await starting
        finally:
            starting.cancel()

    async def found(self) -> None:
        """Let requests go to engines again that have the newest weights; one that was lost since stays lost."""
        self.lost = self.gone()
        self.renewed.clear()
        if not self.lost:
            self.trouble.clear()
        if len(self.lost) < len(self.actors):
            self.there.set()

    async def sleep(self) -> None:
        """Let engines give their memory back; one that is gone has done so, and is started again before an update."""
        await asyncio.gather(*(self._sleep(place) for place in self._there()))

    async def _sleep(self, place: int) -> None:
        incarnation = self.incarnations[place]
        try:
            await self.actors[place].call(RolloutEngine.sleep)
        except ActorDeath as death:
            self.lose(place, str(death), incarnation)

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
