"""A vLLM engine whose worker loads something else than it was given, once told to."""

from typing import Any

from torch import Tensor

from tests.support.faults import FAULTS, Weights
from tests.support.slow_engine import slow_step
from trueline.rollout import vllm_engine
from trueline.rollout import vllm_receiver as receiving
from trueline.rollout.engine import EngineSpec


class FaultyReceiver(receiving.WeightReceiver):
    fault = ""

    def break_loading(self, fault: str) -> None:
        self.fault = fault

    def tell_in_place(self) -> bool | None:
        return self.in_place

    def load_tensors(self, model: Any, weights: Weights) -> None:
        super().load_tensors(model, FAULTS[self.fault](weights) if self.fault else weights)

    def load_adapter(self, tensors: dict[str, Tensor]) -> None:
        super().load_adapter(dict(FAULTS[self.fault](list(tensors.items()))) if self.fault else tensors)


class FaultyEngine(vllm_engine.VllmEngine):
    def __init__(self, spec: EngineSpec) -> None:
        vllm_engine.RECEIVER = "tests.support.faulty_receiver.FaultyReceiver"
        super().__init__(spec)
        self.forgetful = False

    async def break_with(self, fault: str) -> None:
        """Load by this fault from now on, `cached` keeps the prefix cache, none is an honest engine."""
        self.forgetful = fault == "cached"
        await self._call(self.llm.collective_rpc, "break_loading", args=("" if self.forgetful else fault,))

    async def pause(self, mode: str = "wait") -> None:
        if not self.forgetful:
            await super().pause(mode)

    async def loads_in_place(self) -> bool:
        return all(await self._call(self.llm.collective_rpc, "tell_in_place"))

    async def be_slow(self, seconds: float) -> None:
        """Sleep before each step, so that what comes in the midst of a completion does."""
        self.llm.step = slow_step(self.llm, seconds)  # type: ignore[method-assign]

    async def receive(self, buckets: Any, version: int) -> list[list[int]]:
        emptied = self.llm.reset_prefix_cache
        if self.forgetful:
            self.llm.reset_prefix_cache = keep_cache  # type: ignore[method-assign]
        try:
            return await super().receive(buckets, version)
        finally:
            self.llm.reset_prefix_cache = emptied  # type: ignore[method-assign]


def keep_cache() -> bool:
    return True
