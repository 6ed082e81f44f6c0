import math
from pathlib import Path
from statistics import fmean, pstdev, stdev

import pytest
import torch

from trueline.algorithms.advantages import ADVANTAGES, assign_advantages, discounted_sums, keep_uncertain, whiten
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.data.types import Sample

GROUPS = {7: [1.0, 0.0, 0.25, 2.0], 3: [-1.0, 4.0], 5: [0.5, 0.5, 3.0]}
GREEDY = {7: 0.5, 3: -2.0, 5: 3.0}  # reward of each prompt's greedy answer
OF_GROUPS = ["group_norm", "group_mean", "leave_one_out"]
OF_ANSWERS = [*OF_GROUPS, "batch_mean", "greedy_baseline"]


def samples_of(groups: dict[int, list[float]], shift: float = 0.0) -> list[Sample]:
    """The groups' answers in turn, as minibatches mix them; each three tokens, two of them sampled."""
    longest = max(len(rewards) for rewards in groups.values())
    return [
        Sample(
            torch.arange(3),
            torch.tensor([False, True, True]),
            group=group,
            reward=rewards[index] + shift,
            baseline=GREEDY.get(group, 0.0),
        )
        for index in range(longest)
        for group, rewards in groups.items()
        if index < len(rewards)
    ]


def assigned(name: str, samples: list[Sample]) -> dict[int, list[float]]:
    """Advantages by group."""
    assign_advantages(samples, AlgorithmConfig(preset="dr_grpo", advantage=name))
    result: dict[int, list[float]] = {}
    for sample in samples:
        assert sample.advantages.dtype == torch.float32
        assert sample.advantages[0] == 0  # not sampled
        assert sample.advantages[1] == sample.advantages[2]
        result.setdefault(sample.group, []).append(sample.advantages[1].item())
    return result


def advantages(name: str, groups: dict[int, list[float]], shift: float = 0.0) -> dict[int, list[float]]:
    return assigned(name, samples_of(groups, shift))


