"""Sampling from the likeliest tokens alone: which an engine keeps, and a trainer that samples from the same ones."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LEAST = -1e9  # a logit whose probability is 0, and whose products with 0 are 0


class Controls(Protocol):
    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Truncation:
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, controls: Controls) -> "Truncation":
        return cls(controls.top_k, controls.top_p, controls.min_p)

    def keeps_all(self) -> bool:
        return self == Truncation(0, 1.0, 0.0)


def truncate(logits: Tensor, how: Truncation) -> Tensor:
    """Return logits [..., V], minus infinity for tokens that are not kept; steps and order are vLLM's."""
    if how.min_p > 0:
        shares = (logits - logits.amax(-1, keepdim=True)).exp()
        logits = logits.masked_fill(shares < how.min_p, -torch.inf)
    if how.top_k > 0:
        least = logits.topk(min(how.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_p < 1:
        ascending, places = logits.sort()
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - how.top_p
        unlikely[..., -1] = False  # the likeliest token stays, whatever rounding does
        logits = logits.masked_fill(torch.zeros_like(unlikely).scatter(-1, places, unlikely), -torch.inf)
    return logits


def truncate_around(targets: Tensor, logits: Tensor, how: Truncation) -> Tensor:
    """Do the same for [T, V] in finite numbers; the tokens that were sampled [T] stay, whatever rounding does."""
    places = targets[:, None]
    return truncate(logits, how).scatter_(-1, places, logits.gather(-1, places)).clamp_(min=LEAST)
