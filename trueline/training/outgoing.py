"""The weights that rollout engines should hold: as they are sent, and the bit sums that prove their arrival."""

import torch
from torch import Tensor

from trueline.config.model import LoraConfig
from trueline.models import lora
from trueline.models.weight_names import Named, WeightNames
from trueline.runtime.fingerprints import LiveSums, add_bits, as_numbers
from trueline.runtime.transport import (
    WIRE_DTYPES,
    Bucket,
    Channel,
    TensorSpec,
    bucket_buffer,
    bucket_print,
    bucket_views,
)
from trueline.training.engines.engine import TrainEngine
from trueline.training.engines.shards import empty_tensors, own_elements


class Outgoing:
    """One rank's view; weights that are gathered are gathered by all ranks together."""

    def __init__(self, engine: TrainEngine, names: WeightNames, config: LoraConfig, rank: int) -> None:
        self.engine, self.names, self.config, self.rank = engine, names, config, rank
        self.adapter_only = config.adapter_only()

    def plain_weights(self) -> Named:
        """Yield the weights with their names on disk, on every rank; adapters are merged unless sent separately."""
        return self.names.file_tensors(self.without_adapters(self.engine.weights()))

    def without_adapters(self, weights: Named) -> Named:
        """Merge adapters into the other weights, or leave them out if they are sent separately."""
        if not self.config.rank:
            return weights
        if self.config.quantize:
            weights = lora.dequantize(weights, self.names.model)
        return lora.base_weights(weights) if self.adapter_only else lora.merge_adapters(weights, self.config.scale())

    def sent_weights(self) -> Named:
        return self._as_sent(self.engine.weights(lora.is_adapter if self.adapter_only else None))

    def send(self, buckets: list[Bucket], channel: Channel | None) -> tuple[list[int], RuntimeError | None]:
        """Gather the weights; with a channel, send them. Return a fingerprint per bucket, and why an engine is gone."""
        weights, prints = self.sent_weights(), list[Tensor]()
        failure: RuntimeError | None = None  # the other ranks still gather weights with this one
        for bucket in buckets:
            buffer = bucket_buffer(bucket) if channel is None else channel.next_buffer(bucket)
            for name, view in bucket_views(bucket, buffer):
                sent, tensor = next(weights)
                assert sent == name, f"the order of weights has changed: {sent} instead of {name}"
                if channel is not None:
                    view.copy_(tensor)
            if channel is not None:
                prints.append(bucket_print(bucket, buffer))
                try:
                    channel.send(buffer)
                except RuntimeError as error:
                    failure, channel = error, None
        next(weights, None)  # lets the last gather end
        return as_numbers(prints), failure

    def _as_sent(self, weights: Named) -> Named:
        if self.adapter_only:
            return lora.scale_adapters(weights, self.config.scale())
        return self.names.file_tensors(self.without_adapters(weights))

    def specs(self, dtype: str) -> list[TensorSpec]:
        """Return names, shapes and types of the weights as engines receive them."""
        found = []
        held = self.engine.weights() if self.config.quantize else empty_tensors(self.engine.weight_shards())
        for name, tensor in self._as_sent(held):  # what training does not change keeps the precision of its file
            fixed = name in self.names.fixed and tensor.dtype == torch.float32
            found.append(TensorSpec(name, tuple(tensor.shape), "float32" if fixed else dtype))
        return found

    def bit_sums(self, dtype: str, base: bool = True) -> LiveSums:
        """Return this rank's part of the bit sums of what engines should hold; the parts of all ranks add up.

        A rank adds up what it holds itself, whatever was gathered and sent. Without `base`, it adds up only adapters.
        """
        wire = WIRE_DTYPES[dtype]
        if self.adapter_only:
            adapters = add_bits(self._as_sent(own_elements(self.engine.weight_shards())), wire)
        else:
            masters = self.engine.master_shards() if self.config.rank else ()
            adapters = add_bits(own_elements(masters), torch.float32)
        if not base:
            return LiveSums(adapters=adapters)
        fixed = self.names.on_disk(iter(self.names.buffers.items() if self.rank == 0 else ()))
        return LiveSums(add_bits(self._own_weights(), wire), adapters, add_bits(fixed, wire))

    def _own_weights(self) -> Named:
        """Yield the weights that this rank speaks for; rank 0 speaks for those that have to be gathered."""
        for name, values in own_elements(self.engine.weight_shards()):
            if not lora.is_adapter(name) and not self._is_remade(name):
                yield name, values
        whole = self.names.on_disk(self.without_adapters(self.engine.weights(self._is_remade)))
        yield from (entry for entry in whole if self.rank == 0)

    def _is_remade(self, name: str) -> bool:
        """Tell whether a weight is sent as other numbers than its ranks hold: merged, dequantized or converted."""
        merged = self.config.rank > 0 and not self.adapter_only and (lora.BASE in name or lora.is_adapter(name))
        return merged or self.config.quantize or name.replace(lora.BASE, ".") in self.names.resized
