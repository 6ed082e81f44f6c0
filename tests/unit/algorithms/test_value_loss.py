import pytest
import torch

from trueline.algorithms.losses import LOSSES
from trueline.algorithms.value_loss import explained_variance
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, ModelOutput, Sample

# value, old value, return
ROWS = [
    (1.0, 1.0, 3.0),  # where it was: 2^2
    (1.3, 1.0, 3.0),  # within the clip: 1.7^2
    (2.0, 1.0, 3.0),  # nearer than the clip allows: as if at 1.5
    (0.0, 1.0, 3.0),  # farther: its own 3^2, not the clip's 2.5^2
    (3.0, 1.0, 0.0),  # beyond the clip on the wrong side
    (-1.0, 1.0, 0.0),  # clipped value 0.5: 0.5^2, its own 1^2 is larger
]


def make() -> tuple[ModelOutput, Batch]:
    values, old, returns = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    size = len(ROWS)
    batch = Batch(torch.zeros(size), torch.ones(size, dtype=torch.bool), [size], torch.ones(1), torch.zeros(1))
    batch.values, batch.returns = old, returns
    output = ModelOutput()
    output.values = values.requires_grad_()
    return output, batch


def test_the_larger_of_two_squares() -> None:
    output, batch = make()
    loss = LOSSES["value"].compute(output, batch, AlgorithmConfig(preset="ppo", value_clip=0.5))
    assert loss.values.tolist() == pytest.approx([2.0, 1.445, 1.125, 4.5, 4.5, 0.5])
    assert loss.means["critic/clip_fraction"].tolist() == [0, 0, 1, 0, 0, 0]
    assert loss.means["critic/value"].tolist() == pytest.approx([row[0] for row in ROWS])
    assert not loss.per_sequence


def test_a_value_beyond_its_clip_has_no_gradient() -> None:
    output, batch = make()
    LOSSES["value"].compute(output, batch, AlgorithmConfig(preset="ppo")).values.sum().backward()
    assert output.values.grad is not None
    assert output.values.grad.tolist() == pytest.approx([-2.0, -1.7, 0.0, -3.0, 3.0, -1.0])


def test_zero_turns_the_clip_off() -> None:
    output, batch = make()
    loss = LOSSES["value"].compute(output, batch, AlgorithmConfig(preset="ppo", value_clip=0.0))
    assert loss.values.tolist() == pytest.approx([0.5 * (value - target) ** 2 for value, _, target in ROWS])
    assert not loss.means["critic/clip_fraction"].any()


def criticised(values: list[float], returns: list[float]) -> list[Sample]:
    """Two answers behind a prompt token whose numbers must not count."""
    samples = []
    for start in (0, 2):
        sample = Sample(torch.arange(3), torch.tensor([False, True, True]))
        sample.values = torch.tensor([99.0, *values[start : start + 2]])
        sample.returns = torch.tensor([0.0, *returns[start : start + 2]])
        samples.append(sample)
    return samples


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 6.0], 1.0),  # perfect
        ([11.0, 12.0, 13.0, 16.0], 1.0),  # off by a constant
        ([4.0, 4.0, 4.0, 4.0], 0.0),  # knows nothing
        ([-1.0, -2.0, -3.0, -6.0], -3.0),  # returns - values is twice the returns: 1 - 4
    ],
)
def test_explained_variance(values: list[float], expected: float) -> None:
    assert explained_variance(criticised(values, [1.0, 2.0, 3.0, 6.0])) == pytest.approx(expected)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    assert explained_variance(criticised([1.0, 2.0, 3.0, 4.0], [2.0] * 4)) == 0.0
