"""Weights on the wire: buckets of raw bytes, broadcast from one trainer rank to every engine process."""

import datetime
import math
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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
    """Neighbours share a bucket up to `bucket_bytes`; a larger tensor has one of its own."""
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
    """Room for the bucket's bytes, each tensor starting at a multiple of eight."""
    return torch.zeros(sum(padded(spec.nbytes()) for spec in bucket), dtype=torch.uint8)


def bucket_views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its bytes."""
    start = 0
    for spec in bucket:
        view = buffer[start : start + spec.nbytes()].view(spec.torch_dtype()).view(spec.shape)
        yield spec.name, view
        start += padded(spec.nbytes())


def padded(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


def checksum(buffer: Tensor) -> int:
    """Equal bytes give equal sums; a lost, altered or misplaced piece gives another."""
    words = torch.nn.functional.pad(buffer.view(torch.int64), (0, -(buffer.numel() // 8) % CHECKSUM_ROW))
    rows = words.view(-1, CHECKSUM_ROW)
    by_row = (rows.sum(1) * torch.arange(1, len(rows) + 1)).sum()
    by_column = (rows.sum(0) * torch.arange(1, CHECKSUM_ROW + 1)).sum()
    return int(by_row * 31 + by_column)


dist: Any = torch.distributed  # its stores and gloo groups have no type stubs


class BroadcastGroup:
    """A gloo group of its own, beside those of DeepSpeed and vLLM. Rank 0 sends."""

    def __init__(self, address: tuple[str, int], rank: int, world: int, timeout_seconds: float) -> None:
        timeout = datetime.timedelta(seconds=timeout_seconds)
        store = dist.TCPStore(*address, world, rank == 0, timeout, wait_for_workers=False)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, timeout)

    def broadcast(self, buffer: Tensor) -> None:
        self.group.broadcast(buffer, 0).wait()


def free_address() -> tuple[str, int]:
    """An address of this machine that others can reach, and a free port."""
    host = socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            host = "127.0.0.1"
            probe.bind((host, 0))
        return host, probe.getsockname()[1]
