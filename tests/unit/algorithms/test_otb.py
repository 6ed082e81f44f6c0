"""The optimal token baseline, against the gradients of a policy whose every completion is known."""

from itertools import product

import pytest
import torch
from torch import Tensor

from trueline.algorithms.advantages import assign_advantages
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample

# Of eighths: first the token at the start, then those behind each first token. Behind token 0, completions end.
CHANCES = torch.tensor([[1.0, 5.0, 2.0], [0.0, 0.0, 0.0], [6.0, 1.0, 1.0], [2.0, 3.0, 3.0]], dtype=torch.float64) / 8
REWARDS = {(0,): (1.5,), (1,): (0.5, -1.0), (2,): (-0.25, 2.0)}  # of the first token, and of the second
GAMMA = 0.5
Path = tuple[int, ...]


def group_of_all() -> list[Path]:
    """Every completion as often as it occurs in 64 draws: a mean over the group is an expectation."""
    eighths = (8 * CHANCES).round().long().tolist()
    paths: list[Path] = [(0,)] * (8 * eighths[0][0])
    for first, second in product((1, 2), range(3)):
        paths += [(first, second)] * (eighths[0][first] * eighths[first + 1][second])
    assert len(paths) == 64
    return paths


def rewards_of(path: Path) -> list[float]:
    first, *rest = REWARDS[path[:1]]
    return [first, *(value * path[1] for value in rest)]


def sample_of(path: Path, group: int = 0) -> Sample:
    """With a token of the environment before each sampled one; what lies on it must not be read."""
    mask = torch.tensor([False, True] * len(path))
    sample = Sample(torch.zeros(len(mask), dtype=torch.long), mask, group=group, reward=sum(rewards_of(path)))
    states = [0, *(token + 1 for token in path[:-1])]
    nothing = torch.full((len(mask),), 9.0)
    for name, values in {
        "token_rewards": rewards_of(path),
        "old_logprobs": [CHANCES[state, token].log().item() for state, token in zip(states, path, strict=True)],
        "squares": [CHANCES[state].square().sum().item() for state in states],
    }.items():
        setattr(sample, name, nothing.masked_scatter(mask, torch.tensor(values)))
    return sample


def assign(samples: list[Sample]) -> None:
    assign_advantages(samples, AlgorithmConfig(preset="otb", gamma=GAMMA))


def returns_of(path: Path) -> list[float]:
    rewards = rewards_of(path)
    return [sum(GAMMA**far * reward for far, reward in enumerate(rewards[at:])) for at in range(len(rewards))]


def gradient_so_far(path: Path, place: int) -> Tensor:
    """Of the log-prob of the tokens up to a place, by the logits, as autograd finds it."""
    logits = CHANCES.clamp(min=1e-9).log().requires_grad_()
    states = [0, *(token + 1 for token in path)]
    sum(logits[states[at]].log_softmax(-1)[path[at]] for at in range(place + 1)).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    return logits.grad.flatten()


def least_variance(paths: list[Path], place: int) -> float:
    """The constant b at which the second moment of (G - b) x gradient is lowest; its mean does not depend on b."""
    there = [path for path in paths if len(path) > place]

    def second_moment(constant: float) -> float:
        terms = [(returns_of(path)[place] - constant) * gradient_so_far(path, place) for path in there]
        return torch.stack(terms).square().sum(-1).mean().item()

    low, middle, high = (second_moment(constant) for constant in (-1.0, 0.0, 1.0))
    found = (low - high) / (2 * (low - 2 * middle + high))  # the vertex of the parabola through them
    assert second_moment(found) < min(second_moment(found - 0.01), second_moment(found + 0.01))
    return found


@pytest.mark.parametrize("place", [0, 1])
def test_the_baseline_is_where_the_gradient_varies_least(place: int) -> None:
    paths = group_of_all()
    samples = [sample_of(path) for path in paths]
    assign([*samples, *(sample_of(path, group=1) for path in [(1, 2), (2, 1), (0,)])])  # another prompt
    expected = least_variance(paths, place)
    mean = sum(returns_of(path)[place] for path in paths if len(path) > place) / 64
    assert abs(expected - mean) > 0.05  # not the group's mean by chance
    for path, sample in zip(paths, samples, strict=True):
        found = sample.advantages[sample.mask].tolist()
        assert sample.advantages[~sample.mask].eq(0).all()
        if len(path) > place:
            assert found[place] == pytest.approx(returns_of(path)[place] - expected, abs=1e-5)


def test_past_the_others_nothing_is_subtracted() -> None:
    longer, short = sample_of((1, 2)), sample_of((0,))
    assign([short, longer])
    assert longer.advantages[3].item() == pytest.approx(returns_of((1, 2))[1])
    weights = [1 - 2 * CHANCES[0, token] + CHANCES[0].square().sum() for token in (0, 1)]
    baseline = (weights[0] * 1.5 + weights[1] * returns_of((1, 2))[0]) / sum(weights)
    assert short.advantages[1].item() == pytest.approx(1.5 - float(baseline))


def test_an_episode_of_two_sequences_counts_its_tokens_through() -> None:
    """As one sequence of the same tokens; the second sequence's reward stands at the end of the first as well."""
    whole, other = sample_of((2, 1)), sample_of((1, 2))
    assign([whole, other])
    first, second = (Sample(whole.tokens[:2], whole.mask[:2], episode=0) for _ in range(2))
    for name in ("old_logprobs", "squares"):
        setattr(first, name, getattr(whole, name)[:2])
        setattr(second, name, getattr(whole, name)[2:])
    gone, rest = rewards_of((2, 1))
    first.token_rewards, second.token_rewards = torch.tensor([0.0, gone + GAMMA * rest]), torch.tensor([0.0, rest])
    again = sample_of((1, 2))
    again.episode = 1
    assign([first, again, second])
    assert [first.advantages[1].item(), second.advantages[1].item()] == whole.advantages[whole.mask].tolist()
    assert torch.equal(again.advantages, other.advantages)


def test_equal_returns_teach_nothing_and_certain_tokens_divide_by_nothing() -> None:
    samples = [sample_of((1, 2)) for _ in range(3)]
    assign(samples)
    assert all(sample.advantages.eq(0).all() for sample in samples)
    for number, sample in enumerate(samples):
        sample.token_rewards = torch.tensor([0.0, 0.0, 0.0, float(number)])
        sample.old_logprobs, sample.squares = torch.zeros(4), torch.full((4,), 1 - 1e-7)  # the policy had no choice
    assign(samples)
    assert all(sample.advantages.isfinite().all() for sample in samples)
