"""An exponential moving average of weights, kept beside the tensors that the optimizer steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class MovingAverage:
    """A moving average of whatever pieces a rank holds: whole parameters, or its shard of them."""

    def __init__(self, pieces: list[Tensor], decay: float) -> None:
        self.pieces, self.decay = pieces, decay
        self.average = [piece.detach().clone() for piece in pieces]

    @torch.no_grad()
    def update(self) -> None:
        for average, piece in zip(self.average, self.pieces, strict=True):
            average.lerp_(piece, 1 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the average from the weights as they are."""
        for average, piece in zip(self.average, self.pieces, strict=True):
            average.copy_(piece)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the tensors themselves while inside, for whoever reads or writes them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, piece in zip(self.average, self.pieces, strict=True):
            kept = piece.clone()
            piece.copy_(average)
            average.copy_(kept)
