"""Objects in Ray processes or in this one, behind the same three calls.

A call names the method itself, `actor.submit(Worker.score, ...)`, so mypy checks its arguments and result. Only the
method's name is sent.
"""

import asyncio
import re
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
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trueline.monitoring.heartbeat import BEAT, WORK, Activity
from trueline.monitoring.timing import Milestones
from trueline.runtime.host import ActorHost, AsyncActorHost, Location

CONCURRENT_CALLS = 4096  # of the target's bulk methods
CONTROL, CONTROL_CALLS = "control", 64  # Ray's concurrency group of all other methods: they must not queue behind it
# A result is lost with its node, too; and a process cannot start on a node that is gone.
DEATHS = (RayActorError, ObjectLostError, NodeDiedError, ActorUnschedulableError)
LOCATION_SECONDS = 10  # that a process has to report its location before it is killed

Given = ParamSpec("Given")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Body = TypeVar("Body")
Object = TypeVar("Object")
Object_co = TypeVar("Object_co", covariant=True)
Method = Callable[Concatenate[Object, Given], Result]
AsyncMethod = Callable[Concatenate[Object, Given], Coroutine[Any, Any, Result]]


class ActorFailure(RuntimeError):
    """A process of the run failed; the message names the process, the call and the log."""


class ActorDeath(ActorFailure):
    """The process is gone; `cause` is the same for deaths of the same kind."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = re.sub(r"[0-9]+", "#", cause or message)  # numbers differ each time


class NodeLost(ActorDeath):
    """The process is gone, and its node with it."""


class Pending(Protocol[Result_co]):
    def result(self, timeout_seconds: float) -> Result_co: ...

    async def async_result(self) -> Result_co:
        """Return the result to callers inside an event loop."""


class Actor(Protocol[Object_co]):
    """A handle of one object; `submit` takes ordinary methods, `call` takes coroutines."""

    name: str

    def submit(
        self, method: Method[Object_co, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> Pending[Result]: ...

    def submit_kept(
        self, method: Method[Object_co, Given, tuple[Result, Body]], *args: Given.args, **named: Given.kwargs
    ) -> "Pending[tuple[Result, Stored[Body]]]":
        """Make a call whose second result stays in the object store."""

    async def call(
        self, method: AsyncMethod[Object_co, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> Result: ...

    async def call_kept(
        self, bodies: int, method: AsyncMethod[Object_co, Given, Any], *args: Given.args, **named: Given.kwargs
    ) -> "tuple[Any, tuple[Stored[Any], ...]]":
        """Make a call whose results behind the first stay in the object store; the caller owns them."""

    def stop(self) -> None: ...


SHARING = threading.Lock()


@dataclass(slots=True)
class Stored(Generic[Result_co]):
    """A value that lies in the object store, or in this process; who needs it fetches it."""

    place: Any  # Ray's reference, or the value itself

    def fetch(self) -> Result_co:
        """Return the value without a copy, if it lies on this node; its arrays cannot be written."""
        try:
            value: Result_co = ray.get(self.place) if isinstance(self.place, ray.ObjectRef) else self.place
        except RayError as error:
            raise ActorFailure(f"samples of this step are lost with the node that held them: {error}") from error
        return value

    def share(self) -> None:
        """Move a value of this process into the object store, where there is one, for other processes."""
        with SHARING:  # several threads send the same samples
            if ray.is_initialized() and not isinstance(self.place, ray.ObjectRef):
                self.place = ray.put(self.place)


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    value: Result

    def result(self, timeout_seconds: float) -> Result:
        return self.value

    async def async_result(self) -> Result:
        return self.value


def shown_name(method: str) -> str:
    """Return the name of a call for people, to whom it does not matter where its result stays."""
    return method.removesuffix("_kept")


LOCAL_CALLS = threading.RLock()  # models of one process share the state of a forward pass


class LocalActor(Actor[Object]):
    """An object of this process; calls run at once, one at a time."""

    def __init__(self, name: str, target: Object) -> None:
        self.name, self.target = name, target

    def submit(
        self, method: Method[Object, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> Pending[Result]:
        with WORK.doing("call", self.name, shown_name(method.__name__)), LOCAL_CALLS:
            return Done(methodcaller(method.__name__, *args, **named)(self.target))

    async def call(
        self, method: AsyncMethod[Object, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> Result:
        with WORK.doing("call", self.name, method.__name__):
            result: Result = await methodcaller(method.__name__, *args, **named)(self.target)
        return result

    def submit_kept(
        self, method: Method[Object, Given, tuple[Result, Body]], *args: Given.args, **named: Given.kwargs
    ) -> Pending[tuple[Result, Stored[Body]]]:
        head, body = self.submit(method, *args, **named).result(0)
        return Done((head, Stored(body)))

    async def call_kept(
        self, bodies: int, method: AsyncMethod[Object, Given, Any], *args: Given.args, **named: Given.kwargs
    ) -> tuple[Any, tuple[Stored[Any], ...]]:
        head, *rest = await self.call(method, *args, **named)
        return head, tuple(map(Stored, rest))

    def stop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RayPending(Generic[Result]):
    who: str
    reference: Any
    log: Path
    activity: Activity | None = None
    address: str = ""  # of its node, in a cluster
    kept: tuple[Any, ...] | None = None  # further references, whose values stay where they are

    def result(self, timeout_seconds: float) -> Result:
        try:
            value = ray.get(self.reference, timeout=timeout_seconds)
        except GetTimeoutError:
            message = f"{self.who}: no answer within {timeout_seconds:.0f} s; see {self.log}"
            raise ActorFailure(message) from None
        except (*DEATHS, RayTaskError) as error:
            raise self._failure(error) from error
        return self._end(value)

    async def async_result(self) -> Result:
        try:
            value = await self.reference
        except (*DEATHS, RayTaskError) as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            ray.cancel(self.reference)
            raise
        return self._end(value)

    def _end(self, value: Any) -> Result:
        if self.activity is not None:
            WORK.end(self.activity)
        found: Any = value if self.kept is None else (value, *map(Stored, self.kept))
        result: Result = found
        return result

    def _failure(self, error: Exception) -> ActorFailure:
        """Keep the cause alone: Ray's own message is pages long."""
        if isinstance(error, RayTaskError):
            return ActorFailure(f"{self.who}: {type(error.cause).__name__}: {error.cause}; see {self.log}")
        address = self.address
        if is_node_lost(address):
            gone = f"node {address} is gone"
            return NodeLost(f"{self.who}: {gone} with all its processes; resume on the other nodes with --resume", gone)
        where = f" on {address}" if address else ""
        # The last line of a log is the type and message of an exception that ended the process.
        lines = self.log.read_text(errors="replace").split("\n") if self.log.is_file() else []
        line = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")
        return ActorDeath(f"{self.who}: its process died{where} ({line}); see {self.log}", line)


