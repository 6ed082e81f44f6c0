"""The protocol of rollout engines."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from trueline.data.pictures import Shown
from trueline.data.types import INTERRUPTED, Completion, experts_of
from trueline.environments.base import Structure
from trueline.runtime.actors import Stored
from trueline.runtime.fingerprints import Holding
from trueline.runtime.transport import Bucket, Link

MOST_REMEMBERED = 64 * 2**20  # tokens of sequences that an engine keeps for later turns


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float  # 0 is greedy
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()  # the episode looks for them: engines have no tokenizer
    experts: bool = True  # return the experts of each token, if the engine can; False: nobody trains on them
    structure: Structure | None = None  # of the completion, enforced by the engine


def derive_seed(seed: int | None, *place: int) -> int | None:
    """Return the seed of a place, which does not depend on the order of sampling or on interruptions."""
    return None if seed is None else int(np.random.SeedSequence([seed, *place]).generate_state(1)[0]) >> 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    model: str
    dtype: str
    context: int  # longest prompt and completion together
    tensor_parallel: int
    max_sequences: int
    seed: int
    gpu_memory_utilization: float
    cuda_graphs: bool
    sleeps: bool  # releases its GPU memory between steps
    trust_remote_code: bool
    adapter_rank: int = 0  # of adapters that are sent instead of weights
    cache_bytes: int = 0  # of its KV cache on each GPU; 0: measured by the engine
    experts: bool = False  # it returns the experts of each token
    structured: bool = False  # requests may have a structure, for which it loads the tokenizer
    speculative: bool = False  # guess tokens from repeated text
    lean_logprobs: bool = False  # keep log-probs on the device until a request ends
    pictures: int = 0  # of a sequence, at most


Request = tuple[str, SamplingParams]  # its name, and how it is sampled
Found = dict[int, Completion]  # by the place of its request in the group


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A prompt that continues a sequence: only what the engine does not know of it is sent."""

    sequence: str
    known: int  # tokens of it that still hold
    new: list[int]
    shown: Stored[Shown] | None = None  # its pictures, if the engine does not know them
    added: Shown | None = None  # those of the new tokens, if it knows the others


Generate = Callable[[list[int], SamplingParams, str, Shown | None], Coroutine[Any, Any, Completion]]


