"""Compute how far a student's next-token distributions are from a teacher's, slice by slice of the positions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.preference import DistillConfig
from trueline.models.head import slices
from trueline.models.loading import load_model, shape_of


@dataclass(frozen=True, slots=True)
class Teacher:
    model: Any
    config: DistillConfig


def load_teacher(config: DistillConfig, source: ModelConfig, student: Any, dtype: torch.dtype, packed: bool) -> Teacher:
    """Load the teacher beside its student, whose vocabulary it must have."""
    model = load_model(source, dtype, packed=packed).to(student.device).requires_grad_(False)
    known, taught = (shape_of(one.get_output_embeddings().weight)[0] for one in (student, model))
    if known != taught:
        raise ConfigError(
            f"distill.teacher={source.path}: it knows {taught} tokens and the student {known}; "
            "choose models with one vocabulary"
        )
    return Teacher(model, config)


def chunked_divergence(
    hidden: Tensor, head: nn.Linear, teacher: tuple[Tensor, Any], config: DistillConfig, chunk: int
) -> Tensor:
    """Compute divergences [n]; the backward pass computes each slice's logits again, so they never exist as a whole."""
    taught, teacher_head = teacher
    parts = [
        checkpoint(
            slice_divergence,
            hidden[rows],
            head.weight,
            head.bias,
            (taught[rows], teacher_head),
            config,
            use_reentrant=False,
        )
        for rows in slices(len(hidden), chunk)
    ]
    return torch.cat(parts) if parts else hidden.sum(-1).float()


def slice_divergence(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: tuple[Tensor, Any], config: DistillConfig
) -> Tensor:
    student_logits = nn.functional.linear(hidden, weight, bias).float() / config.temperature
    with torch.no_grad():
        teacher_logits = nn.functional.linear(teacher[0], teacher[1].weight, teacher[1].bias).float()
        teacher_logits = teacher_logits / config.temperature
    if config.top_k is not None:
        teacher_logits, likeliest = teacher_logits.topk(min(config.top_k, teacher_logits.shape[-1]))
        student_logits = student_logits.gather(-1, likeliest)
    return DIVERGENCES[config.divergence](teacher_logits.log_softmax(-1), student_logits.log_softmax(-1))


def kl(one: Tensor, other: Tensor) -> Tensor:
    """Compute KL(one || other) of log-probs [n, V]."""
    return (one.exp() * (one - other)).sum(-1)


def jensen_shannon(teacher: Tensor, student: Tensor) -> Tensor:
    mixture = torch.logaddexp(teacher, student) - torch.log(torch.tensor(2.0))
    return 0.5 * (kl(teacher, mixture) + kl(student, mixture))


DIVERGENCES = {
    "forward": kl,
    "reverse": lambda teacher, student: kl(student, teacher),
    "jsd": jensen_shannon,
}
