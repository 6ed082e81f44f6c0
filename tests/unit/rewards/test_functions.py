import builtins
import json
import random
from pathlib import Path
from typing import Any

import pytest

from trueline.rewards.functions import exact, final_answer, length, matches_format, math, reasoning_gym, regex

SOLUTIONS = Path(__file__).parents[4] / "shared/assets/gsm8k/example_model_solutions.jsonl"


@pytest.mark.parametrize(
    ("reply", "label", "reward"),
    [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42", 42, 1.0), ("42.0", 42, 0.0), ("a 42", "42", 0.0), ("", "", 1.0)],
)
def test_exact(reply: str, label: object, reward: float) -> None:
    assert exact(reply, label) == reward


@pytest.mark.parametrize(
    ("reply", "pattern", "reward"),
    [("so #### 72", r"####\s*\d+", 1.0), ("72", r"####", 0.0), ("a\nb", r"^b", 0.0), ("a\nb", r"(?m)^b", 1.0)],
)
def test_regex(reply: str, pattern: str, reward: float) -> None:
    assert regex(reply, pattern) == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<think>so\nit is</think>\n<answer>42</answer>", 1.0),
        ("\n<think>a</think><answer>b</answer> ", 1.0),
        ("<think></think><answer>42</answer>", 0.0),
        ("<answer>42</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
    ],
)
def test_format(reply: str, reward: float) -> None:
    assert matches_format(reply) == reward


def test_format_has_a_pattern() -> None:
    assert matches_format("yes, a\nb", "yes.*") == 1.0
    assert matches_format("oh yes", "yes.*") == 0.0


@pytest.mark.parametrize(
    ("size", "reward"), [(0, 0.0), (5, 5 / 10), (10, 1.0), (20, 1.0), (25, 0.75), (40, 0.0), (90, 0.0)]
)
def test_length(size: int, reward: float) -> None:
    assert length("x" * size, maximum=20, minimum=10) == reward
    assert length("x yz " * size, maximum=40, minimum=20, unit="words") == reward


def test_length_of_something_unknown() -> None:
    assert length("", maximum=5) == 1.0
    with pytest.raises(ValueError, match="characters, words"):
        length("x", maximum=5, unit="tokens")


@pytest.mark.parametrize(
    ("reply", "label", "reward"),
    [
        ("The answer is 72.", "72", 1.0),
        ("The answer is 71.", "72", 0.0),
        ("5 + 7 = 12\n#### 12", "a sum\n#### 12", 1.0),
        ("first #### 11, no: #### 12", "#### 12", 1.0),
        ("#### 1,234", "#### 1234", 1.0),
        ("#### 12 apples\nThat is 3 bags.", "12", 1.0),
        ("#### 1,2", "12", 0.0),
        ("5 + 7 = 12\nA: 12", "#### 12", 1.0),
        ("A: 12\nB: 13\nThe answer is 13.", "13", 1.0),
        ("A: $12.50", "12.5", 1.0),
        ("A: -1.8 billion", "2", 0.0),
        ("10000001", "10000000", 0.0),
        ("3" * 5000, "3", 0.0),
        ("0.3333333", "0.333333", 1.0),
        ("1e-05", 0.00001, 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.0),
        (r"first \boxed{1}, then \boxed{2}.", "2", 1.0),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),  # notation without dollars is read to its end
        (r"\boxed{x^2 + 1}", "1 + x^2", 1.0),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left(3, \frac{\pi}{2}\right)", 1.0),
        (r"\boxed{\text{even}}", r"\text{odd}", 0.0),
        ("<think>3 + 4 = 7, or 8?</think><answer>7</answer>", "7", 1.0),
        ("<think>3 + 4 = 7</think><answer>8</answer>", "7", 0.0),
        ("<answer>7</answer> <answer>8 apples</answer>", "8", 1.0),
        ("**7**", "$7$", 1.0),
        ("I do not know.", "72", 0.0),
        ("", "72", 0.0),
        ("72", 72, 1.0),
    ],
)
def test_math(reply: str, label: object, reward: float) -> None:
    assert math(reply, label) == reward


def test_math_grades_solutions_of_any_shape() -> None:
    """Steps with numbers of their own, then the answer, right or not, as people and models write it."""
    draw = random.Random(0)
    endings = ("A: {}", "#### {}", r"So it is \\boxed{{{}}}.", "Final answer: {}", "The answer is {}")
    for _ in range(200):
        price, count, rest = draw.randint(2, 60), draw.randint(2, 90), draw.randint(1, 9)
        right = price * count - rest
        steps = (
            f"{count} of them cost {price} * {count} = <<{price}*{count}={price * count}>>{price * count} dollars.\n"
        )
        said = draw.choice([right, right + 1, -right, right * 10])
        shown = draw.choice([f"{said}", f"{said:,}", f"${said}", f"{said}.00"])
        label = f"Take {rest} off.\n#### {right}"
        assert math(steps + draw.choice(endings).format(shown), label) == float(said == right)


def test_math_agrees_with_published_verdicts() -> None:
    """Four models' answers to the test questions of GSM8K, graded by those who published them."""
    if not SOLUTIONS.exists():
        pytest.skip("GSM8K's example_model_solutions.jsonl is not in ../shared/assets/gsm8k")
    rows = [json.loads(line) for line in SOLUTIONS.read_text().splitlines()]
    graded = [
        (row["ground_truth"], answer["solution"], answer["is_correct"])
        for row in rows
        for answer in row.values()
        if isinstance(answer, dict)
    ]
    assert len(graded) == 4 * 1319
    assert [case for case in graded if math(case[1], case[0]) != case[2]] == []


def test_what_cannot_be_graded_is_an_error_and_not_a_zero() -> None:
    for label in ("blue", "A", ""):
        with pytest.raises(ValueError, match="no mathematical answer"):
            math("72", label)
    for function in (math, exact):
        with pytest.raises(ValueError, match=r"data\.label_column"):
            function("None", None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("x #### 1 #### 2,000 ", "2,000"),
        ("####\n12\n", "12"),
        ("so\nA: 12\n", "12"),
        ("Final answer: 12", "12"),
        ("A: 12\nB: 13", "A: 12\nB: 13"),
        (r"#### 1 and \boxed{2}", r"\boxed{2}"),
        ("\\boxed{1} <answer>so\n#### 2</answer> #### 3", "2"),
        ("no mark", "no mark"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


COUNTDOWN = {
    "question": "Calculate 309 using all of these numbers: 6, 61, 94, 4.",
    "answer": "94*4 - 61 - 6",
    "metadata": {"source_dataset": "countdown", "numbers": [6, 61, 94, 4], "target": 309},
}


def test_reasoning_gym_asks_the_grader_of_the_task() -> None:
    pytest.importorskip("reasoning_gym")
    assert reasoning_gym("<think>hm</think><answer>4*94 - (61 + 6)</answer>", **COUNTDOWN) == 1.0
    assert reasoning_gym(" 94*4 - 61 - 6\n", **COUNTDOWN) == 1.0
    assert reasoning_gym("<answer>94*4 - 61</answer>", **COUNTDOWN) < 1.0
    as_text = COUNTDOWN | {"metadata": json.dumps(COUNTDOWN["metadata"])}
    assert reasoning_gym("<answer>94*4 - 61 - 6</answer>", **as_text) == 1.0


def test_reasoning_gym_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return importing(name, *arguments)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"trueline\[reasoning\]"):
        reasoning_gym("1", **COUNTDOWN)
