"""A vLLM engine whose cache is too small for its requests, so that it preempts some of them."""

from unittest.mock import patch

from vllm import EngineArgs

from trueline.rollout import vllm_engine
from trueline.rollout.engine import EngineSpec
from trueline.rollout.vllm_engine import VllmEngine

BLOCK_TOKENS, BLOCKS = 32, 9  # eight for requests: two of 128 tokens


class SmallCacheEngine(VllmEngine):
    def __init__(self, spec: EngineSpec) -> None:
        options = vllm_engine.on_cpu_options(spec) | {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": BLOCKS}
        with patch.object(vllm_engine, "on_cpu_options", lambda spec: options):
            super().__init__(spec)

    async def code_key(self, folder: str, remote: bool) -> str:
        """Return vLLM's key of the code that it compiles for a model."""
        model = EngineArgs(model=folder, skip_tokenizer_init=True, trust_remote_code=remote).create_model_config()
        return str(model.compute_hash())
