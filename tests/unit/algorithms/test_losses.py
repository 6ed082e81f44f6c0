"""Losses of supervised tasks and of the critic."""

import math

import pytest
import torch
from torch import Tensor

from trueline.algorithms.losses import LOSSES, explained_variance
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.supervised import DistillConfig
from trueline.data.types import Batch, ModelOutput, Sample

# Two sequences; the loss applies to two tokens of the first and to one of the second.
MASK = [False, True, True, False, True]


def make() -> Batch:
    """Each of the three tokens has a third of the loss."""
    shares = torch.full((2,), 1 / 3)
    return Batch(torch.zeros(5, dtype=torch.long), torch.tensor(MASK), [3, 2], shares, torch.zeros(2))


def test_sft_is_the_negative_log_likelihood() -> None:
    output, batch = ModelOutput(), make()
    output.logprobs = torch.tensor([0.0, -1.5, -0.25, 0.0, -0.5], requires_grad=True)
    loss = LOSSES["sft"].compute(output, batch, None)
    total = (batch.token_weights() * loss.values).sum()
    total.backward()
    assert not loss.per_sequence
    assert total.item() == pytest.approx((1.5 + 0.25 + 0.5) / 3)
    assert output.logprobs.grad is not None
    assert output.logprobs.grad.tolist() == pytest.approx([0.0, -1 / 3, -1 / 3, 0.0, -1 / 3])


# Logits of bad and of good at each token, and how good the step is.
SCORES = [[9.0, -9.0], [0.5, 2.0], [1.0, 0.25], [-9.0, 9.0], [0.0, 1.0]]
LABELS = [0.0, 1.0, 0.75, 0.0, 0.0]


def scored(scores: list[list[float]]) -> tuple[ModelOutput, Batch]:
    output, batch = ModelOutput(), make()
    output.scores = torch.tensor(scores, requires_grad=True)
    batch.step_labels = torch.tensor(LABELS)
    return output, batch


def share_of_good(bad: float, good: float) -> float:
    return math.exp(good) / (math.exp(bad) + math.exp(good))


def test_process_reward_is_the_cross_entropy_with_soft_labels() -> None:
    output, batch = scored(SCORES)
    loss = LOSSES["process_reward"].compute(output, batch, None)
    steps = [(share_of_good(*SCORES[at]), LABELS[at]) for at in (1, 2, 4)]
    expected = [-label * math.log(good) - (1 - label) * math.log(1 - good) for good, label in steps]
    assert not loss.per_sequence
    assert loss.values[batch.mask].tolist() == pytest.approx(expected, rel=1e-5)
    total = (batch.token_weights() * loss.values).sum()
    assert total.item() == pytest.approx(sum(expected) / 3)


def test_the_gradient_of_process_reward_is_the_gap_to_the_label() -> None:
    """(share of good - label) on the logit of good, its opposite on that of bad; nothing off the labelled steps."""
    output, batch = scored(SCORES)
    loss = LOSSES["process_reward"].compute(output, batch, None)
    (batch.token_weights() * loss.values).sum().backward()
    gaps = [(share_of_good(*scores) - label) / 3 for scores, label in zip(SCORES, LABELS, strict=True)]
    on_good = [gap if masked else 0.0 for gap, masked in zip(gaps, MASK, strict=True)]
    assert output.scores.grad is not None
    assert output.scores.grad[:, 1].tolist() == pytest.approx(on_good, rel=1e-5)
    assert output.scores.grad[:, 0].tolist() == pytest.approx([-gap for gap in on_good], rel=1e-5)


def test_a_verdict_is_right_when_both_say_good_or_both_say_bad() -> None:
    output, batch = scored(SCORES)
    accuracy = LOSSES["process_reward"].compute(output, batch, None).means["process_reward/accuracy"]
    assert accuracy[batch.mask].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_process_reward_is_finite_for_logits_far_apart(gap: float) -> None:
    output, batch = scored([[0.0, gap]] * 5)
    loss = LOSSES["process_reward"].compute(output, batch, None)
    loss.values.sum().backward()
    assert output.scores.grad is not None
    assert loss.values.isfinite().all()
    assert output.scores.grad.isfinite().all()


