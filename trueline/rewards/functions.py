"""Built-in reward functions, whose parameters are filled by name."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any

from trueline.rewards.code import code

# A thought, then an answer, and neither tag inside of its own part.
THINK_ANSWER = r"<think>(?:(?!</?think>).)+</think>\s*<answer>(?:(?!</?answer>).)+</answer>"
NUMBER = re.compile(r"([+-]?)[$€£]?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)((?:[eE][+-]?\d{1,3})?)\.?")
LATEX_WORDS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[A-Za-z]+")
UNITS: dict[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


def exact(reply: str, label: Any) -> float:
    """Return 1 if the reply is the label, white space at the ends aside."""
    return float(reply.strip() == label_text(label).strip())


def label_text(label: Any) -> str:
    """Return the label as text. A row without one has no reward: an error, not a zero."""
    if label is None:
        raise ValueError("the row has no label: name its column with data.label_column")
    return str(label)


def math(reply: str, label: Any) -> float:
    """Return 1 if the reply's final answer equals the label's: as plain numbers, else by math-verify."""
    expected, given = final_answer(label_text(label)), final_answer(reply)
    numbers = plain_number(expected), plain_number(given)
    are_whole = all(number is not None and number == number.to_integral_value() for number in numbers)
    if are_whole or (None not in numbers and numbers[0] == numbers[1]):
        return float(numbers[0] == numbers[1])
    from math_verify import verify  # noqa: PLC0415  (seconds to import)

    if not (gold := parse_math(expected)):
        raise ValueError(f"the label {label!r} holds no mathematical answer")
    return float(verify(gold, parse_math(given)))


def final_answer(text: str) -> str:
    r"""Return, of the last <answer>, the text from the last `\boxed` on, the line of `####` or a last `A:`, or all."""
    text = (re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text])[-1]
    if "\\boxed" in text:
        return text[text.rindex("\\boxed") :]
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].rstrip()
    marked = re.search(r"^(?:Final )?A(?:nswer)?:\s*(.+)\s*\Z", text, re.MULTILINE | re.IGNORECASE)
    return (marked[1] if marked else text).strip()


def plain_number(text: str) -> Decimal | None:
    found = NUMBER.fullmatch(text.strip("*$"))  # bold, or mathematics
    return Decimal("".join(found.groups()).replace(",", "")) if found else None


def parse_math(answer: str) -> list[Any]:
    """Parse by math-verify, which sees notation inside of dollars only, and takes `2\\sqrt{3}` without them for 2."""
    from math_verify import parse  # noqa: PLC0415  (seconds to import)

    delimited, has_words = "$" in answer or "\\boxed" in answer, re.search(r"[A-Za-z]{2,}", LATEX_WORDS.sub("", answer))
    is_notation = re.search(r"[\d\\^]", answer) and not delimited and not has_words
    return (parse(f"${answer}$") if is_notation else []) or parse(answer)


def regex(reply: str, pattern: str) -> float:
    """Return 1 if the pattern (reward.pattern) is found in the reply."""
    return float(re.search(pattern, reply) is not None)


def matches_format(reply: str, pattern: str = THINK_ANSWER) -> float:
    """Return 1 if the whole reply matches the pattern, in which a dot is any character, newlines too."""
    return float(re.fullmatch(pattern, reply.strip(), re.DOTALL) is not None)


def length(reply: str, maximum: float, minimum: float = 0, unit: str = "characters") -> float:
    """Return 1 from minimum to maximum, falling in proportion to 0 at no length, and at twice the maximum."""
    if unit not in UNITS:
        raise ValueError(f"reward.options.unit={unit}: give one of {', '.join(UNITS)}")
    size = UNITS[unit](reply)
    if size < minimum:
        return size / minimum
    return 1.0 if size <= maximum else max(0.0, 2 - size / maximum)


def reasoning_gym(reply: str, question: str, answer: Any, metadata: Any) -> float:
    """Return the score of Reasoning Gym's own grader for the row's kind of task."""
    try:
        from reasoning_gym.utils import extract_answer  # noqa: PLC0415  (seconds to import)
    except ImportError as error:
        raise ImportError("the reward reasoning_gym needs its package: pip install 'trueline[reasoning]'") from error
    details, given = json.loads(metadata) if isinstance(metadata, str) else metadata, extract_answer(reply)
    entry = {"question": question, "answer": answer, "metadata": details}
    return float(gym_grader(details["source_dataset"])(reply.strip() if given is None else given, entry))


@cache
def gym_grader(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn  # noqa: PLC0415  (an extra; seconds to import)

    return get_score_answer_fn(task)


REWARDS: dict[str, Callable[..., float]] = {
    "code": code,
    "exact": exact,
    "format": matches_format,
    "length": length,
    "math": math,
    "reasoning_gym": reasoning_gym,
    "regex": regex,
}
