"""Log-probs and divergences in slices against plain sums over all logits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.algorithms.importance_sampling import draw_metrics
from trueline.config.supervised import DistillConfig
from trueline.models.head import ChunkedHead, HeadWork, chunked_divergence, slices
from trueline.rollout.engine import SamplingParams
from trueline.rollout.hf_engine import shape_logits

ROWS, WIDTH, VOCABULARY = 7, 5, 11


def inputs(rows: int, with_bias: bool) -> tuple[list[Tensor | None], Tensor]:
    generator = torch.Generator().manual_seed(rows + with_bias)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    bias = torch.randn(VOCABULARY, generator=generator) if with_bias else None
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    return [hidden, weight, bias], targets


def trainable(tensors: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype).clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [3, 10_000])
def test_sums_of_squares_come_with_or_without_entropies(entropy: bool, chunk: int) -> None:
    tensors, targets = inputs(ROWS, True)
    ours = trainable(tensors, torch.float32)
    work = HeadWork(0.7, chunk, entropy, squares=True)
    logprobs, entropies, variance, squares = ChunkedHead.apply(*ours, targets, work)
    hidden, weight, bias = tensors
    assert hidden is not None and weight is not None and bias is not None
    shares = ((hidden @ weight.T + bias) / 0.7).softmax(-1)
    torch.testing.assert_close(squares, shares.square().sum(-1))
    torch.testing.assert_close(logprobs, shares.log()[torch.arange(ROWS), targets])
    assert not squares.requires_grad and (entropies is None) == (variance is None) == (not entropy)
    if entropies is not None and variance is not None:
        plain = ChunkedHead.apply(*ours, targets, HeadWork(0.7, chunk, True))
        assert torch.equal(entropies, plain[1]) and torch.equal(variance, plain[2]) and plain[3] is None


def full(parts: list[Tensor | None], targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """All logits at once, by autograd alone."""
    hidden, weight, bias = parts
    assert hidden is not None and weight is not None
    logits = hidden @ weight.T + (0 if bias is None else bias)
    scores = (logits / temperature).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    variance = (scores.exp() * (scores + entropy[:, None]).square()).sum(-1)
    return scores[torch.arange(len(targets)), targets], entropy, variance


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk", [1, 3, 10_000])
def test_values_and_gradients_are_those_of_the_full_softmax(with_bias: bool, temperature: float, chunk: int) -> None:
    tensors, targets = inputs(ROWS, with_bias)
    ours, theirs = trainable(tensors, torch.float32), trainable(tensors, torch.float64)
    logprobs, entropy, variance, _ = ChunkedHead.apply(*ours, targets, HeadWork(temperature, chunk, entropy=True))
    expected_logprobs, expected_entropy, expected_variance = full(theirs, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance.double(), expected_variance, rtol=1e-4, atol=1e-5)
    assert not variance.requires_grad

    flow = torch.linspace(-1, 2, ROWS)  # another factor on every row, and on the two outputs
    (flow * logprobs + flow.square() * entropy).sum().backward()
    (flow * expected_logprobs + flow.square() * expected_entropy).sum().backward()
    for our, their in zip(ours, theirs, strict=True):
        if our is not None and their is not None:
            assert our.grad is not None and their.grad is not None
            torch.testing.assert_close(our.grad.double(), their.grad, rtol=1e-4, atol=1e-5)


def test_one_output_alone_can_be_used() -> None:
    tensors, targets = inputs(ROWS, False)
    ours, theirs = trainable(tensors, torch.float32), trainable(tensors, torch.float64)
    ChunkedHead.apply(*ours, targets, HeadWork(1.0, 3, entropy=True))[1].sum().backward()
    full(theirs, targets, 1.0)[1].sum().backward()
    assert ours[0] is not None and theirs[0] is not None
    assert ours[0].grad is not None and theirs[0].grad is not None
    torch.testing.assert_close(ours[0].grad.double(), theirs[0].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_entropy_log_probs_and_gradients_are_the_same(temperature: float) -> None:
    tensors, targets = inputs(ROWS, True)
    found = []
    for entropy in (True, False):
        ours = trainable(tensors, torch.float32)
        logprobs, entropies, variances, _ = ChunkedHead.apply(*ours, targets, HeadWork(temperature, 3, entropy))
        assert (entropies is None) == (variances is None) == (not entropy)
        (logprobs * torch.linspace(-1, 2, ROWS)).sum().backward()
        found.append([logprobs, *(tensor.grad for tensor in ours if tensor is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_frozen_head_gets_no_gradient() -> None:
    tensors, targets = inputs(ROWS, False)
    hidden, weight, bias = trainable(tensors, torch.float32)
    assert hidden is not None and weight is not None
    weight.requires_grad_(False)
    ChunkedHead.apply(hidden, weight, bias, targets, HeadWork(1.0, 3, False))[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_zero_rows_give_zero_gradients() -> None:
    tensors, targets = inputs(0, True)
    ours = trainable(tensors, torch.float32)
    logprobs, entropy, variance, _ = ChunkedHead.apply(*ours, targets, HeadWork(1.0, 4, entropy=True))
    assert logprobs.shape == entropy.shape == variance.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    for tensor in ours:
        assert tensor is not None and tensor.grad is not None
        assert (tensor.grad == 0).all()


def test_bfloat16_hidden_states_give_float32_log_probs() -> None:
    tensors, targets = inputs(ROWS, False)
    ours = trainable(tensors, torch.bfloat16)
    logprobs, *_ = ChunkedHead.apply(*ours, targets, HeadWork(1.0, 3, entropy=False))
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert all(tensor.grad.dtype == torch.bfloat16 for tensor in ours if tensor is not None and tensor.grad is not None)


@pytest.mark.parametrize(("total", "chunk"), [(0, 3), (1, 3), (3, 3), (7, 3), (7, 1), (7, 100)])
def test_slices_cover_every_row_once(total: int, chunk: int) -> None:
    rows = list(range(total))
    parts = [rows[part] for part in slices(total, chunk)]
    assert [row for part in parts for row in part] == rows
    assert all(0 < len(part) <= chunk for part in parts)


@pytest.mark.parametrize(
    ("controls", "caught"), [({}, False), ({"top_p": 0.95}, True), ({"top_k": 40}, True), ({"min_p": 0.02}, True)]
)
def test_the_test_of_draws_tells_narrowed_sampling_from_honest(controls: dict[str, float], caught: bool) -> None:
    """4,000 tokens of a vocabulary of 300, by the moments of the chunked head."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(4000, 16, generator=generator), torch.randn(300, 16, generator=generator) / 2
    logits = hidden @ weight.T
    params: Any = SamplingParams(0.8, 1, (), **controls)  # type: ignore[arg-type]
    shares = torch.stack([shape_logits(row, params, []) for row in logits]).softmax(-1)
    tokens = torch.multinomial(shares, 1, generator=generator)[:, 0]
    logprobs, entropy, variance, _ = ChunkedHead.apply(hidden, weight, None, tokens, HeadWork(0.8, 128, entropy=True))
    found = draw_metrics((logprobs + entropy).sum().item(), variance.sum().item())
    z, effect = found["mismatch/sampler_z"], found["mismatch/sampler_effect"]
    assert (z > 6 and effect > 0.05) if caught else abs(z) < 4


ROWS, WIDTH, TEACHER_WIDTH, VOCABULARY = 7, 5, 9, 11


def linear(width: int, bias: bool, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, VOCABULARY, bias=bias)


def make(rows: int = ROWS, bias: bool = False) -> tuple[Tensor, nn.Linear, tuple[Tensor, nn.Linear]]:
    """A student's hidden states and head, a teacher's of another width."""
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, WIDTH, generator=random).requires_grad_()
    taught = torch.randn(rows, TEACHER_WIDTH, generator=random)
    return hidden, linear(WIDTH, bias, 1), (taught, linear(TEACHER_WIDTH, bias, 2))


def found(config: DistillConfig, chunk: int = 3, bias: bool = False) -> Tensor:
    hidden, head, teacher = make(bias=bias)
    return chunked_divergence(hidden, head, teacher, config, chunk)


def probabilities(config: DistillConfig, bias: bool = False) -> list[tuple[list[float], list[float]]]:
    """Of teacher and student, row by row, as plain lists."""
    hidden, head, (taught, teacher_head) = make(bias=bias)
    student_logits = (head(hidden).double() / config.temperature).tolist()
    teacher_logits = (teacher_head(taught).double() / config.temperature).tolist()
    rows = []
    for theirs, ours in zip(teacher_logits, student_logits, strict=True):
        likeliest = sorted(range(VOCABULARY), key=lambda token: -theirs[token])[: config.top_k]
        rows.append((softmax([theirs[token] for token in likeliest]), softmax([ours[token] for token in likeliest])))
    return rows


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def kl(one: list[float], other: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))


