"""Mixtures of experts: what their routers choose, samples that tell it, and a forward pass worked out by hand."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from tests.support.tiny import make_samples
from trueline.algorithms.loss_aggregation import set_weights
from trueline.data.types import UNKNOWN_EXPERT, Sample
from trueline.models.routing import Recorder

EXPERTS, TOP_K, LAYERS = 4, 2, 2  # of `make_tiny_mixture`


def chosen_by(folder: Path, tokens: Tensor) -> Tensor:
    """The experts that a model chooses for one sequence, [T, layers, top_k]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    recorder = Recorder(model)
    with torch.no_grad():
        model(input_ids=tokens[None])
    return recorder.of_pass(1)[0].to(torch.int8)


def told_samples(folder: Path, count: int = 5, *, changed: float = 0.0, untold: float = 0.0) -> list[Sample]:
    """Samples with the model's own experts, of which a share of tokens has other ones, and another none."""
    samples, generator = make_samples(count, seed=3), torch.Generator().manual_seed(5)
    set_weights(samples, "token_mean", 0)
    for sample in samples:
        experts = chosen_by(folder, sample.tokens)
        rows = torch.rand(sample.length(), LAYERS, generator=generator)
        others = torch.rand(sample.length(), LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
        experts = torch.where(rows[..., None] < changed, others.to(torch.int8), experts)
        experts[torch.rand(sample.length(), generator=generator) < untold] = UNKNOWN_EXPERT
        sample.experts = experts
    return samples


def by_hand(folder: Path, samples: list[Sample]) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
    """Log-probs, gradients of the sum over weight x -log p, and router logits [T, layers, E], token by token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, logits = [], []
    for sample in samples:
        seen: list[Tensor] = []
        for layer, block in enumerate(decoder_layer.mlp for decoder_layer in model.model.layers):
            block.forward = mixture(block, sample.experts[:, layer], model.config, seen)
        scores = model(input_ids=sample.tokens[None]).logits[0, :-1].log_softmax(-1)
        logprobs = scores.gather(-1, sample.tokens[1:, None])[:, 0]
        found.append(torch.cat([torch.zeros(1), logprobs]) * sample.mask)
        logits.append(torch.stack(seen, dim=1))
    sum(-(sample.weight * one).sum() for sample, one in zip(samples, found, strict=True)).backward()  # type: ignore[union-attr]
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return [one.detach() for one in found], gradients, [one.detach() for one in logits]


def mixture(block: Any, experts: Tensor, config: Any, seen: list[Tensor]) -> Any:
    normed = config.model_type == "mixtral" or config.norm_topk_prob

    def forward(hidden: Tensor) -> Tensor:
        tokens, rows = hidden[0], []
        logits = tokens @ block.gate.weight.T
        seen.append(logits)
        for token, told, scores in zip(tokens, experts.tolist(), logits, strict=True):
            shares = scores.softmax(-1)
            mine = shares.topk(TOP_K).indices.tolist() if UNKNOWN_EXPERT in told else told
            whole = sum(shares[one] for one in mine) if normed else 1.0
            rows.append(sum(shares[one] / whole * expert(block.experts, one, token) for one in mine))
        return torch.stack(rows)[None]

    return forward


def expert(experts: Any, number: int, token: Tensor) -> Tensor:
    gate, up = (experts.gate_up_proj[number] @ token).chunk(2)
    return experts.down_proj[number] @ (silu(gate) * up)
