"""vLLM in the process of a test, so that a run of the real loop starts it in seconds; only the wire is left out."""

import os

# Read when vLLM is imported, or its engine made.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import gc
import sys
from contextlib import redirect_stdout
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.model_executor.models.transformers.base import Base

from trueline.rollout import vllm_engine
from trueline.rollout.engine import EngineSpec
from trueline.rollout.vllm_engine import VllmEngine
from trueline.runtime.transport import Bucket, TensorSpec, bucket_buffer, bucket_views, plan_buckets

# vLLM changes the class of a model that it takes from Transformers, which the trainer has in this process too.
LEFT_ALONE = ("_decorate_cls_for_torch_compile", lambda self, **settings: None)
BUCKET_BYTES = 2**16  # several to a model
BLOCKS = 64


class EngineHere(VllmEngine):
    """It takes weights by reference; the receiver inside vLLM's worker loads them as it does those from the wire."""

    made: ClassVar[list["EngineHere"]] = []

    def __init__(self, spec: EngineSpec) -> None:
        options = vllm_engine.on_cpu_options(spec) | {"num_gpu_blocks_override": BLOCKS}
        kept = patch.object(torch, "set_num_threads", torch.set_num_threads)  # which vLLM's worker makes do nothing
        given, left_alone = (
            patch.object(vllm_engine, "on_cpu_options", lambda spec: options),
            patch.object(Base, *LEFT_ALONE),
        )
        with kept, given, left_alone, redirect_stdout(sys.__stdout__):  # some versions of vLLM redirect its descriptor
            super().__init__(spec)
        self.made.append(self)

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in weights}
        specs = [TensorSpec(name, tuple(tensor.shape), types[name]) for name, tensor in weights]
        named = dict(weights)

        def take(bucket: Bucket) -> Tensor:
            buffer = bucket_buffer(bucket)
            for name, view in bucket_views(bucket, buffer):
                view.copy_(named[name])
            return buffer

        receiver = self.llm.model_executor.driver_worker.worker
        await self._call(receiver._reload, plan_buckets(specs, BUCKET_BYTES), take)
        await self._empty_caches()
        self.version = version


def release() -> None:
    """Give back what engines of runs that have ended hold."""
    for engine in EngineHere.made:
        engine.llm.engine_core.shutdown()
        engine.thread.stop()
        del engine.llm
    if EngineHere.made:  # the next model may be a mixture, which has groups of its own
        destroy_model_parallel()
        destroy_distributed_environment()
    EngineHere.made.clear()
    gc.collect()
