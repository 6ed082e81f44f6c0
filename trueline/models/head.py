"""Compute log-probs, entropy and variance from hidden states, slice by slice: a [T, V] tensor never exists."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

HEAD_CHUNK = {"cuda": 1024, "cpu": 128}  # tokens; what was quickest


class HeadWork(NamedTuple):
    """What is asked of the head."""

    temperature: float
    chunk: int  # rows of logits held at a time
    entropy: bool  # and the variance of log p


class ChunkedHead(torch.autograd.Function):
    """Compute each target's log-prob from hidden states and head weight and, if asked for, each position's moments: the
    entropy, which is -E[log p], and Var[log p], which has no gradient.

    Both passes hold logits for `chunk` rows only; the backward pass computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: HeadWork
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if work.entropy else None
        variance = torch.empty_like(logprobs) if work.entropy else None
        for rows in slices(len(targets), work.chunk):
            logits = tempered(hidden[rows], weight, bias, work.temperature)
            normalizers[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, targets[rows, None])[:, 0] - normalizers[rows]
            if entropy is not None and variance is not None:
                entropy[rows], variance[rows] = moments(logits.sub_(normalizers[rows, None]))
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.work = work
        ctx.set_materialize_grads(False)
        if variance is not None:
            ctx.mark_non_differentiable(variance)
        return logprobs, entropy, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        work, (to_logprob, to_entropy, _) = ctx.work, gradients
        to_logprob = torch.zeros_like(normalizers) if to_logprob is None else to_logprob
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in slices(len(targets), work.chunk):
            scores = tempered(hidden[rows], weight, bias, work.temperature).sub_(normalizers[rows, None])
            if to_entropy is None:
                flow = scores.exp_().mul_(-to_logprob[rows, None])
            else:
                flow = flow_with_entropy(scores, to_logprob[rows], to_entropy[rows], entropy[rows])
            flow.scatter_add_(-1, targets[rows, None], to_logprob[rows, None])
            flow = (flow if work.temperature == 1 else flow.div_(work.temperature)).to(hidden.dtype)
            hidden_gradient[rows] = flow @ weight
            if weight_gradient is not None:
                weight_gradient += flow.T @ hidden[rows]
            if bias_gradient is not None:
                bias_gradient += flow.sum(0)
        done = [total if total is None else total.to(hidden.dtype) for total in (weight_gradient, bias_gradient)]
        return hidden_gradient, done[0], done[1], None, None


def moments(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return entropy and variance of log p, [T] each, from log-probs [T, V]; logits would lose digits to their size."""
    weighted = scores.exp().mul_(scores)
    entropy = -weighted.sum(-1)
    return entropy, torch.linalg.vecdot(weighted, scores) - entropy.square()


def flow_with_entropy(scores: Tensor, to_logprob: Tensor, to_entropy: Tensor, entropy: Tensor) -> Tensor:
    """Add d logprob / d logits = onehot - p, without the onehot, and d entropy / d logits = -p (log p + entropy)."""
    factors = to_logprob[:, None] + to_entropy[:, None] * (scores + entropy[:, None])
    return -scores.exp() * factors


def tempered(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return logits in float32, divided by the temperature."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1 else logits.div_(temperature)


def slices(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]
