"""What one rank holds of a tensor, and where it lies in the whole; engines of training give this to everything else."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive elements of some columns of a tensor that is read as rows of `width` elements.

    A tensor that is flattened and divided, or cut along its first dimension, is one row.
    """

    shape: tuple[int, ...]  # of the whole tensor
    width: int
    first: int  # column
    last: int  # column, exclusive
    start: int  # element of the columns, row by row
    stop: int

    def size(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Region":
        """Return some of its elements, counted from its first one."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def bounds(self) -> slice:
        """Return the shortest slice of the flat tensor that has all its elements."""
        return slice(self._place(self.start), self._place(self.stop - 1) + 1) if self.size() else slice(0)

    def _place(self, element: int) -> int:
        row, column = divmod(element, self.last - self.first)
        return row * self.width + self.first + column

    def within(self, first: int, last: int) -> "Region":
        """Leave out elements before and behind a slice of the flat tensor; of columns, only whole rows."""
        columns = self.last - self.first
        if self.width == math.prod(self.shape):  # one row
            low, high = first - self.first, last - self.first
        else:
            low, high = first // self.width * columns, -(-last // self.width) * columns
        start = min(max(self.start, low), self.stop)
        return replace(self, start=start, stop=max(min(self.stop, high), start))

    def lay(self, values: Tensor, whole: Tensor) -> None:
        """Copy the values of these elements into their places in a flat tensor."""
        columns = self.last - self.first
        rows, at = whole.view(-1, self.width)[:, self.first : self.last], self.start
        while at < self.stop:  # the end of a row, whole rows, the beginning of a row
            row, column = divmod(at, columns)
            count = 1 if column else max((self.stop - at) // columns, 1)
            end = min(at + count * columns - column, self.stop)
            place = rows[row : row + count, column : column + end - at]
            place.copy_(values[at - self.start : end - self.start].view(place.shape))
            at = end


def whole_region(shape: Iterable[int]) -> Region:
    return cut_region(shape, 0, 0, 1)


def cut_region(shape: Iterable[int], dim: int, place: int, parts: int) -> Region:
    """Return one of equal parts of a tensor that is cut along a dimension."""
    sizes = tuple(shape)
    width = math.prod(sizes[dim:])
    return Region(sizes, width, width * place // parts, width * (place + 1) // parts, 0, math.prod(sizes) // parts)


def piece(elements: int, rank: int, world: int) -> tuple[int, int]:
    """Return where a rank's piece of some elements begins and ends."""
    return elements * rank // world, elements * (rank + 1) // world


@dataclass(frozen=True, slots=True)
class Shard:
    """The elements of a tensor that this rank holds; on some ranks there may be none."""

    name: str
    region: Region
    values: Tensor  # flat
    holder: int = 0  # this rank's place among the ranks that hold the same elements
    holders: int = 1

    def counts(self) -> bool:
        """Tell whether this rank speaks for these elements: of those that hold them, one does."""
        return self.holder == 0

    def own(self) -> tuple[int, int]:
        """Return which of the values this rank writes, so that the holders of the same elements share the work."""
        return piece(self.region.size(), self.holder, self.holders)


def whole_shard(name: str, tensor: Tensor, holder: int = 0, holders: int = 1) -> Shard:
    return Shard(name, whole_region(tensor.shape), tensor.detach().flatten(), holder, holders)


def own_elements(shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yield the elements that this rank speaks for."""
    return ((shard.name, shard.values) for shard in shards if shard.counts())


def empty_tensors(shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yield names, shapes and types of whole tensors, without memory for them."""
    for shard in shards:
        yield shard.name, torch.empty(shard.region.shape, dtype=shard.values.dtype, device="meta")
