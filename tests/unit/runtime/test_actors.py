"""Processes seen from outside: how they begin and end, and calls to those that are gone."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OwnerDiedError

from trueline.monitoring.heartbeat import BEAT
from trueline.runtime import actors
from trueline.runtime.actors import ActorDeath, ActorFailure, Placement, RayActor, RayPending, Target, wait_all
from trueline.runtime.host import Location

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
        asyncio.run(pending.async_result())


def test_waiting_for_several_ends_with_their_deadline_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def wait(references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        given.append(timeout)
        return [], references

    monkeypatch.setattr(ray, "wait", wait)
    pendings: list[Any] = [RayPending(f"policy-{rank}.update", object(), Path("logs/a.log")) for rank in (1, 0)]
    with pytest.raises(ActorFailure, match=r"within 7 s from: policy-0\.update, policy-1\.update; logs in logs"):
        wait_all(pendings, 7)
    assert len(given) == 1 and 0 < given[0] <= 7


class Quiet(RayActor[Any]):
    """Its process is a record of what was done to it."""

    def begin(self) -> None:
        self.handle = self.location_ref = f"process {len(list(self.log.parent.glob('begun-*')))}"
        (self.log.parent / f"begun-{self.handle}").touch()


def test_an_actor_begins_by_itself_and_stops_whether_or_not_it_has_beaten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    actor = Quiet("engine-0", Target(""), [], Placement(), tmp_path / "engine-0.log")
    assert actor.handle == "process 0"
    actor.stop()
    beat = (tmp_path / "engine-0.log").with_suffix(BEAT)
    beat.touch()
    actor.stop()
    assert ended == ["process 0"] * 2 and not beat.exists()


@pytest.mark.parametrize("here", [True, False])
def test_ending_an_actor_ends_all_that_it_has_started_on_its_own_node(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    remote = SimpleNamespace(options=lambda **named: remote, remote=lambda pid: ended.append(("there", pid)))
    monkeypatch.setattr(ray, "get", lambda reference, timeout=0: Location("node-1", [], 4711) if timeout else None)
    monkeypatch.setattr(ray, "kill", lambda handle: ended.append(handle))
    monkeypatch.setattr(ray, "remote", lambda function: remote)
    node = "node-1" if here else "node-2"
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: node))
    monkeypatch.setattr(actors, "NodeAffinitySchedulingStrategy", lambda node, soft: None)
    monkeypatch.setattr(actors, "kill_family", lambda pid: ended.append(("here", pid)))
    Quiet("engine-0", Target(""), [], Placement(), tmp_path / "engine-0.log").kill()
    assert ended == [("here" if here else "there", 4711), "process 0"]
