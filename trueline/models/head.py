"""Log-probs and entropy from hidden states, slice by slice: a [T, V] tensor never exists."""

from typing import Any

import torch
from torch import Tensor


class ChunkedHead(torch.autograd.Function):
    """Hidden states and the head's weight -> log-prob of each target and entropy at each position.

    Both passes hold logits for `chunk` rows only; the backward pass computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: tuple[float, int]
    ) -> tuple[Tensor, Tensor]:
        temperature, chunk = settings
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in slices(len(targets), chunk):
            scores = log_softmax(hidden[rows], weight, bias, temperature)
            logprobs[rows] = scores.gather(-1, targets[rows, None])[:, 0]
            entropy[rows] = -(scores.exp() * scores).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.settings = settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot - p; d entropy / d logits = -p (log p + entropy)."""
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        temperature, chunk = ctx.settings
        to_logprob, to_entropy = gradients
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for rows in slices(len(targets), chunk):
            scores = log_softmax(hidden[rows], weight, bias, temperature)
            share = scores.exp()
            flow = -share * (to_logprob[rows, None] + to_entropy[rows, None] * (scores + entropy[rows, None]))
            flow.scatter_add_(-1, targets[rows, None], to_logprob[rows, None])
            flow = (flow / temperature).to(hidden.dtype)
            hidden_gradient[rows] = flow @ weight
            weight_gradient += flow.T @ hidden[rows]
            if bias_gradient is not None:
                bias_gradient += flow.sum(0)
        done_bias = bias_gradient.to(bias.dtype) if bias_gradient is not None else None
        return hidden_gradient, weight_gradient.to(weight.dtype), done_bias, None, None


def log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits / temperature, dim=-1)


def slices(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]
