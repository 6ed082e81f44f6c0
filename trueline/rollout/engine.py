"""What rollout asks of a sampler."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from trueline.data.types import INTERRUPTED, Completion, experts_of
from trueline.environments.base import Structure
from trueline.runtime.fingerprints import Holding
from trueline.runtime.transport import Bucket, Link


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
    stop: tuple[str, ...] = ()  # looked for by the episode: engines have no tokenizer
    experts: bool = True  # are told by an engine that tells them; False: nobody trains on them
    structure: Structure | None = None  # that the completion is held to

    def after(self, tokens: int, parts: int) -> "SamplingParams":
        """Return what is left to sample after so many tokens in so many parts; each part has a seed of its own."""
        if not parts:
            return self
        seed = self.seed
        if seed is not None:
            seed = int(np.random.SeedSequence([seed, parts]).generate_state(1)[0]) >> 1
        return replace(self, max_new_tokens=self.max_new_tokens - tokens, seed=seed)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All that an engine must know to start."""

    model: str
    dtype: str
    context: int  # longest prompt and completion together
    tensor_parallel: int
    max_sequences: int
    seed: int
    gpu_memory_utilization: float
    cuda_graphs: bool
    sleeps: bool  # gives its GPU memory back between steps
    trust_remote_code: bool
    adapter_rank: int = 0  # of adapters that it holds beside its weights, and is sent in their place
    cache_bytes: int = 0  # of its KV cache on each GPU; 0: what is free of its share once it has measured that
    experts: bool = False  # it tells which experts of a mixture it sends each token to
    structured: bool = False  # it may be asked for completions of a structure, for which it has to know the tokenizer


class RolloutEngine(Protocol):
    async def generate(self, tokens: list[int], params: SamplingParams, request: str) -> Completion: ...

    async def score(self, tokens: list[int]) -> list[float]:
        """Return log-probs of tokens[1:] at temperature 1, under the weights now in the engine."""

    async def pause(self, mode: str = "wait") -> None:
        """Start no new requests; let running ones end (`wait`), or cut them off where they are, to be gone on with
        by whoever asked (`interrupt`) or, once it resumes, by the engine itself (`keep`).
        """

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give device memory back, if it can; what still runs is cut off, and the next update resumes the engine."""

    async def wake(self, part: str) -> None:
        """Take memory again for `weights` or `kv_cache`."""

    async def processes(self) -> int:
        """Return how many processes receive weights."""
        return 1

    async def connect(self, link: Link, first_rank: int) -> str:
        """Join the trainer's group, one process after another from this rank on; return why NCCL cannot form it."""
        return ""

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        """Take new weights from the group, and return a fingerprint per bucket from each process."""

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        """Take new weights from this very process."""

    async def holdings(self) -> list[dict[str, Holding]]:
        """Return what each process holds of its weights, fused and cut as they are there."""

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        """Return the bit sums of what each process holds, as numbers of this type."""

    async def scramble(self) -> None:
        """Overwrite the weights with noise."""

    async def load_noise(self, buckets: list[Bucket]) -> None:
        """Load noise as weights are loaded, under their names: every process gets the same, and keeps its part."""

    async def cached(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt of one cache block are answered from what was computed before.

        The prompt begins with `tokens`, is cached by this, and is asked also of an engine that is paused.
        """
        return 0


async def in_parts(
    sample: Callable[[list[int], SamplingParams, str], Awaitable[Completion]],
    tokens: list[int],
    params: SamplingParams,
    request: str,
    goes_on: Callable[[], bool],
) -> Completion:
    """Sample a completion that updates may cut off: each part goes on from the tokens of those before.

    One of a structure begins anew instead, for an engine can only check that from its beginning on.
    """
    parts: list[Completion] = []
    asked = 0
    while not asked or (parts[-1].finish_reason == INTERRUPTED and goes_on()):
        parts = [] if params.structure else parts
        before = [token for part in parts for token in part.tokens.tolist()]
        rest = params.after(len(before), asked)
        parts.append(await sample(tokens + before, rest, f"{request}.{asked}" if asked else request))
        asked += 1
    return Completion.joined(parts)


def checked_experts(told: np.ndarray | None, tokens: int) -> np.ndarray:
    """Return the experts of so many tokens, told of all but the last, which was not computed; or refuse what is told.

    There is a column for every layer of the decoder; those of layers without experts may hold anything.
    """
    if told is None or len(told) != tokens - 1:
        found = 0 if told is None else len(told)
        raise RuntimeError(
            f"the engine was to tell the experts of {tokens - 1} tokens and tells those of {found}: "
            "set training.replay_routing=false"
        )
    if told.shape[-1] > 1 and not np.ptp(told, axis=-1).any():
        raise RuntimeError(
            "the engine tells one expert in place of several for every token: its kernel for this model chooses them "
            "where they are not recorded; set training.replay_routing=false"
        )
    return experts_of(told, tokens)
