"""A short comparison at the start: does the scorer say what the plain model says, and do neighbours stay apart?"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trueline.config.base import ConfigError
from trueline.models.attention import Current, Layout

LENGTHS = (7, 5)
REMEDY = "set training.packing=false and model.ring=1, or choose another model"


class Probe:
    """Made of the model as it was loaded, compared with what training has made of it: packed, cut, sharded."""

    def __init__(self, model: Any, packed: bool, speaks: bool) -> None:
        random = torch.Generator().manual_seed(0)
        highest = model.get_input_embeddings().num_embeddings
        device = model.get_input_embeddings().weight.device
        self.name, self.packed = type(model).__name__, packed
        self.tokens = torch.randint(0, highest, (sum(LENGTHS),), generator=random).to(device)
        self.expected: Tensor | None = None
        if speaks:
            self.expected = torch.cat([self.guarded(plain_logprobs, model, part) for part in self.parts()])

    def parts(self) -> tuple[Tensor, ...]:
        return self.tokens.split(LENGTHS)

    @torch.no_grad()
    def compare(self, forward: Callable[[Tensor, list[int]], Tensor], tolerance: float) -> None:
        """`forward` takes tokens and the lengths of the sequences among them; every rank takes part."""
        together = self.guarded(forward, self.tokens, list(LENGTHS)).float()
        alone = torch.cat([self.guarded(forward, part, [len(part)]) for part in self.parts()]).float()
        gap = (together - alone).abs().mean().item()
        if not gap < tolerance:
            raise ConfigError(f"{self.name}: sequences in one pass influence each other (mean gap {gap:.2g}): {REMEDY}")
        if self.expected is None:
            return
        gap = (together - self.expected).abs().mean().item()
        if not gap < tolerance:
            raise ConfigError(
                f"{self.name}: its log-probs in training differ from plain transformers' by {gap:.2g}; it does more "
                "between its last hidden states and its logits than one linear layer: choose another model"
            )

    def guarded(self, call: Callable[..., Tensor], *args: Any) -> Tensor:
        """An architecture that cannot take packed sequences fails in its own words; say it in ours."""
        try:
            return call(*args)
        except (KeyError, AttributeError, TypeError, NotImplementedError) as error:
            if not self.packed:
                raise
            raise ConfigError(f"{self.name} cannot take packed sequences ({error!r}): {REMEDY}") from error


@torch.no_grad()
def plain_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """[T], as transformers' own forward pass gives them; zero at the first token."""
    Current.layout = Layout([len(tokens)])
    scores = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    found = scores[:-1].gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros_like(found[:1]), found])
