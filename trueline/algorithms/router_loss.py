"""The load-balancing loss of mixtures of experts: Switch Transformer (arXiv:2101.03961), eq. 4-6.

Over all tokens and layers: E * sum over E experts of (share of tokens sent there) * (mean probability).
The shares have no gradient, so with known shares each pass sums over its own tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trueline.data.types import Batch, ModelOutput


def routing(logits: Sequence[Tensor], top_k: int) -> dict[str, Tensor]:
    """Return the router fields of ModelOutput from each layer's router logits [N, E]."""
    probabilities = [layer.float().softmax(-1) for layer in logits]
    sent = [torch.zeros_like(layer).scatter_(-1, layer.topk(top_k).indices, 1.0) for layer in probabilities]
    return {"expert_counts": torch.stack(sent).sum(0), "router_probs": torch.stack(probabilities).sum(0)}


def over_learnt(values: Tensor, batch: Batch) -> Tensor:
    """Sum over the tokens of all sequences except fillers and filtered ones, [N, E] -> [E]."""
    return values[batch.spread(batch.shares) > 0].sum(0)


def router_loss(output: ModelOutput, batch: Batch, counts: list[float], top_k: int) -> Tensor:
    """Return this pass's part of the loss; `counts` [E] are of the whole minibatch."""
    rows = sum(counts) / top_k  # tokens x layers
    factors = torch.tensor([len(counts) * count / rows**2 for count in counts], device=batch.shares.device)
    return (factors * over_learnt(output.router_probs, batch)).sum()
