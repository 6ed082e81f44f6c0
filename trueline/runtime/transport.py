"""Weights on the wire: buckets of raw bytes from trainer ranks to every engine process."""

import datetime
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
import torch
import torch.distributed
from torch import Tensor

from trueline.runtime.fingerprints import fingerprint, salted

CPU = torch.device("cpu")
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


def bucket_bytes(bucket: Bucket) -> int:
    return sum(padded(spec.nbytes()) for spec in bucket)


def bucket_buffer(bucket: Bucket, device: torch.device = CPU) -> Tensor:
    """Make room for the bucket's bytes, each tensor starting at a multiple of eight."""
    return torch.zeros(bucket_bytes(bucket), dtype=torch.uint8, device=device)


def bucket_views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket by name, as views of its bytes."""
    start = 0
    for spec in bucket:
        view = buffer[start : start + spec.nbytes()].view(spec.torch_dtype()).view(spec.shape)
        yield spec.name, view
        start += padded(spec.nbytes())


def bucket_noise(bucket: Bucket, generator: torch.Generator) -> Tensor:
    """Return a bucket of noise, the same wherever a generator of the same seed draws it."""
    buffer = bucket_buffer(bucket, generator.device)
    for _, view in bucket_views(bucket, buffer):
        view.normal_(generator=generator)
    return buffer


def padded(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


def bucket_print(bucket: Bucket, buffer: Tensor) -> Tensor:
    """Return a number for a bucket's bytes under the names, shapes and places of its tensors."""
    return salted(fingerprint(buffer), " ".join(f"{spec.name} {spec.shape} {spec.dtype}" for spec in bucket))


dist: Any = torch.distributed  # its stores and gloo groups have no type stubs


Address = tuple[str, int]
# A member that is lost must be an error of the call that waits for it, as with gloo, not the end of this process.
RAISING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


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


class Channel(Protocol):
    """The way of weights from trainer ranks to engine processes, which take the buckets in the same order."""

    def room(self, bucket: Bucket) -> Tensor:
        """Return a place for the bucket's bytes, on a sender."""

    def send(self, buffer: Tensor) -> None: ...

    def take(self, bucket: Bucket) -> Tensor:
        """Return the bucket's bytes, which may be overwritten once the next bucket is taken."""


class NoGroup(RuntimeError):
    """These processes cannot form a group over NCCL."""


def joining(join: Callable[[], None]) -> str:
    """Join a group, or say why NCCL cannot form it: whoever asked may try another transport."""
    try:
        join()
    except NoGroup as reason:
        return str(reason)
    return ""


