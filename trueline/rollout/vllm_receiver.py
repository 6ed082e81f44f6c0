"""The receiving side of weight sync in vLLM's worker processes (an extension of vLLM's worker class)."""

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from trueline.rollout.vllm_logprobs import Ended, LogprobStore, keep_logprobs
from trueline.runtime import fingerprints, transport
from trueline.runtime.fingerprints import ADAPTERS, Holding, as_numbers

PlainBucket = list[tuple[str, list[int], str]]
DIRECT = ("GptOssForCausalLM",)
PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # on GPUs they keep weights as they are loaded
LAYER = re.compile(r"\blayers\.(\d+)\.")
ADAPTER = 1  # vLLM's number of the only adapter
Receive = Callable[[transport.Bucket], Tensor]  # returns a bucket's bytes


def hash_of_shape(config: ModelConfig, whole: Callable[[ModelConfig], str] = ModelConfig.compute_hash) -> str:
    """Return vLLM's key of compiled code without the model's folder, so that all models of one shape share it.

    Code depends on config.json and vLLM's settings, not on weights. Only a model with code of its own keeps its folder.
    """
    alike = copy.copy(config)
    if not config.trust_remote_code:
        alike.model = ""
    return whole(alike)


ModelConfig.compute_hash = hash_of_shape  # type: ignore[assignment, method-assign]


