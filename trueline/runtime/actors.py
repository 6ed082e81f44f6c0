"""Objects that live in processes of their own (Ray) or in this one, behind the same three calls.

A call names the method itself, `actor.submit(Worker.score, ...)`, so that its arguments and result are checked; what
travels is the method's name.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trueline.monitoring.beats import BEAT, WORK, Doing
from trueline.runtime.host import AsyncHost, Home, Host

CONCURRENT_CALLS = 4096  # of the one method that is called by the thousand
CONTROL, CONTROL_CALLS = "control", 64  # Ray's concurrency group of all others, which must not queue behind those
DEATHS = (RayActorError, ObjectLostError, NodeDiedError)  # an answer is lost with the node that held it, too
HOME_SECONDS = 10  # that a process has to say where it is, once it is to be ended

Given = ParamSpec("Given")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Object = TypeVar("Object")
Object_co = TypeVar("Object_co", covariant=True)


class ActorFailure(RuntimeError):
    """A process of the run failed; the message names it, what it was doing and where its log is."""


class ActorDeath(ActorFailure):
    """Its process is gone."""


class NodeLost(ActorDeath):
    """Its process is gone, and the node that it was on."""


class Pending(Protocol[Result_co]):
    """A call under way."""

    @property
    def who(self) -> str: ...

    def result(self, timeout_seconds: float) -> Result_co: ...

    async def awaited(self) -> Result_co:
        """Give the result to callers inside an event loop."""


class Actor(Protocol[Object_co]):
    """A handle of one object; `submit` takes its ordinary methods, `call` its coroutines."""

    name: str

    def submit(
        self, method: Callable[Concatenate[Object_co, Given], Result], *args: Given.args, **named: Given.kwargs
    ) -> Pending[Result]: ...

    async def call(
        self,
        method: Callable[Concatenate[Object_co, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> Result: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    who: str
    value: Result

    def result(self, timeout_seconds: float) -> Result:
        return self.value

    async def awaited(self) -> Result:
        return self.value


LOCAL_CALLS = threading.RLock()  # models of one process share the state of a forward pass


class LocalActor(Generic[Object]):
    """An object of this process; calls run at once, one after the other."""

    def __init__(self, name: str, target: Object) -> None:
        self.name, self.target = name, target

    def submit(
        self, method: Callable[Concatenate[Object, Given], Result], *args: Given.args, **named: Given.kwargs
    ) -> Pending[Result]:
        with WORK.doing("call", self.name, method.__name__), LOCAL_CALLS:
            return Done(self.name, methodcaller(method.__name__, *args, **named)(self.target))

    async def call(
        self,
        method: Callable[Concatenate[Object, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> Result:
        with WORK.doing("call", self.name, method.__name__):
            result: Result = await methodcaller(method.__name__, *args, **named)(self.target)
        return result

    def stop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RayPending(Generic[Result]):
    who: str
    reference: Any
    log: Path
    doing: Doing | None = None
    address: str = ""  # of its node, in a cluster

    def result(self, timeout_seconds: float) -> Result:
        try:
            value: Result = ray.get(self.reference, timeout=timeout_seconds)
            self._returned()
            return value
        except GetTimeoutError:
            message = f"{self.who}: no answer within {timeout_seconds:.0f} s; see {self.log}"
            raise ActorFailure(message) from None
        except (*DEATHS, RayTaskError) as error:
            raise failure(self.who, error, self.log, self.address) from error

    async def awaited(self) -> Result:
        try:
            value: Result = await self.reference
            self._returned()
            return value
        except (*DEATHS, RayTaskError) as error:
            raise failure(self.who, error, self.log, self.address) from error
        except asyncio.CancelledError:
            ray.cancel(self.reference)
            raise

    def _returned(self) -> None:
        if self.doing is not None:
            WORK.end(self.doing)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a process is put and what it sees."""

    group: Any = None  # Ray placement group
    bundle: int = -1
    node: str | None = None  # instead of a bundle: this node, sharing the devices named in `environment`
    cpus: float = 0
    gpus: float = 0
    environment: dict[str, str] = field(default_factory=dict)
    address: str = ""  # of the node, in a cluster

    def options(self) -> dict[str, Any]:
        strategy: Any = "DEFAULT"
        if self.group is not None:
            strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        elif self.node is not None:
            strategy = NodeAffinitySchedulingStrategy(self.node, soft=False)
        return {
            "scheduling_strategy": strategy,
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "runtime_env": {"env_vars": self.environment},
        }


