"""Weight transfer: buckets of raw bytes from trainer ranks to every engine process."""

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

from trueline.runtime.fingerprints import fingerprint, salt_print

CPU = torch.device("cpu")
WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of WIRE_DTYPES

    def nbytes(self) -> int:
        return math.prod(self.shape) * WIRE_DTYPES[self.dtype].itemsize


Bucket = list[TensorSpec]


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Put consecutive tensors into buckets of up to `bucket_bytes`; a larger tensor gets its own bucket."""
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
    return sum(padded_size(spec.nbytes()) for spec in bucket)


def bucket_buffer(bucket: Bucket, device: torch.device = CPU) -> Tensor:
    """Return a buffer for the bucket; each tensor starts at a multiple of eight bytes."""
    return torch.zeros(bucket_bytes(bucket), dtype=torch.uint8, device=device)


def bucket_views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for spec in bucket:
        yield spec.name, buffer[start : start + spec.nbytes()].view(WIRE_DTYPES[spec.dtype]).view(spec.shape)
        start += padded_size(spec.nbytes())


def bucket_noise(bucket: Bucket, generator: torch.Generator) -> Tensor:
    """Return a bucket of noise, the same for every generator with the same seed."""
    buffer = bucket_buffer(bucket, generator.device)
    for _, view in bucket_views(bucket, buffer):
        view.normal_(generator=generator)
    return buffer


def padded_size(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


def bucket_print(bucket: Bucket, buffer: Tensor) -> Tensor:
    """Return a fingerprint of a bucket's bytes, names, shapes and order."""
    return salt_print(
        fingerprint(buffer.view(torch.int64)), " ".join(f"{spec.name} {spec.shape} {spec.dtype}" for spec in bucket)
    )


dist: Any = torch.distributed  # its stores and gloo groups have no type stubs
Address = tuple[str, int]
# A lost peer must raise an error in the waiting call, as with gloo, and not end this process.
RAISING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


