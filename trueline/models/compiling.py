"""A model's decoder layers, compiled by torch: their many small operations become few kernels."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from trueline.data.types import Batch
from trueline.models import attention
from trueline.models.scorer import LEAST, NOISE, Scorer, mean_gap, rounding


class CompiledLayers:
    """Layers and a head that are compiled for sequences of any length; attention among packed ones stays as it is.

    The first batch that is trained proves that outputs and gradients are those of plain layers, or they are used.
    """

    def __init__(self, scorer: Scorer) -> None:
        model, self.scorer = scorer.model, scorer
        AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
        self.layers: list[nn.Module] = list(model.get_decoder().layers)
        self.embeddings: nn.Module = model.get_input_embeddings()
        self.proven, self.doubt = False, ""
        self.scorer.compiled = True
        for layer in self.layers:
            layer.compile(dynamic=True)

    def prove(self, batch: Batch) -> None:
        """Compare outputs and gradients once; return to plain layers if they differ by more than rounding."""
        if self.proven:  # as on all ranks, which may gather layers together
            return
        self.proven = True
        if not batch.mask.any():  # a filler
            batch.mask = torch.ones_like(batch.mask)
            batch.host_mask = batch.mask.cpu()
        compiled = self._run(batch)
        calls = [layer._compiled_call_impl for layer in self.layers]
        self._set([None] * len(calls))
        plain = self._run(batch)
        with rounding(self.embeddings):
            rounded = self._run(batch)
        gap, limit = distance(compiled, plain), max(LEAST, NOISE * distance(rounded, plain))
        if gap < limit:
            self._set(calls)
        else:
            self.doubt = f"compiled layers move log-probs or gradients by {gap:.2g} (rounding: up to {limit:.2g})"

    def _set(self, calls: list[Any]) -> None:
        self.scorer.compiled = calls[0] is not None
        for layer, call in zip(self.layers, calls, strict=True):
            layer._compiled_call_impl = call

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return outputs, and their gradient by the embedded tokens, which passes through all layers."""
        given, embedded = (batch.tokens, batch.mask_bytes(), batch.lengths), []

        def begin(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[0]

        with self.embeddings.register_forward_hook(begin):
            *_, outputs = self.scorer(*given, 1.0, False, repeats=batch.repeats, pictures=batch.pictures).values()
        outputs = outputs.float()[batch.mask]
        (gradient,) = torch.autograd.grad(outputs.sum(), embedded)
        return outputs.detach(), gradient.float()


def distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the larger of the mean gap of outputs and that of gradients in relation to their norm."""
    size = other[1].norm().clamp(min=torch.finfo(torch.float32).tiny)
    return max(mean_gap(one[0], other[0]), ((one[1] - other[1]).norm() / size).item())
