"""A check at the start: training computes what the plain model computes, and packed sequences stay separate."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.models.attention import Current, PackedLayout

LENGTHS = (7, 5)
LEAST = 1e-3  # a mean gap up to this is rounding in any model
NOISE = 5.0  # times the effect of rounding the embeddings once: every layer rounds, and real faults do far more
REMEDY = "set training.packing=false and model.context_parallel=1, or choose another model"


class Probe:
    """Compare the model as loaded with the model as trained: packed, parallel, sharded."""

    def __init__(self, model: Any, device: torch.device, packed: bool, has_language_head: bool) -> None:
        random = torch.Generator().manual_seed(0)
        highest = model.get_input_embeddings().num_embeddings
        self.name, self.packed = type(model).__name__, packed
        self.tokens = torch.randint(0, highest, (sum(LENGTHS),), generator=random).to(device)
        self.expected: Tensor | None = None
        if has_language_head:
            self.expect(partial(plain_logprobs, model))

    @torch.no_grad()
    def expect(self, plain: Callable[[Tensor], Tensor]) -> None:
        """Remember the log-probs of transformers' own forward pass over each sequence."""
        self.expected = torch.cat([self._call(plain, part) for part in self.tokens.split(LENGTHS)]).float()

    @torch.no_grad()
    def compare(self, forward: Callable[[Tensor, list[int]], Tensor], embeddings: nn.Module) -> None:
        """Refuse a model that differs; `forward` takes tokens and sequence lengths, on every rank."""
        together = self._call(forward, self.tokens, list(LENGTHS)).float()
        alone = torch.cat([self._call(forward, part, [len(part)]) for part in self.tokens.split(LENGTHS)]).float()
        random = torch.Generator().manual_seed(1)

        def move(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            """Change every embedded number by its last bit, up or down, to measure what rounding does."""
            signs = torch.randint(0, 2, output.shape, generator=random) * 2 - 1
            return output * (1 + torch.finfo(output.dtype).eps * signs).to(output)

        with embeddings.register_forward_hook(move):
            rounded = forward(self.tokens, list(LENGTHS)).float()
        limit = max(LEAST, NOISE * mean_gap(together, rounded))
        gap = mean_gap(together, alone)
        if not gap < limit:
            raise ConfigError(
                f"{self.name}: packed sequences influence each other (mean gap {gap:.2g}, limit {limit:.2g}): {REMEDY}"
            )
        if self.expected is None:
            return
        gap = mean_gap(together, self.expected)
        if not gap < limit:
            raise ConfigError(
                f"{self.name}: log-probs in training differ from plain transformers' by {gap:.2g} (limit {limit:.2g}), "
                "because its head is more than one linear layer: choose another model"
            )

    def _call(self, call: Callable[..., Tensor], *args: Any) -> Tensor:
        """Make the call; explain errors of architectures that do not support packed sequences."""
        try:
            return call(*args)
        except (KeyError, AttributeError, TypeError, NotImplementedError) as error:
            if not self.packed:
                raise
            raise ConfigError(f"{self.name} does not support packed sequences ({error!r}): {REMEDY}") from error


def mean_gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


@torch.no_grad()
def plain_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return log-probs [T] of transformers' own forward pass; zero at the first token."""
    Current.layout = PackedLayout([len(tokens)])
    scores = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    found = scores[:-1].gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros_like(found[:1]), found])
