"""A rank that hands out something else than its weights, once told to."""

from collections.abc import Iterator

import torch

from trueline.runtime.transport import Bucket
from trueline.training.worker import Worker, WorkerSpec

Weights = list[tuple[str, torch.Tensor]]


class FaultyWorker(Worker):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.fault = ""
        self.kept: Weights = []
        self.sending = False

    def break_with(self, fault: str) -> None:
        """Send what is held now from now on (`late`), the model without its adapters (`unmerged`), or be honest."""
        self.fault = fault
        self.kept = self.copy_weights() if fault == "late" else []

    def send_weights(self, buckets: list[Bucket]) -> list[int]:
        self.sending = True
        try:
            return super().send_weights(buckets)
        finally:
            self.sending = False

    def plain_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.fault == "late" and self.sending:
            return iter(self.kept)
        if self.fault == "unmerged":
            named = ((name.replace(".base_layer", ""), tensor) for name, tensor in self.engine.weights())
            return ((name, tensor) for name, tensor in named if "lora_" not in name)
        return super().plain_weights()
