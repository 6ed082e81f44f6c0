"""A short comparison at the start: does the scorer say what the plain model says, and do neighbours stay apart?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trueline.config.base import ConfigError
from trueline.models.attention import Current, Layout

LENGTHS = (7, 5)
LEAST = 1e-3  # a mean gap up to this is rounding in any model
NOISE = 5.0  # times what one rounding of the embeddings does: every layer rounds, and real faults do far more
REMEDY = "set training.packing=false and model.context_parallel=1, or choose another model"


class Probe:
    """Compare the model as it was loaded with what training has made of it: packed, cut, sharded."""

    def __init__(self, model: Any, device: torch.device, packed: bool, speaks: bool) -> None:
        random = torch.Generator().manual_seed(0)
        highest = model.get_input_embeddings().num_embeddings
        self.name, self.packed = type(model).__name__, packed
        self.tokens = torch.randint(0, highest, (sum(LENGTHS),), generator=random).to(device)
        self.expected: Tensor | None = None
        if speaks:
            self.expect(partial(plain_logprobs, model))

    @torch.no_grad()
    def expect(self, plain: Callable[[Tensor], Tensor]) -> None:
        """Remember the log-probs of transformers' own forward pass over each sequence."""
        self.expected = torch.cat([self.guarded(plain, part) for part in self.parts()]).float()

    def parts(self) -> tuple[Tensor, ...]:
        return self.tokens.split(LENGTHS)

    @torch.no_grad()
    def compare(self, forward: Callable[[Tensor, list[int]], Tensor], embeddings: nn.Module) -> None:
        """Refuse a model that differs; `forward` takes tokens and their sequences' lengths, on every rank."""
        together = self.guarded(forward, self.tokens, list(LENGTHS)).float()
        alone = torch.cat([self.guarded(forward, part, [len(part)]) for part in self.parts()]).float()
        with one_rounding(embeddings):
            rounded = forward(self.tokens, list(LENGTHS)).float()
        limit = max(LEAST, NOISE * mean_gap(together, rounded))
        gap = mean_gap(together, alone)
        if not gap < limit:
            raise ConfigError(
                f"{self.name}: sequences in one pass influence each other (mean gap {gap:.2g}, at most {limit:.2g} "
                f"are rounding): {REMEDY}"
            )
        if self.expected is None:
            return
        gap = mean_gap(together, self.expected)
        if not gap < limit:
            raise ConfigError(
                f"{self.name}: its log-probs in training differ from plain transformers' by {gap:.2g} (at most "
                f"{limit:.2g} are rounding); it does more between its last hidden states and its logits than one "
                "linear layer: choose another model"
            )

    def guarded(self, call: Callable[..., Tensor], *args: Any) -> Tensor:
        """Make the call; where an architecture cannot take packed sequences, say so in our words, not its own."""
        try:
            return call(*args)
        except (KeyError, AttributeError, TypeError, NotImplementedError) as error:
            if not self.packed:
                raise
            raise ConfigError(f"{self.name} cannot take packed sequences ({error!r}): {REMEDY}") from error


def mean_gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


@contextmanager
def one_rounding(embeddings: nn.Module) -> Iterator[None]:
    """Move every embedded number, inside, by the last bit of its type, up or down: what this does to the output is
    what rounding does to it.
    """
    random = torch.Generator().manual_seed(1)

    def move(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=random) * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs).to(output)

    handle = embeddings.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def plain_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return log-probs [T] as transformers' own forward pass gives them; zero at the first token."""
    Current.layout = Layout([len(tokens)])
    scores = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    found = scores[:-1].gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros_like(found[:1]), found])