@dataclass(frozen=True, slots=True)
class Placement:
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


class RayHandle(Actor[Object]):
    """An object in a Ray process, which another process has started."""

    def __init__(self, name: str, target: "Target[Object]", handle: Any, log: Path, address: str) -> None:
        self.name, self.target, self.handle, self.log, self.address = name, target, handle, log, address

    def submit(
        self, method: Method[Object, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> Pending[Result]:
        return self._call(method.__name__, {}, *args, **named)

    def submit_kept(
        self, method: Method[Object, Given, tuple[Result, Body]], *args: Given.args, **named: Given.kwargs
    ) -> Pending[tuple[Result, Stored[Body]]]:
        return self._call(method.__name__, {"num_returns": 2}, *args, **named)

    async def call(
        self, method: AsyncMethod[Object, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> Result:
        pending: RayPending[Result] = self._call(method.__name__, {}, *args, **named)
        return await pending.async_result()

    async def call_kept(
        self, bodies: int, method: AsyncMethod[Object, Given, Any], *args: Given.args, **named: Given.kwargs
    ) -> tuple[Any, tuple[Stored[Any], ...]]:
        pending = self._call(method.__name__, {"num_returns": 1 + bodies}, *args, **named)
        head, *rest = await pending.async_result()
        return head, tuple(rest)

    def _call(self, method: str, options: dict[str, Any], *args: Any, **named: Any) -> RayPending[Any]:
        activity, remote = WORK.begin("call", self.name, shown_name(method)), self.handle.call
        if self.target.asynchronous and method not in self.target.bulk_methods:
            options = options | {"concurrency_group": CONTROL}
        references = (remote.options(**options) if options else remote).remote(method, *args, **named)
        one, *rest = references if "num_returns" in options else (references,)
        return self._pending(method, one, activity, tuple(rest) or None)

    def _control(self, method: Any) -> Any:
        """Return the host's method in the concurrency group of all calls but those of bulk methods."""
        return method.options(concurrency_group=CONTROL) if self.target.asynchronous else method

    def _pending(
        self, method: str, reference: Any, activity: Activity | None = None, kept: tuple[Any, ...] | None = None
    ) -> RayPending[Any]:
        return RayPending(f"{self.name}.{method}", reference, self.log, activity, self.address, kept)

    def stop(self) -> None:
        """Leave it to the process that has started it."""


class RayActor(RayHandle[Object]):
    """An object in a Ray process; what it prints goes to `log`."""

    def __init__(self, name: str, target: "Target[Object]", args: Sequence[Any], spot: Placement, log: Path) -> None:
        super().__init__(name, target, None, log, spot.address)
        self.args, self.placement, self.begun = args, spot, time.time()
        self.begin()

    def begin(self) -> None:
        """Start the process, or replace it if it is gone."""
        remote: Any = ray.remote  # whose types know no concurrency groups
        options = self.placement.options()
        if self.target.asynchronous:
            host = remote(concurrency_groups={CONTROL: CONTROL_CALLS})(AsyncActorHost)
            options["max_concurrency"] = CONCURRENT_CALLS
        else:
            host = remote(ActorHost)
        self.handle = host.options(**options).remote(str(self.log))
        # The location is known before the object is made, which takes long. Neither may queue behind bulk calls.
        self.location_ref = self._control(self.handle.location).remote()
        self._control(self.handle.make).remote(self.target.path, self.args)

    def for_others(self) -> RayHandle[Object]:
        """Return a handle of the present process, for other processes of the run."""
        target: Target[Object] = Target(self.target.path, self.target.asynchronous, self.target.bulk_methods)
        return RayHandle(self.name, target, self.handle, self.log, self.address)

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL, which ends stopped ones as well."""
        handle, location_ref = self.handle, self.location_ref  # `begin` may replace them meanwhile
        with suppress(RayError):  # it died or was stopped before it reported its location, or its node is gone
            location: Location = ray.get(location_ref, timeout=LOCATION_SECONDS)
            if location.node == ray.get_runtime_context().get_node_id():
                kill_family(location.pid)
            else:
                there = NodeAffinitySchedulingStrategy(location.node, soft=False)
                ray.get(ray.remote(kill_family).options(scheduling_strategy=there, num_cpus=0).remote(location.pid))
        ray.kill(handle)

    def ping(self) -> Pending[None]:
        """Check that a process with coroutines responds."""
        return self._pending("ping", self._control(self.handle.ping).remote())

    def has_lost_node(self) -> bool:
        return is_node_lost(self.address)

    def location(self) -> Pending[Location]:
        return self._pending("location", self.location_ref)

    def milestones(self) -> Pending[Milestones]:
        """Return the parts of the start of the process."""
        return self._pending("milestones", self._control(self.handle.milestones).remote())

    def stop(self) -> None:
        ray.kill(self.handle)
        self.log.with_suffix(BEAT).unlink(missing_ok=True)


def no_environment(gpus: int) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Target(Generic[Object]):
    path: str
    asynchronous: bool = False  # its methods are coroutines
    bulk_methods: tuple[str, ...] = ()  # have thousands of calls in progress; others do not queue behind them
    environment: Callable[[int], dict[str, str]] = no_environment  # by the number of GPUs


def is_node_lost(address: str) -> bool:
    return bool(address) and not any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes())


def kill_family(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def wait_all(pendings: Sequence[Pending[Result]], timeout_seconds: float) -> list[Result]:
    """Return all results in order; raise the first failure at once, without waiting for the other calls."""
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
    """Put a value into the object store once for several actors; Ray passes them the value itself."""
    shared: Any = ray.put(value) if ray.is_initialized() else value
    return shared