class Rendezvous:
    """The store where the ranks of a group find each other.

    Rank 0 binds the port and keeps it until the store listens, so no other program can take it in between.
    """

    def __init__(self) -> None:
        self.listener: socket.socket | None = None

    def open(self) -> Address:
        """Bind a port on rank 0, and return its address for the other ranks."""
        host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        self.listener = socket.socket()
        self.listener.bind((host, 0))
        self.listener.listen()  # a refused rank sleeps for longer and longer before it tries again
        return host, self.listener.getsockname()[1]

    def store(self, address: Address, world: int, timeout_seconds: float) -> Any:
        """Return the store of all ranks; the rank that called `open` serves it."""
        timeout = datetime.timedelta(seconds=timeout_seconds)
        if self.listener is None:
            return dist.TCPStore(*address, world, False, timeout, wait_for_workers=False)
        descriptor, self.listener = self.listener.detach(), None
        return dist.TCPStore(*address, world, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


class Channel(Protocol):
    """Transfers buckets from trainer ranks to engine processes, in the same order on both sides."""

    def next_buffer(self, bucket: Bucket) -> Tensor:
        """Return a buffer for the bucket's bytes, on a sender."""

    def send(self, buffer: Tensor) -> None: ...

    def receive(self, bucket: Bucket) -> Tensor:
        """Return the bucket's bytes; the next call may overwrite them."""
        buffer = self.next_buffer(bucket)
        self.send(buffer)
        return buffer


class NoGroup(RuntimeError):
    """These processes cannot form a group over NCCL."""


def try_join(join: Callable[[], None]) -> str:
    """Join a group; return why NCCL cannot form it, or "", so that the caller can try another transport."""
    try:
        join()
    except NoGroup as reason:
        return str(reason)
    return ""


class BroadcastGroup(Channel):
    """Gloo or NCCL groups, separate from those of DeepSpeed and vLLM. Rank 0 sends.

    `nodes` has the node of each rank. Rank 0 sends to one process per node, which forwards to the others on its node.
    """

    def __init__(
        self, store: Any, rank: int, nodes: Sequence[int], timeout_seconds: float, device: torch.device = CPU
    ) -> None:
        self.device, self.timeout = device, datetime.timedelta(seconds=timeout_seconds)
        firsts = [nodes.index(node) for node in dict.fromkeys(nodes)]
        here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        members = {"between": firsts if rank in firsts else [], f"within {nodes[rank]}": here}
        self.groups = [
            self._group(dist.PrefixStore(f"weights {name}", store), ranks.index(rank), len(ranks))
            for name, ranks in members.items()
            if len(ranks) > 1 or len(nodes) == 1
        ]

    def _group(self, store: Any, rank: int, world: int) -> Any:
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, world, self.timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        before = {name: os.environ.get(name) for name in RAISING}
        os.environ.update(RAISING)  # for this group only: NCCL reads them when a group is made
        try:
            return dist.ProcessGroupNCCL(store, rank, world, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def try_out(self) -> None:
        """Broadcast one number: NCCL forms its group in the first call, which may hang."""
        number = torch.ones(1, device=self.device)
        try:
            run_within(self.timeout.total_seconds(), lambda: self.send(number))
        except (RuntimeError, TimeoutError) as error:
            for group in self.groups:
                with suppress(RuntimeError):
                    group.abort()
            reason = str(error).splitlines()[0] if str(error) else "it did not respond"
            raise NoGroup(f"NCCL failed: {reason}") from error

    def next_buffer(self, bucket: Bucket) -> Tensor:
        return bucket_buffer(bucket, self.device)

    def send(self, buffer: Tensor) -> None:
        for group in self.groups:
            group.broadcast(buffer, 0).wait()


def agree_on_gpus(store: Any, rank: int, world: int, device: torch.device) -> None:
    """Exchange the GPUs of all ranks; refuse NCCL on all ranks if one has no GPU or two share one."""
    usable = device.type == "cuda" and dist.is_nccl_available()
    store.set(f"gpu {rank}", gpu_name(device) if usable else "")
    gpus = [store.get(f"gpu {other}").decode() for other in range(world)]
    store.set(f"read {rank}", "")
    if rank == 0:  # it serves the store, so it must leave last
        store.wait([f"read {other}" for other in range(world)])
    if "" in gpus:
        raise NoGroup(f"process {gpus.index('')} of {world} has no GPU that NCCL can use")
    if len(set(gpus)) < world:
        raise NoGroup(f"{world} processes share {len(set(gpus))} GPUs, and NCCL needs one for each")


def run_within(seconds: float, work: Callable[[], None]) -> None:
    """Run work that may hang in a thread; raise its error, or TimeoutError."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    done.result(seconds)


SharedMemory = list[Any]  # plain bytes and numbers, with which another process opens a tensor on the same GPU


@dataclass(frozen=True, slots=True)
class Link:
    address: Address
    nodes: tuple[int, ...]  # of all ranks
    timeout_seconds: float
    transport: str = "gloo"  # or "nccl", "ipc"
    shared: dict[str, list[SharedMemory]] = field(default_factory=dict)  # by GPU, for ipc

    def join(self, rank: int, device: torch.device, rendezvous: Rendezvous | None = None) -> BroadcastGroup:
        """Return the group on this rank; the rank that called `Rendezvous.open` passes it in."""
        store = (rendezvous or Rendezvous()).store(self.address, len(self.nodes), self.timeout_seconds)
        if self.transport != "nccl":
            return BroadcastGroup(store, rank, self.nodes, self.timeout_seconds)
        agree_on_gpus(store, rank, len(self.nodes), device)
        group = BroadcastGroup(store, rank, self.nodes, self.timeout_seconds, device)
        group.try_out()
        return group

    def open_receiver(self, rank: int, device: torch.device) -> Channel:
        group = self.join(rank, device)
        if self.transport != "ipc":
            return group
        if gpu_name(device) not in self.shared:
            raise RuntimeError(
                f"sync.transport=ipc: no trainer rank shares GPU {gpu_name(device)} with this engine; set "
                "placement=colocated with as many ranks as engines have GPUs, or sync.transport=gloo"
            )
        storages = [
            torch.UntypedStorage._new_shared_cuda(device.index or 0, *handle)
            for handle in self.shared[gpu_name(device)]
        ]
        buffers = [torch.empty(0, dtype=torch.uint8, device=device).set_(storage) for storage in storages]
        return GpuPair(group, buffers)


def shared_memory(buffer: Tensor) -> SharedMemory:
    try:
        return list(buffer.untyped_storage()._share_cuda_()[1:])
    except RuntimeError as error:
        raise RuntimeError(
            f"this GPU memory cannot be shared between processes ({error}): remove expandable_segments from "
            "PYTORCH_CUDA_ALLOC_CONF, or set sync.transport=gloo"
        ) from error


def gpu_name(device: torch.device) -> str:
    """Return the UUID of the physical GPU, which does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


class GpuPair(Channel):
    """Two buffers in a GPU's memory that a rank fills and an engine process on the same GPU reads, in turns.

    A gloo barrier separates the turns: a buffer is filled again only after its reader has requested the other one.
    """

    def __init__(self, group: BroadcastGroup, buffers: list[Tensor]) -> None:
        (self.group,), self.buffers = group.groups, buffers
        self.turn = 0

    def next_buffer(self, bucket: Bucket) -> Tensor:
        self.turn += 1
        return self.buffers[self.turn % 2][: bucket_bytes(bucket)]

    def send(self, buffer: Tensor) -> None:
        torch.cuda.synchronize(buffer.device)
        self.group.barrier().wait()
