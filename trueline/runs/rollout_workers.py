"""Rollout workers: processes that run episodes with their environments and rewards, and talk to engines directly."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trueline.environments.base import Environment
from trueline.environments.opening import OpenEnvironment
from trueline.rollout.episode import Episodes
from trueline.rollout.failures import EngineLost, RolloutFailure
from trueline.rollout.groups import GroupSampler, Numbered, Sampler, SamplerSpec
from trueline.rollout.pool import MOST_DEATHS, EngineLoss, EnginePool, Load, load_metrics
from trueline.rollout.summary import (
    CALL,
    Parcels,
    SampledGroup,
    pack_group,
    pack_pictures,
    repeated_call,
    summarise_group,
    transcript,
)
from trueline.runtime.actors import Actor, ActorDeath, ActorFailure, NodeLost, RayActor, RayHandle, Result, Stored

TRAIN = "train"  # the purpose of groups whose tokens stay in the object store
BODIES = 5  # results of a group besides its numbers: see Parcels


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engines as a rollout worker gets them from the process that restarts them."""

    engines: list[RayHandle[Any]]
    incarnations: list[int]
    lost: dict[int, str]

    @classmethod
    def of(cls, pool: EnginePool) -> "EngineView":
        engines = [actor.for_others() for actor in pool.actors if isinstance(actor, RayActor)]
        return cls(engines, list(pool.incarnations), dict(pool.lost))


class GroupWorker:
    """Samples groups in its process: the controller's own, or that of a rollout worker."""

    def __init__(self, episodes: Episodes, environment: Callable[[], Environment]) -> None:
        self.episodes, self.environment = episodes, environment

    async def start(self) -> str:
        """Start what episodes need; return a remark for the user, or nothing."""
        if not isinstance(self.environment, OpenEnvironment):
            return ""
        await self.environment.start()
        return self.environment.remark

    async def sample(self, spec: SamplerSpec, numbered: Numbered, place: int, engine: int | None) -> tuple[Any, ...]:
        """Return the episodes of a group, to be trained on as numbers, and then arrays and texts (see `Parcels`).

        It is sent to this engine, if one is named, as long as that has room.
        """
        pool = self.episodes.pool
        with pool.keep_group(place):
            if engine is not None:
                pool.group_engines[place] = engine
            group = await GroupSampler(self.episodes, self.environment, spec).sample(numbered, place)
        if spec.purpose != TRAIN:
            return group, {}, {}, {}, [], {}
        texts = [transcript(one, TRAIN) | {CALL: repeated_call(one)} for one in group if one.outcome.is_scored]
        return summarise_group(group), *pack_group(group), texts, pack_pictures(group)

    async def partial_lengths(self, spec: SamplerSpec, groups: Collection[int]) -> list[int]:
        return await GroupSampler(self.episodes, self.environment, spec).partial_lengths(groups)

    async def flush_loads(self) -> list[Load]:
        return self.episodes.pool.flush_loads()

    async def next_loss(self) -> EngineLoss:
        """Wait until this process notices that an engine is lost."""
        return await self.episodes.pool.news.get()

    async def use_engines(self, view: EngineView) -> None:
        self.episodes.pool.use(view.engines, view.incarnations, view.lost)

    async def run(self, task: Callable[..., Result], *args: Any) -> Result:
        """Run a function in a thread of this process; its first argument is the chat format."""
        return await asyncio.to_thread(task, self.episodes.chat, *args)


