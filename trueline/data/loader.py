"""The order in which rows are drawn: shuffled anew in every epoch, and resumable from one number."""

import numpy as np


class Order:
    """An endless sequence of row numbers that depends on seed and position alone."""

    def __init__(self, rows: int, seed: int, shuffle: bool, position: int = 0) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.position = position
        self.epoch = -1
        self.permutation = np.arange(rows)

    def __next__(self) -> int:
        epoch, offset = divmod(self.position, self.rows)
        if self.shuffle and epoch != self.epoch:
            self.permutation = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        self.epoch = epoch
        self.position += 1
        return int(self.permutation[offset])

    def __iter__(self) -> "Order":
        return self
