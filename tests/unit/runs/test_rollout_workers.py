"""What the controller knows of its rollout workers: which has what, which died, and when it gives up."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.index_engine import PARAMS
from tests.unit.rollout.test_pool import in_loop, until
from trueline.config.reward import RewardConfig
from trueline.rollout.failures import EngineLost, RolloutFailure
from trueline.rollout.groups import SamplerSpec
from trueline.rollout.pool import EngineLoss, EnginePool
from trueline.runs.processes import share_of_rewards
from trueline.runs.rollout_workers import EngineView, GroupWorker, RolloutWorkers, WorkerSampler
from trueline.runtime.actors import ActorDeath, ActorFailure, Done, LocalActor, NodeLost, Placement, RayActor, Target

EVALUATE, TRAIN = SamplerSpec(PARAMS, 4, 0, "evaluate"), SamplerSpec(PARAMS, 4, 0, "train")
PROMPT: Any = None


class Life:
    """One process of a worker."""

    def __init__(self) -> None:
        self.end: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.groups: dict[int, int | None] = {}  # the engine of each
        self.views: list[EngineView] = []
        self.losses: asyncio.Queue[EngineLoss] = asyncio.Queue()


class MortalWorker(RayActor[GroupWorker]):
    """Groups wait until they are let go on, and fail when their process is ended; `started` lets it start."""

    def __init__(self, name: str) -> None:
        self.lives: list[Life] = []
        self.open, self.responds, self.started = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.responds.set()
        self.started.set()
        self.start_error: ActorFailure | None = None
        self.head: Any = ["an episode"]
        self.kills = 0
        super().__init__(name, Target("", asynchronous=True), [], Placement(), Path())

    def begin(self) -> None:
        self.lives.append(Life())

    def kill(self) -> None:
        self.kills += 1
        life = len(self.lives) - 1
        self.lives[life].end.get_loop().call_soon_threadsafe(self.die, None, life)

    def die(self, death: Exception | None = None, life: int = -1) -> None:
        if not self.lives[life].end.done():
            self.lives[life].end.set_result(death or ActorDeath(f"{self.name}: its process died (line 17)", "line 17"))

    def ping(self) -> Any:
        return Ping(self)

    async def call_kept(self, bodies: int, method: Any, *args: Any, **named: Any) -> Any:
        return await self.call(method, *args), (None,) * bodies

    async def call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        life = self.lives[-1]
        work = asyncio.create_task(self._answer(life, method.__name__, *args))
        await asyncio.wait({work, life.end}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise life.end.result()
        return work.result()

    async def _answer(self, life: Life, method: str, *args: Any) -> Any:
        if method == "start":
            await self.started.wait()
            if self.start_error is not None and len(self.lives) > 1:
                raise self.start_error
            return ""
        if method == "sample":
            life.groups[args[2]] = args[3]
            await self.open.wait()
            return self.head
        if method == "use_engines":
            life.views.append(args[0])
        if method == "next_loss":
            return await life.losses.get()
        return []


class Ping:
    def __init__(self, actor: MortalWorker) -> None:
        self.actor = actor

    async def async_result(self) -> None:
        await self.actor.responds.wait()


class Engine(RayActor[Any]):
    def begin(self) -> None:
        self.handle = object()


async def start(count: int, engines: int = 2) -> tuple[RolloutWorkers, list[MortalWorker], list[str]]:
    actors, notes = [MortalWorker(f"rollouts-{number}") for number in range(count)], list[str]()
    engine_actors = [Engine(f"engine-{number}", Target(""), [], Placement(), Path()) for number in range(engines)]
    workers = RolloutWorkers(actors, EnginePool(engine_actors), note=notes.append)
    await workers.start()
    return workers, actors, notes


def begin(workers: RolloutWorkers, *places: int, spec: SamplerSpec = EVALUATE) -> list["asyncio.Task[list[Any]]"]:
    return [asyncio.create_task(workers.sample(spec, (place, PROMPT), place)) for place in places]


@in_loop
async def test_groups_go_to_the_worker_with_the_fewest_and_the_engine_with_the_fewest_tokens() -> None:
    workers, (first, second), _ = await start(2)
    groups = begin(workers, 0, 1, 2, 3)
    await until(lambda: len(first.lives[0].groups) + len(second.lives[0].groups) == 4)
    assert first.lives[0].groups == {0: 0, 2: 0} and second.lives[0].groups == {1: 1, 3: 1}
    assert workers.promised == {0: 64, 1: 64}  # two groups of four completions of up to eight tokens
    second.open.set()
    await asyncio.wait({groups[1], groups[3]})
    groups += begin(workers, 4, 5)
    await until(lambda: len(second.lives[0].groups) == 4)
    assert first.lives[0].groups.keys() == {0, 2} and second.lives[0].groups[4] == second.lives[0].groups[5] == 1
    first.open.set()
    assert await asyncio.gather(*groups) == [["an episode"]] * 6
    assert not any(workers.groups.values()) and not any(workers.promised.values())


@in_loop
async def test_a_lost_engine_gets_no_groups() -> None:
    workers, (worker, _), _ = await start(2)
    workers.pool.lost = {0: "gone"}
    begin(workers, 0, 1)
    await until(lambda: worker.lives[0].groups)
    assert worker.lives[0].groups == {0: 1}


@in_loop
async def test_the_only_worker_chooses_engines_itself() -> None:
    workers, (worker,), _ = await start(1)
    begin(workers, 0)
    await until(lambda: worker.lives[0].groups)
    assert worker.lives[0].groups == {0: None}


@in_loop
async def test_the_groups_of_a_dead_worker_begin_anew_on_another_and_it_is_started_once() -> None:
    workers, (first, second), notes = await start(2)
    groups = begin(workers, 0, 1, 2)
    await until(lambda: len(first.lives[0].groups) == 2)
    first.started.clear()
    first.die()
    await until(lambda: second.lives[0].groups.keys() == {0, 1, 2})
    await until(lambda: len(first.lives) == 2)
    assert len(notes) == 1 and "line 17" in notes[0]
    assert workers.groups[0] == 0 and workers.groups[1] == 3
    first.started.set()
    await until(lambda: workers.ready[0].is_set())
    begin(workers, 3)
    await until(lambda: first.lives[1].groups)
    second.open.set()
    assert len(await asyncio.gather(*groups)) == 3


@in_loop
async def test_groups_wait_where_every_worker_is_starting() -> None:
    workers, (worker,), _ = await start(1)
    worker.started.clear()
    worker.die()
    (group,) = begin(workers, 0)
    await until(lambda: len(worker.lives) == 2)
    assert not group.done() and not worker.lives[1].groups
    worker.started.set()
    worker.open.set()
    assert await group == ["an episode"]


@in_loop
async def test_the_death_of_an_idle_worker_is_noticed() -> None:
    workers, (worker, _), notes = await start(2)
    worker.die()
    await until(lambda: len(worker.lives) == 2 and workers.ready[0].is_set())
    assert len(notes) == 1 and workers.deaths.total() == 1


@in_loop
async def test_a_restarted_worker_gets_the_engines_of_now() -> None:
    """One that were restarted while it started would be lost for it ever after."""
    workers, (worker, _), _ = await start(2)
    worker.started.clear()
    worker.die()
    await until(lambda: len(worker.lives) == 2)
    workers.pool.incarnations[1] = 5
    await workers.pool.readmit()  # while the worker cannot hear of it
    assert not worker.lives[1].views
    worker.started.set()
    await until(lambda: worker.lives[1].views)
    assert worker.lives[1].views[-1].incarnations == [0, 5]


@in_loop
async def test_engines_that_a_worker_finds_lost_are_lost_for_all() -> None:
    workers, (worker, other), _ = await start(2)
    worker.lives[0].losses.put_nowait(EngineLoss(1, 0, "engine-1: its process died", "died"))
    await until(lambda: workers.pool.lost)
    assert workers.pool.lost == {1: "engine-1: its process died"} and workers.pool.engine_lost.is_set()
    workers.pool.restarted.add(1)
    await workers.pool.readmit()
    assert [one.lives[0].views[-1].lost for one in (worker, other)] == [{}, {}]


@in_loop
async def test_an_engine_lost_during_an_evaluation_is_reported_as_such() -> None:
    workers, (worker,), _ = await start(1)
    worker.head = "engine-0: its process died"
    worker.open.set()
    with pytest.raises(EngineLost, match="engine-0"):
        await workers.sample(EVALUATE, (0, PROMPT), 0)


@in_loop
async def test_workers_that_keep_dying_end_the_run_and_those_of_earlier_steps_do_not_count() -> None:
    workers, (worker,), _ = await start(1)
    sampler = WorkerSampler(workers, TRAIN)
    (group,) = begin(workers, 0)
    for life in range(4):
        await until(lambda life=life: len(worker.lives) == life + 1 and worker.lives[-1].groups)
        if life == 1:
            sampler.begin_step()
        worker.die(ActorDeath(f"died with number {life}", f"number {life}"))
    with pytest.raises(RolloutFailure, match=r"rollout workers keep dying \(3 times\).*died with number 3"):
        await group
    with pytest.raises(RolloutFailure):  # at once, not after a wait
        await workers.sample(EVALUATE, (1, PROMPT), 1)
    assert len(worker.lives) == 4


@in_loop
async def test_a_worker_that_never_starts_again_ends_the_run_though_steps_go_on() -> None:
    workers, (worker, other), notes = await start(2)
    worker.start_error = ActorFailure("rollouts-0.start: no such environment")
    sampler = WorkerSampler(workers, TRAIN)
    worker.die()
    for life in range(2, 5):
        await until(lambda life=life: len(worker.lives) == life)
        sampler.begin_step()  # the other worker does the work
    await until(lambda: workers.failure)
    with pytest.raises(RolloutFailure, match=r"3 times.*no such environment"):
        await workers.sample(EVALUATE, (0, PROMPT), 0)
    assert not other.lives[0].groups and len(notes) == 3


@in_loop
async def test_a_worker_is_not_started_on_a_node_that_is_gone() -> None:
    workers, (first, second), notes = await start(2)
    groups = begin(workers, 0, 1)
    await until(lambda: first.lives[0].groups and second.lives[0].groups)
    first.die(NodeLost("node 10.0.0.1 is gone", "node"))
    await until(lambda: len(second.lives[0].groups) == 2)
    assert len(first.lives) == 1 and workers.gone == {0} and "node 10.0.0.1 is gone" in notes[0]
    second.die(NodeLost("node 10.0.0.2 is gone", "node"))
    for group in groups:
        with pytest.raises(NodeLost, match=r"10\.0\.0\.2"):
            await group


@in_loop
async def test_a_worker_that_does_not_respond_is_killed_and_restarted() -> None:
    workers, (worker,), notes = await start(1)
    (group,) = begin(workers, 0)
    await until(lambda: worker.lives[0].groups)
    worker.responds.clear()
    watching = asyncio.create_task(workers.watch(0.02))
    await until(lambda: len(worker.lives) == 2)
    worker.responds.set()
    worker.open.set()
    assert await group == ["an episode"]
    assert worker.kills == 1 and len(worker.lives) == 2 and "rollouts-0 sent no heartbeat" in notes[0]
    watching.cancel()


@in_loop
async def test_what_goes_wrong_in_a_restart_is_not_waited_for() -> None:
    workers, (worker,), _ = await start(1)

    def fail(number: int) -> None:
        raise OSError("no disk")

    workers.renew = fail
    worker.die()
    with pytest.raises(OSError, match="no disk"):
        await workers.sample(EVALUATE, (0, PROMPT), 0)


@in_loop
async def test_the_controllers_own_worker_is_not_watched() -> None:
    workers = RolloutWorkers([LocalActor("rollouts", PROMPT)], EnginePool([]))
    await workers.watch(0.01)
    assert not workers.remote


def test_all_workers_together_have_what_rewards_may_use() -> None:
    remote = {"concurrency": 16}
    parts = {"judged": {"function": "judge", "remote": remote}, "plain": {"function": "math"}}
    several = RewardConfig.parse({"parts": parts, "processes": 3})
    mine = share_of_rewards(several, 2)
    assert mine.processes == 2 and [one.remote.concurrency for one in mine.parts.values()] == [8, 8]
    single = share_of_rewards(RewardConfig.parse({"function": "judge", "remote": remote}), 3)
    assert single.processes == 1 and single.remote.concurrency == 6


def test_a_pool_whose_engines_are_all_lost_waits_for_them() -> None:
    pool = EnginePool([Done(None)] * 2)  # type: ignore[list-item]
    pool.use(pool.actors, [1, 1], {0: "gone", 1: "gone"})
    assert not pool.available.is_set()
    pool.use(pool.actors, [2, 1], {1: "gone"})
    assert pool.available.is_set()
