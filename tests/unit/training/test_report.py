import pytest
import torch

from trueline.data.types import Batch, LossOutput
from trueline.training.report import LossAccumulator


def batch(share: float) -> Batch:
    """Two sequences of two tokens, of which the second is learnt; the last sequence fills up and weighs nothing."""
    mask = torch.tensor([False, True, False, True])
    return Batch(torch.arange(4), mask, [2, 2], torch.tensor([share, 0.0]), torch.zeros(2))


def loss(value: float, largest: float) -> LossOutput:
    values = torch.tensor([9.0, value, 9.0, 9.0])
    return LossOutput(values, {"mean": 10 * values}, {"largest": torch.tensor([99.0, largest, 99.0, 99.0])})


def test_passes_add_up_and_maxima_are_those_of_tokens_that_count() -> None:
    tally = LossAccumulator()
    for value, largest, share in ((1.0, 5.0, 0.25), (2.0, 3.0, 0.75)):
        tally.add(loss(value, largest), batch(share))
    report = tally.report()
    assert report.sums == pytest.approx({"mean": 10 * 1.75, "loss": 1.75, "weight": 1.0})
    assert report.maxima == {"largest": 5.0}
