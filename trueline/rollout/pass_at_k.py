"""What the completions of a set of prompts say of a model: mean@k, pass@k, maj@k, and how sure that is."""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, stdev

from trueline.rewards.functions import final_answer

BOXED = "\\boxed{"
NORMAL_95 = 1.96  # standard errors on each side of a mean that hold 95 %


@dataclass(frozen=True, slots=True)
class Scored:
    """The completions of one prompt that have a reward, in the order of their seeds."""

    replies: list[str]
    rewards: list[float]


def set_metrics(prompts: list[Scored], samples: int, pass_reward: float) -> dict[str, float]:
    """Return means over prompts. A prompt whose completions all failed is left out of everything, and of pass@k also
    one that has fewer than k completions left.
    """
    scored = [prompt for prompt in prompts if prompt.rewards]
    if not scored:
        return {}
    means = [fmean(prompt.rewards) for prompt in scored]
    metrics = {"reward": fmean(means)}
    half_width = confidence_half_width(means)
    if half_width is not None:
        metrics["reward_ci95"] = half_width
    if samples == 1:
        return metrics
    metrics[f"mean@{samples}"] = metrics["reward"]
    for k in pass_sizes(samples):
        passes = [passed(prompt, k, pass_reward) for prompt in scored if len(prompt.rewards) >= k]
        if passes:
            metrics[f"pass@{k}"] = fmean(passes)
    metrics[f"maj@{samples}"] = fmean(majority_reward(prompt) for prompt in scored)
    return metrics


def pass_sizes(samples: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def passed(prompt: Scored, k: int, pass_reward: float) -> float:
    right = sum(reward >= pass_reward for reward in prompt.rewards)
    return pass_at_k(right, len(prompt.rewards), k)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Return how likely one of k of the n completions, drawn without putting back, is right: 1 - C(n-c, k) / C(n, k).

    It is unbiased for k fresh completions (Chen et al. 2021, arXiv 2107.03374). n is `samples` and c is `right`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} answers: take k from 1 to {samples}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_reward(prompt: Scored) -> float:
    """Return the reward of the final answer that most completions share, or of the first of equally frequent ones."""
    keys = [answer_key(reply) for reply in prompt.replies]
    votes = Counter(keys)  # in the order of first occurrence, which `max` keeps
    return prompt.rewards[keys.index(max(votes, key=votes.__getitem__))]


def answer_key(reply: str) -> str:
    """Return what two replies must share to be the same answer: the final answer that the reward `math` sees."""
    answer = final_answer(reply)
    return (last_boxed(answer) or answer).strip()


def last_boxed(reply: str) -> str:
    """Return what the last box holds, which is empty where there is none, or where it never ends."""
    start = reply.rfind(BOXED)
    if start < 0:
        return ""
    begin, depth = start + len(BOXED), 1
    for at in range(begin, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[at], 0)
        if depth == 0:
            return reply[begin:at]
    return ""


def confidence_half_width(values: list[float]) -> float | None:
    """Return half the width of the mean's 95 % interval (normal approximation), or None with too few values to tell."""
    return NORMAL_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