def jsd(one: list[float], other: list[float]) -> float:
    mixture = [(p + q) / 2 for p, q in zip(one, other, strict=True)]
    return (kl(one, mixture) + kl(other, mixture)) / 2


FORMULAS = {"forward": kl, "reverse": lambda teacher, student: kl(student, teacher), "jsd": jsd}
CONFIGS = [
    DistillConfig(divergence=divergence, temperature=temperature, top_k=top_k)  # type: ignore[arg-type]
    for divergence in FORMULAS
    for temperature in (1.0, 2.5)
    for top_k in (None, 1, 4, 1000)
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.divergence}-{config.temperature}-{config.top_k}"
)
def test_values_are_those_of_the_formulas(config: DistillConfig, bias: bool) -> None:
    expected = [FORMULAS[config.divergence](*row) for row in probabilities(config, bias)]
    assert found(config, bias=bias).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("config", CONFIGS[::4], ids=lambda config: f"{config.divergence}-{config.temperature}")
def test_the_size_of_a_slice_changes_nothing(config: DistillConfig) -> None:
    whole = found(config, chunk=ROWS)
    for chunk in (1, 2, 5, 1000):
        torch.testing.assert_close(found(config, chunk=chunk), whole, rtol=1e-5, atol=1e-6)


def plain(config: DistillConfig, hidden: Tensor, head: nn.Linear, teacher: tuple[Tensor, nn.Linear]) -> Tensor:
    """All logits at once, by autograd alone."""
    ours = (head(hidden) / config.temperature).log_softmax(-1)
    theirs = (teacher[1](teacher[0]) / config.temperature).log_softmax(-1).detach()
    forward, reverse = (theirs.exp() * (theirs - ours)).sum(-1), (ours.exp() * (ours - theirs)).sum(-1)
    middle = ((ours.exp() + theirs.exp()) / 2).log()
    both = ((theirs.exp() * (theirs - middle)).sum(-1) + (ours.exp() * (ours - middle)).sum(-1)) / 2
    return {"forward": forward, "reverse": reverse, "jsd": both}[config.divergence]


def gradients(divergence: Tensor, parts: list[Any]) -> list[Tensor]:
    (divergence * torch.linspace(-1, 2, ROWS)).sum().backward()
    return [part.grad for part in parts]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_gradients_are_those_of_plain_autograd(kind: str, chunk: int) -> None:
    config = DistillConfig(divergence=kind, temperature=1.7)  # type: ignore[arg-type]
    hidden, head, teacher = make(bias=True)
    ours = gradients(chunked_divergence(hidden, head, teacher, config, chunk), [hidden, head.weight, head.bias])
    hidden, head, teacher = make(bias=True)
    theirs = gradients(plain(config, hidden, head, teacher), [hidden, head.weight, head.bias])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert teacher[1].weight.grad is None


@pytest.mark.parametrize("kind", sorted(FORMULAS))
def test_a_model_is_at_no_distance_from_itself(kind: str) -> None:
    hidden, head, _ = make()
    config = DistillConfig(divergence=kind)  # type: ignore[arg-type]
    divergence = chunked_divergence(hidden, head, (hidden.detach(), head), config, 3)
    assert divergence.tolist() == pytest.approx([0.0] * ROWS, abs=1e-6)


def test_the_mixture_bounds_the_divergence() -> None:
    """Distributions without a common token are log 2 apart."""
    head = nn.Linear(2, 2, bias=False)
    head.weight.data.copy_(torch.eye(2) * 100)
    hidden, taught = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    divergence = chunked_divergence(hidden, head, (taught, head), DistillConfig(divergence="jsd"), 1)
    assert divergence.item() == pytest.approx(math.log(2), rel=1e-5)


def test_no_rows_are_no_numbers_and_can_be_differentiated() -> None:
    hidden, head, teacher = make(rows=0)
    divergence = chunked_divergence(hidden, head, teacher, DistillConfig(), 3)
    assert divergence.shape == (0,)
    divergence.sum().backward()
