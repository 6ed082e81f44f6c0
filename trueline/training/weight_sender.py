"""The sending side of weight sync, a part of every rank of the policy."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from trueline.models.weight_names import WeightNames
from trueline.runtime import transport
from trueline.runtime.fingerprints import LiveSums, as_numbers, bit_sum, wrap_int64


class WeightSender(ABC):
    rank: int
    device: torch.device
    rendezvous: transport.Rendezvous
    channel: transport.Channel | None = None
    names: WeightNames
    adapter_only: bool  # only adapters are sent; engines keep the weights that they loaded

    @abstractmethod
    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with their names on disk, on every rank; adapters are merged unless sent separately."""

    @abstractmethod
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters."""

    def sent_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.adapter_weights() if self.adapter_only else self.plain_weights()

    def weight_specs(self, dtype: str) -> list[transport.TensorSpec]:
        """Return names, shapes and types of the weights as engines receive them."""
        specs = []
        for name, tensor in self.sent_weights():  # what training does not change keeps the precision of its file
            fixed = name in self.names.fixed and tensor.dtype == torch.float32
            specs.append(transport.TensorSpec(name, tuple(tensor.shape), "float32" if fixed else dtype))
        return specs

    def share_memory(self, nbytes: int) -> dict[str, list[transport.SharedMemory]]:
        """Make two buffers for engines on this GPU, and return their handles."""
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return {transport.gpu_name(self.device): [transport.shared_memory(buffer) for buffer in self.buffers]}

    def connect(self, link: transport.Link) -> str:
        """Join the engines' group, and return why NCCL cannot form it, or nothing."""
        # Every rank joins with shared GPU memory; otherwise rank 0 alone, which sends to all.
        return transport.try_join(partial(self._join, link)) if self.rank == 0 or link.transport == "ipc" else ""

    def _join(self, link: transport.Link) -> None:
        group = link.join(self.rank, self.device, self.rendezvous)
        self.channel = transport.GpuPair(group, self.buffers) if link.transport == "ipc" else group

    def send_weights(self, buckets: list[transport.Bucket]) -> list[int]:
        """Gather the weights on every rank; ranks with a channel send them, and return a fingerprint per bucket."""
        weights = self.sent_weights()
        prints: list[Tensor] = []
        failure: RuntimeError | None = None  # an engine is gone; the other ranks still gather weights with this one
        for bucket in buckets:
            buffer = transport.bucket_buffer(bucket) if self.channel is None else self.channel.next_buffer(bucket)
            for name, view in transport.bucket_views(bucket, buffer):
                sent, tensor = next(weights)
                assert sent == name, f"the order of weights has changed: {sent} instead of {name}"
                if self.channel is not None:
                    view.copy_(tensor)
            if self.channel is not None:
                prints.append(transport.bucket_print(bucket, buffer))
                try:
                    self.channel.send(buffer)
                except RuntimeError as error:
                    failure, self.channel = error, None
        next(weights, None)  # lets the last gather end
        if failure is not None:
            raise failure
        return as_numbers(prints)

    def weight_bits(self, dtype: str) -> LiveSums:
        """Return the bit sums of what engines should hold: weights, adapters and fixed numbers."""
        wire, fixed = transport.WIRE_DTYPES[dtype], self.names.fixed
        plain = {name: bit_sum(tensor.to(wire)) for name, tensor in self.plain_weights()}
        adapters = (bit_sum(tensor.to(wire) if self.adapter_only else tensor) for _, tensor in self.adapter_weights())
        return LiveSums(
            wrap_int64(sum(as_numbers(bits for name, bits in plain.items() if name not in fixed))),
            wrap_int64(sum(as_numbers(adapters))),
            wrap_int64(sum(as_numbers(plain[name] for name in fixed))),
        )

    def copy_weights(self) -> list[tuple[str, Tensor]]:
        """Return copies of the weights, for an engine in the same process."""
        return [(name, tensor.clone()) for name, tensor in self.plain_weights()]
