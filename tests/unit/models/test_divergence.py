"""Divergences against plain sums in float64, over all logits at once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.config.preference import DistillConfig
from trueline.models.divergence import chunked_divergence

ROWS, WIDTH, TEACHER_WIDTH, VOCABULARY = 7, 5, 9, 11


def linear(width: int, bias: bool, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, VOCABULARY, bias=bias)


def make(rows: int = ROWS, bias: bool = False) -> tuple[Tensor, nn.Linear, tuple[Tensor, nn.Linear]]:
    """A student's hidden states and head, a teacher's of another width."""
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, WIDTH, generator=random).requires_grad_()
    taught = torch.randn(rows, TEACHER_WIDTH, generator=random)
    return hidden, linear(WIDTH, bias, 1), (taught, linear(TEACHER_WIDTH, bias, 2))


def found(config: DistillConfig, chunk: int = 3, bias: bool = False) -> Tensor:
    hidden, head, teacher = make(bias=bias)
    return chunked_divergence(hidden, head, teacher, config, chunk)


def probabilities(config: DistillConfig, bias: bool = False) -> list[tuple[list[float], list[float]]]:
    """Of teacher and student, row by row, as plain lists."""
    hidden, head, (taught, teacher_head) = make(bias=bias)
    student_logits = (head(hidden).double() / config.temperature).tolist()
    teacher_logits = (teacher_head(taught).double() / config.temperature).tolist()
    rows = []
    for theirs, ours in zip(teacher_logits, student_logits, strict=True):
        likeliest = sorted(range(VOCABULARY), key=lambda token: -theirs[token])[: config.top_k]
        rows.append((softmax([theirs[token] for token in likeliest]), softmax([ours[token] for token in likeliest])))
    return rows


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def kl(one: list[float], other: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))


def jsd(one: list[float], other: list[float]) -> float:
    mixture = [(p + q) / 2 for p, q in zip(one, other, strict=True)]
    return (kl(one, mixture) + kl(other, mixture)) / 2


FORMULAS = {"forward": kl, "reverse": lambda teacher, student: kl(student, teacher), "jsd": jsd}
CONFIGS = [
    DistillConfig(divergence=divergence, temperature=temperature, top_k=top_k)  # type: ignore[arg-type]
    for divergence in FORMULAS
    for temperature in (1.0, 2.5)
    for top_k in (None, 1, 4, 1000)
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.divergence}-{config.temperature}-{config.top_k}"
)
def test_values_are_those_of_the_formulas(config: DistillConfig, bias: bool) -> None:
    expected = [FORMULAS[config.divergence](*row) for row in probabilities(config, bias)]
    assert found(config, bias=bias).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("config", CONFIGS[::4], ids=lambda config: f"{config.divergence}-{config.temperature}")
def test_the_size_of_a_slice_changes_nothing(config: DistillConfig) -> None:
    whole = found(config, chunk=ROWS)
    for chunk in (1, 2, 5, 1000):
        torch.testing.assert_close(found(config, chunk=chunk), whole, rtol=1e-5, atol=1e-6)


def plain(config: DistillConfig, hidden: Tensor, head: nn.Linear, teacher: tuple[Tensor, nn.Linear]) -> Tensor:
    """All logits at once, by autograd alone."""
    ours = (head(hidden) / config.temperature).log_softmax(-1)
    theirs = (teacher[1](teacher[0]) / config.temperature).log_softmax(-1).detach()
    forward, reverse = (theirs.exp() * (theirs - ours)).sum(-1), (ours.exp() * (ours - theirs)).sum(-1)
    middle = ((ours.exp() + theirs.exp()) / 2).log()
    both = ((theirs.exp() * (theirs - middle)).sum(-1) + (ours.exp() * (ours - middle)).sum(-1)) / 2
    return {"forward": forward, "reverse": reverse, "jsd": both}[config.divergence]


def gradients(divergence: Tensor, parts: list[Any]) -> list[Tensor]:
    (divergence * torch.linspace(-1, 2, ROWS)).sum().backward()
    return [part.grad for part in parts]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_gradients_are_those_of_plain_autograd(kind: str, chunk: int) -> None:
    config = DistillConfig(divergence=kind, temperature=1.7)  # type: ignore[arg-type]
    hidden, head, teacher = make(bias=True)
    ours = gradients(chunked_divergence(hidden, head, teacher, config, chunk), [hidden, head.weight, head.bias])
    hidden, head, teacher = make(bias=True)
    theirs = gradients(plain(config, hidden, head, teacher), [hidden, head.weight, head.bias])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert teacher[1].weight.grad is None


@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_a_model_is_at_no_distance_from_itself(kind: str) -> None:
    hidden, head, _ = make()
    config = DistillConfig(divergence=kind)  # type: ignore[arg-type]
    divergence = chunked_divergence(hidden, head, (hidden.detach(), head), config, 3)
    assert divergence.tolist() == pytest.approx([0.0] * ROWS, abs=1e-6)


def test_the_mixture_bounds_the_divergence() -> None:
    """Distributions without a common token are log 2 apart."""
    head = nn.Linear(2, 2, bias=False)
    head.weight.data.copy_(torch.eye(2) * 100)
    hidden, taught = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    divergence = chunked_divergence(hidden, head, (taught, head), DistillConfig(divergence="jsd"), 1)
    assert divergence.item() == pytest.approx(math.log(2), rel=1e-5)


def test_no_rows_are_no_numbers_and_can_be_differentiated() -> None:
    hidden, head, teacher = make(rows=0)
    divergence = chunked_divergence(hidden, head, teacher, DistillConfig(), 3)
    assert divergence.shape == (0,)
    divergence.sum().backward()
