"""A causal language model as training needs it: tokens in, log-probs and entropy of those tokens out."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trueline.models.head import ChunkedHead


class Scorer(nn.Module):
    """Backbone and chunked head in one module, called as a whole so that ZeRO's hooks see every part.

    The only place where positions are shifted: log-prob t is that of token t given those before it.
    Sequences are padded on the right, so under causal attention no mask is needed.
    """

    def __init__(self, model: Any, head_chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        head.forward = MethodType(score_targets, head)
        self.chunk = head_chunk_tokens

    def forward(self, tokens: Tensor, mask: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        wanted = mask[:, 1:]
        head = self.model.get_output_embeddings()
        logprobs, entropy = head(hidden[:, :-1][wanted], tokens[:, 1:][wanted], (temperature, self.chunk))
        return place(logprobs, mask), place(entropy, mask)


def score_targets(
    head: nn.Linear, hidden: Tensor, targets: Tensor, settings: tuple[float, int]
) -> tuple[Tensor, Tensor]:
    return ChunkedHead.apply(hidden, head.weight, head.bias, targets, settings)  # type: ignore[no-any-return]


def place(values: Tensor, mask: Tensor) -> Tensor:
    """Put the values of the wanted positions back on the token axis; zero elsewhere."""
    positions = torch.zeros_like(mask)
    positions[:, 1:] = mask[:, 1:]
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(positions, values)


def hf_name(name: str) -> str:
    """The Hugging Face name of one of a Scorer's parameters."""
    return name.removeprefix("model.")
