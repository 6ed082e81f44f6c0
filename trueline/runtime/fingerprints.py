"""Fingerprints and bit sums of weights, computed on their device, to compare weights across processes."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW = 1024  # words of eight bytes
PIECE = 2**26  # bytes that are processed at a time, to save memory
ODD = 0x9E3779B97F4A7C15 - 2**64
PATTERNS = {2: torch.int16, 4: torch.int32}  # whole numbers as wide as a weight

ADAPTERS = "adapters"  # in place of a weight's name: the sum of all adapters of a process

Holding = tuple[int, int]  # a weight's fingerprint and its number of elements


class LiveSums(NamedTuple):
    """Bit sums of the trainer's tensors, or of one rank's part of them."""

    plain: int = 0  # weights; adapters are merged unless they are sent separately
    adapters: int = 0
    fixed: int = 0  # numbers that training does not change; an engine may hold them as weights


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a number that differs if one bit changes or two values swap places.

    0.0 and -0.0 are equal: adding an adapter of zeros turns -0.0 into 0.0.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    columns = multipliers(0, ROW, tensor.device)
    done = 0
    for piece in tensor.detach().flatten().split(PIECE // tensor.element_size()):
        unsigned = piece + 0 if piece.is_floating_point() else piece
        room = -unsigned.numel() % (ROW * 8 // unsigned.element_size())
        padded = torch.nn.functional.pad(unsigned, (0, room)) if room else unsigned
        rows = padded.view(torch.int64).view(-1, ROW)
        total += ((rows * columns).sum(1) * multipliers(done, len(rows), tensor.device)).sum()
        done += len(rows)
    return total


def multipliers(first: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random odd numbers, one for each position."""
    mixed = (torch.arange(first, first + count, device=device) + 1) * ODD
    return ((mixed ^ (mixed >> 29)) * ODD) | 1


def salt_print(print_: Tensor, label: str) -> Tensor:
    """Return a fingerprint that depends on this label."""
    salt = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big", signed=True)
    return print_ * (salt | 1) + salt


def bit_sum(tensor: Tensor) -> Tensor:
    """Add bit patterns as integers: the sum does not change if a tensor is fused, split or permuted."""
    pattern = PATTERNS[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in tensor.detach().flatten().split(PIECE // tensor.element_size()):
        total += (piece + 0).view(pattern).sum(dtype=torch.int64)  # 0.0 and -0.0 are equal
    return total


def add_bits(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> int:
    """Return the bit sum of all tensors in this type."""
    return wrap_int64(sum(as_numbers(bit_sum(tensor.to(dtype)) for _, tensor in named)))


def total_sums(parts: Iterable[LiveSums]) -> LiveSums:
    """Add up the parts of all ranks."""
    return LiveSums(*(wrap_int64(sum(sums)) for sums in zip(*parts, strict=True)))


def plain_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once; weights that the engine has packed are empty."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and (parameter.data_ptr() not in seen or not parameter.numel()):
            seen.add(parameter.data_ptr())
            yield name, parameter.data


def holdings(model: Any) -> dict[str, Holding]:
    named = list(plain_parameters(model))
    prints = as_numbers(fingerprint(weight) for _, weight in named)
    return {name: (print_, weight.numel()) for (name, weight), print_ in zip(named, prints, strict=True)}


def bit_sums(model: Any, dtype: torch.dtype) -> dict[str, int]:
    named = list(plain_parameters(model))
    sums = as_numbers(bit_sum(weight.to(dtype)) for _, weight in named)
    return {name: bits for (name, _), bits in zip(named, sums, strict=True)}


def as_numbers(values: Iterable[Tensor]) -> list[int]:
    """Return all numbers with one transfer from the device, if it is one."""
    listed = list(values)
    if len({value.device for value in listed}) > 1:
        listed = [value.cpu() for value in listed]
    return torch.stack(listed).tolist() if listed else []


def scramble(model: Any) -> None:
    """Overwrite every weight with noise, so that only weights loaded afterwards can be right."""
    for _, weight in plain_parameters(model):
        weight.normal_()


def wrap_int64(total: int) -> int:
    """Wrap a sum into a signed 64-bit number, as devices do."""
    return (total + 2**63) % 2**64 - 2**63
