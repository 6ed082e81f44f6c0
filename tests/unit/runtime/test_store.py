"""The object store of a run: its size, and what is said where it is too small."""

from collections import namedtuple
from dataclasses import replace

import pytest

from trueline.runtime import cluster
from trueline.runtime.cluster import OBJECT_STORE_BYTES, Machine, Node
from trueline.runtime.placement import store_bytes, store_findings

GIB = 2**30
HERE = Machine(2, 16 * GIB, 0, 0, store_bytes=4 * GIB)


def test_a_store_grows_with_the_samples_as_far_as_the_machine_allows() -> None:
    assert store_bytes(0, HERE) == store_bytes(OBJECT_STORE_BYTES // 2, HERE) == OBJECT_STORE_BYTES
    assert store_bytes(2 * GIB, HERE) == 2.5 * GIB
    assert store_bytes(64 * GIB, HERE) == 4 * GIB


def test_a_store_that_is_too_small_is_told_with_the_remedy_of_its_place() -> None:
    assert store_findings(2 * GIB, store_bytes(2 * GIB, HERE), HERE) == []
    (found,) = store_findings(6 * GIB, store_bytes(6 * GIB, HERE), HERE)
    assert found.code == "object_store" and "6.0 GiB, Ray's object store has 4.0 GiB" in found.line()
    assert "/dev/shm" in found.line()
    joined = replace(HERE, nodes=(Node("10.0.0.1", "a", 2, GIB),), store_bytes=1 * GIB)
    (found,) = store_findings(2 * GIB, store_bytes(2 * GIB, HERE), joined)
    assert "has 1.0 GiB" in found.line() and "--object-store-memory" in found.line()


@pytest.mark.parametrize(
    ("free", "shared", "largest"), [(10 * GIB, 64 * GIB, 3 * GIB), (100 * GIB, GIB, GIB), (GIB, 0, OBJECT_STORE_BYTES)]
)
def test_the_largest_store_is_a_share_of_memory_and_fits_where_it_lies(
    free: int, shared: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cluster, "free_memory", lambda: free)
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda folder: usage(0, 0, shared))
    assert cluster.largest_store() == pytest.approx(largest, rel=1e-6)