def test_logits_in_half_precision_are_compared_in_float32() -> None:
    """bfloat16 holds 100 and 0.25, not their difference; so far out the loss of a good step is that difference."""
    output, batch = scored([[100.0, 0.25]] * 5)
    output.scores = output.scores.detach().bfloat16()
    assert LOSSES["process_reward"].compute(output, batch, None).values[1].item() == 99.75


def test_distillation_minimises_the_divergence_of_each_token() -> None:
    output, batch = ModelOutput(), make()
    output.divergence = torch.tensor([0.0, 0.5, 0.25, 0.0, 1.5], requires_grad=True)
    loss = LOSSES["distill"].compute(output, batch, DistillConfig(teacher="teacher"))
    assert not loss.per_sequence
    assert (batch.token_weights() * loss.values).sum().item() == pytest.approx((0.5 + 0.25 + 1.5) / 3)
    (batch.token_weights() * loss.values).sum().backward()
    assert output.divergence.grad is not None
    assert output.divergence.grad.tolist() == pytest.approx([0.0, 1 / 3, 1 / 3, 0.0, 1 / 3])


def test_every_loss_that_a_worker_may_be_asked_for() -> None:
    names = {"policy", "value", "sft", "preference", "kto", "reward_model", "process_reward", "distill"}
    assert set(LOSSES) == names


def test_only_the_policy_loss_pays_for_the_entropy() -> None:
    assert [name for name, loss in LOSSES.items() if loss.entropy] == ["policy"]


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"kto"}))
def test_a_loss_that_asks_nothing_of_the_model_lets_it_rest(name: str) -> None:
    def score(samples: list[Sample]) -> list[Tensor]:
        raise AssertionError("another forward pass")

    assert LOSSES[name].prepare([], AlgorithmConfig(), score) == {}
    if name != "reward_model":
        assert LOSSES[name].facts([], None, score) == {}


def test_a_reward_model_keeps_mean_and_deviation_of_its_scores() -> None:
    scores = [torch.tensor([[9.0], [1.0]]), torch.tensor([[9.0], [9.0], [5.0]])]
    assert LOSSES["reward_model"].facts([], None, lambda samples: scores) == {"reward_mean": 3.0, "reward_std": 2.0}


# value, old value, return
ROWS = [
    (1.0, 1.0, 3.0),  # where it was: 2^2
    (1.3, 1.0, 3.0),  # within the clip: 1.7^2
    (2.0, 1.0, 3.0),  # nearer than the clip allows: as if at 1.5
    (0.0, 1.0, 3.0),  # farther: its own 3^2, not the clip's 2.5^2
    (3.0, 1.0, 0.0),  # beyond the clip on the wrong side
    (-1.0, 1.0, 0.0),  # clipped value 0.5: 0.5^2, its own 1^2 is larger
]


def make_value_case() -> tuple[ModelOutput, Batch]:
    values, old, returns = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    size = len(ROWS)
    batch = Batch(torch.zeros(size), torch.ones(size, dtype=torch.bool), [size], torch.ones(1), torch.zeros(1))
    batch.values, batch.returns = old, returns
    output = ModelOutput()
    output.values = values.requires_grad_()
    return output, batch


def test_the_larger_of_two_squares() -> None:
    output, batch = make_value_case()
    loss = LOSSES["value"].compute(output, batch, AlgorithmConfig(preset="ppo", value_clip=0.5))
    assert loss.values.tolist() == pytest.approx([2.0, 1.445, 1.125, 4.5, 4.5, 0.5])
    assert loss.means["critic/clip_fraction"].tolist() == [0, 0, 1, 0, 0, 0]
    assert loss.means["critic/value"].tolist() == pytest.approx([row[0] for row in ROWS])
    assert not loss.per_sequence


def test_a_value_beyond_its_clip_has_no_gradient() -> None:
    output, batch = make_value_case()
    LOSSES["value"].compute(output, batch, AlgorithmConfig(preset="ppo")).values.sum().backward()
    assert output.values.grad is not None
    assert output.values.grad.tolist() == pytest.approx([-2.0, -1.7, 0.0, -3.0, 3.0, -1.0])


def test_zero_turns_the_clip_off() -> None:
    output, batch = make_value_case()
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