class BroadcastGroup:
    """Gloo or NCCL groups of their own, beside those of DeepSpeed and vLLM. Rank 0 sends.

    `nodes` are those of all ranks. Weights go to one process of each node, which passes them on to the others there.
    """

    def __init__(
        self, store: Any, rank: int, nodes: Sequence[int], timeout_seconds: float, device: torch.device = CPU
    ) -> None:
        self.device, self.timeout = device, datetime.timedelta(seconds=timeout_seconds)
        firsts = [nodes.index(node) for node in dict.fromkeys(nodes)]
        here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        ways = {"between": firsts if rank in firsts else [], f"within {nodes[rank]}": here}
        self.groups = [
            self._group(dist.PrefixStore(f"weights {name}", store), ranks.index(rank), len(ranks))
            for name, ranks in ways.items()
            if len(ranks) > 1 or len(nodes) == 1
        ]

    def _group(self, store: Any, rank: int, world: int) -> Any:
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, world, self.timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        before = {name: os.environ.get(name) for name in RAISING}
        os.environ.update(RAISING)  # read when the group is made; those of DeepSpeed and vLLM stay as they are
        try:
            return dist.ProcessGroupNCCL(store, rank, world, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def try_out(self) -> None:
        """Send a number to all: NCCL forms its group with the first that is sent, in a call that may never return."""
        number = torch.ones(1, device=self.device)
        try:
            within(self.timeout.total_seconds(), lambda: self.send(number))
        except (RuntimeError, TimeoutError) as error:
            for group in self.groups:
                with suppress(RuntimeError):
                    group.abort()
            raise NoGroup(
                f"NCCL failed: {str(error).splitlines()[0] if str(error) else 'it did not answer'}"
            ) from error

    def room(self, bucket: Bucket) -> Tensor:
        return bucket_buffer(bucket, self.device)

    def send(self, buffer: Tensor) -> None:
        for group in self.groups:
            group.broadcast(buffer, 0).wait()

    def take(self, bucket: Bucket) -> Tensor:
        buffer = self.room(bucket)
        self.send(buffer)
        return buffer


def agree_on_gpus(store: Any, rank: int, world: int, device: torch.device) -> None:
    """Have all ranks tell their GPUs, and refuse NCCL on all of them where one has none, or two have the same."""
    usable = device.type == "cuda" and dist.is_nccl_available()
    store.set(f"gpu {rank}", gpu_name(device) if usable else "")
    gpus = [store.get(f"gpu {other}").decode() for other in range(world)]
    store.set(f"read {rank}", "")
    if rank == 0:  # it serves the store, which goes with it
        store.wait([f"read {other}" for other in range(world)])
    if "" in gpus:
        raise NoGroup(f"process {gpus.index('')} of {world} has no GPU that NCCL can use")
    if len(set(gpus)) < world:
        raise NoGroup(f"{world} processes have {len(set(gpus))} GPUs, and NCCL needs one for each")


def within(seconds: float, work: Callable[[], None]) -> None:
    """Do in a thread what may never return; raise what it raises, or TimeoutError."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except RuntimeError as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result(seconds)


SharedMemory = list[Any]  # bytes and numbers by which another process opens a tensor on the same GPU


@dataclass(frozen=True, slots=True)
class Link:
    """How trainer ranks and engine processes reach each other."""

    address: Address
    nodes: tuple[int, ...]  # of all ranks
    timeout_seconds: float
    transport: str = "gloo"  # or "nccl", "ipc"
    shared: dict[str, list[SharedMemory]] = field(default_factory=dict)  # by GPU, where weights travel by ipc

    def joined(self, rank: int, device: torch.device, meeting: Meeting | None = None) -> BroadcastGroup:
        """Return the group on this rank; the one that opened the meeting brings it."""
        store = (meeting or Meeting()).store(self.address, len(self.nodes), self.timeout_seconds)
        if self.transport != "nccl":
            return BroadcastGroup(store, rank, self.nodes, self.timeout_seconds)
        agree_on_gpus(store, rank, len(self.nodes), device)
        group = BroadcastGroup(store, rank, self.nodes, self.timeout_seconds, device)
        group.try_out()
        return group

    def received_by(self, rank: int, device: torch.device) -> Channel:
        """Return the channel of an engine's process."""
        group = self.joined(rank, device)
        if self.transport != "ipc":
            return group
        if gpu_name(device) not in self.shared:
            raise RuntimeError(
                f"sync.transport=ipc: no trainer rank shares GPU {gpu_name(device)} with this engine; set "
                "placement=colocated with as many ranks as engines have GPUs, or sync.transport=gloo"
            )
        return GpuPair.opened(group, self.shared[gpu_name(device)], device)


def shared_memory(buffer: Tensor) -> SharedMemory:
    """Return what another process needs to open the buffer: plain bytes and numbers, nothing to unpickle."""
    try:
        return list(buffer.untyped_storage()._share_cuda_()[1:])
    except RuntimeError as error:
        raise RuntimeError(
            f"this GPU memory cannot be shared between processes ({error}): take expandable_segments out of "
            "PYTORCH_CUDA_ALLOC_CONF, or set sync.transport=gloo"
        ) from error


def gpu_name(device: torch.device) -> str:
    """Return the name of the physical GPU, whatever number a process sees it under."""
    return str(torch.cuda.get_device_properties(device).uuid)


class GpuPair:
    """Two buffers in a GPU's memory that a rank fills and an engine process on the same GPU reads, in turns.

    A gloo group tells either side when: a reader asks for the next bucket once it has read the one before, so a buffer
    is filled again only after its reader has asked for the other one.
    """

    def __init__(self, group: BroadcastGroup, buffers: list[Tensor]) -> None:
        (self.group,), self.buffers = group.groups, buffers
        self.turn = 0

    @classmethod
    def opened(cls, group: BroadcastGroup, handles: list[SharedMemory], device: torch.device) -> "GpuPair":
        """Open the buffers of the rank on the same GPU."""
        storages = [torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle) for handle in handles]
        return cls(group, [torch.empty(0, dtype=torch.uint8, device=device).set_(storage) for storage in storages])

    def room(self, bucket: Bucket) -> Tensor:
        self.turn += 1
        return self.buffers[self.turn % 2][: bucket_bytes(bucket)]

    def send(self, buffer: Tensor) -> None:
        torch.cuda.synchronize(buffer.device)
        self.group.barrier().wait()

    def take(self, bucket: Bucket) -> Tensor:
        buffer = self.room(bucket)
        self.send(buffer)
        return buffer
