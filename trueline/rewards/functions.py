"""Built-in reward functions. Parameters are filled by name; a plain number comes back."""

import re
from collections.abc import Callable
from typing import Any


def exact(reply: str, label: Any) -> float:
    """1 if the reply is the label, white space at the ends aside."""
    return float(reply.strip() == str(label).strip())


def math(reply: str, label: Any) -> float:
    """1 if the reply's final mathematical answer equals the label's (math-verify)."""
    from math_verify import parse, verify  # noqa: PLC0415  (seconds to import)

    gold = parse(final_answer(str(label)))
    return float(bool(gold) and verify(gold, parse(final_answer(reply))))


def final_answer(text: str) -> str:
    """What stands behind GSM8K's last `####`, where there is one."""
    return text.rpartition("####")[2].strip().replace(",", "") if "####" in text else text


def regex(reply: str, pattern: str) -> float:
    """1 if the pattern (reward.pattern) is found in the reply."""
    return float(re.search(pattern, reply) is not None)


REWARDS: dict[str, Callable[..., float]] = {"exact": exact, "math": math, "regex": regex}
