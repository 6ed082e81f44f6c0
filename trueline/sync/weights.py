"""Weights from the trainer to every engine, with proof of arrival."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import torch

from trueline.config.rl import SyncConfig
from trueline.data.types import Sample
from trueline.rollout.pool import EnginePool
from trueline.rollout.rollouts import EventLoop
from trueline.runtime.actors import wait_all
from trueline.runtime.transport import Bucket, plan_buckets
from trueline.training.group import ModelGroup


class SyncFailure(RuntimeError):
    """An engine does not hold the weights that were sent."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Tokens that trainer and engines both score after an update, and how far apart they may be."""

    tokens: list[int]
    tolerance: float


class WeightSync:
    """Publishes a version: pause, send, compare checksums, compare log-probs, resume."""

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
        specs = policy.call("weight_specs", dtype)[0]
        self.bytes = sum(spec.nbytes() for spec in specs)
        self.buckets: list[Bucket] = plan_buckets(specs, config.bucket_mib * 2**20)
        if not in_process:
            self._connect()

    def _connect(self) -> None:
        address = self.policy.actors[0].submit("listen").result(self.policy.timeout_seconds)
        sizes = self._engines("processes")
        world = 1 + sum(sizes)
        firsts = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        seconds = self.policy.timeout_seconds
        ranks = [actor.submit("connect", address, world, seconds) for actor in self.policy.actors]
        self.loop.run(self._connect_engines(address, firsts, world), "connecting engines to the trainer")
        wait_all(ranks, seconds)

    async def _connect_engines(self, address: tuple[str, int], firsts: list[int], world: int) -> None:
        seconds = self.policy.timeout_seconds
        pairs = zip(self.pool.actors, firsts, strict=True)
        await asyncio.gather(*(actor.call("connect", address, first, world, seconds) for actor, first in pairs))

    def publish(self, version: int) -> dict[str, float]:
        """Make the trainer's weights live in every engine."""
        start = time.perf_counter()
        self._engines("pause")
        if self.in_process:
            self._engines("load", self.policy.call("copy_weights")[0], version)
        else:
            self._broadcast(version)
        seconds = time.perf_counter() - start
        self._engines("resume")
        return {"sync/seconds": seconds, "sync/gb_per_second": self.bytes / 1e9 / seconds, "sync/version": version}

    def verify(self) -> dict[str, float]:
        """Trainer and engines score the same tokens. Needs engines that are fully awake."""
        if not self.check:
            return {}
        gap = self._canary_gap()
        if not gap <= self.canary.tolerance:
            raise SyncFailure(
                f"after the update an engine's log-probs differ from the trainer's by {gap:.3g} on average, more than "
                f"{self.canary.tolerance:g} (sync.tolerance): it does not compute with the weights that were sent"
            )
        return {"sync/canary_gap": gap}

    def _broadcast(self, version: int) -> None:
        calls = [actor.submit("send_weights", self.buckets) for actor in self.policy.actors]
        received = self._engines("receive", self.buckets, version)
        sent = wait_all(calls, self.policy.timeout_seconds)[0]
        for engine, processes in enumerate(received):
            for process, sums in enumerate(processes):
                if list(sums) != sent:
                    raise SyncFailure(f"process {process} of engine {engine} received other bytes than were sent")

    def _canary_gap(self) -> float:
        tokens = torch.tensor(self.canary.tokens)
        sample = Sample(tokens, torch.arange(len(tokens)) > 0)
        ours = self.policy.score([sample], temperature=1.0)[0][1:]
        theirs = self._engines("score", self.canary.tokens)
        return max((ours - torch.tensor(scores)).abs().mean().item() for scores in theirs)

    def _engines(self, method: str, *args: Any) -> list[Any]:
        return self.loop.run(self.pool.call(method, *args), f"{method} on {len(self.pool.actors)} engines")
