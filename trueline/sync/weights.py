"""Weights from the trainer to every engine, with proof of arrival."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, TypeVar

import torch

from trueline.config.rl import SyncConfig
from trueline.data.types import Sample
from trueline.rollout.engine import RolloutEngine
from trueline.rollout.pool import SILENCE, EnginePool
from trueline.runtime.actors import Given, Result
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.transport import Bucket, Link, SharedMemory, bucket_bytes, plan_buckets
from trueline.sync.proof import EngineProof, LiveSums, Sums, SyncFailure
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker

Sent = TypeVar("Sent")
Got = TypeVar("Got")
NOISE = 4.0  # how many times their gap on the same weights trainer and engines may be apart after an update
LEAST_SECONDS = 30.0  # that a broadcast may take
STRANGE = 0.01  # nats a token that are no rounding where both compute in float32


@dataclass(frozen=True, slots=True)
class Canary:
    """Tokens that trainer and engines both score, and how far apart they may be."""

    tokens: list[int]
    least: float  # a mean gap up to this is rounding in any model
    tolerance: float | None = None  # the user's own limit
    strange: float = math.inf  # more than this is no rounding even on the same weights


@dataclass(frozen=True, slots=True)
class Way:
    """In which form weights travel, by what, and why the trainer's may not be the checkpoint's bit for bit."""

    dtype: str
    transport: str  # "local" within one process, or that of a transport.Link
    differs: str = ""  # empty: they are the same
    apart: bool = False  # adapters alone are sent
    on_update: str = "wait"  # what becomes of completions under way
    nodes: tuple[int, ...] = ()  # of the rank that sends and of each engine; empty: one
    or_gloo: bool = False  # where NCCL cannot form a group

    def crossings(self) -> int:
        """Return how often the weights go from node to node; within a process or a GPU they never do."""
        return 0 if self.transport in ("local", "ipc") else max(len(set(self.nodes)) - 1, 0)


class WeightSync:
    """Publish a policy version: pause, send, prove that it is held, resume, compare log-probs."""

    floor = 0.0  # the gap on the same weights
    remark = ""  # on the transport, where it is not the one that was meant
    held = False  # engines are paused, with an update that is not proven yet

    def __init__(
        self, policy: ModelGroup, pool: EnginePool, loop: EventLoop, config: SyncConfig, canary: Canary, way: Way
    ) -> None:
        self.policy, self.pool, self.loop = policy, pool, loop
        self.canary, self.check, self.way, self.transport = canary, config.check, way, way.transport
        specs = policy.call(Worker.weight_specs, way.dtype)[0]
        self.bytes = sum(spec.nbytes() for spec in specs)
        self.buckets: list[Bucket] = plan_buckets(specs, config.bucket_mib * 2**20)
        self.proof: EngineProof | None = None  # of what engines hold; it is known after `attest`
        if self.transport != "local":
            self._connect()

    def _connect(self) -> None:
        """Make a group of all that are there now, over gloo where NCCL cannot and nobody asked for it."""
        reason = self._join()
        if reason and not self.way.or_gloo:
            raise SyncFailure(f"sync.transport=nccl: {reason}; set sync.transport=auto or gloo")
        if reason:
            self.transport, self.remark = "gloo", f"; weights go through the machine's memory (gloo), as {reason}"
            self._join()

    def _join(self) -> str:
        """Make a group of the ranks that send and all engines; return why NCCL cannot, or nothing."""
        seconds, policy = self.policy.timeout_seconds, self.policy
        shared: dict[str, list[SharedMemory]] = {}
        if self.transport == "ipc":
            for handles in policy.call(Worker.share_memory, max(map(bucket_bytes, self.buckets))):
                shared |= handles
        address = policy.actors[0].submit(Worker.listen).result(seconds)
        sizes, senders = self._engines(RolloutEngine.processes), len(policy.actors) if shared else 1
        patience = min(max(seconds / SILENCE, LEAST_SECONDS), seconds)  # a member that is stopped blocks all others
        sender, *engines = self.way.nodes or (0,) * (1 + len(sizes))
        nodes = [sender] * senders + [node for node, size in zip(engines, sizes, strict=True) for _ in range(size)]
        if shared:  # what travels between processes there says only when
            nodes = [0] * len(nodes)
        link = Link(address, tuple(nodes), patience, self.transport, shared)
        firsts = [senders + sum(sizes[:number]) for number in range(len(sizes))]
        ranks, engine_processes = self._both(
            [actor.submit(Worker.connect, link).awaited() for actor in policy.actors],
            [
                actor.call(RolloutEngine.connect, link, first)
                for actor, first in zip(self.pool.actors, firsts, strict=True)
            ],
            "connecting engines to the trainer",
        )
        return next(filter(None, [*ranks, *engine_processes]), "")

    def _both(
        self, ranks: list[Awaitable[Sent]], engines: list[Awaitable[Got]], what: str
    ) -> tuple[list[Sent], list[Got]]:
        """Wait for both sides; the first failure of either is raised at once, while its peers still wait for it."""

        async def all_of_them() -> tuple[list[Sent], list[Got]]:
            sent, got = await asyncio.gather(asyncio.gather(*ranks), asyncio.gather(*engines))
            return list(sent), list(got)

        return self.loop.run(all_of_them(), what)

    def lost_engines(self) -> bool:
        return self.loop.run(self.pool.seek(self.policy.timeout_seconds / SILENCE), "looking for engines")

    def renew(self) -> None:
        """Start engines that are gone again, in their places; the next `publish` sends to them as to all."""
        patience = self.policy.timeout_seconds
        self.loop.run(self.pool.renew(patience), "starting engines again", bounded=False)
        if self.transport != "local" and not self.pool.gone():
            self._connect()

    def found(self) -> None:
        """Let requests go to engines that were started again, once they hold the newest weights."""
        self.loop.run(self.pool.found(), "asking engines again")

    def attest(self) -> str:
        """Prove, while trainer and engines were started from one checkpoint, that what is sent arrives in its place.

        Engines have loaded the checkpoint themselves: after noise and a transfer they must hold the same bits again.
        The gap of log-probs on the same weights sets the limit for later gaps.
        """
        if not self.check:
            return f"no comparison of engines and trainer (sync.check=false){self.remark}"
        proof = EngineProof(self._engines(RolloutEngine.holdings), self.way.apart)
        self.proof = None
        same = not self.way.differs and not self.way.apart
        if same:
            self._engines(RolloutEngine.scramble)
        if not self.way.apart and any(len(processes) > 1 for processes in proof.own):
            self._engines(RolloutEngine.load_noise, self.buckets)
            proof.tell_cut(self._engines(RolloutEngine.holdings))
        self.publish(0)
        if same:
            proof.check_same(self._engines(RolloutEngine.holdings))
        proof.start(*self._bits())
        self.proof = proof
        self._resume()
        return f"{proof.describe(self.way.differs)}; {self._calibrate()}{self.remark}"

    def _bits(self) -> tuple[LiveSums, Sums]:
        """Return the bit sums of the trainer's weights, and of what every process of every engine holds."""
        dtype = self.way.dtype
        live, held = self._both(
            [actor.submit(Worker.weight_bits, dtype).awaited() for actor in self.policy.actors],
            [actor.call(RolloutEngine.bit_sums, dtype) for actor in self.pool.actors],
            "adding up weights",
        )
        return live[0], held

    def _calibrate(self) -> str:
        self.floor = self.gap(self.canary.tokens)
        limit = self.canary.tolerance or self.canary.strange
        if not self.floor <= limit:
            raise SyncFailure(
                f"engines and trainer were started from the same checkpoint, yet their log-probs differ by "
                f"{self.floor:.3g} on average, more than {limit:g}: this model is not computed alike by both. See "
                "whether rollout.engine=hf agrees with the trainer; sync.tolerance sets another limit"
            )
        return (
            f"log-probs differ by {self.floor:.2g} nats a token on the same weights, and more than {self.limit():.2g} "
            "after an update stops the run"
        )

    def limit(self) -> float:
        return self.canary.tolerance or max(self.canary.least, NOISE * self.floor)

    def publish(self, version: int) -> dict[str, float]:
        """Make the trainer's weights live in every engine, all of which wait then for `verify`."""
        start = time.perf_counter()
        self._engines(RolloutEngine.pause, self.way.on_update)
        self.held = True
        if self.check:
            self._engines(RolloutEngine.cached, self.canary.tokens)  # so that a cache that stays is seen to answer
        begun = time.perf_counter()
        if self.transport == "local":
            self._engines(RolloutEngine.load, self.policy.call(Worker.copy_weights)[0], version)
        else:
            self._send(version)
        sent = time.perf_counter() - begun
        if self.proof is not None:
            self.proof.check_sum(*self._bits())
        seconds = time.perf_counter() - start
        speed = self.bytes / 1e9 / sent
        wire = self.bytes / 1e9 * self.way.crossings()
        return {"sync/seconds": seconds, "sync/gb_per_second": speed, "sync/wire_gb": wire, "sync/version": version}

    def _resume(self) -> None:
        """Let engines go on that do not answer from what old weights cached; once they go on, new weights have."""
        for engine, tokens in enumerate(self._engines(RolloutEngine.cached, self.canary.tokens) if self.check else ()):
            if tokens:
                raise SyncFailure(
                    f"after the update engine {engine} answers {tokens} tokens of a prompt from its prefix cache, "
                    "which the old weights filled: it was not emptied"
                )
        self._engines(RolloutEngine.resume)
        self.held = False

    def verify(self) -> dict[str, float]:
        """Let engines, which must be fully awake, go on, and compare their log-probs with the trainer's."""
        if self.held:
            self._resume()
        if not self.check:
            return {}
        gap = self.gap(self.canary.tokens)
        if not gap <= self.limit():
            raise SyncFailure(
                f"after the update an engine's log-probs differ from the trainer's by {gap:.3g} on average, more than "
                f"{self.limit():.3g} ({self.floor:.3g} while both held the same checkpoint; sync.tolerance): it does "
                "not compute with the weights that were sent"
            )
        return {"sync/canary_gap": gap, "sync/canary_floor": self.floor}

    def _send(self, version: int) -> None:
        sent, received = self._both(
            [actor.submit(Worker.send_weights, self.buckets).awaited() for actor in self.policy.actors],
            [actor.call(RolloutEngine.receive, self.buckets, version) for actor in self.pool.actors],
            "sending weights to the engines",
        )
        for engine, processes in enumerate(received):
            for process, prints in enumerate(processes):
                wrong = [at for at, (one, other) in enumerate(zip(prints, sent[0], strict=True)) if one != other]
                if wrong:
                    names = [spec.name for spec in self.buckets[wrong[0]]]
                    raise SyncFailure(
                        f"process {process} of engine {engine} received other weights than the trainer's (among "
                        f"{names[0]} to {names[-1]})"
                    )

    def gap(self, tokens: list[int], counted: list[bool] | None = None) -> float:
        """Return how far the log-probs of trainer and engines are apart, under the weights of now.

        The mean is over the `counted` ones of these tokens, or over all but the first.
        """
        mask = torch.arange(len(tokens)) > 0
        sample = Sample(torch.tensor(tokens), mask if counted is None else mask & torch.tensor(counted))
        ours, where = self.policy.score([sample], temperature=1.0)[0][1:], sample.mask[1:]
        theirs = [torch.tensor(scores) for scores in self._engines(RolloutEngine.score, tokens)]
        return torch.stack([(ours - scores)[where].abs().mean() for scores in theirs]).max().item()  # NaN too

    def _engines(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> list[Result]:
        what = f"{method.__name__} on {len(self.pool.actors)} engines"
        return self.loop.run(self.pool.call(method, *args, **named), what)
