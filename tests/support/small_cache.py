"""A vLLM engine whose cache is too small for its requests, so that it preempts some of them."""

from unittest.mock import patch

from trueline.rollout import vllm_engine
from trueline.rollout.engine import EngineSpec
from trueline.rollout.vllm_engine import VllmEngine

BLOCK_TOKENS, BLOCKS = 32, 9  # eight for requests: two of 128 tokens


class SmallCacheEngine(VllmEngine):
    def __init__(self, spec: EngineSpec) -> None:
        options = vllm_engine.on_cpu_options(spec) | {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": BLOCKS}
        with patch.object(vllm_engine, "on_cpu_options", lambda spec: options):
            super().__init__(spec)
