"""What rollout asks of a sampler."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trueline.data.types import Completion
from trueline.runtime.transport import Bucket


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


class RolloutEngine(Protocol):
    async def generate(self, tokens: list[int], params: SamplingParams, request: str) -> Completion: ...

    async def score(self, tokens: list[int]) -> list[float]:
        """Return log-probs of tokens[1:] at temperature 1, under the weights now in the engine."""

    async def pause(self) -> None:
        """Let running requests end, and start no new ones."""

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give device memory back."""

    async def wake(self, part: str) -> None:
        """Take memory again for `weights` or `kv_cache`."""

    async def processes(self) -> int:
        """Return how many processes receive weights."""

    async def connect(self, address: tuple[str, int], first_rank: int, world: int, timeout_seconds: float) -> None:
        """Join the trainer's broadcast group."""

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        """Take new weights from the group, and return a checksum per bucket from each process."""

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        """Take new weights from this very process."""
