"""The sending end, a part of every rank of the policy."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from trueline.models.weight_names import WeightNames
from trueline.runtime.fingerprints import as_numbers, bit_sum, wrapped
from trueline.runtime.transport import (
    WIRE_DTYPES,
    Bucket,
    Channel,
    GpuPair,
    Link,
    Meeting,
    SharedMemory,
    TensorSpec,
    bucket_buffer,
    bucket_print,
    bucket_views,
    gpu_name,
    joining,
    shared_memory,
)
from trueline.sync.proof import LiveSums


class WeightSender(ABC):
    """Hand a model's weights to engines; whose they are, a rank says."""

    rank: int
    device: torch.device
    meeting: Meeting
    channel: Channel | None = None
    names: WeightNames
    apart: bool  # adapters travel alone, and engines hold them beside the weights that they have loaded

    @abstractmethod
    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under a plain model's names on disk, on every rank; adapters are merged or apart."""

    @abstractmethod
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is merged into them, or sent apart."""

    def sent_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.adapter_weights() if self.apart else self.plain_weights()

    def weight_specs(self, dtype: str) -> list[TensorSpec]:
        """Return names, shapes and type of the weights as engines will receive them."""
        return [
            TensorSpec(name, tuple(tensor.shape), self._wire_dtype(name, tensor, dtype))
            for name, tensor in self.sent_weights()
        ]

    def _wire_dtype(self, name: str, tensor: Tensor, dtype: str) -> str:
        """Return the type that a tensor travels in: what training does not change keeps the precision of its file."""
        return "float32" if name in self.names.fixed and tensor.dtype == torch.float32 else dtype

    def share_memory(self, nbytes: int) -> dict[str, list[SharedMemory]]:
        """Make two buffers that engines on this GPU can read, and return by which handles."""
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return {gpu_name(self.device): [shared_memory(buffer) for buffer in self.buffers]}

    def connect(self, link: Link) -> str:
        """Join the engines' group: every rank where GPU memory is shared, else rank 0 alone, which sends to all.

        Return why NCCL cannot form it, or nothing.
        """
        return joining(partial(self._join, link)) if self.rank == 0 or link.transport == "ipc" else ""

    def _join(self, link: Link) -> None:
        group = link.joined(self.rank, self.device, self.meeting)
        self.channel = GpuPair(group, self.buffers) if link.transport == "ipc" else group

    def send_weights(self, buckets: list[Bucket]) -> list[int]:
        """Gather the weights on every rank; those with a channel send them, and return a fingerprint per bucket."""
        weights = self.sent_weights()
        prints: list[Tensor] = []
        failure: RuntimeError | None = None  # an engine is gone: other ranks still wait to gather the weights with this
        for bucket in buckets:
            buffer = bucket_buffer(bucket) if self.channel is None else self.channel.room(bucket)
            for name, view in bucket_views(bucket, buffer):
                sent, tensor = next(weights)
                assert sent == name, f"weights come in another order: {sent} instead of {name}"
                if self.channel is not None:
                    view.copy_(tensor)
            if self.channel is not None:
                prints.append(bucket_print(bucket, buffer))
                try:
                    self.channel.send(buffer)
                except RuntimeError as error:
                    failure, self.channel = error, None
        next(weights, None)  # lets the last gather end
        if failure is not None:
            raise failure
        return as_numbers(prints)

    def weight_bits(self, dtype: str) -> LiveSums:
        """Return the bit sums of what engines should hold: weights, adapters, merged or apart, and fixed numbers."""
        wire, fixed = WIRE_DTYPES[dtype], self.names.fixed
        plain = {name: bit_sum(tensor.to(wire)) for name, tensor in self.plain_weights()}
        adapters = (bit_sum(tensor.to(wire) if self.apart else tensor) for _, tensor in self.adapter_weights())
        return LiveSums(
            wrapped(sum(as_numbers(bits for name, bits in plain.items() if name not in fixed))),
            wrapped(sum(as_numbers(adapters))),
            wrapped(sum(as_numbers(plain[name] for name in fixed))),
        )

    def copy_weights(self) -> list[tuple[str, Tensor]]:
        """Return copies of the weights, for an engine in the same process."""
        return [(name, tensor.clone()) for name, tensor in self.plain_weights()]
