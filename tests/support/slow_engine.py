"""A vLLM engine that sleeps before each of its steps, as if every token took long; the core stays free for others."""

import os
import time
from collections.abc import Callable
from typing import Any

from trueline.rollout.engine import EngineSpec
from trueline.rollout.vllm_engine import VllmEngine

DELAY = "SECONDS_PER_TOKEN"  # environment variable


class SlowEngine(VllmEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.llm.step = slow_step(self.llm, float(os.environ.get(DELAY, "0.02")))  # type: ignore[method-assign]


def slow_step(llm: Any, seconds: float) -> Callable[[], Any]:
    step = type(llm).step

    def slowly() -> Any:
        time.sleep(seconds)
        return step(llm)

    return slowly
