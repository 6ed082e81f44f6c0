"""Calls to processes that are gone."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OwnerDiedError

from trueline.runtime.actors import ActorDeath, RayPending

GONE = [ObjectLostError("1f", None, ""), OwnerDiedError("1f", None, ""), NodeDiedError("a node")]


class Lost:
    """A reference to an answer that no process holds any more."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __await__(self) -> Generator[Any, None, Any]:
        raise self.error
        yield


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
def test_an_answer_that_is_lost_is_a_death(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Lost, timeout: float) -> None:
        raise reference.error

    monkeypatch.setattr(ray, "get", get)
    pending: RayPending[int] = RayPending("engine-0.generate", Lost(error), Path("engine-0.log"))
    with pytest.raises(ActorDeath, match=r"engine-0\.generate: its process died"):
        pending.result(1)
    with pytest.raises(ActorDeath, match=r"engine-0\.generate: its process died"):
        asyncio.run(pending.awaited())
