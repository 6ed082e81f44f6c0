"""How an engine divides a model among ranks, and the sizes of that model that its memory depends on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """Among how many ranks each part of a model is divided."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    experts: int = 1  # of a mixture; fewer ranks never divide these
    casts: bool = False  # weights in the compute type are cast from the optimizer's, block by block


WHOLE = Division()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of elements of a model on one rank, before it is sharded."""

    model: float
    blocks: int  # layers
    tables: float  # embeddings and head
    alike: int  # ranks that divide it

    def block(self) -> float:
        return (self.model - self.tables) / max(self.blocks, 1)
