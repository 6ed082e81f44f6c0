"""Send the trainer's weights to every engine, and prove that they arrived."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from trueline.config.rl import SyncConfig
from trueline.data.pictures import Shown
from trueline.data.types import Sample
from trueline.monitoring.findings import WATCH, Finding
from trueline.rollout.engine import PROOFS, Received, RolloutEngine
from trueline.rollout.pool import SILENCE, EnginePool
from trueline.runtime.actors import AsyncMethod, Given, Pending, Result, wait_all
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.fingerprints import LiveSums, total_sums
from trueline.runtime.transport import Bucket, Link, SharedMemory, bucket_bytes, plan_buckets
from trueline.sync.proof import EngineProof, Sums, SyncFailure
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker

Sent = TypeVar("Sent")
Taken = TypeVar("Taken")
GAP_FACTOR = 4.0  # the gap after an update may be this many times the gap at the start
MIN_BROADCAST_SECONDS = 30.0  # lower bound of the timeout
WORDS = {  # what each proof of an engine shows
    "holdings": "that it holds the checkpoint's bits at the start",
    "bit_sums": "the sum of its bits after updates",
    "cached_tokens": "that its prefix cache is emptied",
    "score": "that its log-probs are the trainer's",
}
STRANGE = 0.01  # nats per token: more is no rounding where both compute in float32


@dataclass(frozen=True, slots=True)
class Canary:
    """Tokens that trainer and engines both score, and how much their log-probs may differ."""

    tokens: list[int]
    least: float  # a mean gap up to this is rounding in any model
    tolerance: float | None = None  # the user's own limit
    strange: float = math.inf  # a larger gap is no rounding, even at the start
    shown: Shown | None = None  # the pictures that they stand for
    text: list[int] = field(default_factory=list)  # those behind the last picture, which can be computed without it

    def block(self) -> list[int]:
        """Return what a block of the prefix cache is made of."""
        return self.text or self.tokens


@dataclass(frozen=True, slots=True)
class SyncPlan:
    dtype: str
    transport: str  # "local" within one process, or that of a transport.Link
    differs: str = ""  # why the trainer's weights differ from the checkpoint; empty: they are the same bits
    adapter_only: bool = False  # only adapters are sent
    on_update: str = "wait"  # rollout.on_update, for in-flight completions
    nodes: tuple[int, ...] = ()  # of the sending rank and of each engine; empty: one node
    or_gloo: bool = False  # use gloo if NCCL cannot form a group
    proofs: tuple[str, ...] = PROOFS  # that the engines have

    def crossings(self) -> int:
        return 0 if self.transport in ("local", "ipc") else max(len(set(self.nodes)) - 1, 0)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens that the trainer has begun to score."""

    tokens: list[int]
    where: Tensor  # of tokens[1:], those that count
    shown: Shown | None
    wait: Callable[[], list[Tensor]]


