import math
from statistics import fmean, stdev

import pytest
import torch

from trueline.algorithms.advantages import ADVANTAGES, assign_advantages
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.data.types import Sample

GROUPS = {7: [1.0, 0.0, 0.25, 2.0], 3: [-1.0, 4.0], 5: [0.5, 0.5, 3.0]}


def samples_of(groups: dict[int, list[float]], shift: float = 0.0) -> list[Sample]:
    """The groups' answers in turn, as minibatches mix them; each three tokens, two of them sampled."""
    longest = max(len(rewards) for rewards in groups.values())
    return [
        Sample(torch.arange(3), torch.tensor([False, True, True]), group=group, reward=rewards[index] + shift)
        for index in range(longest)
        for group, rewards in groups.items()
        if index < len(rewards)
    ]


def advantages(name: str, groups: dict[int, list[float]], shift: float = 0.0) -> dict[int, list[float]]:
    samples = samples_of(groups, shift)
    assign_advantages(samples, AlgorithmConfig(advantage=name))
    result: dict[int, list[float]] = {group: [] for group in groups}
    for sample in samples:
        assert sample.advantages.dtype == torch.float32
        assert sample.advantages[0] == 0  # not sampled
        assert sample.advantages[1] == sample.advantages[2]
        result[sample.group].append(sample.advantages[1].item())
    return result


def naive(name: str, rewards: list[float]) -> list[float]:
    if name == "group_mean":
        return [reward - fmean(rewards) for reward in rewards]
    if name == "group_norm":
        return [(reward - fmean(rewards)) / (stdev(rewards) + 1e-6) for reward in rewards]
    others = [rewards[:index] + rewards[index + 1 :] for index in range(len(rewards))]
    return [reward - fmean(rest) for reward, rest in zip(rewards, others, strict=True)]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_closed_form(name: str) -> None:
    found = advantages(name, GROUPS)
    for group, rewards in GROUPS.items():
        assert found[group] == pytest.approx(naive(name, rewards), rel=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_adding_a_constant_to_all_rewards_changes_nothing(name: str) -> None:
    plain, shifted = advantages(name, GROUPS), advantages(name, GROUPS, shift=100.0)
    for group in GROUPS:
        assert shifted[group] == pytest.approx(plain[group], abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_of_equal_rewards_teaches_nothing_at_all(name: str, reward: float, size: int) -> None:
    assert advantages(name, {0: [reward] * size})[0] == [0.0] * size


def test_group_norm_is_invariant_to_the_scale_of_rewards() -> None:
    rewards = [1.0, 0.0, 0.25, 2.0]
    scaled = advantages("group_norm", {0: [1000 * reward for reward in rewards]})[0]
    assert scaled == pytest.approx(advantages("group_norm", {0: rewards})[0], rel=1e-5)


def test_leave_one_out_is_group_mean_times_n_over_n_minus_one() -> None:
    mean, loo = advantages("group_mean", GROUPS), advantages("leave_one_out", GROUPS)
    for group, rewards in GROUPS.items():
        factor = len(rewards) / (len(rewards) - 1)
        assert loo[group] == pytest.approx([factor * value for value in mean[group]], abs=1e-6)


def test_two_answers_right_and_wrong() -> None:
    """Rewards 1 and 0: mean 1/2, sample standard deviation 1/sqrt(2)."""
    unit = 0.5 / (1 / math.sqrt(2) + 1e-6)
    assert advantages("group_norm", {0: [1.0, 0.0]})[0] == pytest.approx([unit, -unit], rel=1e-6)


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        assign_advantages(samples_of(GROUPS), AlgorithmConfig(advantage="group_nrom"))
    assert "algorithm.advantage=group_nrom" in str(caught.value)
    for name in ADVANTAGES:
        assert name in str(caught.value)
