"""Bit patterns as numbers, computed where the tensor lives, to tell across processes whether two hold the same."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

ROW = 1024  # words of eight bytes
PIECE = 2**26  # bytes that are worked on at a time, so that a fingerprint takes little memory
ODD = 0x9E3779B97F4A7C15 - 2**64
PATTERNS = {2: torch.int16, 4: torch.int32}  # whole numbers as wide as a weight

Holding = tuple[int, int]  # a weight's fingerprint and its number of elements


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a number that is equal for equal values, and another once one bit changes or two values change places.

    Zeros count alike whatever their sign: adding an adapter of zeros turns -0.0 into 0.0.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    columns = multipliers(0, ROW, tensor.device)
    done = 0
    for piece in tensor.detach().flatten().split(PIECE // tensor.element_size()):
        unsigned = piece + 0
        room = -unsigned.numel() % (ROW * 8 // unsigned.element_size())
        rows = torch.nn.functional.pad(unsigned, (0, room)).view(torch.int64).view(-1, ROW)
        total += ((rows * columns).sum(1) * multipliers(done, len(rows), tensor.device)).sum()
        done += len(rows)
    return total


def multipliers(first: int, count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, one for each place."""
    mixed = (torch.arange(first, first + count, device=device) + 1) * ODD
    return ((mixed ^ (mixed >> 29)) * ODD) | 1


def salted(print_: Tensor, label: str) -> Tensor:
    """Return a fingerprint as one of this label alone."""
    salt = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big", signed=True)
    return print_ * (salt | 1) + salt


def bit_sum(tensor: Tensor) -> Tensor:
    """Add bit patterns as whole numbers: whichever way a tensor is fused, cut or permuted, the sum is the same."""
    pattern = PATTERNS[tensor.element_size()]
    negative_zero = torch.iinfo(pattern).min
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for bits in tensor.detach().contiguous().view(pattern).flatten().split(PIECE // tensor.element_size()):
        total += bits.sum(dtype=torch.int64) - negative_zero * (bits == negative_zero).sum()
    return total


def plain_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once; one that the engine has packed away is empty."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and (parameter.data_ptr() not in seen or not parameter.numel()):
            seen.add(parameter.data_ptr())
            yield name, parameter.data


def holdings(model: Any) -> dict[str, Holding]:
    """Return what a process holds of each weight, in its own layout."""
    named = list(plain_parameters(model))
    prints = as_numbers(fingerprint(weight) for _, weight in named)
    return {name: (print_, weight.numel()) for (name, weight), print_ in zip(named, prints, strict=True)}


def bit_sums(model: Any, dtype: torch.dtype) -> dict[str, int]:
    """Return the bit sum of each weight as numbers of this type."""
    named = list(plain_parameters(model))
    sums = as_numbers(bit_sum(weight.to(dtype)) for _, weight in named)
    return {name: bits for (name, _), bits in zip(named, sums, strict=True)}


def as_numbers(values: Iterable[Tensor]) -> list[int]:
    """Return the numbers of all values by one transfer from their device."""
    listed = list(values)
    return torch.stack(listed).tolist() if listed else []


def scramble(model: Any) -> None:
    """Overwrite every plain weight with noise, so that only what is loaded afterwards can be right."""
    for _, weight in plain_parameters(model):
        weight.normal_()


def wrapped(total: int) -> int:
    """Return a sum as the signed number of 64 bits that devices compute."""
    return (total + 2**63) % 2**64 - 2**63
