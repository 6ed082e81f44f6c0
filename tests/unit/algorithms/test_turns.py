"""Credit over turns, and episodes of several sequences, against plain arithmetic."""

from statistics import fmean

import pytest
import torch

from trueline.algorithms.advantages import assign_advantages
from trueline.algorithms.loss_aggregation import AGGREGATIONS, set_weights
from trueline.algorithms.reward_shaping import shape_rewards
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample


def sample_of(
    turns: list[tuple[int, float]], *, group: int = 0, episode: int = 0, total: float | None = None
) -> Sample:
    """A sequence of turns, each of so many tokens with a reward on the last, and two other tokens before each."""
    mask, rewards = [], []
    for count, reward in turns:
        mask += [False, False] + [True] * count
        rewards += [0.0] * (count + 1) + [reward]
    made = Sample(torch.arange(len(mask)), torch.tensor(mask), group=group, episode=episode)
    made.token_rewards = torch.tensor(rewards)
    made.reward = made.task_reward = sum(reward for _, reward in turns) if total is None else total
    return made


def by_turn(sample: Sample, values: torch.Tensor) -> list[float]:
    """One number for each turn, on all of its tokens, and zero on the others."""
    assert (values[~sample.mask] == 0).all()
    found: list[list[float]] = []
    for at in range(sample.length()):
        if sample.mask[at] and not (at and sample.mask[at - 1]):
            found.append([])
        if sample.mask[at]:
            found[-1].append(values[at].item())
    assert all(len(set(turn)) == 1 for turn in found)
    return [turn[0] for turn in found]


def config(advantage: str, **keys: object) -> AlgorithmConfig:
    return AlgorithmConfig(preset="dr_grpo", advantage=advantage, credit="turn", **keys)


def test_returns_of_turns() -> None:
    sample = sample_of([(3, 1.0), (1, 0.0), (2, 4.0)])
    assign_advantages([sample, other := sample_of([(2, 5.0)])], config("reinforce", gamma=0.5))
    assert by_turn(sample, sample.advantages) == [1.0 + 0.25 * 4.0, 2.0, 4.0]  # the discount is one per turn
    assert by_turn(other, other.advantages) == [5.0]


def test_generalised_advantages_of_turns() -> None:
    sample = sample_of([(2, 1.0), (3, 0.0), (1, 2.0)])
    sample.values = torch.linspace(0.1, 1.2, sample.length()) * sample.mask
    first = [at for at in range(sample.length()) if sample.mask[at] and not sample.mask[at - 1]]
    values, rewards, gamma, trace = [sample.values[at].item() for at in first], [1.0, 0.0, 2.0], 0.9, 0.8
    expected, later = [0.0] * 3, 0.0
    for turn in (2, 1, 0):
        following = values[turn + 1] if turn < 2 else 0.0
        later = expected[turn] = rewards[turn] + gamma * following - values[turn] + gamma * trace * later
    assign_advantages([sample], config("gae", gamma=gamma, gae_lambda=trace))
    assert by_turn(sample, sample.advantages) == pytest.approx(expected)
    assert by_turn(sample, sample.returns) == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out", "group_norm", "batch_mean"])
def test_groups_compare_the_same_turn(advantage: str) -> None:
    episodes = [[(1, 1.0), (2, 0.0)], [(2, 0.0), (1, 3.0), (1, 1.0)], [(1, 0.5)]]
    samples = [sample_of(turns, episode=number) for number, turns in enumerate(episodes)]
    assign_advantages(samples, config(advantage))
    first, second = [1.0, 4.0, 0.5], [0.0, 4.0]
    baselines = {"leave_one_out": [fmean([4.0, 0.5]), fmean([1.0, 0.5]), fmean([1.0, 4.0])]}.get(
        advantage, [fmean(first)] * 3
    )
    deviation = torch.tensor(first).std().item() + 1e-6 if advantage == "group_norm" else 1.0
    found = [by_turn(sample, sample.advantages) for sample in samples]
    assert [one[0] for one in found] == pytest.approx(
        [(value - baseline) / deviation for value, baseline in zip(first, baselines, strict=True)]
    )
    assert found[0][1] == pytest.approx(-found[1][1]) and found[1][1] > 0 and second[1] > second[0]
    alone = [1.0, *[sample.reward for sample in (samples[0], samples[2])]]  # the third turn, which no other has
    if advantage == "group_mean":
        assert found[1][2] == pytest.approx(1.0 - fmean(alone))


def test_episodes_are_compared_whole_and_counted_once() -> None:
    """An episode of two sequences is one member of its group, and both get its advantage."""
    parts = [sample_of([(2, 0.0)], episode=0, total=3.0), sample_of([(1, 3.0)], episode=0, total=3.0)]
    other = sample_of([(4, 1.0)], episode=1)
    assign_advantages([*parts, other], AlgorithmConfig(preset="dr_grpo", advantage="group_mean"))
    assert [by_turn(one, one.advantages) for one in (*parts, other)] == [[1.0], [1.0], [-1.0]]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_sequences_of_an_episode_share_its_weight(name: str) -> None:
    """They weigh what one sequence of their length together weighs, whatever they are cut into."""
    whole = [sample_of([(3, 0.0), (2, 1.0)], episode=0), sample_of([(4, 0.0)], episode=1)]
    parts = [sample_of([(3, 0.0)], episode=0), whole[1], sample_of([(2, 1.0)], episode=0)]
    set_weights(whole, name, 10)
    expected = [one.weight for one in whole]
    set_weights(parts, name, 10)
    assert [one.weight for one in parts] == [expected[0], expected[1], expected[0]]


def test_shaping_looks_at_whole_episodes() -> None:
    keys = {"shaping": {"overlong_factor": 1.0, "overlong_share": 0.5}, "kl": {"coefficient": 0.1, "place": "reward"}}
    algorithm = AlgorithmConfig(preset="dr_grpo", **keys)
    parts = [sample_of([(4, 0.0)], episode=0, total=1.0), sample_of([(4, 1.0)], episode=0, total=1.0)]
    for one in parts:
        one.old_logprobs, one.ref_logprobs = torch.zeros(6), -torch.ones(6)
    shape_rewards(parts, algorithm, 10, 0.1)
    length, penalty = (8 - 5) / 5, 0.1 * 8  # eight tokens of ten, of which five are free; one nat for each
    assert [one.reward for one in parts] == pytest.approx([1.0 - length - penalty] * 2)


def test_a_sample_without_an_episode_is_one_by_itself() -> None:
    samples = [Sample(torch.arange(3), torch.tensor([False, True, True])) for _ in range(4)]
    set_weights(samples, "sequence_sum", 0)
    assert [one.weight for one in samples] == [0.25] * 4
