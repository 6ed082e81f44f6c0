"""How the sequences of a batch lie in one forward pass: end to end, padded, or divided over a ring of ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.data.types import UNTOLD, moved
from trueline.models.attention import Current, Layout
from trueline.models.ring_attention import Ring, gather_ring, local_positions, padded_lengths


class Arrangement(ABC):
    """Convert between the flat axis [N] of a batch and what one rank's model is given of it."""

    @abstractmethod
    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the model's arguments."""

    def hidden(self, states: Tensor) -> Tensor:
        """Turn the model's last hidden states into [n, H], one row for each local position."""
        return states[0]

    def local(self, values: Tensor) -> Tensor:
        """Take this rank's part, [N] -> [n]."""
        return values

    def whole(self, values: Tensor) -> Tensor:
        """Put the parts of all ranks together, [n, ...] -> [N, ...]."""
        return values

    def routed(self, experts: Tensor) -> Tensor:
        """Lay experts out as routers see the tokens of a pass: one list, padding included, [N, ...] -> [rows, ...]."""
        return experts


@dataclass(frozen=True)
class Packed(Arrangement):
    lengths: list[int]

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        Current.layout = Layout(self.lengths)
        return {"input_ids": tokens[None], "position_ids": positions(self.lengths, tokens.device)[None]}


@dataclass(frozen=True)
class Padded(Arrangement):
    """Sequences padded on the right, so that under causal attention no mask is needed."""

    lengths: list[int]

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(tokens.split(self.lengths), batch_first=True)}

    def hidden(self, states: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(states, self.lengths, strict=True)])

    def routed(self, experts: Tensor) -> Tensor:
        parts = experts.split(self.lengths)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=UNTOLD).flatten(0, 1)


class Ringed(Arrangement):
    """Each sequence is stretched to a length that the ring divides; the added tokens stand last and are dropped."""

    def __init__(self, lengths: list[int], ring: Ring, device: torch.device) -> None:
        self.ring, self.stretched = ring, padded_lengths(lengths, ring.size)
        starts = [0]
        for length in self.stretched:
            starts.append(starts[-1] + length)
        self.total = starts[-1]
        real = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)])
        here = local_positions(self.stretched, ring.rank, ring.size)
        cpu = torch.device("cpu")
        self.real = {cpu: real, device: moved(real, device)}
        self.here = {cpu: here, device: moved(here, device)}

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        Current.layout = Layout([length // self.ring.size for length in self.stretched], self.ring)
        places = positions(self.stretched, tokens.device)[self.here[tokens.device]]
        return {"input_ids": self.local(tokens)[None], "position_ids": places[None]}

    def local(self, values: Tensor) -> Tensor:
        return self._divided(values, 0)

    def routed(self, experts: Tensor) -> Tensor:
        return self._divided(experts, UNTOLD)

    def _divided(self, values: Tensor, added: int) -> Tensor:
        stretched = values.new_full((self.total, *values.shape[1:]), added)
        stretched[self.real[values.device]] = values
        return stretched[self.here[values.device]]

    def whole(self, values: Tensor) -> Tensor:
        return gather_ring(values, self.stretched, self.ring)[self.real[values.device]]


def positions(lengths: list[int], device: torch.device) -> Tensor:
    return moved(torch.cat([torch.arange(length) for length in lengths]), device)
