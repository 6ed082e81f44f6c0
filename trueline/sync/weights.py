"""Weights from the trainer to every engine, with proof of arrival."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, TypeVar

import torch

from trueline.config.rl import SyncConfig
from trueline.data.types import Sample
from trueline.rollout.engine import RolloutEngine
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import Given, Result
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.transport import Bucket, plan_buckets
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker


class SyncFailure(RuntimeError):
    """An engine does not hold the weights that were sent."""


Sent = TypeVar("Sent")
Got = TypeVar("Got")
NOISE = 4.0  # how many times their gap on the same weights trainer and engines may be apart after an update
STRANGE = 10.0  # how many times `Canary.least` they may be apart on the same weights


@dataclass(frozen=True, slots=True)
class Canary:
    """Tokens that trainer and engines both score, and how far apart they may be."""

    tokens: list[int]
    least: float  # a mean gap up to this is rounding in any model
    tolerance: float | None = None  # the user's own limit


class WeightSync:
    """Publish a policy version: pause, send, compare checksums, resume, compare log-probs."""

    floor = 0.0  # the gap on the same weights

    def __init__(
        self,
        policy: ModelGroup,
        pool: EnginePool,
        loop: EventLoop,
        config: SyncConfig,
        canary: Canary,
        dtype: str,
        in_process: bool,
    ) -> None:
        self.policy, self.pool, self.loop = policy, pool, loop
        self.canary, self.check, self.in_process = canary, config.check, in_process
        specs = policy.call(Worker.weight_specs, dtype)[0]
        self.bytes = sum(spec.nbytes() for spec in specs)
        self.buckets: list[Bucket] = plan_buckets(specs, config.bucket_mib * 2**20)
        if not in_process:
            self._connect()

    def _connect(self) -> None:
        address = self.policy.actors[0].submit(Worker.listen).result(self.policy.timeout_seconds)
        sizes = self._engines(RolloutEngine.processes)
        world, seconds = 1 + sum(sizes), self.policy.timeout_seconds
        firsts = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        self._both(
            [actor.submit(Worker.connect, address, world, seconds).awaited() for actor in self.policy.actors],
            [
                actor.call(RolloutEngine.connect, address, first, world, seconds)
                for actor, first in zip(self.pool.actors, firsts, strict=True)
            ],
            "connecting engines to the trainer",
        )

    def _both(
        self, ranks: list[Awaitable[Sent]], engines: list[Awaitable[Got]], what: str
    ) -> tuple[list[Sent], list[Got]]:
        """Wait for both sides; the first failure of either is raised at once, while its peers still wait for it."""

        async def all_of_them() -> tuple[list[Sent], list[Got]]:
            sent, got = await asyncio.gather(asyncio.gather(*ranks), asyncio.gather(*engines))
            return list(sent), list(got)

        return self.loop.run(all_of_them(), what)

    def calibrate(self) -> str:
        """Measure the gap while trainer and engines hold the same checkpoint; it sets the limit for later gaps."""
        if not self.check:
            return "no comparison of engines and trainer (sync.check=false)"
        self.floor = self._canary_gap()
        limit = self.canary.tolerance or STRANGE * self.canary.least
        if not self.floor <= limit:
            raise SyncFailure(
                f"engines and trainer were started from the same checkpoint, yet their log-probs differ by "
                f"{self.floor:.3g} on average, more than {limit:g}: this model is not computed alike by both. See "
                "whether rollout.engine=hf agrees with the trainer; sync.tolerance sets another limit"
            )
        return (
            f"engines and trainer differ by {self.floor:.2g} nats a token on the same weights; after an update, more "
            f"than {self.limit():.2g} stops the run"
        )

    def limit(self) -> float:
        return self.canary.tolerance or max(self.canary.least, NOISE * self.floor)

    def publish(self, version: int) -> dict[str, float]:
        """Make the trainer's weights live in every engine."""
        start = time.perf_counter()
        self._engines(RolloutEngine.pause)
        if self.in_process:
            self._engines(RolloutEngine.load, self.policy.call(Worker.copy_weights)[0], version)
        else:
            self._broadcast(version)
        seconds = time.perf_counter() - start
        self._engines(RolloutEngine.resume)
        return {"sync/seconds": seconds, "sync/gb_per_second": self.bytes / 1e9 / seconds, "sync/version": version}

    def verify(self) -> dict[str, float]:
        """Compare the log-probs of trainer and engines, which must be fully awake, on the same tokens."""
        if not self.check:
            return {}
        gap = self._canary_gap()
        if not gap <= self.limit():
            raise SyncFailure(
                f"after the update an engine's log-probs differ from the trainer's by {gap:.3g} on average, more than "
                f"{self.limit():.3g} ({self.floor:.3g} while both held the same checkpoint; sync.tolerance): it does "
                "not compute with the weights that were sent"
            )
        return {"sync/canary_gap": gap, "sync/canary_floor": self.floor}

    def _broadcast(self, version: int) -> None:
        sent, received = self._both(
            [actor.submit(Worker.send_weights, self.buckets).awaited() for actor in self.policy.actors],
            [actor.call(RolloutEngine.receive, self.buckets, version) for actor in self.pool.actors],
            "sending weights to the engines",
        )
        for engine, processes in enumerate(received):
            for process, sums in enumerate(processes):
                if list(sums) != sent[0]:
                    raise SyncFailure(f"process {process} of engine {engine} received other bytes than were sent")

    def _canary_gap(self) -> float:
        tokens = torch.tensor(self.canary.tokens)
        sample = Sample(tokens, torch.arange(len(tokens)) > 0)
        ours = self.policy.score([sample], temperature=1.0)[0][1:]
        theirs = self._engines(RolloutEngine.score, self.canary.tokens)
        return torch.stack([(ours - torch.tensor(scores)).abs().mean() for scores in theirs]).max().item()  # NaN too

    def _engines(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> list[Result]:
        what = f"{method.__name__} on {len(self.pool.actors)} engines"
        return self.loop.run(self.pool.call(method, *args, **named), what)
