import pytest

from trueline.rewards.functions import exact, final_answer, math, regex


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
    ("reply", "label", "reward"),
    [
        ("The answer is 72.", "72", 1.0),
        ("The answer is 71.", "72", 0.0),
        ("5 + 7 = 12\n#### 12", "a sum\n#### 12", 1.0),
        ("first #### 11, no: #### 12", "#### 12", 1.0),
        ("#### 1,234", "#### 1234", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.0),
        ("I do not know.", "72", 0.0),
        ("", "72", 0.0),
        ("72", 72, 1.0),
    ],
)
def test_math(reply: str, label: object, reward: float) -> None:
    assert math(reply, label) == reward


def test_what_cannot_be_graded_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no mathematical answer"):
        math("72", "blue")
    for function in (math, exact):
        with pytest.raises(ValueError, match=r"data\.label_column"):
            function("None", None)


@pytest.mark.parametrize(
    ("text", "answer"), [("x #### 1 #### 2,000 ", "2000"), ("no mark", "no mark"), ("1, 2", "1, 2")]
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer
