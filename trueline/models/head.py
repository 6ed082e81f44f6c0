"""The LM head in slices: log-probs, entropies and divergences without ever holding all logits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trueline.algorithms.divergences import DIVERGENCES
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.supervised import DistillConfig
from trueline.models.loading import load_model, shape_of
from trueline.models.truncation import Truncation, truncate_around

HEAD_CHUNK = {"cuda": 1024, "cpu": 128}  # tokens; the fastest


class HeadWork(NamedTuple):
    """What the head computes, and how."""

    temperature: float
    chunk: int  # rows of logits held at a time
    entropy: bool  # also the variance of log p
    compiled: bool = False  # few kernels for each slice
    squares: bool = False  # also the sum of p^2
    kept: Truncation | None = None  # the likeliest tokens alone; both passes must keep the same ones, bit for bit

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return compile_kernel(function) if self.compiled and self.kept is None else function


class ChunkedHead(torch.autograd.Function):
    """Compute each target's log-prob and, on request, each position's entropy, Var[log p] and sum of p^2.

    The last two have no gradient.
    Both passes hold logits of only `chunk` rows; the backward pass computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: HeadWork
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if work.entropy else None
        variance = torch.empty_like(logprobs) if work.entropy else None
        squares = torch.empty_like(logprobs) if work.squares else None
        read = work.kernel(read_slice)
        for rows in slices(len(targets), work.chunk):
            found = read(hidden[rows], weight, bias, targets[rows], work)
            normalizers[rows], logprobs[rows] = found[:2]
            if entropy is not None and variance is not None:
                entropy[rows], variance[rows] = found[2:4]
            if squares is not None:
                squares[rows] = found[-1]
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.work = work
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one in (variance, squares) if one is not None))
        return logprobs, entropy, variance, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        work, (to_logprob, to_entropy, *_) = ctx.work, gradients
        to_logprob = torch.zeros_like(normalizers) if to_logprob is None else to_logprob
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        flow_back = work.kernel(slice_gradient)
        for rows in slices(len(targets), work.chunk):
            by_entropy = None if to_entropy is None else (to_entropy[rows], entropy[rows])
            known = targets[rows], normalizers[rows], to_logprob[rows], by_entropy
            flow = flow_back(hidden[rows], weight, bias, known, work)
            hidden_gradient[rows] = flow @ weight
            if weight_gradient is not None:
                weight_gradient += flow.T @ hidden[rows]
            if bias_gradient is not None:
                bias_gradient += flow.sum(0)
        done = [total if total is None else total.to(hidden.dtype) for total in (weight_gradient, bias_gradient)]
        return hidden_gradient, done[0], done[1], None, None


@cache
def compile_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def read_slice(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: HeadWork
) -> tuple[Tensor, ...]:
    """Return normalizers and log-probs of targets; on request also entropy and variance of log p, and sums of p^2."""
    logits = keep_likeliest(temper(hidden, weight, bias, work), targets, work)
    normalizers = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normalizers
    scores = logits.sub_(normalizers[:, None]) if work.entropy or work.squares else logits
    more = moments(scores) if work.entropy else ()
    return normalizers, logprobs, *more, *((scores.mul(2).exp_().sum(-1),) if work.squares else ())


def slice_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, known: tuple[Any, ...], work: HeadWork
) -> Tensor:
    """Return the gradient by logits, in the type of the hidden states."""
    targets, normalizers, to_logprob, by_entropy = known
    scores = keep_likeliest(temper(hidden, weight, bias, work), targets, work).sub_(normalizers[:, None])
    if by_entropy is None:
        flow = scores.exp_().mul_(-to_logprob[:, None])
    else:
        flow = flow_with_entropy(scores, to_logprob, *by_entropy)
    flow.scatter_add_(-1, targets[:, None], to_logprob[:, None])
    return (flow if work.temperature == 1 else flow.div_(work.temperature)).to(hidden.dtype)


def moments(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return entropy and variance of log p, [T] each, from log-probs [T, V], which are more precise than logits."""
    weighted = scores.exp().mul_(scores)
    entropy = -weighted.sum(-1)
    return entropy, torch.linalg.vecdot(weighted, scores) - entropy.square()


def flow_with_entropy(scores: Tensor, to_logprob: Tensor, to_entropy: Tensor, entropy: Tensor) -> Tensor:
    """Add d logprob / d logits = onehot - p, without the onehot, and d entropy / d logits = -p (log p + entropy)."""
    factors = to_logprob[:, None] + to_entropy[:, None] * (scores + entropy[:, None])
    return -scores.exp() * factors


def temper(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: HeadWork) -> Tensor:
    """Return logits in float32, divided by the temperature."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if work.temperature == 1 else logits.div_(work.temperature)


def keep_likeliest(logits: Tensor, targets: Tensor, work: HeadWork) -> Tensor:
    """Give tokens that are not kept the probability 0."""
    return logits if work.kept is None else truncate_around(targets, logits, work.kept)


def slices(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]


@dataclass(frozen=True, slots=True)
class Teacher:
    model: Any
    config: DistillConfig


def load_teacher(config: DistillConfig, source: ModelConfig, student: Any, dtype: torch.dtype, packed: bool) -> Teacher:
    """Load the teacher on the student's device; it must have the student's vocabulary."""
    model = load_model(source, dtype, packed=packed).to(student.device).requires_grad_(False)
    known, taught = (shape_of(one.get_output_embeddings().weight)[0] for one in (student, model))
    if known != taught:
        raise ConfigError(
            f"distill.teacher={source.path} has {taught} tokens and the student {known}: choose models with the same "
            "vocabulary"
        )
    return Teacher(model, config)


def chunked_divergence(
    hidden: Tensor, head: nn.Linear, teacher: tuple[Tensor, Any], config: DistillConfig, chunk: int
) -> Tensor:
    """Compute divergences [n] in slices; the backward pass computes each slice's logits again."""
    taught, teacher_head = teacher
    compute, weights = partial(checkpoint, slice_divergence, use_reentrant=False), (head.weight, head.bias)
    places = slices(len(hidden), chunk)
    parts = [compute(hidden[rows], *weights, (taught[rows], teacher_head), config) for rows in places]
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


def chunked_likeliest(hidden: Tensor, head: nn.Linear, wanted: Tensor | int, work: HeadWork) -> tuple[Tensor, Tensor]:
    """Return tokens [n, k] and their log-probs, in slices as divergences are: the k likeliest, or those given.

    Behind the log-probs is that of all other tokens together, unless there are none.
    """
    compute = partial(checkpoint, slice_likeliest, use_reentrant=False)
    parts = [
        compute(hidden[rows], head.weight, head.bias, wanted if isinstance(wanted, int) else wanted[rows], work)
        for rows in slices(len(hidden), work.chunk) or [slice(0, 0)]
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def slice_likeliest(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor | int, work: HeadWork
) -> tuple[Tensor, Tensor]:
    scores = temper(hidden, weight, bias, work).log_softmax(-1)
    size = scores.shape[-1]
    ids = scores.topk(min(wanted, size)).indices if isinstance(wanted, int) else wanted.long().clamp(min=0)
    logprobs = scores.gather(-1, ids)
    if ids.shape[-1] < size:
        others = scores.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        logprobs = torch.cat([logprobs, others], -1)
    return ids.int(), logprobs
