from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trueline.rl.models import DeviceSharing
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import ActorDeath, LocalActor
from trueline.runtime.event_loop import EventLoop


class Sleeper:
    """An engine of which only the memory matters."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def sleep(self) -> None:
        self.heard.append("sleep")

    async def wake(self, part: str) -> None:
        self.heard.append(part)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(timeout_seconds=60)
    yield made
    made.stop()


class Holder:
    """A model of which only the memory matters."""

    def __init__(self, heard: list[str], used: float) -> None:
        self.heard, self.used = heard, used

    def call(self, method: Callable[..., Any]) -> list[tuple[float, float]]:
        self.heard.append(method.__name__)
        return [(self.used, 0.5), (self.used + len(self.heard), 0.25)]


def heard(loop: EventLoop, *, shared: bool) -> list[list[str]]:
    """What two engines are told while a step trains and its weights are sent."""
    engines: list[Any] = [Sleeper(), Sleeper()]
    sharing = DeviceSharing(EnginePool([LocalActor("engine", engine) for engine in engines]), loop, shared)
    with sharing.training():
        engines[0].heard.append("train")
    with sharing.syncing():
        engines[0].heard.append("send")
    return [engine.heard for engine in engines]


def test_engines_sleep_while_models_train_and_get_their_cache_back_after_the_weights(loop: EventLoop) -> None:
    first, second = heard(loop, shared=True)
    assert first == ["sleep", "train", "weights", "send", "kv_cache"]
    assert second == ["sleep", "weights", "kv_cache"]


def test_an_engine_that_died_unnoticed_is_left_to_the_next_update(loop: EventLoop) -> None:
    """It is started again in memory that models have given back, before engines wake for the weights."""

    class Dead(Sleeper):
        async def sleep(self) -> None:
            raise ActorDeath("engine-1.sleep: its process died")

    engines: list[Any] = [Sleeper(), Dead()]
    pool = EnginePool([LocalActor("engine", engine) for engine in engines])
    model: Any = Holder(engines[0].heard, 1.0)
    sharing = DeviceSharing(pool, loop, True, [model])
    with sharing.training():
        engines[0].heard.append("train")
    assert pool.missing() == {1: "engine-1.sleep: its process died"}
    with sharing.syncing(lambda: engines[0].heard.append("revive")):
        engines[0].heard.append("send")
    assert engines[0].heard == ["release", "sleep", "train", "release", "revive", "weights", "send", "kv_cache"]


def test_engines_with_gpus_of_their_own_stay_awake(loop: EventLoop) -> None:
    assert heard(loop, shared=False) == [["train", "send"], []]


def test_models_give_back_memory_before_an_engine_takes_any(loop: EventLoop) -> None:
    """What is in use is told at the end of each phase: before the engine sleeps, and before it wakes."""
    engine, said = Sleeper(), []
    models: list[Any] = [Holder(engine.heard, 20.0), Holder(engine.heard, 10.0)]
    sharing = DeviceSharing(EnginePool([LocalActor("engine", engine)]), loop, True, models, said.append)
    assert sharing.metrics() == {}
    for _ in range(2):
        with sharing.syncing():
            pass
        with sharing.training():
            pass
    released = ["release", "release"]
    assert engine.heard == [*released, "weights", "kv_cache", *released, "sleep"] * 2
    assert said == ["memory     models give back 1.5 GiB before the engine wakes"]  # once in a run
    phases = {"memory/start_gib": 21.0, "memory/training_gib": 28.0, "memory/rollout_gib": 32.0}
    assert sharing.metrics() == phases | {"memory/device_gib": 32.0}


def test_models_with_gpus_of_their_own_keep_their_memory(loop: EventLoop) -> None:
    calls: list[str] = []
    model: Any = Holder(calls, 1.0)
    sharing = DeviceSharing(EnginePool([]), loop, False, [model])
    with sharing.training(), sharing.syncing():
        pass
    assert calls == [] and sharing.metrics() == {}
