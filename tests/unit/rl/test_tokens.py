"""Numbers of the tokens of a transcript: aligned with their texts, near the truth, and few bytes."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from trueline.data.pieces import Pieces
from trueline.data.types import Completion, Prompt, Sample, Trajectory, to_samples
from trueline.demo.material import make_tokenizer
from trueline.monitoring.trackers import compact
from trueline.monitoring.transcripts import pack_numbers, unpack_numbers
from trueline.rl.transcripts import MOST_TOKENS, token_row, token_rows

PIECES = Pieces(make_tokenizer())
COLUMNS = ("logprob", "log_ratio", "advantage", "entropy")


def ids(text: str) -> list[int]:
    return list(PIECES.tokenizer(text)["input_ids"])


def scored(trajectory: Trajectory) -> list[Sample]:
    """Return its samples as they are after an update."""
    trajectory.reward = 1.0
    samples = to_samples(trajectory, 0)
    for seed, sample in enumerate(samples):
        noise = torch.randn(2, sample.length(), generator=torch.Generator().manual_seed(seed))
        sample.old_logprobs = sample.rollout_logprobs + 0.01 * noise[0] * sample.mask
        sample.advantages = noise[1] * sample.mask
        sample.entropy = noise[1].abs() * sample.mask
    return samples


def action(tokens: list[int]) -> Completion:
    return Completion.of(tokens, [-0.1 * (at + 1) for at in range(len(tokens))], 0, "stop")


def episode(*turns: tuple[str, str]) -> Trajectory:
    """Return what was inserted and sampled, in turns."""
    trajectory = Trajectory(Prompt(0, [{"role": "user", "content": "?"}]), 0)
    for inserted, sampled in turns:
        trajectory.add_observation(ids(inserted))
        trajectory.add_action(action(ids(sampled)))
    return trajectory


def sampled_text(row: dict[str, Any]) -> str:
    turns = [turn % 2 == 0 for turn, count in enumerate(row["sampled"]) for _ in range(count)]
    return "".join(text for text, sampled in zip(row["text"], turns, strict=True) if sampled)


def test_several_turns_without_the_prompt() -> None:
    (sample,) = scored(episode(("ask:", "two"), ("tool", "three")))
    row = token_row(sample, PIECES)
    assert row["text"] == list("twotoolthree") and row["sampled"] == [3, 4, 5]
    assert sampled_text(row) == "twothree" and "left_out" not in row
    known = {
        "logprob": sample.rollout_logprobs,
        "log_ratio": sample.old_logprobs - sample.rollout_logprobs,
        "advantage": sample.advantages,
        "entropy": sample.entropy,
    }
    for name, values in known.items():
        assert unpack_numbers(row[name], 12).tolist() == pytest.approx(values[4:].tolist(), rel=1e-3, abs=1e-6)
    assert row["logprob"] != row["log_ratio"]


def test_all_sequences_of_an_episode_are_told() -> None:
    trajectory = episode(("one:", "abc"))
    trajectory.branches = [episode(("two:", "defg"))]
    assert [sampled_text(row) for row in token_rows(scored(trajectory), PIECES)] == ["abc", "defg"]


def test_a_character_is_not_shared_with_what_was_inserted() -> None:
    first, second = ids("é")
    trajectory = episode(("?", "a"))
    trajectory.add_action(action([first]))
    trajectory.add_observation([second])
    row = token_row(scored(trajectory)[0], PIECES)
    assert row["text"] == ["a", "\ufffd", "\ufffd"] and row["sampled"] == [2, 1]


def test_long_sequences_say_how_much_is_left_out() -> None:
    (sample,) = scored(episode(("long prompt: ", "x" * 511 + "é" + "y" * 88)))
    row = token_row(sample, PIECES)
    assert len(row["text"]) == sum(row["sampled"]) == MOST_TOKENS == 512 and row["left_out"] == 601 - 512
    assert row["text"][-2:] == ["x", ""]  # the character ends behind the bound, and is no garbage before it
    assert all(len(unpack_numbers(row[name], 512)) == 512 for name in COLUMNS)


def test_what_is_not_known_is_not_told() -> None:
    (sample,) = to_samples(replace_reward(episode(("?", "ab"))), 0)
    sample.old_logprobs = sample.rollout_logprobs  # the engine's are taken for the trainer's
    sample.advantages = torch.tensor([0.0, 0.5, 0.5])
    row = token_row(sample, PIECES)
    assert set(row) == {"text", "sampled", "logprob", "advantage"}
    assert row["advantage"] == 0.5  # of all tokens


def replace_reward(trajectory: Trajectory) -> Trajectory:
    trajectory.reward = 1.0
    return trajectory


def test_numbers_of_all_sizes() -> None:
    values = np.array([0.0, -1.2345e-4, 3.14159, -700.0, 1e9, -np.inf, np.nan])
    found = unpack_numbers(pack_numbers(values), 7).tolist()
    assert found[:4] == pytest.approx(values[:4].tolist(), rel=1e-3)
    assert found[4:6] == [6e4, -6e4] and np.isnan(found[6])
    assert pack_numbers(np.full(3, np.nan)) != pack_numbers(np.zeros(3)) == 0.0
    json.dumps(pack_numbers(np.full(3, np.inf)), allow_nan=False)


def test_a_thousand_steps_take_less_than_fifty_megabytes() -> None:
    """Four transcripts of 512 tokens a step, 4.5 characters a token as in English, and all numbers different."""
    texts = [" wordings"[: 2 + at % 6] for at in range(512)]
    row = token_row(scored(episode(("?", "x" * 512)))[0], PIECES) | {"text": texts}
    told = {"step": 1000, "purpose": "train", "prompt": "p" * 200, "reply": "".join(texts), "reward": 1.0}
    row["logprob"] = pack_numbers(np.linspace(-3, 0, 512))
    assert all(isinstance(row[name], str) for name in COLUMNS)
    assert 4 * 1000 * len(compact(told | {"tokens": [row]}).encode()) < 50e6
