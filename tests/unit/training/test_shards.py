"""Where elements lie: of tensors that are divided, cut along any dimension, or both."""

import math
from itertools import pairwise

import pytest
import torch

from trueline.training.engines.shards import Region, Shard, cut_region, empty_tensors, piece, whole_region

SHAPES = {0: (4, 6), 1: (6, 4), 2: (2, 3, 8)}  # by the dimension that is cut


def regions(dim: int, parts: int, pieces: int) -> list[Region]:
    """Every part of a tensor that is cut, divided further as ZeRO divides flat tensors."""
    found = []
    for place in range(parts):
        region = cut_region(SHAPES[dim], dim, place, parts)
        edges = [region.size() * number // pieces for number in range(pieces + 1)]
        found += [region.part(*both) for both in pairwise(edges)]
    return found


def elements(region: Region) -> torch.Tensor:
    """The numbers of its elements, found by PyTorch's own cutting."""
    numbers = torch.arange(math.prod(region.shape)).view(-1, region.width)
    return numbers[:, region.first : region.last].flatten()[region.start : region.stop]


@pytest.mark.parametrize(("dim", "parts", "pieces"), [(0, 1, 1), (0, 2, 5), (1, 2, 1), (1, 2, 5), (2, 4, 3), (1, 1, 7)])
def test_all_regions_make_the_tensor(dim: int, parts: int, pieces: int) -> None:
    whole = torch.randn(SHAPES[dim])
    cuts = whole.chunk(parts, dim)
    flats = [cut.flatten()[slice(*piece(cut.numel(), one, pieces))] for cut in cuts for one in range(pieces)]
    found = torch.full((whole.numel(),), torch.nan)
    for region, values in zip(regions(dim, parts, pieces), flats, strict=True):
        assert region.size() == len(values)
        region.lay(values, found)
        inside = elements(region)
        assert region.bounds() == (slice(int(inside.min()), int(inside.max()) + 1) if len(inside) else slice(0))
    assert torch.equal(found.view(whole.shape), whole)


@pytest.mark.parametrize(("dim", "parts", "pieces"), [(0, 2, 3), (1, 2, 3), (2, 4, 2)])
def test_what_a_slice_leaves_has_all_that_is_in_it_and_little_else(dim: int, parts: int, pieces: int) -> None:
    size = math.prod(SHAPES[dim])
    for region in regions(dim, parts, pieces):
        for first, last in ((0, size), (0, 0), (5, 6), (3, size - 4), (size - 1, size)):
            inside, kept = elements(region), elements(region.within(first, last))
            assert set(inside[(inside >= first) & (inside < last)].tolist()) <= set(kept.tolist())
            row = region.width if region.width < size else 1
            assert ((kept >= first // row * row) & (kept < -(-last // row) * row)).all()


def test_ranks_that_hold_the_same_share_the_writing_and_one_speaks_for_them() -> None:
    values = torch.randn(7)
    shards = [Shard("w", whole_region((7,)), values, place, 3) for place in range(3)]
    assert torch.equal(torch.cat([values[slice(*shard.own())] for shard in shards]), values)
    assert [shard.counts() for shard in shards] == [True, False, False]
    ((name, empty),) = empty_tensors(shards[1:2])
    assert (name, empty.shape, empty.dtype, empty.is_meta) == ("w", (7,), torch.float32, True)
