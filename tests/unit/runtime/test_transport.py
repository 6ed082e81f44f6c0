from dataclasses import replace

import pytest
import torch

from trueline.runtime.transport import TensorSpec, bucket_buffer, bucket_bytes, bucket_print, bucket_views, plan_buckets

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
