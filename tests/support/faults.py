"""What an engine can load wrongly, and the call that makes one do it."""

from typing import Protocol

import torch
from torch import Tensor

Weights = list[tuple[str, Tensor]]
LAST = "layers.1."


def skipped(weights: Weights) -> Weights:
    return [(name, tensor) for name, tensor in weights if LAST + "mlp.down_proj." not in name]


def swapped(weights: Weights) -> Weights:
    """Rows of queries and keys trade places, as far as there are keys."""
    named = dict(weights)
    for name in [name for name in named if "q_proj.weight" in name]:
        queries, keys = named[name], named[name.replace("q_proj", "k_proj")]
        rows = len(keys)
        named[name] = torch.cat([keys, queries[rows:]])
        named[name.replace("q_proj", "k_proj")] = queries[:rows]
    return list(named.items())


def flipped(weights: Weights) -> Weights:
    """One bit of one weight changes: in float32 the highest of the exponent, so that it can be seen in log-probs."""
    return [(name, flip(tensor) if LAST + "mlp.up_proj." in name else tensor) for name, tensor in weights]


def flip(tensor: Tensor) -> Tensor:
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.clone().view(kind)
    bits.view(-1)[7] ^= 1 << (8 * tensor.element_size() - 3)
    return bits.view(tensor.dtype)


def narrowed(weights: Weights) -> Weights:
    """Of another type on its way: eight bits."""
    return [(name, tensor.to(torch.float8_e4m3fn).to(tensor.dtype)) for name, tensor in weights]


def headless(weights: Weights) -> Weights:
    return [(name, tensor) for name, tensor in weights if "embed_tokens" not in name]


FAULTS = {"skipped": skipped, "swapped": swapped, "flipped": flipped, "narrowed": narrowed, "headless": headless}


class Breakable(Protocol):
    async def break_with(self, fault: str) -> None: ...

    async def be_slow(self, seconds: float) -> None: ...

    async def loads_in_place(self) -> bool: ...