class RayActor(Generic[Object]):
    """An object in a Ray process; what it prints goes to `log`."""

    def __init__(self, name: str, target: "Target[Object]", args: Sequence[Any], spot: Spot, log: Path) -> None:
        self.name, self.log = name, log
        self.target, self.args, self.spot = target, args, spot
        self.begin()

    def begin(self) -> None:
        """Start the process, anew where the one before is gone."""
        remote: Any = ray.remote  # whose types know no concurrency groups
        options = self.spot.options()
        if self.target.asynchronous:
            host = remote(concurrency_groups={CONTROL: CONTROL_CALLS})(AsyncHost)
            options["max_concurrency"] = CONCURRENT_CALLS
        else:
            host = remote(Host)
        self.handle = host.options(**options).remote(str(self.log))
        # Known before the object is made, which takes long; neither may wait behind calls that wait for it.
        self.at_home = self._remote(self.handle.home, crowded=False).remote()
        self._remote(self.handle.make, crowded=False).remote(self.target.path, self.args)

    def kill(self) -> None:
        """End the process and all that it has started, by a signal that one which is stopped obeys as well."""
        handle, at_home = self.handle, self.at_home  # not those of a process that is begun meanwhile
        with suppress(RayError):  # it died or was stopped before it could say where it is, or its node is gone
            home: Home = ray.get(at_home, timeout=HOME_SECONDS)
            if home.node == ray.get_runtime_context().get_node_id():
                kill_family(home.pid)
            else:
                there = NodeAffinitySchedulingStrategy(home.node, soft=False)
                ray.get(ray.remote(kill_family).options(scheduling_strategy=there, num_cpus=0).remote(home.pid))
        ray.kill(handle)

    def submit(
        self, method: Callable[Concatenate[Object, Given], Result], *args: Given.args, **named: Given.kwargs
    ) -> Pending[Result]:
        return self._pending(method.__name__, *args, **named)

    async def call(
        self,
        method: Callable[Concatenate[Object, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> Result:
        pending: RayPending[Result] = self._pending(method.__name__, *args, **named)
        return await pending.awaited()

    def _pending(self, method: str, *args: Any, **named: Any) -> RayPending[Any]:
        doing, address = WORK.begin("call", self.name, method), self.spot.address
        called = self._remote(self.handle.call, crowded=method == self.target.crowded).remote(method, *args, **named)
        return RayPending(f"{self.name}.{method}", called, self.log, doing, address)

    def _remote(self, method: Any, *, crowded: bool) -> Any:
        """Return the host's method, in the concurrency group of the call."""
        return method if crowded or not self.target.asynchronous else method.options(concurrency_group=CONTROL)

    def alive(self) -> Pending[None]:
        """Ask a process with coroutines for a sign of life."""
        asked = self._remote(self.handle.alive, crowded=False).remote()
        return RayPending(f"{self.name}.alive", asked, self.log, address=self.spot.address)

    def home(self) -> Pending[Home]:
        return RayPending(f"{self.name}.home", self.at_home, self.log, address=self.spot.address)

    def stop(self) -> None:
        ray.kill(self.handle)
        self.log.with_suffix(BEAT).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Target(Generic[Object]):
    """A class by its import path, whether its methods are coroutines, and what its processes start with."""

    path: str
    asynchronous: bool = False
    crowded: str = ""  # the method that is called by the thousand: others have slots of their own
    environment: Callable[[int], dict[str, str]] = lambda gpus: {}  # by the number of GPUs


def failure(who: str, error: Exception, log: Path, address: str = "") -> ActorFailure:
    """Make a failure of the cause alone, the user's mistake or ours, for Ray's own message is pages long."""
    if isinstance(error, RayTaskError):
        return ActorFailure(f"{who}: {type(error.cause).__name__}: {error.cause}; see {log}")
    if gone(address):
        return NodeLost(f"{who}: node {address} is gone, with all of its processes; --resume goes on with what is left")
    where = f" on {address}" if address else ""
    return ActorDeath(f"{who}: its process died{where} ({last_line(log)}); see {log}")


def gone(address: str) -> bool:
    """Tell whether a node of the cluster is lost."""
    return bool(address) and not any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes())


def kill_family(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def last_line(log: Path) -> str:
    """Return the last line of a log: where an exception ended the process, its type and message."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "without a word")


def wait_all(pendings: Sequence[Pending[Result]], timeout_seconds: float) -> list[Result]:
    """Return all results in order; raise the first failure as soon as it is known, not after its peers' deadline."""
    deadline = time.monotonic() + timeout_seconds
    waiting = {pending.reference: pending for pending in pendings if isinstance(pending, RayPending)}
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            names = ", ".join(sorted(pending.who for pending in waiting.values()))
            log = next(iter(waiting.values())).log
            raise ActorFailure(f"no answer within {timeout_seconds:.0f} s from: {names}; logs in {log.parent}")
        for reference in ready:
            waiting.pop(reference).result(timeout_seconds)
    return [pending.result(timeout_seconds) for pending in pendings]


def share(value: Result) -> Result:
    """Put a value that several actors read into the object store once; Ray hands it to them as itself."""
    shared: Any = ray.put(value) if ray.is_initialized() else value
    return shared
