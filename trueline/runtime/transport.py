"""Weights on the wire: buckets of raw bytes, broadcast from one trainer rank to every engine process."""

import datetime
import math
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed
from torch import Tensor

CHECKSUM_ROW = 1024  # words
WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of WIRE_DTYPES

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype().itemsize

    def torch_dtype(self) -> torch.dtype:
        return WIRE_DTYPES[self.dtype]


Bucket = list[TensorSpec]


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Divide tensors into buckets: neighbours share one up to `bucket_bytes`, a larger tensor has one of its own."""
    buckets: list[Bucket] = []
    room = 0
    for spec in specs:
        if not buckets or spec.nbytes() > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= spec.nbytes()
    return buckets


def bucket_buffer(bucket: Bucket) -> Tensor:
    """Make room for the bucket's bytes, each tensor starting at a multiple of eight."""
    return torch.zeros(sum(padded(spec.nbytes()) for spec in bucket), dtype=torch.uint8)


def bucket_views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket by name, as views of its bytes."""
    start = 0
    for spec in bucket:
        view = buffer[start : start + spec.nbytes()].view(spec.torch_dtype()).view(spec.shape)
        yield spec.name, view
        start += padded(spec.nbytes())


def padded(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


def checksum(buffer: Tensor) -> int:
    """Return a sum that is equal for equal bytes, and another for a lost, altered or misplaced piece."""
    words = torch.nn.functional.pad(buffer.view(torch.int64), (0, -(buffer.numel() // 8) % CHECKSUM_ROW))
    rows = words.view(-1, CHECKSUM_ROW)
    by_row = (rows.sum(1) * torch.arange(1, len(rows) + 1)).sum()
    by_column = (rows.sum(0) * torch.arange(1, CHECKSUM_ROW + 1)).sum()
    return int(by_row * 31 + by_column)


dist: Any = torch.distributed  # its stores and gloo groups have no type stubs


Address = tuple[str, int]


class Meeting:
    """Where the ranks of a group find each other. Rank 0 holds the port from the moment it is named until the store
    listens on it, so that no other program can take it in between; and it listens on that address alone.
    """

    def __init__(self) -> None:
        self.listener: socket.socket | None = None

    def open(self) -> Address:
        """Hold a port on rank 0, and return the address at which the others reach it."""
        host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        self.listener = socket.socket()
        self.listener.bind((host, 0))
        return host, self.listener.getsockname()[1]

    def store(self, address: Address, world: int, timeout_seconds: float) -> Any:
        """Return the store of all ranks; the one that opened the meeting serves it."""
        timeout = datetime.timedelta(seconds=timeout_seconds)
        if self.listener is None:
            return dist.TCPStore(*address, world, False, timeout, wait_for_workers=False)
        descriptor, self.listener = self.listener.detach(), None
        return dist.TCPStore(*address, world, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


class BroadcastGroup:
    """A gloo group of its own, beside those of DeepSpeed and vLLM. Rank 0 sends."""

    def __init__(self, store: Any, rank: int, world: int, timeout_seconds: float) -> None:
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, timeout)

    @classmethod
    def join(cls, address: Address, rank: int, world: int, timeout_seconds: float) -> "BroadcastGroup":
        """Join the group on a rank that did not open the meeting."""
        return cls(Meeting().store(address, world, timeout_seconds), rank, world, timeout_seconds)

    def broadcast(self, buffer: Tensor) -> None:
        self.group.broadcast(buffer, 0).wait()
