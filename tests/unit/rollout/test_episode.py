"""Where stop strings end a completion."""

import asyncio
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from trueline.data.chat import ChatFormat
from trueline.data.types import Completion, Outcome, Prompt, Trajectory
from trueline.environments.single_turn import SingleTurn
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.session import EpisodeLimits, cut_at_stop

# A text of one token per byte, stop strings, tokens that stay, and the reply.
CASES: list[tuple[str, list[str], int, str]] = [
    ("the answer is 4.", [], 16, "the answer is 4."),
    ("the answer is 4.", ["END", "5"], 16, "the answer is 4."),
    ("so 4ENDmore", ["END"], 7, "so 4"),
    ("so 4END", ["END"], 7, "so 4"),
    ("ENDso", ["END"], 3, ""),
    ("aENDbENDc", ["END"], 4, "a"),
    ("aEN END", ["END"], 7, "aEN "),
    ("one, two. three", [". ", ", "], 5, "one"),
    ("abcd", ["bcd", "c"], 3, "ab"),
    ("abcd", ["c", "abc"], 3, ""),
    ("größer", ["ö"], 4, "gr"),  # two bytes
    ("größer", ["ße"], 7, "grö"),
    ("né ☃ now", ["☃ n"], 9, "né "),
    ("né ☃", ["é"], 3, "n"),
]


def test_a_completion_ends_at_the_token_that_completes_a_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    for text, stops, stay, reply in CASES:
        tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        sampled = Completion.of(tokens, [-float(at) for at in range(len(tokens))], 3, "length")
        completion, found = cut_at_stop(sampled, stops, ChatFormat(tokenizer, use_template=False).reply_text)
        assert found == reply, (text, stops)
        whole = reply == text
        stayed = slice(len(tokens) if whole else stay)
        assert completion.tokens.tolist() == tokens[stayed], (text, stops)
        assert completion.logprobs.tolist() == sampled.logprobs[stayed].tolist()
        assert (set(completion.versions.tolist()), completion.finish_reason) == ({3}, "length" if whole else "stop")


def test_a_character_that_is_cut_off_hides_no_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    """Half of a character before it, and half of one behind it."""
    half = tokenizer("é")["input_ids"][:1]
    tokens = [*half, *tokenizer("END")["input_ids"], *half]
    completion, reply = cut_at_stop(Completion.of(tokens, [0.0] * 5, 0, "length"), ["END"], tokenizer.decode)
    assert (len(completion.tokens), reply) == (4, "\N{REPLACEMENT CHARACTER}")


def test_a_token_with_two_stop_strings_ends_before_the_first() -> None:
    words = ["so", "\n\n#\n", "more"]
    sampled = Completion.of([0, 1, 2], [-1.0, -2.0, -3.0], 0, "length")
    completion, reply = cut_at_stop(sampled, ["#", "\n"], lambda tokens: "".join(words[token] for token in tokens))
    assert (completion.tokens.tolist(), reply) == ([0, 1], "so")


class Saying:
    """An engine that always says the same, up to its limit."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def call(self, method: Callable[..., Any], *args: Any) -> Completion:
        return Completion.of(self.tokens, [-float(at + 1) for at in range(len(self.tokens))], 7, "length")


def episode(tokenizer: PreTrainedTokenizerFast, text: str, *stops: str) -> Trajectory:
    engine: Any = Saying(tokenizer(text)["input_ids"])
    episodes = Episodes(EnginePool([engine]), ChatFormat(tokenizer, use_template=False), EpisodeLimits(512))
    prompt = Prompt(0, [{"role": "user", "content": "2+2="}])
    params = SamplingParams(1.0, 8, (2,), stop=stops)
    return asyncio.run(episodes.run(SingleTurn(CombinedReward({}, 0.0)), prompt, RolloutKey(0, 0, None), params))


def test_what_is_trained_on_is_a_prefix_of_what_was_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    free, stopped = episode(tokenizer, "4\n\nthen 5"), episode(tokenizer, "4\n\nthen 5", "\n\n")
    assert (free.truncated, free.outcome, free.reply) == (True, Outcome.TRUNCATED, "4\n\nthen 5")
    assert (stopped.truncated, stopped.outcome, stopped.reply) == (False, Outcome.FINISHED, "4")
    count = 4 + 3  # of the prompt, and of "4\n\n"
    assert stopped.tokens.tolist() == free.tokens[:count].tolist()
    assert stopped.mask.tolist() == [False] * 4 + [True] * 3
    assert stopped.logprobs.tolist() == [0.0] * 4 + [-1.0, -2.0, -3.0]
    assert stopped.versions.tolist() == [-1] * 4 + [7] * 3
    assert len(stopped.rewards) == count and stopped.reward == 0.0
