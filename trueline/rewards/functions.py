"""Built-in reward functions. Parameters are filled by name; a plain number comes back."""

import re
from collections.abc import Callable
from typing import Any


def exact(reply: str, label: Any) -> float:
    """1 if the reply is the label, white space at the ends aside."""
    return float(reply.strip() == labelled(label).strip())


def math(reply: str, label: Any) -> float:
    """1 if the reply's final mathematical answer equals the label's (math-verify)."""
    from math_verify import parse, verify  # noqa: PLC0415  (seconds to import)

    gold = parse(final_answer(labelled(label)))
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematical answer")
    return float(verify(gold, parse(final_answer(reply))))


def labelled(label: Any) -> str:
    """A row without a label cannot be graded; its reward is an error, not a zero."""
    if label is None:
        raise ValueError("the row has no label: name its column with data.label_column")
    return str(label)


def final_answer(text: str) -> str:
    """What stands behind GSM8K's last `####`, where there is one."""
    return text.rpartition("####")[2].strip().replace(",", "") if "####" in text else text


def regex(reply: str, pattern: str) -> float:
    """1 if the pattern (reward.pattern) is found in the reply."""
    return float(re.search(pattern, reply) is not None)


REWARDS: dict[str, Callable[..., float]] = {"exact": exact, "math": math, "regex": regex}
