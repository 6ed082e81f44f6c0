"""What the pool makes of engines that die and come back; their processes are objects of this one."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from trueline.data.types import Completion
from trueline.rollout import pool as pool_module
from trueline.rollout.engine import RolloutEngine, SamplingParams
from trueline.rollout.failures import EngineCrashLoop
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.runtime.actors import ActorDeath, Placement, RayActor, Target
from trueline.runtime.event_loop import EventLoop

PARAMS = SamplingParams(1.0, 5, ())


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""
    return functools.wraps(test)(lambda *args, **named: asyncio.run(test(*args, **named)))


class Life:
    """One process of an engine."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked = self.running = self.most = 0
        self.heard: list[str] = []


class MortalActor(RayActor[RolloutEngine]):
    """Calls wait until they are let go on, and fail when the process that they were made to is ended."""

    def __init__(self, name: str) -> None:
        self.lives: list[Life] = []
        self.open, self.starts = asyncio.Event(), asyncio.Event()
        self.starts.set()
        super().__init__(name, Target("", asynchronous=True), [], Placement(), Path())

    def begin(self) -> None:
        self.lives.append(Life())

    def kill(self) -> None:
        pass

    def die(self, life: int = -1) -> None:
        self.lives[life].end.set_result(None)

    async def call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        life = self.lives[-1]
        life.heard.append(method.__name__)
        let_go = self.open if method.__name__ == "generate" else self.starts
        going = asyncio.create_task(let_go.wait())
        life.running += 1
        life.most = max(life.most, life.running)
        await asyncio.wait({going, life.end}, return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        life.running -= 1
        if life.end.done():
            raise ActorDeath(f"{self.name}.{method.__name__}: its process died", "its process died")
        return Completion.of([7], [-0.5], 0, "stop")


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def lose(pool: EnginePool, actor: MortalActor) -> "asyncio.Task[Completion]":
    """Let an engine die of which something was asked; return what waits for the answer."""
    place = pool.actors.index(actor)
    asked = asyncio.create_task(pool.generate([1], PARAMS, RolloutKey(place, 0)))
    await until(lambda: actor.lives[-1].running)
    actor.die()
    await until(lambda: place in pool.lost)
    return asked


def engines(count: int) -> tuple[EnginePool, list[MortalActor]]:
    actors = [MortalActor(f"engine-{number}") for number in range(count)]
    pool = EnginePool(actors)
    pool.is_supervised = True
    return pool, actors


@in_loop
async def test_an_engine_that_dies_while_another_is_started_again_is_started_too() -> None:
    pool, (first, second) = engines(2)
    second.open.set()  # answers what the first had to
    await (await lose(pool, first))
    first.starts.clear()
    renewing = asyncio.create_task(pool.restart(60))
    await until(lambda: len(first.lives) == 2)
    second.open.clear()
    asked = await lose(pool, second)
    first.starts.set()
    await renewing
    assert list(pool.missing()) == [1] and pool.restarted == {0}
    await pool.restart(60)
    assert [len(one.lives) for one in (first, second)] == [2, 2]  # the first was not started once more
    for one in (first, second):
        one.open.set()
    await pool.readmit()
    assert len((await asked).tokens) == 1
    assert not pool.lost and not pool.engine_lost.is_set()


@in_loop
async def test_an_engine_is_as_loaded_as_it_has_requests() -> None:
    """By these the freest engine is found; what is answered, or lost, is no load."""
    pool, (engine,) = engines(1)
    asked = [asyncio.create_task(pool.generate([1, 2], PARAMS, RolloutKey(group, 0))) for group in range(3)]
    await until(lambda: engine.lives[0].running == 3)
    assert (pool.loads[0].requests, pool.loads[0].tokens, pool.loads[0].peak) == (3, 21, 21)
    asked[0].cancel()
    await asyncio.wait([asked[0]])
    assert (pool.loads[0].requests, pool.loads[0].tokens) == (2, 14)
    engine.open.set()
    await asyncio.gather(*asked[1:])
    assert (pool.loads[0].requests, pool.loads[0].tokens, pool.loads[0].served) == (0, 0, 3)


@in_loop
async def test_each_death_counts_once_by_its_cause() -> None:
    """Three of one cause within a step end a run: an engine that died before of something else does not count again."""
    pool, _ = engines(1)
    for cause in ("out of memory", "no heartbeat"):
        pool.mark_lost(0, ActorDeath(cause), pool.incarnations[0])
        await pool.restart(60)
        await pool.readmit()
    assert pool.deaths == {"out of memory": 1, "no heartbeat": 1}


@in_loop
async def test_the_late_death_of_an_earlier_process_is_not_the_new_ones() -> None:
    pool, (engine,) = engines(1)
    asked = asyncio.create_task(pool.generate([1], PARAMS, RolloutKey(0, 0)))
    await until(lambda: engine.lives[0].running)
    pool.mark_lost(0, ActorDeath("no heartbeat"), 0)
    await pool.restart(60)
    await pool.readmit()
    engine.die(0)  # only now does its call learn that it is gone
    await until(lambda: engine.lives[1].running)
    assert not pool.lost and pool.available.is_set()
    engine.open.set()
    assert len((await asked).tokens) == 1


@in_loop
async def test_an_engine_that_dies_while_it_is_started_again_is_started_once_more() -> None:
    pool, (engine,) = engines(1)
    asked = await lose(pool, engine)
    engine.starts.clear()
    renewing = asyncio.create_task(pool.restart(60))
    await until(lambda: len(engine.lives) == 2 and engine.lives[1].running)
    engine.die()
    await renewing
    assert list(pool.missing()) == [0] and not pool.available.is_set()
    engine.starts.set()
    await pool.restart(60)
    assert not pool.missing()
    engine.open.set()
    await pool.readmit()
    assert len((await asked).tokens) == 1 and len(engine.lives) == 3


@in_loop
async def test_an_engine_that_dies_in_every_start_ends_the_run() -> None:
    pool, (engine,) = engines(1)
    asked = await lose(pool, engine)
    engine.starts.clear()
    for _ in range(2):
        renewing = asyncio.create_task(pool.restart(60))
        begun = len(engine.lives)
        await until(lambda begun=begun: len(engine.lives) > begun and engine.lives[-1].running)
        engine.die()
        await renewing
    with pytest.raises(EngineCrashLoop, match=r"died \d times in one step\. The last error: engine-0\.processes"):
        while True:
            await pool.restart(0.01)
    asked.cancel()


@pytest.mark.parametrize(("count", "allowed"), [(1, 2), (150, 2), (200, 3)])
def test_of_many_engines_more_may_die_in_a_step(count: int, allowed: int) -> None:
    async def some() -> None:
        pool, _ = engines(count)
        for _ in range(allowed):
            pool.mark_lost(0, ActorDeath("engine-0 died", "its process died"), pool.incarnations[0])
            await pool.restart(60)
        pool.mark_lost(0, ActorDeath("engine-0 died", "its process died"), pool.incarnations[0])
        with pytest.raises(EngineCrashLoop, match=rf"died {allowed + 1} times in one step"):
            await pool.restart(60)

    asyncio.run(some())


@in_loop
async def test_an_engine_that_dies_once_more_before_it_is_asked_stays_lost() -> None:
    """After its weights were proven and before requests go to it: nobody takes it for a healthy one."""
    pool, (first, second) = engines(2)
    second.open.set()
    await (await lose(pool, first))
    await pool.restart(60)
    pool.mark_lost(0, ActorDeath("died behind the proof"), pool.incarnations[0])
    await pool.readmit()
    assert pool.lost == {0: "died behind the proof"} and pool.engine_lost.is_set() and pool.available.is_set()


@in_loop
async def test_a_sick_update_with_healthy_engines_is_not_made_again_forever() -> None:
    """An engine was started again; then the update fails for another reason, and no engine is gone."""

    class Lively(MortalActor):
        def ping(self) -> Any:
            class Answer:
                async def async_result(self) -> None: ...

            return Answer()

    actor = Lively("engine-0")
    pool = EnginePool([actor])
    pool.is_supervised = True
    asked = await lose(pool, actor)
    assert await pool.abandon_update(60)
    await pool.restart(60)
    assert not await pool.abandon_update(60)
    asked.cancel()


@in_loop
async def test_an_engine_has_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much waits here, and goes elsewhere when the engine that it waits for is lost."""
    monkeypatch.setattr(pool_module, "CONCURRENT_CALLS", 4)
    pool, (first, second) = engines(2)
    asked = [asyncio.create_task(pool.generate([1], PARAMS, RolloutKey(0, one))) for one in range(10)]
    await until(lambda: first.lives[0].running == 4)
    for _ in range(50):
        await asyncio.sleep(0)
    assert (first.lives[0].most, second.lives[0].most) == (4, 0)
    second.open.set()
    first.die()
    assert len(await asyncio.gather(*asked)) == 10
    assert second.lives[0].most <= 4 and first.lives[0].heard == ["generate"] * 4


def test_an_engine_that_died_unnoticed_does_not_end_the_run_when_it_shall_sleep() -> None:
    loop = EventLoop(60)

    async def sleep() -> tuple[list[str], dict[int, str]]:
        pool, (first, second) = engines(2)
        first.die()
        await pool.sleep()
        await pool.sleep()  # one that is gone is not asked again
        assert first.lives[0].heard == ["sleep"]
        return second.lives[0].heard, pool.missing()

    heard, gone = loop.run(sleep(), "sleeping")
    loop.stop()
    assert heard == ["sleep", "sleep"] and gone == {0: "engine-0.sleep: its process died"}
