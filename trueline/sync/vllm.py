"""The receiving end inside vLLM's worker processes (an extension of vLLM's own worker class)."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from trueline.runtime.fingerprints import Holding, as_numbers, bit_sum, bit_sums, holdings, scramble, wrapped
from trueline.runtime.transport import (
    WIRE_DTYPES,
    Bucket,
    Channel,
    Link,
    TensorSpec,
    bucket_noise,
    bucket_print,
    bucket_views,
    joining,
)
from trueline.sync.proof import ADAPTERS

PlainBucket = list[tuple[str, list[int], str]]
DIRECT = ("GptOssForCausalLM",)
LAYER = re.compile(r"\blayers\.(\d+)\.")
ADAPTER = 1  # by this number vLLM knows the one adapter


class WeightReceiver:
    """`self` is a vLLM worker: rank, device, vllm_config, model_config and model_runner are its own."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    model_runner: Any
    channel: Channel

    def join_trainer(self, plain: list[Any], first_rank: int) -> str:
        (host, port), nodes, seconds, transport, shared = plain
        link = Link((host, port), tuple(nodes), seconds, transport, shared)
        return joining(partial(self._join, link, first_rank + self.rank))

    def _join(self, link: Link, rank: int) -> None:
        self.channel = link.received_by(rank, self.device)

    def receive_weights(self, plain: list[PlainBucket]) -> list[int]:
        """Take all buckets, load them in one reload session, and return a fingerprint per bucket.

        vLLM keeps weights fused and, on CPUs, packed: assigning to its parameters is not enough, and a fused
        tensor whose parts arrive in two sessions stays stale without an error.
        """
        buckets = specs_of(plain)
        if self.vllm_config.lora_config is not None:
            return self._receive_adapter(buckets)
        return self._reload(buckets, self._received)

    def load_noise(self, plain: list[PlainBucket]) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        self._reload(specs_of(plain), partial(bucket_noise, generator=generator))

    def _received(self, bucket: Bucket) -> Tensor:
        buffer = self.channel.take(bucket).to(self.device)
        # On a GPU a copy: vLLM holds on to the parts of a fused tensor until the last of them comes.
        return buffer.clone() if self.device.type == "cuda" else buffer

    def _reload(self, buckets: list[Bucket], take: Callable[[Bucket], Tensor]) -> list[int]:
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                forget_packed_experts(model)
            initialize_layerwise_reload(model)
            direct = DirectLayers(model)
            prints = [self._load_bucket(model, bucket, take(bucket), direct) for bucket in buckets]
            direct.finish()
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
                repack_tied_head(model)
        return as_numbers(prints)

    def _load_bucket(self, model: Any, bucket: Bucket, buffer: Tensor, direct: "DirectLayers") -> Tensor:
        for layer, tensors in groupby(bucket_views(bucket, buffer), lambda named: direct.place_of(named[0])):
            direct.enter(layer)
            self.load_tensors(model, list(tensors))
        return bucket_print(bucket, buffer)

    def _receive_adapter(self, buckets: list[Bucket]) -> list[int]:
        tensors: dict[str, Tensor] = {}
        prints = []
        for bucket in buckets:
            buffer = self.channel.take(bucket).to(self.device).clone()
            tensors |= bucket_views(bucket, buffer)
            prints.append(bucket_print(bucket, buffer))
        self.load_adapter(tensors)
        return as_numbers(prints)

    def load_adapter(self, tensors: dict[str, Tensor]) -> None:
        """Put an adapter, whose product is scaled already, in place of the one before; the weights stay."""
        rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
        described = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
        manager, settings = self.model_runner.lora_manager._adapter_manager, self.vllm_config.lora_config
        manager.remove_adapter(ADAPTER)
        adapter = LoRAModel.from_lora_tensors(ADAPTER, tensors, described, str(self.device), settings.lora_dtype)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER)

    def load_tensors(self, model: Any, weights: list[tuple[str, Tensor]]) -> None:
        model.load_weights(iter(weights))

    def weight_holdings(self) -> dict[str, Holding]:
        return holdings(self.model_runner.get_model())

    def weight_bit_sums(self, dtype: str) -> dict[str, int]:
        sums = bit_sums(self.model_runner.get_model(), WIRE_DTYPES[dtype])
        if self.vllm_config.lora_config is not None:
            held = adapter_tensors(self.model_runner.lora_manager._adapter_manager)
            sums[ADAPTERS] = wrapped(sum(as_numbers(bit_sum(tensor.to(WIRE_DTYPES[dtype])) for tensor in held)))
        return sums

    def scramble_weights(self) -> None:
        scramble(self.model_runner.get_model())


def specs_of(plain: list[PlainBucket]) -> list[Bucket]:
    return [[TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in bucket] for bucket in plain]


def adapter_tensors(manager: Any) -> Iterator[Tensor]:
    """Yield what every layer holds of the adapter, with the zeros around it."""
    if ADAPTER not in manager.lora_index_to_id:
        return
    slot = manager.lora_index_to_id.index(ADAPTER)
    for layer in manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            yield from (part[slot] for part in (stacked if isinstance(stacked, tuple) else (stacked,)))


class DirectLayers:
    """Modules that vLLM 0.32's gpt-oss writes to past their loaders, which a layerwise reload would therefore leave as
    they were: they are real while the tensors of their layer come, and packed behind them, one layer after the other.
    """

    def __init__(self, model: Any) -> None:
        named = model.named_modules() if type(model).__name__ in DIRECT else ()
        self.modules: dict[str, list[Any]] = {}  # by the number of their layer
        for name, module in named:
            if "sinks" in module._parameters or isinstance(module, RoutedExperts):
                self.modules.setdefault(layer_of(name), []).append(module)
        self.inside = ""

    def place_of(self, name: str) -> str:
        """Return the layer of a tensor, or nothing in a model that is loaded by its loaders alone."""
        return layer_of(name) if self.modules else ""

    def enter(self, layer: str) -> None:
        """Take tensors of a layer from now on; those of the layer before have all come."""
        if layer != self.inside:
            self.finish()
            self.inside = layer
            for module in self.modules.get(layer, ()):
                materialize_layer(module, get_layerwise_info(module))

    def finish(self) -> None:
        for module in self.modules.get(self.inside, ()):
            _layerwise_process(module, get_layerwise_info(module))
        self.inside = ""


def layer_of(name: str) -> str:
    found = LAYER.search(name)
    return found[1] if found else ""


def forget_packed_experts(model: Any) -> None:
    """Have vLLM 0.32 on CPUs pack experts at every reload: with a kernel at hand it leaves them as they came."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            layer.quant_method.moe_kernel = None


def repack_tied_head(model: Any) -> None:
    """Renew the packed copy of a tied LM head, which a reload by vLLM 0.32 on CPUs leaves as it was."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415

    model.lm_head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
