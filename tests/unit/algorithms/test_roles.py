"""Advantages of several roles: a baseline for each, worked out by hand, which a mixture of the roles would change."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trueline.algorithms.advantages import assign_advantages
from trueline.algorithms.loss_aggregation import set_weights
from trueline.algorithms.reward_shaping import shape_rewards
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample
from trueline.runs.state import RLState
from trueline.training.samples import SampleNumbers

PLAYED = {  # group -> rewards of each episode in it, by role
    0: [{"solver": 1.0, "proposer": 0.0}, {"solver": 0.0, "proposer": 10.0}, {"solver": 2.0, "proposer": 20.0}],
    1: [{"solver": 3.0, "proposer": -1.0}, {"solver": 5.0, "proposer": -1.0}],
}
AVERAGES = {"solver": 2.0, "proposer": 4.0}
BY_HAND: dict[str, dict[str, list[float]]] = {  # of the five episodes
    "group_mean": {"solver": [0, -1, 1, -1, 1], "proposer": [-10, 0, 10, 0, 0]},
    "group_norm": {"solver": [0, -1, 1, -(0.5**0.5), 0.5**0.5], "proposer": [-1, 0, 1, 0, 0]},
    "gdpo": {"solver": [0, -1, 1, -(0.5**0.5), 0.5**0.5], "proposer": [-1, 0, 1, 0, 0]},
    "leave_one_out": {"solver": [0, -1.5, 1.5, -2, 2], "proposer": [-15, 0, 15, 0, 0]},
    "batch_mean": {"solver": [-1.2, -2.2, -0.2, 0.8, 2.8], "proposer": [-5.6, 4.4, 14.4, -6.6, -6.6]},
    "moving_average": {"solver": [-1, -2, 0, 1, 3], "proposer": [-4, 6, 16, -5, -5]},
    "reinforce": {"solver": [1, 0, 2, 3, 5], "proposer": [0, 10, 20, -1, -1]},
}


def played(roles: Sequence[str] = ("solver", "proposer")) -> list[Sample]:
    """A sample for each role of each episode, in the order of episodes; three tokens, two of them sampled."""
    episodes = [(group, rewards) for group, some in PLAYED.items() for rewards in some]
    samples = []
    for number, (group, rewards) in enumerate(episodes):
        for role in roles:
            mask = torch.tensor([False, True, True])
            sample = Sample(torch.arange(3), mask, group, number, reward=rewards[role], task_reward=rewards[role])
            sample.role, sample.baseline = role, AVERAGES[role]
            sample.token_rewards = torch.tensor([0.0, 0.0, rewards[role]])
            samples.append(sample)
    return samples


def assigned(samples: list[Sample], **keys: Any) -> dict[str, list[float]]:
    assign_advantages(samples, AlgorithmConfig(**({"preset": "dr_grpo"} | keys)))
    assert all(one.advantages[0] == 0 and one.advantages[1] == one.advantages[2] for one in samples)
    found: dict[str, list[float]] = {}
    for one in samples:
        found.setdefault(one.role, []).append(one.advantages[1].item())
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_each_role_has_its_baseline(name: str) -> None:
    for role, wanted in assigned(played(), advantage=name).items():
        assert wanted and wanted == pytest.approx(BY_HAND[name][role], rel=1e-5, abs=1e-6), role


@pytest.mark.parametrize("name", [name for name in BY_HAND if name != "moving_average"])
@pytest.mark.parametrize("credit", ["token", "turn"])
@pytest.mark.parametrize("whitened", [False, True])
def test_a_role_learns_as_if_it_were_alone(name: str, credit: str, whitened: bool) -> None:
    keys = {"advantage": name, "credit": credit, "whiten": whitened}
    together = assigned(played(), **keys)
    for role in together:
        assert together[role] == assigned(played([role]), **keys)[role]


def test_whitening_is_of_each_role() -> None:
    found = assigned(played(), advantage="reinforce", whiten=True)
    solver = torch.tensor([1.0, 0.0, 2.0, 3.0, 5.0])
    expected = (solver - solver.mean()) / solver.var(correction=0).sqrt()
    assert found["solver"] == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_role_that_plays_in_one_episode_of_its_group_has_nothing_to_be_compared_with() -> None:
    samples = [one for one in played() if one.role == "solver" or one.episode == 0]
    assert assigned(samples, advantage="leave_one_out")["proposer"] == [0.0]


def test_a_role_of_an_episode_counts_as_one_completion() -> None:
    """Its lengths, its punishment for them, and its weight are its own."""
    samples = played()[:2]
    second = Sample(torch.arange(9), torch.arange(9) > 0, 0, 0, task_reward=0.0)  # of the proposer, too
    second.role, second.token_rewards = "proposer", torch.zeros(9)
    samples.append(second)
    set_weights(samples, "sequence_mean", 8)
    assert [one.weight for one in samples] == pytest.approx([1 / (2 * 2), 1 / (2 * 10), 1 / (2 * 10)])
    config = AlgorithmConfig(shaping={"overlong_factor": 1.0, "overlong_share": 0.5})
    shape_rewards(samples, config, max_new_tokens=8, kl_coefficient=0.0)
    assert [one.reward for one in samples] == [1.0, -1.0, -1.0]


def numbers(role: str, episode: int, reward: float) -> SampleNumbers:
    return SampleNumbers(3, 2, 0, episode, 0, reward, 0.0, False, reward=reward, role=role)


def test_averages_follow_the_rewards_of_their_role() -> None:
    """Half of an average is left by each completion; several sequences of one count once."""
    state = RLState()
    rows = [numbers("solver", 0, 1.0), numbers("proposer", 0, 4.0), numbers("solver", 1, 0.0)]
    rows += [numbers("proposer", 1, 2.0), numbers("proposer", 1, 2.0)]
    state.follow(rows, 0.5)
    assert state.averages == {"solver": 0.75 * 0.5, "proposer": 0.75 * 3.0}
    state.follow([numbers("solver", 0, 1.0)], 0.5)
    assert state.averages == {"solver": 0.5 * 0.375 + 0.5 * 1.0, "proposer": 2.25}
    state.follow([numbers("solver", 0, 7.0)], 0.0)
    assert state.averages["solver"] == 7.0
