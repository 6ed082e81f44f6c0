"""A vLLM engine that sleeps before each of its steps, as if every token took long; the core stays free for others.

With HEAVY_TAIL=1 the lengths of completions are heavy-tailed, whatever the model says: most have tens of tokens, some
as many as they may have.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from trueline.data.pictures import Shown
from trueline.data.types import Completion
from trueline.rollout import vllm_engine
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.vllm_engine import VllmEngine

DELAY, HEAVY = "SECONDS_PER_TOKEN", "HEAVY_TAIL"  # environment variables
SHORTEST, SHAPE = 20, 1.0  # of Pareto's distribution


class SlowEngine(VllmEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.heavy = HEAVY in os.environ
        if self.heavy:  # vLLM knows the model's own end, too
            vllm_engine.VllmParams = partial(vllm_engine.VllmParams, ignore_eos=True)  # type: ignore[misc,assignment,attr-defined]
        self.most = 0
        self.llm.step = slow_step(self.llm, float(os.environ.get(DELAY, "0.02")))  # type: ignore[method-assign]

    async def _sample(self, shown: Shown | None, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        if self.heavy:
            self.most = max(self.most, params.max_new_tokens)
            length = min(int(SHORTEST * Random(request.partition(".")[0]).paretovariate(SHAPE)), self.most)
            before = self.most - params.max_new_tokens  # of a completion that goes on
            params = replace(params, max_new_tokens=max(length - before, 1), stop_tokens=())
        return await super()._sample(shown, tokens, params, request)


def slow_step(llm: Any, seconds: float) -> Callable[[], Any]:
    step = type(llm).step

    def slowly() -> Any:
        time.sleep(seconds)
        return step(llm)

    return slowly
