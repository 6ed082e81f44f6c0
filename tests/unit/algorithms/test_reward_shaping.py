import pytest
import torch

from trueline.algorithms.reward_shaping import (
    adapt_coefficient,
    cosine_reward,
    overlong_punishment,
    sequence_kl,
    shape_rewards,
    truncated_reward,
)
from trueline.config.algorithm import AlgorithmConfig, KLConfig, ShapingConfig
from trueline.config.base import ConfigError
from trueline.data.types import Sample

BUDGET = 10
# A prompt token, a turn of two tokens, the environment's token, a turn of two tokens.
MASK = [False, True, True, False, True, True]
TURNS = [0.0, 0.0, 0.75, 0.0, 0.0, -0.25]  # turn rewards; the task reward is 0.5
LAST = 5


def make(truncated: bool = False) -> Sample:
    sample = Sample(torch.arange(6), torch.tensor(MASK), task_reward=0.5, baseline=0.125, truncated=truncated)
    sample.token_rewards = torch.tensor(TURNS)
    sample.old_logprobs = torch.tensor([5.0, -1.0, -2.0, 5.0, -0.5, -1.0])
    sample.ref_logprobs = torch.tensor([-5.0, -1.5, -1.0, -5.0, -0.5, -3.0])
    return sample


K1 = [0.0, 0.5, -1.0, 0.0, 0.0, 2.0]  # log policy / reference on sampled tokens


def shaped(sample: Sample, coefficient: float = 0.0, kl: KLConfig | None = None, **shaping: object) -> Sample:
    config = AlgorithmConfig.parse({"preset": "dr_grpo", "shaping": shaping, "kl": (kl or KLConfig()).model_dump()})
    shape_rewards([sample], config, BUDGET, coefficient)
    assert sample.reward == pytest.approx(sample.token_rewards.double().sum().item(), abs=1e-6)
    assert (sample.task_reward, sample.baseline) == (0.5, 0.125)
    return sample


def test_without_shaping_the_reward_is_the_task_reward() -> None:
    sample = shaped(make())
    assert sample.reward == 0.5
    assert sample.token_rewards.tolist() == TURNS
    assert not sample.filtered


def test_what_came_from_the_trajectory_is_not_written_into() -> None:
    sample = make(truncated=True)
    before = sample.token_rewards
    shaped(sample, truncated="set", truncated_value=-1.0)
    assert before.tolist() == TURNS


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0), (130, -1.0)]
)
def test_the_overlong_punishment_falls_over_the_last_fifth(length: int, expected: float) -> None:
    assert overlong_punishment(length, 100, 0.2) == pytest.approx(expected)


def test_the_overlong_punishment_stands_on_the_last_sampled_token() -> None:
    """4 sampled tokens of 5: the last 40 % begin at 3, so (3 - 4) / 2, times 3."""
    config = AlgorithmConfig.parse({"shaping": {"overlong_factor": 3.0, "overlong_share": 0.4}})
    sample = make()
    shape_rewards([sample], config, 5, 0.0)
    assert sample.reward == pytest.approx(0.5 - 1.5)
    assert sample.token_rewards.tolist() == pytest.approx([*TURNS[:LAST], TURNS[LAST] - 1.5])


COSINE = {"cosine_correct": [2.0, 1.0], "cosine_wrong": [-10.0, -4.0]}


@pytest.mark.parametrize(
    ("share", "right", "wrong"),
    [
        (0.0, 2.0, -10.0),
        (1 / 3, 1.75, -8.5),  # cos(60 degrees) = 1/2: three quarters of the way are left
        (0.5, 1.5, -7.0),
        (2 / 3, 1.25, -5.5),
        (1.0, 1.0, -4.0),
        (1.5, 1.0, -4.0),  # turns beyond the limit of one
    ],
)
def test_a_reward_follows_half_a_cosine_of_the_length(share: float, right: float, wrong: float) -> None:
    config = ShapingConfig.parse(COSINE)
    for reward, expected in ((1.0, right), (0.01, right), (0.0, wrong), (-1.0, wrong)):
        assert cosine_reward(reward, share, config) == pytest.approx(expected)
    assert cosine_reward(0.3, share, ShapingConfig()) == 0.3


def test_the_cosine_is_of_the_whole_episodes_length_and_comes_before_truncation() -> None:
    """Task reward 0.5 and 4 sampled tokens of 10: 1.5 + cos(72 degrees) / 2; then halved."""
    expected = 1.5 + 0.30901699 / 2
    sample = shaped(make(), **COSINE)
    assert sample.reward == pytest.approx(expected)
    assert sample.token_rewards.tolist() == pytest.approx([*TURNS[:LAST], TURNS[LAST] + expected - 0.5])
    cut = {"truncated": "multiply", "truncated_value": 0.5}
    assert shaped(make(truncated=True), **COSINE, **cut).reward == pytest.approx(expected / 2)
    set_to = {"truncated": "set", "truncated_value": -10.0}
    assert shaped(make(truncated=True), **COSINE, **set_to).reward == -10.0
    pair = [make(), make()]
    for one in pair:
        one.episode = 0
    shape_rewards(pair, AlgorithmConfig.parse({"shaping": COSINE}), BUDGET, 0.0)
    assert [one.reward for one in pair] == pytest.approx([1.5 - 0.80901699 / 2] * 2)  # 8 of 10: cos(144 degrees)


