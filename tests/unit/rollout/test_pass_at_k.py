"""Evaluation metrics against what can be counted or derived by hand."""

import math
from itertools import combinations

import pytest

from trueline.rollout.evaluation import Scored, answer_key, majority_reward, pass_at_k, set_metrics


def scored(replies: str, *rewards: float) -> Scored:
    return list(zip(replies, rewards, strict=True))


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
    for samples, sizes in {2: [1, 2], 3: [1, 2, 3], 8: [1, 2, 4, 8], 12: [1, 2, 4, 8, 12]}.items():
        metrics = set_metrics([[("a", 1.0)] * samples], samples, 1.0)
        assert [name for name in metrics if name.startswith("pass@")] == [f"pass@{k}" for k in sizes]


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
    assert majority_reward(list(zip(replies, rewards, strict=True))) == reward


def half_width(*means: float) -> float | None:
    return set_metrics([scored("a", mean) for mean in means], 1, 1.0).get("reward_ci95")


def test_half_width_of_a_mean() -> None:
    """Of 0 and 1: s^2 = 2 * 0.5^2 / 1 = 0.5, so 1.96 * sqrt(0.5) / sqrt(2) = 0.98.

    s^2 of n values, half of them 0 and half 1, is n / (4 (n - 1)): it falls with the root of their number.
    """
    assert half_width(0.0, 1.0) == pytest.approx(0.98)
    assert half_width(3.0, 3.0, 3.0) == 0
    assert half_width(1.0) is half_width() is None
    for count in (100, 400):
        assert half_width(*[0.0, 1.0] * (count // 2)) == pytest.approx(1.96 * math.sqrt(1 / (4 * (count - 1))))


def test_prompts_weigh_the_same_however_many_of_their_answers_failed() -> None:
    """Two of the four answers to the second prompt failed: its mean is 1, the first one's 0.25."""
    metrics = set_metrics([scored("abcc", 1.0, 0.0, 0.0, 0.0), scored("xx", 1.0, 1.0)], samples=4, pass_reward=1.0)
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
    judged = scored("ab", 0.5, 0.5)
    assert set_metrics([judged, []], 2, 1.0) == set_metrics([judged], 2, 1.0)
    assert set_metrics([[]], 2, 1.0) == {}


def test_what_counts_as_right_can_be_less_than_one() -> None:
    prompts = [scored("ab", 0.5, 0.4)]
    assert set_metrics(prompts, 2, 0.5)["pass@1"] == 0.5
    assert set_metrics(prompts, 2, 0.51)["pass@2"] == 0.0


def test_one_answer_per_prompt_has_a_mean_and_nothing_at_k() -> None:
    prompts = [scored("a", 1.0), scored("b", 0.0)]
    assert set(set_metrics(prompts, 1, 1.0)) == {"reward", "reward_ci95"}
