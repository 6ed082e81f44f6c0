"""All engines of a run as one."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from trueline.data.pictures import Shown
from trueline.data.types import Completion
from trueline.rollout.engine import (
    Found,
    NextTurn,
    Request,
    RolloutEngine,
    SamplingParams,
    derive_seed,
    sample_in_parts,
)
from trueline.rollout.failures import EngineCrashLoop, EngineLost
from trueline.runtime.actors import (
    CONCURRENT_CALLS,
    Actor,
    ActorDeath,
    ActorFailure,
    AsyncMethod,
    Given,
    LocalActor,
    RayActor,
    Result,
    Stored,
)

SILENCE = 10  # an engine without a heartbeat for this part of timeout_seconds is restarted
MOST_DEATHS, DEATH_SHARE = 3, 0.02  # of one cause, within one step; of many engines, so many may die by chance
NODE_SECONDS = 2.0  # between two checks of the node of a starting engine
JOINING = 3  # turns of the event loop in which completions of a group join one call
EVALUATE = "evaluate"  # the purpose of requests that the controller itself waits for


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """The episode of a request: its group, its index there, and its own seed."""

    group: int
    index: int
    seed: int | None = None
    purpose: str = "train"

    def request(self, turn: int) -> str:
        return f"{self.purpose}-{self.group}-{self.index}-{turn}"

    def turn_seed(self, turn: int) -> int | None:
        return derive_seed(self.seed, turn, 0) if turn else self.seed


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """Where a turn continues: the number of its sequence in the episode, and how many tokens that has so far."""

    number: int
    known: int
    added: Shown | None = None  # the pictures of the tokens behind these


Sequenced = tuple[SequencePlace | None, Shown | None]  # where a request continues, and the pictures of its sequence


@dataclass(slots=True, eq=False)
class GroupCall:
    """One call for several completions of a prompt."""

    tokens: list[int]
    shown: Shown | None = None  # the pictures of all of them
    requests: list[Request] = field(default_factory=list)
    waiting: list[asyncio.Future[Completion]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def join(self, request: Request) -> Completion:
        """Wait for a completion; the last one that gives up ends the call."""
        mine: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.requests.append(request)
        self.waiting.append(mine)
        try:
            return await mine
        finally:
            if self.task is not None and not self.is_waiting():
                self.task.cancel()

    def is_waiting(self) -> bool:
        return any(not one.done() for one in self.waiting)

    def deliver(self, found: Found) -> None:
        for at, completion in found.items():
            if not self.waiting[at].done():
                self.waiting[at].set_result(completion)

    def end(self, task: asyncio.Task[None]) -> None:
        """Pass an error that ended the call to all that wait."""
        error = None if task.cancelled() else task.exception()
        for one in self.waiting:
            if error is not None and not one.done():
                one.set_exception(error)


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """The loss of an engine, as another process has noticed it."""

    place: int
    incarnation: int
    message: str
    cause: str


@dataclass(slots=True)
class Load:
    requests: int = 0  # in flight
    tokens: int = 0  # of these: prompts, and all tokens that may be sampled
    peak: int = 0
    served: int = 0
    prompts: int = 0  # tokens of prompts
    cached: int = 0  # of these, taken from the prefix cache

    @contextmanager
    def add_request(self, tokens: int) -> Iterator[None]:
        self.requests, self.tokens, self.served = self.requests + 1, self.tokens + tokens, self.served + 1
        self.peak = max(self.peak, self.tokens)
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - 1, self.tokens - tokens


class EnginePool:
    """Completions of one prompt come from one engine while it has room, so the prompt is computed once."""

    def __init__(
        self, actors: Sequence[Actor[RolloutEngine]], room: int = 2**31, *, takes_groups: bool = False
    ) -> None:
        self.actors, self.room = list(actors), room  # requests that an engine processes at a time
        self.takes_groups = takes_groups  # completions of one prompt are one call, and a turn sends its new tokens
        self.group_calls: dict[tuple[int, int], GroupCall] = {}  # by engine and group: others can still join them
        self.holders: dict[RolloutKey, dict[int, tuple[int, int]]] = {}  # engine of each sequence of an episode
        self.shown: dict[int, tuple[Shown, Stored[Shown]]] = {}  # pictures of groups, sent by reference to each turn
        self.loads = [Load() for _ in actors]
        self.slots = [asyncio.Semaphore(CONCURRENT_CALLS) for _ in actors]
        self.incarnations = [0 for _ in actors]  # late failures of an earlier process are ignored
        self.group_engines: dict[int, int] = {}  # of groups with requests in flight
        self.groups = Counter[int]()
        self.sampled: dict[int, Counter[RolloutKey]] = {}  # tokens so far of in-flight groups, by episode
        self.lost: dict[int, str] = {}  # unusable engines, and why; replaced, not changed: other threads read it
        self.restarted: set[int] = set()  # of these, restarted, but without the newest weights
        self.engine_lost = asyncio.Event()
        self.available = asyncio.Event()  # at least one engine is usable
        self.available.set()
        self.causes: set[str] = set()  # of losses since the last restart
        self.deaths = Counter[str]()  # by cause, since the last step
        self.is_supervised = False  # lost engines are restarted
        self.news: asyncio.Queue[EngineLoss] = asyncio.Queue()  # of losses, for the process that restarts engines
        self.on_readmit: list[Callable[[], Awaitable[object]]] = []  # tell other processes of restarted engines

    async def generate(
        self,
        tokens: list[int],
        params: SamplingParams,
        key: RolloutKey,
        turn: int = 0,
        place: SequencePlace | None = None,
        shown: Shown | None = None,
    ) -> Completion:
        """Sample a completion; with its `place`, only what is new is sent to the engine that has the rest."""
        sample = partial(self._sample, key, (place, shown))
        with self.keep_group(key.group):
            return await sample_in_parts(sample, tokens, params, key.request(turn), lambda: True)

    @contextmanager
    def keep_group(self, group: int) -> Iterator[None]:
        """Send all requests of the group to one engine, which has cached its earlier tokens."""
        self.groups[group] += 1
        try:
            yield
        finally:
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]
                self.group_engines.pop(group, None)
                self.shown.pop(group, None)
                for key in self.sampled.pop(group, Counter()):
                    self.holders.pop(key, None)

    async def _sample(
        self, key: RolloutKey, sequence: Sequenced, tokens: list[int], params: SamplingParams, request: str
    ) -> Completion:
        """Send a request to an engine; if the engine dies, send it to another."""
        completion: Completion | None = None
        attempt = 0
        while completion is None:
            # The controller restarts engines, so requests that it waits for cannot wait for engines.
            if not self.available.is_set() and not (self.is_supervised and key.purpose != EVALUATE):
                raise EngineLost("; ".join(self.lost.values()))
            await self.available.wait()
            place = self.group_engines[key.group] = self._choose_engine(key.group)
            name, attempt = f"{request}-again{attempt}" if attempt else request, attempt + 1
            load = self.loads[place]
            with load.add_request(len(tokens) + params.max_new_tokens):
                async with self.slots[place]:
                    if place not in self.lost:
                        call = self._request(place, key, sequence, tokens, (name, params))
                        completion = await self._unless_lost(place, call)
        load.prompts, load.cached = load.prompts + len(tokens), load.cached + completion.cached
        self.sampled.setdefault(key.group, Counter())[key] += len(completion.tokens)
        return completion

    async def _request(
        self, place: int, key: RolloutKey, where: Sequenced, tokens: list[int], request: Request
    ) -> Completion:
        (name, params), (sequence, shown) = request, where
        if not self.takes_groups or params.structure is not None:
            return await self.actors[place].call(RolloutEngine.generate, tokens, params, name, shown)
        if sequence is None:
            return await self._join_group((place, key.group), tokens, shown, request)
        holders, here = self.holders.setdefault(key, {}), (place, self.incarnations[place])
        known = sequence.known if holders.get(sequence.number) == here else 0
        completion = None
        for count in dict.fromkeys((known, 0)):  # 0: the engine has forgotten the sequence, or never had it
            if completion is None:
                sent = (None, sequence.added) if count else (self._by_reference(key.group, shown), None)
                prompt = NextTurn(f"{key.request(0)}/{sequence.number}", count, tokens[count:], *sent)
                completion = await self.actors[place].call(RolloutEngine.generate_turn, prompt, params, name)
        assert completion is not None, "every engine knows no tokens of a sequence"
        holders[sequence.number] = here
        return completion

    def _by_reference(self, group: int, shown: Shown | None) -> Stored[Shown] | None:
        """Put the pictures of a group into the object store once; every episode sends only where they lie."""
        if shown is None:
            return None
        if group not in self.shown or self.shown[group][0] != shown:
            self.shown[group] = shown, Stored(shown)
            if not isinstance(self.actors[0], LocalActor):
                self.shown[group][1].share()
        return self.shown[group][1]

    async def _join_group(
        self, where: tuple[int, int], tokens: list[int], shown: Shown | None, request: Request
    ) -> Completion:
        """Join the call of the group's other completions if that is not sent yet, and has the same prompt."""
        call = self.group_calls.get(where)
        if call is None or (call.tokens, call.shown) != (tokens, shown):
            call = self.group_calls[where] = GroupCall(tokens, shown)
            call.task = asyncio.create_task(self._send_group(where, call))
            call.task.add_done_callback(call.end)
        return await call.join(request)

    async def _send_group(self, where: tuple[int, int], call: "GroupCall") -> None:
        """Send a group to an engine once its completions have joined, and hand out what it returns."""
        for _ in range(JOINING):
            await asyncio.sleep(0)
        if self.group_calls.get(where) is call:
            del self.group_calls[where]
        actor, name = self.actors[where[0]], call.requests[0][0]
        try:
            call.deliver(await actor.call(RolloutEngine.generate_group, name, call.tokens, call.requests, call.shown))
            while call.is_waiting():
                call.deliver(await actor.call(RolloutEngine.collect_group, name))
        except asyncio.CancelledError:
            with suppress(ActorFailure):
                await actor.call(RolloutEngine.drop_group, name)

    async def _unless_lost(self, place: int, call: Awaitable[Result]) -> Result | None:
        """Return the result of a call to an engine, or None if the engine is lost."""
        incarnation = self.incarnations[place]
        try:
            return await call
        except ActorDeath as death:
            self.mark_lost(place, death, incarnation)
            return None

    def _choose_engine(self, group: int) -> int:
        """Return the engine of the group's other requests, or the least loaded one if that is full or lost."""
        usable = [place for place in range(len(self.loads)) if place not in self.lost]
        freest = min(usable, key=lambda place: self.loads[place].tokens)
        known = self.group_engines.get(group, freest)
        full = self.loads[known].requests >= self.room > self.loads[freest].requests
        return freest if full or known in self.lost else known

    def missing(self) -> dict[int, str]:
        """Return engines that are lost and not restarted, and why."""
        return {place: why for place, why in self.lost.items() if place not in self.restarted}

    def mark_lost(self, place: int, death: ActorDeath, incarnation: int) -> None:
        """Record the loss of an engine, and wake those that wait for completions."""
        if incarnation != self.incarnations[place] or place in self.missing():
            return
        self._record_loss(place, death)
        self.news.put_nowait(EngineLoss(place, incarnation, str(death), death.cause))
        self.engine_lost.set()
        if len(self.lost) == len(self.actors):
            self.available.clear()

    def _record_loss(self, place: int, death: ActorDeath) -> None:
        self.lost = self.lost | {place: str(death)}
        self.restarted.discard(place)
        self.causes.add(death.cause)

    async def watch(self, seconds: float) -> None:
        """Ping engines regularly; kill an engine that does not respond for so long, and mark it as lost."""
        self.is_supervised = True
        while True:
            await asyncio.sleep(seconds / 4)
            await self._ping_all(seconds)

    async def _ping_all(self, seconds: float) -> None:
        await asyncio.gather(*(self._ping(place, seconds) for place in self._present()))

    def _present(self) -> set[int]:
        return set(range(len(self.actors))) - self.missing().keys()

    async def _ping(self, place: int, seconds: float) -> None:
        actor, incarnation = self.actors[place], self.incarnations[place]
        if not isinstance(actor, RayActor):
            return
        try:
            await self._unless_lost(place, asyncio.wait_for(actor.ping().async_result(), seconds))
        except TimeoutError:
            if incarnation == self.incarnations[place]:
                silence = ActorDeath(f"{actor.name} sent no heartbeat for {seconds:.0f} s", "no heartbeat")
                self.mark_lost(place, silence, incarnation)
                await asyncio.to_thread(actor.kill)

    async def abandon_update(self, seconds: float) -> bool:
        """Return whether an engine is lost. Then all must restart: the others may hold half of an update."""
        await self._ping_all(seconds)
        if missing := self.missing():
            half = f"got only half of an update, because {'; '.join(missing.values())}"
            self.lost = {place: missing.get(place, f"{one.name} {half}") for place, one in enumerate(self.actors)}
            self.restarted.clear()
            self.available.clear()
        return bool(missing)

    async def restart(self, seconds: float) -> None:
        """Restart lost engines and wait for them; refuse if they keep dying of one cause."""
        missing = self.missing()
        self.deaths.update(self.causes)
        self.causes.clear()
        ((_, times),) = self.deaths.most_common(1)
        if times >= max(MOST_DEATHS, DEATH_SHARE * len(self.actors)):
            last = next(iter(missing.values()))
            raise EngineCrashLoop(f"engines died {times} times in one step. The last error: {last}")
        await asyncio.gather(*(self._start(place, seconds) for place in missing))

    async def _start(self, place: int, seconds: float) -> None:
        actor = self.actors[place]
        assert isinstance(actor, RayActor), "an engine of this very process cannot be lost"
        await asyncio.to_thread(actor.kill)
        self.incarnations[place] += 1
        actor.begin()
        try:
            await asyncio.wait_for(self._wait_until_ready(actor), seconds)
        except ActorDeath as death:
            self._record_loss(place, death)
        except TimeoutError:
            message = f"{actor.name} was not ready within timeout_seconds={seconds:.0f} of its start"
            self._record_loss(place, ActorDeath(message, "not ready"))
        else:
            self.restarted.add(place)

    async def _wait_until_ready(self, actor: RayActor[RolloutEngine]) -> None:
        """Wait for a starting engine; raise an error if its node is gone."""
        starting = asyncio.create_task(actor.call(RolloutEngine.processes))
        try:
            while not (await asyncio.wait({starting}, timeout=NODE_SECONDS))[0]:
                if await asyncio.to_thread(actor.has_lost_node):
                    where = f"{actor.name}: node {actor.placement.address} is gone"
                    raise EngineCrashLoop(f"{where}; resume on the other nodes with --resume")
            await starting
        finally:
            starting.cancel()

    async def readmit(self) -> None:
        """Send requests to restarted engines again; engines lost since then stay lost."""
        self.lost = self.missing()
        self.restarted.clear()
        if not self.lost:
            self.engine_lost.clear()
        if len(self.lost) < len(self.actors):
            self.available.set()
        await asyncio.gather(*(tell() for tell in self.on_readmit))

    def use(self, engines: Sequence[Actor[RolloutEngine]], incarnations: Sequence[int], lost: dict[int, str]) -> None:
        """Send requests to these engines from now on; another process restarts them."""
        self.actors, self.incarnations, self.lost = list(engines), list(incarnations), dict(lost)
        self.is_supervised = True
        self.engine_lost.clear()
        if len(self.lost) < len(self.actors):
            self.available.set()
        else:
            self.available.clear()

    async def sleep(self) -> None:
        """Let engines release their memory; a lost engine is restarted before the next update."""
        calls = [(place, self.actors[place].call(RolloutEngine.sleep)) for place in self._present()]
        await asyncio.gather(*(self._unless_lost(place, call) for place, call in calls))

    def flush_loads(self) -> list[Load]:
        """Return what each engine has served since the last time."""
        found = [replace(load) for load in self.loads]
        for load in self.loads:
            load.served = load.prompts = load.cached = 0
            load.peak = load.tokens
        return found

    async def call(
        self, method: AsyncMethod[RolloutEngine, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> list[Result]:
        return list(await asyncio.gather(*(actor.call(method, *args, **named) for actor in self.actors)))

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()


def load_metrics(processes: Sequence[Sequence[Load]]) -> dict[str, float]:
    """Return metrics of each engine's load, which each process that sends requests knows a part of."""
    found: dict[str, float] = {}
    for place, loads in enumerate(zip(*processes, strict=True)):
        values = {
            "requests": sum(load.served for load in loads),
            "tokens_under_way_max": sum(load.peak for load in loads),
            "cached_share": sum(load.cached for load in loads) / max(sum(load.prompts for load in loads), 1),
        }
        found |= {f"engine/{place}/{name}": value for name, value in values.items()}
    return found
