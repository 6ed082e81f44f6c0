"""A tool whose answer nobody can know before it is asked, and the reward for telling what it said."""

import random


def draw() -> str:
    """Draw a card."""
    return random.choice("abcdefgh")


def told(reply: str, turns: list) -> float:
    """Return 1 if the last answer is what the tool said. `turns` is all that was said after the prompt."""
    results = [turn["content"] for turn in turns if turn["role"] == "tool"]
    return float(bool(results) and reply == results[-1])
