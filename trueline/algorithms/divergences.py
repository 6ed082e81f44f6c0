"""Divergences between two next-token distributions, each given by log-probs [n, V] of the same classes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def kl(one: Tensor, other: Tensor) -> Tensor:
    """Compute KL(one || other), [n]."""
    return (one.exp() * (one - other)).sum(-1)


def jensen_shannon(teacher: Tensor, student: Tensor) -> Tensor:
    mixture = torch.logaddexp(teacher, student) - math.log(2.0)
    return 0.5 * (kl(teacher, mixture) + kl(student, mixture))


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward": kl,
    "reverse": lambda teacher, student: kl(student, teacher),
    "jsd": jensen_shannon,
}
