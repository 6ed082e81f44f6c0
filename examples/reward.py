"""A reward: any function whose parameters are filled by name.

`reply` is the completion's text, `label` the row's ground truth. `prompt`, `messages` and every column of the dataset
are available too: `max_words` below is a column, with a default for rows that lack it.

    trueline grpo --model model/ --data data.jsonl --reward examples/reward.py:reward
"""

import re

BREVITY_SHARE = 0.1


def reward(reply: str, label: str, max_words: int = 50) -> float:
    """0.9 for the right final number, and 0.1 more for a right reply of at most `max_words` words."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", reply.replace(",", ""))
    # A label that is not a number raises: a mistake in the data is reported, not scored.
    if not numbers or float(numbers[-1]) != float(label):
        return 0.0
    return 1.0 if len(reply.split()) <= max_words else 1.0 - BREVITY_SHARE
