"""Where a rank stands among the ranks of its model: data outermost, then context parallel, tensor innermost."""

from dataclasses import dataclass

import torch.distributed as dist

from trueline.models.ring_attention import Ring


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks that differ in their data place see other samples; the others share the work on the same samples."""

    world: int
    ring: int = 1
    tensor: int = 1

    @property
    def width(self) -> int:
        """Return how many ranks work on the same samples."""
        return self.ring * self.tensor

    @property
    def data(self) -> int:
        return self.world // self.width

    def data_place(self, rank: int) -> int:
        return rank // self.width

    def ring_ranks(self, data: int, tensor: int) -> list[int]:
        return [(data * self.ring + place) * self.tensor + tensor for place in range(self.ring)]

    def join_ring(self, rank: int) -> Ring | None:
        """Join this rank's context-parallel ring, on all ranks at once: torch makes every group on every rank."""
        if self.ring == 1:
            return None
        found = None
        for data in range(self.data):
            for tensor in range(self.tensor):
                ranks = self.ring_ranks(data, tensor)
                group = dist.new_group(ranks)
                if rank in ranks:
                    found = Ring(ranks.index(rank), self.ring, group)
        return found
