from collections.abc import Iterator
from typing import Any

import pytest

from trueline.rl.device_sharing import DeviceSharing
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import LocalActor
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


def test_engines_with_gpus_of_their_own_stay_awake(loop: EventLoop) -> None:
    assert heard(loop, shared=False) == [["train", "send"], []]
