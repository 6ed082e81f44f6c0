import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from trueline.runtime import transport
from trueline.runtime.transport import (
    WIRE_DTYPES,
    BroadcastGroup,
    NoGroup,
    TensorSpec,
    agree_on_gpus,
    bucket_buffer,
    bucket_bytes,
    bucket_print,
    bucket_views,
    plan_buckets,
    run_within,
    try_join,
)

SPECS = [
    TensorSpec("a", (3, 5), "float32"),
    TensorSpec("b", (7,), "bfloat16"),  # 14 bytes: the next one must still start aligned
    TensorSpec("c", (), "float32"),
    TensorSpec("d", (100,), "float32"),
    TensorSpec("e", (2, 2), "bfloat16"),
]


@pytest.mark.parametrize("limit", [1, 64, 80, 400, 10_000])
def test_buckets_keep_order_and_size(limit: int) -> None:
    buckets = plan_buckets(SPECS, limit)
    assert [spec for bucket in buckets for spec in bucket] == SPECS
    for bucket in buckets:
        assert len(bucket) == 1 or sum(spec.nbytes() for spec in bucket) <= limit


def test_neighbours_share_a_bucket_where_they_fit() -> None:
    assert [len(bucket) for bucket in plan_buckets(SPECS, 10_000)] == [5]
    assert [len(bucket) for bucket in plan_buckets(SPECS, 1)] == [1] * 5


@pytest.mark.parametrize("limit", [1, 80, 10_000])
def test_what_is_written_on_one_side_is_read_on_the_other(limit: int) -> None:
    tensors = {spec.name: torch.randn(spec.shape).to(WIRE_DTYPES[spec.dtype]) for spec in SPECS}
    for bucket in plan_buckets(SPECS, limit):
        sent = bucket_buffer(bucket)
        for name, view in bucket_views(bucket, sent):
            view.copy_(tensors[name])
        received = sent.clone()
        for name, view in bucket_views(bucket, received):
            assert torch.equal(view, tensors[name])
            assert view.dtype == tensors[name].dtype


def test_the_print_of_a_bucket_knows_bytes_names_and_places() -> None:
    bucket = SPECS[:3]
    buffer = torch.arange(bucket_bytes(bucket)).to(torch.uint8)
    first = int(bucket_print(bucket, buffer))
    assert int(bucket_print(list(bucket), buffer.clone())) == first
    for at in range(len(buffer)):
        other = buffer.clone()
        other[at] += 1
        assert int(bucket_print(bucket, other)) != first
    assert int(bucket_print(bucket, buffer.roll(8))) != first
    for changed in ([SPECS[1], SPECS[0], SPECS[2]], [replace(SPECS[0], name="z"), *SPECS[1:3]]):
        assert int(bucket_print(changed, buffer)) != first


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], ""),
        (["GPU-a", "GPU-b", "GPU-a"], "3 processes share 2 GPUs, and NCCL needs one for each"),
        (["GPU-a", "", "GPU-b"], "process 1 of 3 has no GPU that NCCL can use"),
    ],
)
def test_all_ranks_take_nccl_or_none(gpus: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and their GPUs names."""
    monkeypatch.setattr(transport.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(transport, "gpu_name", lambda device: gpus[device.index])
    store = transport.dist.HashStore()

    def tell(rank: int) -> str:
        device = torch.device("cuda", rank) if gpus[rank] else torch.device("cpu")
        return try_join(lambda: agree_on_gpus(store, rank, 3, device))

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(tell, range(3))) == [said] * 3


class Broken:
    """A group whose peers never come: its call fails, or never returns."""

    def __init__(self, error: str) -> None:
        self.error, self.aborted = error, threading.Event()

    def broadcast(self, buffer: torch.Tensor, source: int) -> Any:
        if not self.error:
            self.aborted.wait()
        raise RuntimeError(self.error)

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize(
    ("error", "said"),
    [("unhandled system error\nand more", "NCCL failed: unhandled system error"), ("", "it did not respond")],
)
def test_a_group_that_fails_or_never_answers_when_tried_is_none(error: str, said: str) -> None:
    group, broken = BroadcastGroup(transport.dist.HashStore(), 0, [0], 0.05), Broken(error)
    group.groups = [broken]
    with pytest.raises(NoGroup, match=said):
        group.try_out()
    assert broken.aborted.is_set()


def test_a_group_that_answers_is_tried_and_kept() -> None:
    group = BroadcastGroup(transport.dist.HashStore(), 0, [0], 60.0)
    group.try_out()
    run_within(60.0, lambda: None)


def test_a_rank_that_comes_before_the_store_is_not_refused() -> None:
    """PyTorch's client tries a refused address again after a pause that can last for minutes."""
    rendezvous = transport.Rendezvous()
    address = rendezvous.open()
    with socket.create_connection(address, timeout=10):
        store = rendezvous.store(address, 1, 10.0)
        store.set("key", "value")
        assert store.get("key") == b"value"