class WeightSync:
    """Publish a policy version: pause engines, send weights, prove their arrival, resume, compare log-probs."""

    floor = 0.0  # the gap at the start
    remark = ""  # why another transport is used
    is_paused = False  # engines hold an update that is not proven yet
    scoring: Scoring | None = None  # of the canary, by the trainer with the weights of this update

    def __init__(
        self, policy: ModelGroup, pool: EnginePool, loop: EventLoop, config: SyncConfig, canary: Canary, plan: SyncPlan
    ) -> None:
        self.policy, self.pool, self.loop = policy, pool, loop
        self.canary, self.check, self.plan, self.transport = canary, config.check, plan, plan.transport
        specs = policy.call(Worker.weight_specs, plan.dtype)[0]
        self.bytes = sum(spec.nbytes() for spec in specs)
        self.buckets: list[Bucket] = plan_buckets(specs, config.bucket_mib * 2**20)
        self.told: set[str] = set()  # remarks of engines
        self.proof: EngineProof | None = None  # known after `verify_initial_sync`
        if self.transport != "local":
            self._connect()

    def _connect(self) -> None:
        """Connect ranks and engines; use gloo if NCCL cannot, unless the user chose NCCL."""
        reason = self._join()
        if reason and not self.plan.or_gloo:
            raise SyncFailure(f"sync.transport=nccl: {reason}; set sync.transport=auto or gloo")
        if reason:
            self.transport, self.remark = "gloo", f"; weights are sent over gloo, because {reason}"
            self._join()

    def _join(self) -> str:
        """Connect the sending ranks and all engines; return why NCCL cannot, or nothing."""
        seconds, policy = self.policy.timeout_seconds, self.policy
        shared: dict[str, list[SharedMemory]] = {}
        if self.transport == "ipc":
            for handles in policy.call(Worker.share_memory, max(map(bucket_bytes, self.buckets))):
                shared |= handles
        address = policy.actors[0].submit(Worker.listen).result(seconds)
        sizes, senders = self._engines(RolloutEngine.processes), len(policy.actors) if shared else 1
        timeout = min(max(seconds / SILENCE, MIN_BROADCAST_SECONDS), seconds)  # a stopped member blocks all others
        one_node = shared or not self.plan.nodes  # with shared memory, the group is only a barrier
        sender, *engines = (0,) * (1 + len(sizes)) if one_node else self.plan.nodes
        nodes = [sender] * senders + [node for node, size in zip(engines, sizes, strict=True) for _ in range(size)]
        link = Link(address, tuple(nodes), timeout, self.transport, shared)
        firsts = [senders + sum(sizes[:number]) for number in range(len(sizes))]
        placed = zip(self.pool.actors, firsts, strict=True)
        ranks, engine_processes = self._both(
            [actor.submit(Worker.connect, link).async_result() for actor in policy.actors],
            [actor.call(RolloutEngine.connect, link, first) for actor, first in placed],
            "connecting engines to the trainer",
        )
        return next(filter(None, [*ranks, *engine_processes]), "")

    def _both(
        self, ranks: list[Awaitable[Sent]], engines: list[Awaitable[Taken]], what: str
    ) -> tuple[list[Sent], list[Taken]]:
        """Wait for both sides; raise the first failure at once, while its peers still wait for it."""

        async def wait() -> tuple[list[Sent], list[Taken]]:
            sent, received = await asyncio.gather(asyncio.gather(*ranks), asyncio.gather(*engines))
            return list(sent), list(received)

        return self.loop.run(wait(), what)

    def has_lost_engines(self) -> bool:
        return self.loop.run(self.pool.abandon_update(self.policy.timeout_seconds / SILENCE), "pinging engines")

    def restart_engines(self) -> None:
        """Restart lost engines; the next `publish` sends to all engines."""
        self.loop.run(self.pool.restart(self.policy.timeout_seconds), "restarting engines", bounded=False)
        if self.transport != "local" and not self.pool.missing():
            self._connect()

    def readmit_engines(self) -> None:
        """Send requests to restarted engines again, now that they hold the newest weights."""
        self.loop.run(self.pool.readmit(), "readmitting engines")

    def verify_initial_sync(self) -> str:
        """Prove that sent weights arrive, while trainer and engines hold the same checkpoint; describe the result.

        Engines loaded the checkpoint themselves: after noise and a transfer they must hold the same bits again.
        The log-prob gap on the same weights sets the limit for later gaps.
        """
        if not self.check:
            return f"not verified (sync.check=false){self.remark}"
        limits = [f"not {WORDS[name]}, which the engine cannot show" for name in PROOFS if not self.has_proof(name)]
        if self.has_proof("holdings"):
            limits += self._attest()
        else:
            self.publish(0)
        self.floor = self._look()
        if not self.has_proof("score"):
            return "; ".join(["verified", *limits]) + self.remark
        limit = self.canary.tolerance or self.canary.strange
        if not self.floor <= limit:
            raise SyncFailure(
                f"engines and trainer loaded the same checkpoint, yet their log-probs differ by {self.floor:.3g} on "
                f"average, more than {limit:g}: they compute this model differently. Try rollout.engine=hf, or set "
                "another limit with sync.tolerance"
            )
        gap = f"largest log-prob gap {self.floor:.2g} (limit {self.limit():.2g})"
        return "; ".join(["verified", gap, *limits]) + self.remark

    def has_proof(self, name: str) -> bool:
        return self.check and name in self.plan.proofs

    def _attest(self) -> list[str]:
        """Publish for the first time, and prove it by the bits that engines hold; return what that does not cover."""
        proof = EngineProof(self._engines(RolloutEngine.holdings), self.plan.adapter_only)
        self.proof = None
        same = not self.plan.differs and not self.plan.adapter_only
        if same:
            self._engines(RolloutEngine.scramble)
        if not self.plan.adapter_only and any(len(processes) > 1 for processes in proof.own):
            self._engines(RolloutEngine.load_noise, self.buckets)
            proof.find_split_weights(self._engines(RolloutEngine.holdings))
        self.publish(0)
        if same:
            proof.check_same(self._engines(RolloutEngine.holdings))
        if self.has_proof("bit_sums"):
            proof.start(*self._bits())
            self.proof = proof
        return proof.limits(self.plan.differs)

    def _bits(self) -> tuple[LiveSums, Sums]:
        """Return the bit sums of the trainer's weights, and of those of every engine process."""
        adding = self._add_up()
        held = self._engines(RolloutEngine.bit_sums, self.plan.dtype)
        return total_sums(wait_all(adding, self.policy.timeout_seconds)), held

    def _add_up(self) -> list[Pending[LiveSums]]:
        """Let every rank begin to add up what it holds itself, whatever is sent; frozen weights are added up once."""
        base = self.proof is None or not self.plan.adapter_only
        return [actor.submit(Worker.weight_bits, self.plan.dtype, base) for actor in self.policy.actors]

    def limit(self) -> float:
        return self.canary.tolerance or max(self.canary.least, GAP_FACTOR * self.floor)

    def publish(self, version: int) -> dict[str, float]:
        """Load the trainer's weights into every engine; engines stay paused until `verify`."""
        start, adding = time.perf_counter(), [] if self.proof is None else self._add_up()
        filled = self.canary.block() if self.has_proof("cached_tokens") else []
        self._engines(RolloutEngine.halt, self.plan.on_update, filled)
        self.is_paused = True
        found = self._load(version) if self.transport == "local" else self._send(version)
        if self.proof is not None:
            live = total_sums(wait_all(adding, self.policy.timeout_seconds))
            self.proof.check_sum(live, [one.sums for one in found])
        speed = self.bytes / 1e9 / max(one.seconds for one in found)
        wire, seconds = self.bytes / 1e9 * self.plan.crossings(), time.perf_counter() - start
        return {"sync/seconds": seconds, "sync/gb_per_second": speed, "sync/wire_gb": wire, "sync/version": version}

    def _load(self, version: int) -> list[Received]:
        """Load weights into engines of this process."""
        begun = time.perf_counter()
        self._engines(RolloutEngine.load, self.policy.call(Worker.copy_weights)[0], version)
        seconds = time.perf_counter() - begun
        nothing: Sums = [[] for _ in self.pool.actors]
        sums = nothing if self.proof is None else self._engines(RolloutEngine.bit_sums, self.plan.dtype)
        return [Received([], one, seconds) for one in sums]

    def _send(self, version: int) -> list[Received]:
        """Send weights to all engines, which add up what they hold then; refuse other bytes than were sent."""
        given = (self.buckets, version, self.plan.dtype if self.proof is not None else "")
        sending = [actor.submit(Worker.send_weights, self.buckets) for actor in self.policy.actors]
        if self.has_proof("score"):  # every rank does that next, while engines still load
            self.scoring = self._begin_score(self.canary.tokens, shown=self.canary.shown)
        sent, received = self._both(
            [one.async_result() for one in sending],
            [actor.call(RolloutEngine.take, *given) for actor in self.pool.actors],
            "sending weights to the engines",
        )
        for engine, found in enumerate(received):
            for process, prints in enumerate(found.prints):
                if wrong := [at for at, (one, other) in enumerate(zip(prints, sent[0], strict=True)) if one != other]:
                    names = [spec.name for spec in self.buckets[wrong[0]]]
                    raise SyncFailure(
                        f"process {process} of engine {engine} received other weights than the trainer's (among "
                        f"{names[0]} to {names[-1]})"
                    )
        self._tell(found.remark for found in received)
        return received

    def _tell(self, remarks: Iterable[str]) -> None:
        """Report each remark of an engine once."""
        for remark in dict.fromkeys(filter(None, remarks)):
            if remark not in self.told:
                self.told.add(remark)
                key = "rollout.lean_logprobs"
                self.policy.report(Finding(WATCH, "plain_logprobs", remark, f"set {key}=false", key))

    def verify(self) -> dict[str, float]:
        """Check and resume engines, which must be fully awake, and compare their log-probs with the trainer's."""
        gap = self._look()
        if not gap <= self.limit():
            raise SyncFailure(
                f"after the update an engine's log-probs differ from the trainer's by {gap:.3g} on average, more than "
                f"{self.limit():.3g} ({self.floor:.3g} at the start; sync.tolerance): it does not compute with the "
                "weights that were sent"
            )
        return {"sync/canary_gap": gap, "sync/canary_floor": self.floor} if self.has_proof("score") else {}

    def _look(self) -> float:
        """Check that paused engines emptied their prefix caches, resume them, and return the gap on the canary."""
        canary, gap, taken = self.canary, 0.0, list[int]()
        block = canary.block() if self.is_paused and self.has_proof("cached_tokens") else []
        if self.has_proof("score"):
            scoring, self.scoring = self.scoring or self._begin_score(canary.tokens, shown=canary.shown), None
            taken, gap = self._compare(scoring, block)
        elif block:
            taken = self._engines(RolloutEngine.cached_tokens, block)
        if any(taken):
            engine = next(at for at, count in enumerate(taken) if count)
            raise SyncFailure(
                f"after the update engine {engine} takes {taken[engine]} tokens of a prompt from its prefix cache, "
                "which the old weights filled: it was not emptied"
            )
        if self.is_paused:
            self._engines(RolloutEngine.resume)
            self.is_paused = False
        return gap

    def gap(self, tokens: list[int], counted: list[bool] | None = None) -> float:
        """Return the largest gap of an engine: the mean absolute difference of its log-probs and the trainer's.

        The mean is over the `counted` tokens, or over all but the first.
        """
        return self._compare(self._begin_score(tokens, counted))[1]

    def _begin_score(self, tokens: list[int], counted: list[bool] | None = None, shown: Shown | None = None) -> Scoring:
        mask = torch.arange(len(tokens)) > 0
        sample = Sample(torch.tensor(tokens), mask if counted is None else mask & torch.tensor(counted))
        sample.pictures = shown.pictures if shown else ()
        work = asyncio.to_thread(self.policy.score, [sample], temperature=1.0)
        return Scoring(tokens, sample.mask[1:], shown, self.loop.begin(work, "scoring by the trainer"))

    def _compare(self, scoring: Scoring, block: Sequence[int] = ()) -> tuple[list[int], float]:
        """Return how many tokens of a block each engine takes from its cache, if there is one, and the largest gap."""
        if self.transport == "local":
            scoring.wait()  # models of one process share the state of a forward pass
        shown = self._engines(RolloutEngine.show, scoring.tokens, list(block), scoring.shown)
        ours = scoring.wait()[0][1:]
        gaps = [(ours - torch.tensor(scores))[scoring.where].abs().mean() for _, scores in shown]
        return [taken for taken, _ in shown], torch.stack(gaps).max().item()  # NaN too

    def _engines(
        self, method: AsyncMethod[RolloutEngine, Given, Result], *args: Given.args, **named: Given.kwargs
    ) -> list[Result]:
        what = f"{method.__name__} on {len(self.pool.actors)} engines"
        return self.loop.run(self.pool.call(method, *args, **named), what)