class WeightReceiver:
    """`self` is a vLLM worker, which has rank, device, vllm_config, model_config and model_runner."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    model_runner: Any
    channel: transport.Channel
    logprob_store: LogprobStore
    in_place: bool | None = None  # vLLM's loaders may write to the weights that it computes with; None: not tried

    def join_trainer(self, plain: list[Any], first_rank: int) -> str:
        (host, port), nodes, *rest = plain
        link = transport.Link((host, port), tuple(nodes), *rest)

        def join() -> None:
            self.channel = link.open_receiver(first_rank + self.rank, self.device)

        return transport.try_join(join)

    def receive_weights(self, plain: list[PlainBucket]) -> list[int]:
        """Receive all buckets, load them, and return a fingerprint per bucket."""
        buckets = specs_of(plain)
        if self.vllm_config.lora_config is not None:
            return self._receive_adapter(buckets)
        return self._reload(buckets, self._receive)

    def load_noise(self, plain: list[PlainBucket]) -> None:
        self._reload(specs_of(plain), self._noise(0))

    def _noise(self, seed: int) -> Receive:
        return partial(transport.bucket_noise, generator=torch.Generator(self.device).manual_seed(seed))

    def _receive(self, bucket: transport.Bucket) -> Tensor:
        buffer = self.channel.receive(bucket).to(self.device)
        # Loading by layers keeps the parts of a fused tensor until the last one arrives; on CPUs they are copies.
        return buffer if self.in_place or self.device.type == "cpu" else buffer.clone()

    def _reload(self, buckets: list[transport.Bucket], receive: Receive) -> list[int]:
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.in_place is None:
                self.in_place = keeps_layout(model, self.device) and self._loads_alike(model, buckets)
            load = self._load_in_place if self.in_place else self._load_by_layers
            return as_numbers(load(model, buckets, receive))

    def _loads_alike(self, model: Any, buckets: list[transport.Bucket]) -> bool:
        """Load noise by layers, then other noise, and the first again in place: tell whether its bits come back."""
        self._load_by_layers(model, buckets, self._noise(0))
        expected = fingerprints.holdings(model)
        self._load_by_layers(model, buckets, self._noise(1))
        self._load_in_place(model, buckets, self._noise(0))
        return fingerprints.holdings(model) == expected

    def _load_in_place(self, model: Any, buckets: list[transport.Bucket], receive: Receive) -> list[Tensor]:
        prints = []
        for bucket in buckets:
            buffer = receive(bucket)
            self.load_tensors(model, list(transport.bucket_views(bucket, buffer)))
            prints.append(transport.bucket_print(bucket, buffer))
        return prints

    def _load_by_layers(self, model: Any, buckets: list[transport.Bucket], receive: Receive) -> list[Tensor]:
        """Load all buckets in one reload session: vLLM may pack or quantize a layer once all of it has arrived.

        A fused tensor whose parts arrive in two sessions stays stale without an error.
        """
        if self.device.type == "cpu":
            forget_packed_experts(model)
        initialize_layerwise_reload(model)
        direct = DirectLayers(model)
        prints = [self._load_bucket(model, bucket, receive(bucket), direct) for bucket in buckets]
        direct.finish()
        finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
            repack_tied_head(model)
        return prints

    def _load_bucket(self, model: Any, bucket: transport.Bucket, buffer: Tensor, direct: "DirectLayers") -> Tensor:
        for layer, tensors in groupby(transport.bucket_views(bucket, buffer), lambda named: direct.layer_of(named[0])):
            direct.enter(layer)
            self.load_tensors(model, list(tensors))
        return transport.bucket_print(bucket, buffer)

    def _receive_adapter(self, buckets: list[transport.Bucket]) -> list[int]:
        tensors: dict[str, Tensor] = {}
        prints = []
        for bucket in buckets:
            buffer = self.channel.receive(bucket).to(self.device).clone()
            tensors |= transport.bucket_views(bucket, buffer)
            prints.append(transport.bucket_print(bucket, buffer))
        self.load_adapter(tensors)
        return as_numbers(prints)

    def load_adapter(self, tensors: dict[str, Tensor]) -> None:
        """Replace the adapter, whose product is already scaled; the weights stay."""
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
        return fingerprints.holdings(self.model_runner.get_model())

    def weight_bit_sums(self, dtype: str) -> dict[str, int]:
        wire = transport.WIRE_DTYPES[dtype]
        sums = fingerprints.bit_sums(self.model_runner.get_model(), wire)
        if self.vllm_config.lora_config is not None:
            held = adapter_tensors(self.model_runner.lora_manager._adapter_manager)
            bits = as_numbers(fingerprints.bit_sum(tensor.to(wire)) for tensor in held)
            sums[ADAPTERS] = fingerprints.wrap_int64(sum(bits))
        return sums

    def keep_logprobs(self) -> str:
        """Keep the log-probs of sampled tokens here; return why that cannot be, or nothing."""
        found = keep_logprobs(self.model_runner, self.vllm_config)
        if isinstance(found, LogprobStore):
            self.logprob_store = found
            return ""
        return found

    def take_logprobs(self, ended: list[Ended]) -> list[list[float]]:
        return self.logprob_store.take(ended)

    def scramble_weights(self) -> None:
        fingerprints.scramble(self.model_runner.get_model())


def keeps_layout(model: Any, device: torch.device) -> bool:
    """Tell whether vLLM computes with the weights as they are loaded, and derives nothing else from them."""
    methods = [one for one in (getattr(layer, "quant_method", None) for layer in model.modules()) if one is not None]
    own = [layer for layer in model.modules() if "process_weights_after_loading" in dir(layer)]
    plain = device.type == "cuda" and all(type(one) in PLAIN for one in methods)
    return (plain or not methods) and all(type(layer) is Attention for layer in own)


def specs_of(plain: list[PlainBucket]) -> list[transport.Bucket]:
    return [[transport.TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in bucket] for bucket in plain]


def adapter_tensors(manager: Any) -> Iterator[Tensor]:
    """Yield the adapter's tensors in every layer, with their padding of zeros."""
    if ADAPTER not in manager.lora_index_to_id:
        return
    slot = manager.lora_index_to_id.index(ADAPTER)
    for layer in manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            yield from (part[slot] for part in (stacked if isinstance(stacked, tuple) else (stacked,)))


class DirectLayers:
    """Modules that vLLM 0.32's gpt-oss writes to without their loaders, so that a layerwise reload would skip them.

    They are materialized while the tensors of their layer arrive, and packed afterwards, layer by layer.
    """

    def __init__(self, model: Any) -> None:
        named = model.named_modules() if type(model).__name__ in DIRECT else ()
        self.modules: dict[str, list[Any]] = {}  # by the number of their layer
        for name, module in named:
            if "sinks" in module._parameters or isinstance(module, RoutedExperts):
                self.modules.setdefault(layer_of(name), []).append(module)
        self.inside = ""

    def layer_of(self, name: str) -> str:
        """Return the layer of a tensor, or nothing in a model that uses its loaders alone."""
        return layer_of(name) if self.modules else ""

    def enter(self, layer: str) -> None:
        """Begin a layer; all tensors of the layer before have arrived."""
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
    """Make vLLM 0.32 on CPUs pack experts at every reload: with an existing kernel it does not."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            layer.quant_method.moe_kernel = None


def repack_tied_head(model: Any) -> None:
    """Pack a tied LM head again: vLLM 0.32 on CPUs does not at a reload."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415

    model.lm_head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