@pytest.mark.parametrize(
    ("kind", "value", "reward", "expected"),
    [
        ("keep", 0.0, 0.5, 0.5),
        ("multiply", 0.25, 0.5, 0.125),
        ("multiply", 0.25, -0.5, -0.5),  # never raised
        ("multiply", 0.0, 1.0, 0.0),
        ("multiply", 1.0, -1.0, -1.0),
        ("set", -1.0, 0.5, -1.0),
        ("set", 0.25, -2.0, 0.25),
    ],
)
def test_the_reward_of_a_truncated_answer(kind: str, value: float, reward: float, expected: float) -> None:
    config = ShapingConfig.parse({"truncated": kind, "truncated_value": value})
    assert truncated_reward(reward, config) == expected


def test_the_truncation_penalty_is_taken_off_the_last_sampled_token() -> None:
    sample = shaped(make(truncated=True), truncated="set", truncated_value=-1.0)
    assert sample.reward == -1.0
    assert sample.token_rewards.tolist() == pytest.approx([*TURNS[:LAST], TURNS[LAST] - 1.5])


def make_cut_short() -> Sample:
    """The environment's token comes last: its answer to the second turn, which is the last there is."""
    sample = make(truncated=True)
    one = torch.ones(1)
    sample.tokens, sample.mask = torch.arange(7), torch.tensor([*MASK, False])
    sample.token_rewards = torch.cat([sample.token_rewards, 0 * one])
    sample.old_logprobs = torch.cat([sample.old_logprobs, 5 * one])
    sample.ref_logprobs = torch.cat([sample.ref_logprobs, -5 * one])
    return sample


def test_an_answer_that_ends_in_an_inserted_token_is_shaped_on_its_last_sampled_one() -> None:
    """multiply: 0.5 -> 0.25; 4 sampled tokens of 5, the last 40 % begin at 3: (3 - 4) / 2, times 3."""
    shaping = {"truncated": "multiply", "truncated_value": 0.5, "overlong_factor": 3.0, "overlong_share": 0.4}
    sample = make_cut_short()
    shape_rewards([sample], AlgorithmConfig.parse({"shaping": shaping}), 5, 0.0)
    assert sample.reward == pytest.approx(0.25 - 1.5)
    assert sample.token_rewards.tolist() == pytest.approx([*TURNS[:LAST], TURNS[LAST] - 0.25 - 1.5, 0.0])


def test_an_inserted_token_at_the_end_carries_no_kl() -> None:
    sample = shaped(make_cut_short(), 0.1, KLConfig(place="reward"))
    expected = [turn - 0.1 * gap for turn, gap in zip(TURNS, K1, strict=True)]
    assert sample.token_rewards.tolist() == pytest.approx([*expected, 0.0])
    assert sample.reward == pytest.approx(0.5 - 0.1 * sum(K1))
    assert sequence_kl([sample]) == pytest.approx(sum(K1))


def test_a_finished_answer_is_not_penalised() -> None:
    sample = shaped(make(), truncated="set", truncated_value=-1.0, overlong_filter=True)
    assert (sample.reward, sample.filtered) == (0.5, False)


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_factor_outside_zero_to_one_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="truncated_value"):
        ShapingConfig.parse({"truncated": "multiply", "truncated_value": value})


def test_the_filter_marks_truncated_answers_and_leaves_their_reward() -> None:
    sample = shaped(make(truncated=True), overlong_filter=True)
    assert (sample.reward, sample.filtered) == (0.5, True)


def test_kl_in_the_reward_is_taken_off_every_sampled_token() -> None:
    sample = shaped(make(), 0.1, KLConfig(coefficient=9.0, place="reward"))  # the adapted coefficient counts
    expected = [turn - 0.1 * gap for turn, gap in zip(TURNS, K1, strict=True)]
    assert sample.token_rewards.tolist() == pytest.approx(expected)
    assert sample.reward == pytest.approx(0.5 - 0.1 * sum(K1))


@pytest.mark.parametrize(("place", "coefficient"), [("loss", 0.1), ("reward", 0.0)])
def test_without_kl_in_the_reward_no_reference_is_read(place: str, coefficient: float) -> None:
    sample = make()
    del sample.ref_logprobs
    assert shaped(sample, coefficient, KLConfig.parse({"place": place})).reward == 0.5


def test_truncation_length_and_kl_add_up() -> None:
    """multiply: 0.5 -> 0.25; 4 of 4 tokens: -1, times 2; then the KL."""
    config = AlgorithmConfig.parse(
        {
            "kl": {"place": "reward"},
            "shaping": {"truncated": "multiply", "truncated_value": 0.5, "overlong_factor": 2.0},
        }
    )
    sample = make(truncated=True)
    shape_rewards([sample], config, 4, 0.1)
    assert sample.reward == pytest.approx(0.25 - 2.0 - 0.1 * sum(K1))
    assert sample.token_rewards.sum().item() == pytest.approx(sample.reward, abs=1e-6)


def test_the_sequence_kl_is_the_mean_of_sums() -> None:
    other = make()
    other.mask = torch.tensor([False, True, False, False, False, False])
    assert sequence_kl([make(), other]) == pytest.approx((sum(K1) + 0.5) / 2)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.05),  # 10 % above the target, 500 of 10,000 answers
        (5.4, 1 - 0.1 * 0.05),
        (60.0, 1 + 0.2 * 0.05),  # bounded
        (0.0, 1 - 0.2 * 0.05),
        (-3.0, 1 - 0.2 * 0.05),
    ],
)
def test_the_coefficient_follows_its_target(kl: float, factor: float) -> None:
    assert adapt_coefficient(0.3, kl, 500, KLConfig(target=6.0)) == pytest.approx(0.3 * factor)


def test_a_fixed_coefficient_stays() -> None:
    assert adapt_coefficient(0.3, 60.0, 500, KLConfig()) == 0.3
