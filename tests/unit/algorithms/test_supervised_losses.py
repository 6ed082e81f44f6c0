import torch

from trueline.algorithms.supervised_losses import LOSSES
from trueline.data.types import Batch, ModelOutput


def test_sft_is_the_negative_log_likelihood() -> None:
    logprobs = torch.tensor([[0.0, -1.5, -0.25]], requires_grad=True)
    batch = Batch(torch.zeros(1, 3), torch.tensor([[False, True, True]]), torch.tensor([[0.0, 0.5, 0.5]]))
    loss = LOSSES["sft"](ModelOutput(logprobs, torch.tensor([[0.0, 0.3, 0.6]])), batch, None)
    total = (batch.weights * loss.values).sum()
    total.backward()
    assert total.item() == (1.5 + 0.25) / 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -0.5, -0.5]]
