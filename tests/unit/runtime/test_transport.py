import pytest
import torch

from trueline.runtime.transport import TensorSpec, bucket_buffer, bucket_views, checksum, plan_buckets

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
    tensors = {spec.name: torch.randn(spec.shape).to(spec.torch_dtype()) for spec in SPECS}
    for bucket in plan_buckets(SPECS, limit):
        sent = bucket_buffer(bucket)
        for name, view in bucket_views(bucket, sent):
            view.copy_(tensors[name])
        received = sent.clone()
        assert checksum(received) == checksum(sent)
        for name, view in bucket_views(bucket, received):
            assert torch.equal(view, tensors[name])
            assert view.dtype == tensors[name].dtype


def test_a_changed_byte_changes_the_checksum() -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    for at in range(64):
        other = buffer.clone()
        other[at] += 1
        assert checksum(other) != checksum(buffer)
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0


def test_pieces_in_another_order_change_the_checksum() -> None:
    first, second = torch.arange(32, dtype=torch.uint8), torch.arange(32, 64, dtype=torch.uint8)
    assert checksum(torch.cat([first, second])) != checksum(torch.cat([second, first]))