class RolloutWorkers:
    """All rollout workers as one. A group whose worker dies begins anew on another, with the same seeds."""

    def __init__(
        self,
        actors: Sequence[Actor[GroupWorker]],
        pool: EnginePool,
        renew: Callable[[int], Any] = lambda number: None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.actors, self.pool, self.renew, self.note = list(actors), pool, renew, note
        self.groups = Counter[int]()  # in flight, by worker
        self.promised = Counter[int]()  # tokens that groups in flight may sample, by engine
        self.incarnations = [0 for _ in actors]
        self.gone: set[int] = set()  # workers whose nodes are gone
        self.ready = [asyncio.Event() for _ in actors]
        self.some_ready = asyncio.Event()
        self.deaths = Counter[str]()  # by cause, since the last step
        self.failed_starts = Counter[int]()  # in a row, by worker
        self.failure: BaseException | None = None  # why no worker is started again
        self.tasks: set[asyncio.Task[None]] = set()  # references, or they might be collected while they run

    @property
    def remote(self) -> list[int]:
        return [number for number, actor in enumerate(self.actors) if isinstance(actor, RayActor)]

    async def start(self) -> list[str]:
        """Start all workers; return their remarks."""
        remarks = await asyncio.gather(*(actor.call(GroupWorker.start) for actor in self.actors))
        for number in range(len(self.actors)):
            self._admit(number)
        if self.remote:
            self.pool.on_readmit.append(self._send_engines)
        return [*dict.fromkeys(filter(None, remarks))]

    def _admit(self, number: int) -> None:
        self.ready[number].set()
        self.some_ready.set()
        if number in self.remote:
            self._spawn(self._follow_losses(number, self.incarnations[number]))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(error)

    async def _follow_losses(self, number: int, incarnation: int) -> None:
        """Record the engines that a worker finds lost, and its own death, also where it has no groups."""
        try:
            while incarnation == self.incarnations[number]:
                loss = await self.actors[number].call(GroupWorker.next_loss)
                self.pool.mark_lost(loss.place, ActorDeath(loss.message, loss.cause), loss.incarnation)
        except ActorDeath as death:
            self._lose(number, incarnation, death)

    async def _send_engines(self) -> None:
        view = EngineView.of(self.pool)
        await self._all_alive([self.actors[number].call(GroupWorker.use_engines, view) for number in self._usable()])

    def _usable(self) -> list[int]:
        return [number for number, ready in enumerate(self.ready) if ready.is_set()]

    async def sample(self, spec: SamplerSpec, numbered: Numbered, place: int) -> list[Any]:
        while True:
            number = await self._choose()
            incarnation = self.incarnations[number]
            with self._admission(number, spec) as engine:
                try:
                    actor = self.actors[number]
                    head, bodies = await actor.call_kept(BODIES, GroupWorker.sample, spec, numbered, place, engine)
                except ActorDeath as death:
                    self._lose(number, incarnation, death)
                    continue
            if isinstance(head, str):
                raise EngineLost(head)
            return SampledGroup(head, Parcels(*bodies)) if spec.purpose == TRAIN else head

    async def _choose(self) -> int:
        """Return the worker with the fewest groups, once there is one."""
        await self.some_ready.wait()
        if self.failure is not None:
            raise self.failure
        return min(self._usable(), key=lambda number: self.groups[number])

    @contextmanager
    def _admission(self, number: int, spec: SamplerSpec) -> Iterator[int | None]:
        """Count a group and its tokens; where several workers send requests, yield the engine with the fewest."""
        tokens = spec.size * spec.params.max_new_tokens
        engines = [at for at in range(len(self.pool.actors)) if at not in self.pool.lost]
        several = len(self.actors) > 1 and engines
        engine = min(engines, key=lambda at: self.promised[at]) if several else None
        self.groups[number] += 1
        self.promised[engine or 0] += tokens
        try:
            yield engine
        finally:
            self.groups[number] -= 1
            self.promised[engine or 0] -= tokens

    def _lose(self, number: int, incarnation: int, death: ActorDeath) -> None:
        """Start a dead worker again, unless that has begun or its node is gone; refuse if they keep dying."""
        if self.failure is not None or incarnation != self.incarnations[number]:
            return
        self.incarnations[number] += 1
        self.ready[number].clear()
        if not self._usable():
            self.some_ready.clear()
        if isinstance(death, NodeLost):
            self._lose_node(number, death)
            return
        self.deaths[death.cause] += 1
        times, most = self.deaths[death.cause], max(MOST_DEATHS, len(self.actors))
        if times >= most or self.failed_starts[number] >= MOST_DEATHS:
            times = max(times, self.failed_starts[number])
            self._give_up(RolloutFailure(f"rollout workers keep dying ({times} times). The last error: {death}"))
        else:
            self.note(f"warning: {death}; the worker is restarted, and its episodes begin anew")
            self._spawn(self._restart(number))

    def _lose_node(self, number: int, death: NodeLost) -> None:
        self.gone.add(number)
        if len(self.gone) == len(self.actors):
            self._give_up(death)
        else:
            self.note(f"warning: {death}; its episodes begin anew on other nodes")

    def _give_up(self, failure: BaseException) -> None:
        """Let all groups fail that wait for a worker."""
        self.failure = failure
        self.some_ready.set()

    async def _restart(self, number: int) -> None:
        actor = self.actors[number]
        assert isinstance(actor, RayActor), "a worker of this very process cannot die"
        await asyncio.to_thread(actor.kill)
        actor.args = [self.renew(number)]
        actor.begin()
        try:
            await actor.call(GroupWorker.start)
        except ActorFailure as failure:
            self.failed_starts[number] += 1
            death = failure if isinstance(failure, ActorDeath) else ActorDeath(str(failure))
            self._lose(number, self.incarnations[number], death)
        else:
            self.failed_starts[number] = 0
            self._admit(number)
            await self._send_engines()  # of which some may have been restarted meanwhile

    async def watch(self, seconds: float) -> None:
        """Ping workers regularly, and restart one that does not respond for so long."""
        while self.remote:
            await asyncio.sleep(seconds / 4)
            await asyncio.gather(*(self._ping(number, seconds) for number in self._usable()))

    async def _ping(self, number: int, seconds: float) -> None:
        actor, incarnation = self.actors[number], self.incarnations[number]
        assert isinstance(actor, RayActor)
        try:
            await asyncio.wait_for(actor.ping().async_result(), seconds)
        except ActorDeath as death:
            self._lose(number, incarnation, death)
        except TimeoutError:
            silence = ActorDeath(f"{actor.name} sent no heartbeat for {seconds:.0f} s", "no heartbeat")
            self._lose(number, incarnation, silence)

    async def run(self, task: Callable[..., Result], *args: Any) -> Result:
        """Run a function in a rollout worker, or in another one if that dies."""
        while True:
            number = await self._choose()
            incarnation = self.incarnations[number]
            try:
                found: Result = await self.actors[number].call(GroupWorker.run, task, *args)
                return found
            except ActorDeath as death:
                self._lose(number, incarnation, death)

    async def run_kept(self, task: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Stored[Any]]:
        """Do the same, and leave the second result in the object store."""
        while True:
            number = await self._choose()
            incarnation = self.incarnations[number]
            try:
                head, (body,) = await self.actors[number].call_kept(1, GroupWorker.run, task, *args)
                return head, body
            except ActorDeath as death:
                self._lose(number, incarnation, death)

    async def partial_lengths(self, spec: SamplerSpec, groups: Collection[int]) -> list[int]:
        calls = [self.actors[number].call(GroupWorker.partial_lengths, spec, groups) for number in self._usable()]
        return [length for found in await self._all_alive(calls) for length in found]

    async def load_metrics(self) -> dict[str, float]:
        calls = [self.actors[number].call(GroupWorker.flush_loads) for number in self._usable()]
        return load_metrics(await self._all_alive(calls))

    async def _all_alive(self, calls: list[Any]) -> list[Any]:
        """Return the results of workers that are not dead; `_follow_losses` reports deaths."""
        found = await asyncio.gather(*calls, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, ActorDeath):
                raise one
        return [one for one in found if not isinstance(one, ActorDeath)]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()


@dataclass(frozen=True, slots=True)
class WorkerSampler(Sampler):
    """Sample groups through rollout workers."""

    workers: RolloutWorkers
    spec: SamplerSpec

    @property
    def pool(self) -> EnginePool:
        return self.workers.pool

    async def sample(self, numbered: Numbered, place: int) -> list[Any]:
        return await self.workers.sample(self.spec, numbered, place)

    async def partial_lengths(self, groups: Collection[int]) -> list[int]:
        return await self.workers.partial_lengths(self.spec, groups)

    def begin_step(self) -> None:
        self.pool.deaths.clear()
        self.workers.deaths.clear()
