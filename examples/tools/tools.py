"""A tool with an unpredictable result, and a reward for repeating it."""

import random


def draw() -> str:
    """Draw a card."""
    return random.choice("bcdefghk")


def repeats_result(reply: str, turns: list) -> float:
    """Return 1 if the last reply is the tool's last result. `turns` is the conversation after the prompt."""
    results = [turn["content"] for turn in turns if turn["role"] == "tool"]
    return float(bool(results) and reply == results[-1])
