"""The receiving end inside vLLM's worker processes (an extension of vLLM's own worker class)."""

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from trueline.runtime.transport import (
    BroadcastGroup,
    Bucket,
    TensorSpec,
    bucket_buffer,
    bucket_views,
    checksum,
)

PlainBucket = list[tuple[str, list[int], str]]


class WeightReceiver:
    """`self` is a vLLM worker: rank, device, vllm_config, model_config and model_runner are its own."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    model_runner: Any

    def join_trainer(self, address: list[Any], first_rank: int, world: int, timeout_seconds: float) -> None:
        host, port = address
        self.channel = BroadcastGroup.join((host, port), first_rank + self.rank, world, timeout_seconds)

    def receive_weights(self, plain: list[PlainBucket]) -> list[int]:
        """Take all buckets, load them in one reload session, and return a checksum per bucket.

        vLLM keeps weights fused and, on CPUs, packed: assigning to its parameters is not enough, and a fused
        tensor whose parts arrive in two sessions stays stale without an error.
        """
        buckets = [[TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in bucket] for bucket in plain]
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            sums = [self._load_bucket(model, bucket) for bucket in buckets]
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
                repack_tied_head(model)
        return sums

    def _load_bucket(self, model: Any, bucket: Bucket) -> int:
        buffer = bucket_buffer(bucket)
        self.channel.broadcast(buffer)
        model.load_weights((name, view.to(self.device)) for name, view in bucket_views(bucket, buffer))
        return checksum(buffer)


def repack_tied_head(model: Any) -> None:
    """Renew the packed copy of a tied LM head, which a reload by vLLM 0.32 on CPUs leaves as it was."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415

    model.lm_head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
