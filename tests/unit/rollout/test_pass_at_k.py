"""Evaluation metrics against what can be counted or derived by hand."""

import math
from itertools import combinations

import pytest

from trueline.rollout.evaluation import (
    ScoredPrompt,
    answer_key,
    confidence_half_width,
    majority_reward,
    pass_at_k,
    pass_sizes,
    set_metrics,
)


@pytest.mark.parametrize(("right", "samples"), [(0, 4), (1, 4), (2, 5), (4, 6), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right: int, samples: int) -> None:
    answers = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        draws = [any(draw) for draw in combinations(answers, k)]
        assert pass_at_k(right, samples, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_pass_at_k_is_unbiased(chance: float, k: int) -> None:
    """Over all counts that 8 answers can have, its mean is the chance that k fresh answers hold a right one."""
    samples = 8
    expected = sum(
        math.comb(samples, right) * chance**right * (1 - chance) ** (samples - right) * pass_at_k(right, samples, k)
        for right in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_answers(k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} of 4 completions is undefined"):
        pass_at_k(2, 4, k)


def test_sizes_double_up_to_the_number_of_answers() -> None:
    assert {samples: pass_sizes(samples) for samples in (1, 2, 3, 8, 12)} == {
        1: [1],
        2: [1, 2],
        3: [1, 2, 3],
        8: [1, 2, 4, 8],
        12: [1, 2, 4, 8, 12],
    }


@pytest.mark.parametrize(
    ("reply", "key"),
    [
        ("2 and 2 is #### 4 ", "4"),
        ("#### 1 no, #### 2", "2"),
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"#### 6, that is \boxed{5}", "5"),
        (r"cut off in \boxed{\frac{1}{2}", r"\boxed{\frac{1}{2}"),
        ("<think>7?</think><answer> 5 </answer>", "5"),
        ("2 and 3 make five.\nAnswer: 5", "5"),
        (" seven\n", "seven"),
        ("", ""),
    ],
)
def test_what_makes_two_replies_the_same_answer(reply: str, key: str) -> None:
    assert answer_key(reply) == key


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["#### 1", "so: #### 2", "#### 2"], 0.2),  # two votes for 2; its first occurrence is the second answer
        (["b", "a", "a", "b"], 0.1),  # a tie: b came first
        (["c", "b", "a"], 0.1),
        (["a", "b", "c", "b"], 0.2),
    ],
)
def test_the_most_frequent_answer_gives_its_first_occurrences_reward(replies: list[str], reward: float) -> None:
    rewards = [0.1, 0.2, 0.3, 0.4][: len(replies)]
    assert majority_reward(ScoredPrompt(replies, rewards)) == reward


def test_half_width_of_a_mean() -> None:
    """Of 0 and 1: s^2 = 2 * 0.5^2 / 1 = 0.5, so 1.96 * sqrt(0.5) / sqrt(2) = 0.98."""
    assert confidence_half_width([0.0, 1.0]) == pytest.approx(0.98)
    assert confidence_half_width([3.0, 3.0, 3.0]) == 0
    assert confidence_half_width([1.0]) is None
    assert confidence_half_width([]) is None


def test_half_width_falls_with_the_root_of_the_number_of_prompts() -> None:
    """s^2 of n values, half of them 0 and half 1, is n / (4 (n - 1))."""
    for count in (100, 400):
        expected = 1.96 * math.sqrt(count / (4 * (count - 1)) / count)
        assert confidence_half_width([0.0, 1.0] * (count // 2)) == pytest.approx(expected)


def test_prompts_weigh_the_same_however_many_of_their_answers_failed() -> None:
    """Two of the four answers to the second prompt failed: its mean is 1, the first one's 0.25."""
    prompts = [ScoredPrompt(["a", "b", "c", "c"], [1.0, 0.0, 0.0, 0.0]), ScoredPrompt(["x", "x"], [1.0, 1.0])]
    metrics = set_metrics(prompts, samples=4, pass_reward=1.0)
    assert metrics.pop("reward_ci95") == pytest.approx(1.96 * math.sqrt(2 * 0.375**2 / 1 / 2))
    assert metrics == pytest.approx(
        {
            "reward": 0.625,
            "mean@4": 0.625,
            "pass@1": (0.25 + 1) / 2,
            "pass@2": (0.5 + 1) / 2,  # 3 of 6 draws of two from four hold the right one
            "pass@4": 1.0,  # of the first prompt alone: the second has not four answers
            "maj@4": (0.0 + 1) / 2,
        }
    )


def test_a_prompt_whose_answers_all_failed_is_left_out() -> None:
    judged = ScoredPrompt(["a", "b"], [0.5, 0.5])
    assert set_metrics([judged, ScoredPrompt([], [])], 2, 1.0) == set_metrics([judged], 2, 1.0)
    assert set_metrics([ScoredPrompt([], [])], 2, 1.0) == {}


def test_what_counts_as_right_can_be_less_than_one() -> None:
    prompts = [ScoredPrompt(["a", "b"], [0.5, 0.4])]
    assert set_metrics(prompts, 2, 0.5)["pass@1"] == 0.5
    assert set_metrics(prompts, 2, 0.51)["pass@2"] == 0.0


def test_one_answer_per_prompt_has_a_mean_and_nothing_at_k() -> None:
    prompts = [ScoredPrompt(["a"], [1.0]), ScoredPrompt(["b"], [0.0])]
    assert set(set_metrics(prompts, 1, 1.0)) == {"reward", "reward_ci95"}