class RequestBook:
    """What the process of an engine keeps: groups whose completions are not all collected, and tokens of sequences."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.groups: dict[str, dict[int, asyncio.Task[Completion]]] = {}
        self.sequences: OrderedDict[str, np.ndarray] = OrderedDict()  # the one used last is the last
        self.shown: dict[str, Shown] = {}  # the pictures of these sequences
        self.tokens = 0  # of all sequences, or what takes as much memory

    async def group(self, name: str, tokens: list[int], requests: list[Request], shown: Shown | None) -> Found:
        """Begin the completions of one prompt; return those that are finished once that is half of them."""
        calls = (self.generate(tokens, params, request, shown) for request, params in requests)
        self.groups[name] = {at: asyncio.create_task(call) for at, call in enumerate(calls)}
        return await self.collect(name)

    async def collect(self, name: str) -> Found:
        """Return what is finished of the rest, once that is half of it; a caller that gives up ends all of it."""
        running, found = self.groups[name], Found()
        try:
            waiting = set(running.values())
            while sum(task.done() for task in running.values()) * 2 < len(running):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            found = {at: task.result() for at, task in running.items() if task.done()}
        finally:
            left = {at: task for at, task in running.items() if at not in found}
            self.groups[name] = left
            if not found or not left:
                self.drop(name)
        return found

    def drop(self, name: str) -> None:
        for task in self.groups.pop(name, {}).values():
            task.cancel()

    async def turn(self, prompt: NextTurn, params: SamplingParams, request: str) -> Completion | None:
        """Continue a sequence, or return None if this process does not know it, or no more of it."""
        known = self.sequences.get(prompt.sequence, np.zeros(0, np.int32))
        shown = self.shown.get(prompt.sequence) if prompt.known else None
        # An interrupted turn has left pictures here that the known tokens do not show.
        if len(known) < prompt.known or (shown is not None and shown.length > prompt.known):
            return None
        tokens = np.concatenate([known[: prompt.known], np.array(prompt.new, np.int32)])
        if prompt.shown is not None:
            shown = await asyncio.to_thread(prompt.shown.fetch)
        elif prompt.added is not None:
            shown = prompt.added.behind(shown, known[: prompt.known].tolist())
        completion = await self.generate(tokens.tolist(), params, request, shown)
        self._remember(prompt.sequence, np.concatenate([tokens, completion.tokens.astype(np.int32)]), shown)
        return completion

    def _remember(self, sequence: str, tokens: np.ndarray, shown: Shown | None) -> None:
        if sequence in self.sequences:
            self._forget(sequence)
        self.sequences[sequence] = tokens
        self.tokens += len(tokens)
        if shown is not None:
            self.shown[sequence] = shown
            self.tokens += shown.tokens()
        while self.tokens > MOST_REMEMBERED and len(self.sequences) > 1:
            self._forget(next(iter(self.sequences)))

    def _forget(self, sequence: str) -> None:
        self.tokens -= len(self.sequences.pop(sequence))
        if (shown := self.shown.pop(sequence, None)) is not None:
            self.tokens -= shown.tokens()


class SamplingEngine(Protocol):
    """An engine that samples. `book` serves its groups and turns by single requests."""

    book: RequestBook

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion: ...

    async def generate_group(
        self, name: str, tokens: list[int], requests: list[Request], shown: Shown | None = None
    ) -> Found:
        """Sample several completions of a prompt: return those that finish first, `collect_group` returns the rest."""
        return await self.book.group(name, tokens, requests, shown)

    async def collect_group(self, name: str) -> Found:
        return await self.book.collect(name)

    async def drop_group(self, name: str) -> None:
        """End what is left of a group that nobody waits for."""
        self.book.drop(name)

    async def generate_turn(self, prompt: NextTurn, params: SamplingParams, request: str) -> Completion | None:
        """Continue a sequence that this engine has sampled, or return None if it has forgotten it."""
        return await self.book.turn(prompt, params, request)

    async def processes(self) -> int:
        """Return how many processes the engine has, once they are ready."""
        return 1


PROOFS = ("holdings", "bit_sums", "cached_tokens", "score")  # methods by which a run proves what an engine holds


class Received(NamedTuple):
    """What an engine tells of an update."""

    prints: list[list[int]]  # of each process, for each bucket
    sums: list[dict[str, int]]  # of each process, by weight, if they were wanted
    seconds: float  # of receiving alone
    remark: str = ""  # the engine's


class WeightSink(Protocol):
    """An engine that takes new weights while it runs. Which of PROOFS it has, its row of the table declares."""

    remark: str = ""  # why log-probs are not kept as rollout.lean_logprobs wants

    async def halt(self, mode: str, tokens: list[int]) -> None:
        """Pause, and cache a block that begins with `tokens`, if there are any: after an update it must be gone."""
        await self.pause(mode)
        if tokens:
            await self.cached_tokens(tokens)

    async def take(self, buckets: list[Bucket], version: int, summed: str = "") -> Received:
        """Receive new weights and, if a type is given, add up what is held then."""
        begun = time.perf_counter()
        prints = await self.receive(buckets, version)
        seconds = time.perf_counter() - begun
        return Received(prints, await self.bit_sums(summed) if summed else [], seconds, self.remark)

    async def show(self, tokens: list[int], block: list[int], shown: Shown | None = None) -> tuple[int, list[float]]:
        """Return what `cached_tokens` tells of a block, if there is one, and `score` of tokens."""
        return await self.cached_tokens(block) if block else 0, await self.score(tokens, shown)

    async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
        """Return log-probs of tokens[1:] at temperature 1, under the current weights. It works while paused."""

    async def pause(self, mode: str = "wait") -> None:
        """Start no new requests. Let running ones end (`wait`), or interrupt them: then the caller continues them
        (`interrupt`), or the engine does when it resumes (`keep`).
        """

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Release device memory, if possible; running requests are interrupted, and the next update resumes it."""

    async def wake(self, part: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` again."""

    async def connect(self, link: Link, first_rank: int) -> str:
        """Join the trainer's group with consecutive ranks; return why NCCL cannot form it, or nothing."""
        return ""

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        """Receive new weights from the group, and return a fingerprint per bucket from each process."""

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        """Load new weights from this process."""

    async def holdings(self) -> list[dict[str, Holding]]:
        """Return fingerprint and size of each weight in each process, in the engine's own layout."""

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        """Return the bit sum of each weight in each process, cast to this type."""

    async def scramble(self) -> None:
        """Overwrite the weights with noise."""

    async def load_noise(self, buckets: list[Bucket]) -> None:
        """Load noise by the names of the weights: every process gets the same, and keeps its part."""

    async def cached_tokens(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt come from the prefix cache.

        The prompt begins with `tokens` and fills one cache block, which this caches. It works while paused.
        """
        return 0


class RolloutEngine(SamplingEngine, WeightSink, Protocol):
    """An engine of a training run."""


async def sample_in_parts(
    sample: Callable[[list[int], SamplingParams, str], Awaitable[Completion]],
    tokens: list[int],
    params: SamplingParams,
    request: str,
    continues: Callable[[], bool],
) -> Completion:
    """Sample a completion that updates may interrupt: each part continues from the tokens of the parts before, and has
    its own seed. With a structure it starts again: an engine can only enforce that from the beginning.
    """
    parts: list[Completion] = []
    sent = 0
    while not sent or (parts[-1].finish_reason == INTERRUPTED and continues()):
        parts = [] if params.structure else parts
        before = [token for part in parts for token in part.tokens.tolist()]
        seed, left = derive_seed(params.seed, sent) if sent else params.seed, params.max_new_tokens - len(before)
        rest = replace(params, seed=seed, max_new_tokens=left)
        parts.append(await sample(tokens + before, rest, f"{request}.{sent}" if sent else request))
        sent += 1
    return Completion.join(parts)


def check_experts(experts: np.ndarray | None, tokens: int) -> np.ndarray:
    """Return the experts of so many tokens; the engine has those of all but the last, which it did not compute.

    There is a column for every layer of the decoder; those of layers without experts may hold anything.
    """
    found = 0 if experts is None else len(experts)
    if experts is None or found != tokens - 1:
        raise RuntimeError(
            f"the engine returned the experts of {found} tokens instead of {tokens - 1}: set "
            "training.replay_routing=false"
        )
    if experts.shape[-1] > 1 and not np.ptp(experts, axis=-1).any():
        raise RuntimeError(
            "the engine returned the same expert several times for every token: its kernel for this model does not "
            "record them; set training.replay_routing=false"
        )
    return experts_of(experts, tokens)
