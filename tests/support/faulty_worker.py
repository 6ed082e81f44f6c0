"""A rank that hands out something else than its weights, once told to."""

import torch

from trueline.models.lora import base_weights
from trueline.models.weight_names import Named
from trueline.runtime.transport import Address
from trueline.training.outgoing import Outgoing
from trueline.training.worker import Worker


class FaultyOutgoing(Outgoing):
    fault = ""
    kept: list[tuple[str, torch.Tensor]]

    def sent_weights(self) -> Named:
        return iter(self.kept) if self.fault == "late" else super().sent_weights()

    def without_adapters(self, weights: Named) -> Named:
        return base_weights(weights) if self.fault == "unmerged" else super().without_adapters(weights)


class FaultyWorker(Worker):
    outgoing: FaultyOutgoing

    def start(self, address: Address) -> None:
        super().start(address)
        self.outgoing = FaultyOutgoing(self.engine, self.names, self.spec.model.lora, self.rank)

    def break_with(self, fault: str) -> None:
        """Send what is held now from now on (`late`), the model without its adapters (`unmerged`), or be honest."""
        self.outgoing.fault = ""
        self.outgoing.kept = [(name, tensor.clone()) for name, tensor in self.outgoing.sent_weights()]
        self.outgoing.fault = fault