def naive(name: str, group: int, rewards: list[float]) -> list[float]:
    everything = [reward for answers in GROUPS.values() for reward in answers]
    others = [fmean(rewards[:index] + rewards[index + 1 :]) for index in range(len(rewards))]
    baselines = {
        "group_norm": [fmean(rewards)] * len(rewards),
        "group_mean": [fmean(rewards)] * len(rewards),
        "leave_one_out": others,
        "batch_mean": [fmean(everything)] * len(rewards),
        "greedy_baseline": [GREEDY[group]] * len(rewards),
    }[name]
    scale = stdev(rewards) + 1e-6 if name == "group_norm" else 1.0
    return [(reward - baseline) / scale for reward, baseline in zip(rewards, baselines, strict=True)]


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_closed_form(name: str) -> None:
    found = advantages(name, GROUPS)
    for group, rewards in GROUPS.items():
        assert found[group] == pytest.approx(naive(name, group, rewards), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", [*OF_GROUPS, "batch_mean"])
def test_adding_a_constant_to_all_rewards_changes_nothing(name: str) -> None:
    plain, shifted = advantages(name, GROUPS), advantages(name, GROUPS, shift=100.0)
    for group in GROUPS:
        assert shifted[group] == pytest.approx(plain[group], abs=1e-6)


@pytest.mark.parametrize("name", [*OF_GROUPS, "batch_mean"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_teach_nothing_at_all(name: str, reward: float, size: int) -> None:
    assert advantages(name, {0: [reward] * size})[0] == [0.0] * size


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_the_order_of_samples_does_not_matter(name: str) -> None:
    forward, backward = samples_of(GROUPS), samples_of(GROUPS)
    assigned(name, forward)
    assigned(name, backward[::-1])
    for sample, other in zip(forward, backward, strict=True):
        torch.testing.assert_close(sample.advantages, other.advantages)


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_filtered_answers_stay_in_the_baseline(name: str) -> None:
    samples = samples_of(GROUPS)
    for sample in samples[::3]:
        sample.filtered = True
    assert assigned(name, samples) == advantages(name, GROUPS)


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


PARTS = {  # by prompt: of each answer the values of two rewards, with weights 1 and -0.5, and what is added besides
    7: [(1.0, 400.0, 0.0), (0.0, 100.0, 0.0), (1.0, 250.0, -0.25), (0.0, 50.0, 0.0)],
    3: [(1.0, 3.0, 0.0), (1.0, 5.0, 0.0)],
}
PART_WEIGHTS = (1.0, -0.5, 1.0)


def of_parts(groups: dict[int, list[tuple[float, ...]]], weights: tuple[float, ...] = PART_WEIGHTS) -> list[Sample]:
    """The last part is in the reward alone."""
    rewards = {
        group: [sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in rows]
        for group, rows in groups.items()
    }
    samples = samples_of(rewards)
    left = {group: iter(rows) for group, rows in groups.items()}
    for sample in samples:
        sample.parts = list(zip(weights[:-1], next(left[sample.group])[:-1], strict=True))
    return samples


def standard(values: tuple[float, ...]) -> list[float]:
    same = len(set(values)) == 1
    return [0.0 if same else (value - fmean(values)) / (stdev(values) + 1e-6) for value in values]


def test_gdpo_normalises_each_reward_on_its_own() -> None:
    found = assigned("gdpo", of_parts(PARTS))
    for group, rows in PARTS.items():
        columns = [standard(column) for column in zip(*rows, strict=True)]
        expected = [
            sum(weight * score for weight, score in zip(PART_WEIGHTS, scores, strict=True))
            for scores in zip(*columns, strict=True)
        ]
        assert found[group] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gdpo_by_hand() -> None:
    """Two answers: 1 and 0 of the first reward, 30 and 10 of the second; each is worth 1/sqrt(2) a side."""
    samples = of_parts({0: [(1.0, 30.0, 0.0), (0.0, 10.0, 0.0)]}, (1.0, -3.0, 1.0))
    assert assigned("gdpo", samples)[0] == pytest.approx([-2 / math.sqrt(2), 2 / math.sqrt(2)], rel=1e-5)


def test_gdpo_tells_apart_what_a_sum_does_not() -> None:
    """Both rewards or one of them, against neither: sums of 2 and 1 look alike to group_norm, not to gdpo."""
    both, one = ({0: [(0.0, 0.0, 0.0), (1.0, second, 0.0)]} for second in (1.0, 0.0))
    weights = (1.0, 1.0, 1.0)
    assert assigned("group_norm", of_parts(both, weights))[0] == pytest.approx(
        assigned("group_norm", of_parts(one, weights))[0], rel=1e-5
    )
    found = assigned("gdpo", of_parts(both, weights))[0]
    assert found == pytest.approx([2 * value for value in assigned("gdpo", of_parts(one, weights))[0]], rel=1e-5)


def test_gdpo_does_not_see_the_scale_of_a_reward() -> None:
    scaled = {group: [(row[0], row[1] * 1000, row[2]) for row in rows] for group, rows in PARTS.items()}
    plain, other = (assigned("gdpo", of_parts(groups)) for groups in (PARTS, scaled))
    for group in PARTS:
        assert other[group] == pytest.approx(plain[group], rel=1e-4)


@pytest.mark.parametrize("parts", [True, False])
def test_gdpo_of_a_single_reward_is_group_norm(parts: bool) -> None:
    samples = samples_of(GROUPS)
    for sample in samples:
        sample.parts = [(1.0, sample.reward)] if parts else []
    assert assigned("gdpo", samples) == advantages("group_norm", GROUPS)


def test_gdpo_treats_the_sequences_of_an_episode_alike_and_counts_them_once() -> None:
    samples = of_parts(PARTS)
    alone = assigned("gdpo", of_parts(PARTS))
    for number, sample in enumerate(samples):
        sample.episode = number
    second = Sample(torch.arange(3), torch.tensor([False, True, True]), group=7, episode=0, reward=samples[0].reward)
    second.parts = samples[0].parts
    assign_advantages([*samples, second], AlgorithmConfig(preset="dr_grpo", advantage="gdpo"))
    assert second.advantages.tolist() == samples[0].advantages.tolist()
    assert samples[0].advantages[1].item() == alone[7][0]


def test_maxrl_divides_by_the_mean() -> None:
    """1 of 4 right: mean 1/4, so 3 and -1; 3 of 4: 1/3 and -1; rewards 1, 2 and 3: -1/2, 0 and 1/2."""
    found = advantages("maxrl", {0: [0.0, 1.0, 0.0, 0.0], 1: [1.0, 0.0, 1.0, 1.0], 2: [1.0, 2.0, 3.0]})
    third = pytest.approx(1 / 3)
    assert found == {0: [-1.0, 3.0, -1.0, -1.0], 1: [third, -1.0, third, third], 2: [-0.5, 0.0, 0.5]}
    assert advantages("maxrl", {0: [0.0] * 4, 1: [1.0] * 4}) == {0: [0.0] * 4, 1: [0.0] * 4}


def test_maxrl_is_invariant_to_the_scale_of_rewards() -> None:
    rewards = [1.0, 0.0, 0.25, 2.0]
    scaled = advantages("maxrl", {0: [1000 * reward for reward in rewards]})
    assert scaled[0] == pytest.approx(advantages("maxrl", {0: rewards})[0], rel=1e-6)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ConfigError, match=r"maxrl divides by mean rewards, and a completion has -0\.5: use rewards"):
        advantages("maxrl", {0: [1.0, -0.5]})


# Estimators that look at single tokens

MASKS = [  # one turn; two turns with environment tokens between; three turns; a single token
    [False, False, True, True, True],
    [False, True, True, False, False, True, True, True],
    [True, False, True, False, False, True, False],
    [False, True],
]


def multi_turn(seed: int = 0) -> list[Sample]:
    """What lies outside the mask must not be read."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for flags in MASKS:
        mask = torch.tensor(flags)
        sample = Sample(torch.arange(len(flags)), mask)
        sample.token_rewards = torch.randn(len(flags), generator=generator) * mask
        sample.values = torch.randn(len(flags), generator=generator).where(mask, torch.nan)
        samples.append(sample)
    return samples


def recursion(sample: Sample, gamma: float, decay: float) -> tuple[list[float], list[float]]:
    """Advantages and lambda-returns, token by token from the end, skipping what was not sampled."""
    size = sample.length()
    advantages, returns = [0.0] * size, [0.0] * size
    following_value, following_advantage = 0.0, 0.0
    for at in range(size - 1, -1, -1):
        if not sample.mask[at]:
            continue
        value = sample.values[at].item()
        gap = sample.token_rewards[at].item() + gamma * following_value - value
        following_advantage = gap + gamma * decay * following_advantage
        following_value = value
        advantages[at], returns[at] = following_advantage, following_advantage + value
    return advantages, returns


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("decay", [1.0, 0.95, 0.3, 0.0])
def test_gae_is_the_naive_recursion(gamma: float, decay: float) -> None:
    samples = multi_turn()
    assign_advantages(samples, AlgorithmConfig(preset="ppo", whiten=False, gamma=gamma, gae_lambda=decay))
    for sample in samples:
        advantage, target = recursion(sample, gamma, decay)
        assert sample.advantages.tolist() == pytest.approx(advantage, rel=1e-5, abs=1e-6)
        assert sample.returns.tolist() == pytest.approx(target, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("alpha", [0.05, 0.4, 2.0])
def test_length_adaptive_gae_has_a_lambda_per_answer_and_monte_carlo_returns(gamma: float, alpha: float) -> None:
    samples = multi_turn()
    assign_advantages(samples, AlgorithmConfig(preset="vapo", gamma=gamma, length_adaptive=alpha))
    for sample in samples:
        decay = min(max(1 - 1 / (alpha * sum(sample.mask.tolist())), 0.0), 1.0)
        assert sample.advantages.tolist() == pytest.approx(recursion(sample, gamma, decay)[0], rel=1e-5, abs=1e-6)
        assert sample.returns.tolist() == pytest.approx(recursion(sample, gamma, 1.0)[1], rel=1e-5, abs=1e-6)


def test_gae_by_hand() -> None:
    """Turn rewards 1 and 2, values 0.5 and -1, gamma 0.5, lambda 0.8.

    The second gap is 2 + 0 + 1 = 3, the first 1 - 0.5 - 0.5 = 0; the first advantage is 0 + 0.4 x 3.
    """
    sample = Sample(torch.arange(5), torch.tensor([False, True, False, False, True]))
    sample.token_rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0])
    sample.values = torch.tensor([9.0, 0.5, 9.0, 9.0, -1.0])
    assign_advantages([sample], AlgorithmConfig(preset="ppo", whiten=False, gamma=0.5, gae_lambda=0.8))
    assert sample.advantages.tolist() == pytest.approx([0.0, 1.2, 0.0, 0.0, 3.0])
    assert sample.returns.tolist() == pytest.approx([0.0, 1.7, 0.0, 0.0, 2.0])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_is_the_discounted_reward_to_go(gamma: float) -> None:
    samples = multi_turn()
    assign_advantages(samples, AlgorithmConfig(preset="reinforce++", whiten=False, gamma=gamma))
    for sample in samples:
        rewards = sample.token_rewards[sample.mask].tolist()
        to_go = [sum(gamma**k * reward for k, reward in enumerate(rewards[at:])) for at in range(len(rewards))]
        assert sample.advantages[sample.mask].tolist() == pytest.approx(to_go, rel=1e-5, abs=1e-6)
        assert (sample.advantages[~sample.mask] == 0).all()


def test_gae_at_lambda_one_is_the_reward_to_go_minus_the_value() -> None:
    samples, plain = multi_turn(), multi_turn()
    assign_advantages(samples, AlgorithmConfig(preset="ppo", whiten=False, gae_lambda=1.0))
    assign_advantages(plain, AlgorithmConfig(preset="reinforce++", whiten=False))
    for sample, other in zip(samples, plain, strict=True):
        expected = (other.advantages - sample.values)[sample.mask]
        torch.testing.assert_close(sample.advantages[sample.mask], expected)
        torch.testing.assert_close(sample.returns, other.advantages)


def test_the_neighbours_in_the_batch_do_not_matter() -> None:
    config = AlgorithmConfig(preset="vapo", gamma=0.9)
    together, alone = multi_turn(), multi_turn()
    assign_advantages(together, config)
    for sample, other in zip(together, alone, strict=True):
        assign_advantages([other], config)
        torch.testing.assert_close(sample.advantages, other.advantages)
        torch.testing.assert_close(sample.returns, other.returns)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 1000])
def test_long_sums_are_exact(length: int) -> None:
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    decay = torch.tensor([1.0, 0.99, 0.0], dtype=torch.float64)
    sums, following = torch.zeros_like(values), torch.zeros(3, dtype=torch.float64)
    for at in range(length - 1, -1, -1):
        following = values[:, at] + decay * following
        sums[:, at] = following
    torch.testing.assert_close(discounted_sums(values, decay), sums)


def test_the_teacher_prefers_what_it_finds_likelier() -> None:
    sample = Sample(torch.arange(3), torch.tensor([False, True, True]))
    sample.teacher_logprobs = torch.tensor([-9.0, -1.0, -2.0])
    sample.old_logprobs = torch.tensor([-1.0, -1.5, -0.25])
    assign_advantages([sample], AlgorithmConfig(preset="on_policy_distill"))
    assert sample.advantages.tolist() == [0.0, 0.5, -1.75]


# Whitening


def raw(filtered: bool) -> list[Sample]:
    samples = []
    for values in ([0.0, 1.0, 4.0], [0.0, -3.0, 0.0, 7.0], [0.0, 100.0]):
        sample = Sample(torch.arange(len(values)), torch.arange(len(values)) > 0)
        sample.advantages = torch.tensor(values)
        samples.append(sample)
    samples[-1].filtered = filtered
    return samples


@pytest.mark.parametrize("filtered", [False, True])
def test_whitening_is_over_the_tokens_in_the_loss(filtered: bool) -> None:
    samples = raw(filtered)
    tokens = [1.0, 4.0, -3.0, 0.0, 7.0, *([] if filtered else [100.0])]
    whiten(samples)
    scale = math.sqrt(pstdev(tokens) ** 2 + 1e-8)
    found = torch.cat([sample.advantages[sample.mask] for sample in samples])[: len(tokens)]
    assert found.tolist() == pytest.approx([(value - fmean(tokens)) / scale for value in tokens], rel=1e-5)
    for sample in samples:
        assert sample.advantages[0] == 0  # not sampled


def test_whitening_without_a_token_in_the_loss_leaves_finite_numbers() -> None:
    samples = raw(True)[-1:]
    whiten(samples)
    assert samples[0].advantages.isfinite().all()


def test_equal_advantages_are_whitened_to_nothing() -> None:
    sample = Sample(torch.arange(3), torch.tensor([False, True, True]))
    sample.advantages = torch.tensor([0.0, 2.0, 2.0])
    whiten([sample])
    assert sample.advantages.tolist() == [0.0, 0.0, 0.0]


def uncertain() -> list[Sample]:
    """Nine sampled tokens, seven of them in the loss; what lies outside must not count."""
    samples = raw(True)
    entropies = ([9.0, 0.5, 2.0], [9.0, 1.0, 3.0, 0.25], [9.0, 8.0])
    for sample, values in zip(samples, entropies, strict=True):
        sample.advantages, sample.entropy = sample.mask.float(), torch.tensor(values)
        sample.reward = values[1]
    return samples


@pytest.mark.parametrize(
    ("share", "kept"), [(0.2, [3.0]), (0.4, [2.0, 3.0]), (0.61, [1.0, 2.0, 3.0]), (0.01, [3.0]), (0.99, [0.25, 0.5])]
)
def test_only_the_tokens_of_highest_entropy_keep_their_advantage(share: float, kept: list[float]) -> None:
    """Of five tokens in the loss: the highest 1, 2, 3, 1 and 5."""
    samples = uncertain()
    keep_uncertain(samples, share)
    for sample in samples:
        assert sample.advantages.tolist() == [
            float(is_sampled and entropy >= min(kept))
            for is_sampled, entropy in zip(sample.mask.tolist(), sample.entropy.tolist(), strict=True)
        ]


def test_the_choice_follows_whitening_over_all_tokens() -> None:
    """Advantages of 1, 4, -3, 0 and 7 are whitened; then those with the entropies 2 and 3 are kept: 4 and 0."""
    plain, chosen = raw(True)[:2], raw(True)[:2]
    whiten(plain)
    for sample, other in zip(chosen, uncertain(), strict=False):
        sample.entropy = other.entropy
        sample.teacher_logprobs, sample.old_logprobs = sample.advantages, torch.zeros(sample.length())
    assign_advantages(chosen, AlgorithmConfig(preset="on_policy_distill", whiten=True, top_entropy_share=0.4))
    (first, second), zero = (sample.advantages.tolist() for sample in plain), 0.0
    assert [one.advantages.tolist() for one in chosen] == [[zero, zero, first[2]], [zero, zero, second[2], zero]]


def test_the_key_turns_whitening_on() -> None:
    plain, whitened = samples_of(GROUPS), samples_of(GROUPS)
    assign_advantages(plain, AlgorithmConfig(preset="dr_grpo"))
    assign_advantages(whitened, AlgorithmConfig(preset="dr_grpo", whiten=True))
    whiten(plain)
    assert [sample.advantages.tolist() for sample in whitened] == [sample.advantages.tolist() for sample in plain]


# Names

OWN_ESTIMATOR = """
def constant(samples, config):
    for sample in samples:
        sample.advantages = config.gamma * sample.mask
"""


def test_an_estimator_of_the_users_own_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_estimator.py").write_text(OWN_ESTIMATOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    samples = multi_turn()
    assign_advantages(samples, AlgorithmConfig(advantage="own_estimator:constant", gamma=0.5))
    assert [sample.advantages.tolist() for sample in samples] == [[0.5 * flag for flag in mask] for mask in MASKS]


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        assign_advantages(samples_of(GROUPS), AlgorithmConfig(advantage="group_nrom"))
    assert "algorithm.advantage=group_nrom" in str(caught.value)
    for name in ADVANTAGES:
        assert name in str(caught.value)


def test_a_critic_without_anything_to_learn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = """
from trueline.algorithms.entries import entry


@entry(needs=("critic",))
def forgetful(samples, config):
    for sample in samples:
        sample.advantages = sample.reward * sample.mask
"""
    (tmp_path / "own_advantages.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    sample = Sample(torch.arange(3), torch.tensor([False, True, True]), reward=2.0)
    with pytest.raises(
        ConfigError, match=r"own_advantages:forgetful needs a critic but sets no targets: fill `returns`"
    ):
        assign_advantages([sample], AlgorithmConfig(advantage="own_advantages:forgetful"))
