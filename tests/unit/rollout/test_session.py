"""Episodes of several turns: the tokens trained are those sampled, whatever the template and the budget."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TEMPLATE, TOOLS
from tests.unit.data.test_chat import CHATML, FORGETS_REASONING, OPENS_REASONING
from trueline.algorithms.advantages import gae
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message
from trueline.data.pictures import Shown
from trueline.data.types import Completion, Outcome, Prompt, Trajectory, to_samples
from trueline.environments.base import Environment, EpisodeResult, OutOfBudget, Policy, Structure
from trueline.rewards.base import RewardFailure
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool, RolloutKey, SequencePlace
from trueline.rollout.session import EpisodeLimits
from trueline.usercode.failures import ProcessLost

ASKED: list[Message] = [{"role": "user", "content": "1+1="}]
MORE: Message = {"role": "user", "content": "and 2+2?"}
Play = Callable[[Policy, Prompt], Awaitable[EpisodeResult]]


class Scripted:
    """An engine that says one text after the other, cut where the limit is, and remembers what it was asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.asked: list[tuple[list[int], SamplingParams, str]] = []
        self.said: list[list[int]] = []
        self.delay = 0.0  # seconds before an answer
        self.script: dict[str, str] = {}  # what it says to a request, however often it is asked

    async def call(
        self, method: Any, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        await asyncio.sleep(self.delay)
        self.asked.append((tokens, params, request))
        text = self.script.get(request) or self.texts.pop(0)
        words = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        chosen = words[: params.max_new_tokens]
        self.said.append(chosen)
        logprobs = [-float(len(self.said)) - 0.01 * at for at in range(len(chosen))]
        return Completion.of(chosen, logprobs, 7, "stop" if chosen == words else "length")


class Playing(Environment):
    def __init__(self, play: Play) -> None:
        self.played, self.closed = play, 0

    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        return await self.played(policy, prompt)

    async def close(self) -> None:
        self.closed += 1


class Table:
    """A tokenizer with a template, an engine with a script, and a budget."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None, *texts: str, **budget: Any) -> None:
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        self.engine = Scripted(own, list(texts))
        self.chat = ChatFormat(own, use_template=True)
        engine: Any = self.engine
        self.budget = EpisodeLimits(**({"context": 400, "turns": 4} | budget))
        self.episodes = Episodes(EnginePool([engine]), self.chat, self.budget)

    def run(self, play: Play, *, seed: int | None = 3, longest: int = 200) -> Trajectory:
        params = SamplingParams(1.0, longest, tuple(self.chat.stop_ids))
        self.environment = Playing(play)
        return asyncio.run(self.episodes.run(self.environment, Prompt(0, ASKED), RolloutKey(5, 1, seed), params))

    def text(self, tokens: Any) -> str:
        return str(self.chat.tokenizer.decode(list(tokens)))


async def two_turns(policy: Policy, prompt: Prompt) -> EpisodeResult:
    first = await policy.reply(prompt.messages)
    policy.add_reward(0.25)
    await policy.reply([*prompt.messages, first.message, MORE])
    return EpisodeResult(1.0, metrics={"game/won": 1.0})


def check_recorded(table: Table, trajectory: Trajectory) -> None:
    """Every reply stands in the sequences as the engine sampled it, with its log-probs, and nothing else is masked."""
    sampled = [token for one in trajectory.sequences() for token in one.tokens[one.mask].tolist()]
    assert sampled == [token for said in table.engine.said for token in said]
    for one in trajectory.sequences():
        assert ((one.logprobs != 0) == one.mask).all() and ((one.versions == 7) == one.mask).all()
    for (asked, _, _), said in zip(table.engine.asked, table.engine.said, strict=True):
        starts = [one.tokens[: len(asked) + len(said)].tolist() for one in trajectory.sequences()]
        assert [*asked, *said] in starts


def test_a_reply_is_decoded_once_unless_it_is_cut(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long replies of many episodes are decoded in one thread."""
    decoded: list[int] = []
    reply_text, raw_text = ChatFormat.reply_text, ChatFormat.raw_text

    def counted(self: ChatFormat, tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return reply_text(self, tokens)

    monkeypatch.setattr(ChatFormat, "reply_text", counted)
    monkeypatch.setattr(ChatFormat, "raw_text", lambda self, tokens: decoded.append(-1) or raw_text(self, tokens))
    table = Table(tokenizer, CHATML, "2", "größer: 4")
    table.run(two_turns)
    assert decoded == [len(said) for said in table.engine.said]


def test_a_stop_string_ends_what_is_said_and_stays_in_what_was_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    """The next prompt goes on from the tokens that were sampled, the stop string with them."""

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        first = await policy.reply(prompt.messages, stop=["END"])
        assert first.text == first.message["content"] == "2"
        await policy.reply([*prompt.messages, first.message, MORE])
        return EpisodeResult(1.0)

    table = Table(tokenizer, CHATML, "2END and more", "4")
    trajectory = table.run(play)
    assert [turn["content"] for turn in trajectory.turns if turn["role"] == "assistant"] == ["2END", "4"]
    assert (
        len(trajectory.sequences()) == 1
        and "2END" in table.text(trajectory.tokens)
        and "more" not in table.text(trajectory.tokens)
    )


def test_turns_are_appended_to_the_tokens_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", "größer: 4")
    trajectory = table.run(two_turns)
    talk = [*ASKED, {"role": "assistant", "content": "2"}, MORE, {"role": "assistant", "content": "größer: 4"}]
    assert table.text(trajectory.tokens) + "\n" == table.chat.tokenizer.apply_chat_template(talk, tokenize=False)
    assert table.text(trajectory.tokens[trajectory.mask]) == "2</s>größer: 4</s>"
    check_recorded(table, trajectory)
    assert (trajectory.outcome, trajectory.reward, trajectory.reply) == (Outcome.FINISHED, 1.25, "größer: 4")
    counts = {"episode/turns": 2.0, "episode/sequences": 1.0}
    assert trajectory.turns == talk[1:] and trajectory.metrics == {"game/won": 1.0, **counts}
    ends = np.flatnonzero(trajectory.rewards)
    assert trajectory.rewards[ends].tolist() == [0.25, 1.0] and trajectory.mask[ends].all()
    assert table.environment.closed == 1


def test_seeds_and_requests_differ_from_turn_to_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", "4")
    table.run(two_turns)
    seeds, names = zip(*((params.seed, request) for _, params, request in table.engine.asked), strict=True)
    assert seeds[0] == 3 and len(set(seeds)) == 2 and names == ("train-5-1-0", "train-5-1-1")
    table = Table(tokenizer, CHATML, "2", "4")
    table.run(two_turns, seed=None)
    assert [params.seed for _, params, _ in table.engine.asked] == [None, None]


def test_the_end_of_a_cut_reply_is_inserted_not_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "two and", "4", turn_tokens=3)
    trajectory = table.run(two_turns)
    assert "<s>assistant\ntwo</s>\n<s>user" in table.text(trajectory.tokens)
    assert table.text(trajectory.tokens[trajectory.mask]) == "two4</s>"
    assert trajectory.truncated and trajectory.outcome is Outcome.TRUNCATED and trajectory.reward == 1.25
    check_recorded(table, trajectory)


def test_without_a_template_turns_follow_line_by_line(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, None, "2", "4")
    trajectory = table.run(two_turns)
    assert table.text(trajectory.tokens) == "1+1=2</s>\nand 2+2?4</s>"
    check_recorded(table, trajectory)


def test_a_history_that_the_template_rewrites_becomes_sequences_of_their_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    table = Table(tokenizer, FORGETS_REASONING, "<think>easy</think>2", "<think>hard</think>4")
    trajectory = table.run(two_turns)
    first, second = trajectory.sequences()
    assert table.text(first.tokens).endswith("<think>easy</think>2</s>")
    assert "easy" not in table.text(second.tokens) and "<s>assistant\n2</s>\n<s>user" in table.text(second.tokens)
    check_recorded(table, trajectory)
    samples = to_samples(trajectory, 9)
    assert [(one.episode, one.reward) for one in samples] == [(9, 1.25), (9, 1.25)]
    assert [one.token_rewards.sum().item() for one in samples] == [1.25, 1.0]  # the first one earned what followed
    assert all(one.token_rewards[one.mask][-1] > 0 for one in samples)


@pytest.mark.parametrize(
    ("template", "found"),
    [(CHATML, ""), (None, ""), (FORGETS_REASONING, "their reasoning"), (OPENS_REASONING, "all of them")],
)
def test_what_a_template_rewrites_is_found_at_the_start(
    template: str | None, found: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert Table(tokenizer, template).chat.rewrites() == found


def test_replies_are_known_by_what_others_call_them(tokenizer: PreTrainedTokenizerFast) -> None:
    """An agent sends a call back taken apart, without the text that was sampled; that stays as it was."""
    calls = [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    adapter_only: Message = {"role": "assistant", "content": None, "tool_calls": calls}
    table = Table(tokenizer, TOOL_TEMPLATE, "<call>add{ }", "two")

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(prompt.messages, TOOLS, lambda text: adapter_only)
        assert reply.message is adapter_only and reply.text == "<call>add{ }"
        sent: Message = {"role": "assistant", "content": "", "tool_calls": calls, "refusal": None}
        await policy.reply(
            [*prompt.messages, sent, {"role": "tool", "tool_call_id": "call00001", "content": "2"}], TOOLS
        )
        return EpisodeResult()

    trajectory = table.run(play)
    assert len(trajectory.sequences()) == 1
    assert "<assistant><call>add{ }</s>\n<tool>2</s>\n<assistant>two</s>" in table.text(trajectory.tokens)
    check_recorded(table, trajectory)


@pytest.mark.parametrize("change", ["text", "tools", "asked again"])
def test_what_was_altered_or_asked_again_is_a_sequence_of_its_own(
    change: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    table = Table(tokenizer, TOOL_TEMPLATE, "2", "4")

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(prompt.messages)
        if change == "asked again":
            await policy.reply(prompt.messages)
        else:
            said = reply.message if change == "tools" else {"role": "assistant", "content": "3"}
            await policy.reply([*prompt.messages, said, MORE], TOOLS if change == "tools" else [])
        return EpisodeResult(0.5)

    trajectory = table.run(play)
    assert len(trajectory.sequences()) == 2 and len(trajectory.branches) == 1
    check_recorded(table, trajectory)


def test_requests_at_once_do_not_mix(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", "3", "4")

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        await asyncio.gather(*(policy.reply(prompt.messages) for _ in range(3)))
        return EpisodeResult(1.0)

    trajectory = table.run(play)
    assert [table.text(one.tokens[one.mask]) for one in trajectory.sequences()] == ["2</s>", "3</s>", "4</s>"]
    assert trajectory.sampled_tokens() == 6 and sum(one.rewards.sum() for one in trajectory.sequences()) == 1.0


def test_turns_end_with_the_budget(tokenizer: PreTrainedTokenizerFast) -> None:
    async def endless(policy: Policy, prompt: Prompt) -> EpisodeResult:
        messages = prompt.messages
        while True:
            reply = await policy.reply(messages)
            policy.add_reward(0.5)
            messages = [*messages, reply.message, MORE]

    for budget, longest, turns in (({"turns": 3}, 200, 3), ({}, 3, 2), ({"context": 60}, 200, 2)):
        table = Table(tokenizer, CHATML, *"23456789", **budget)
        trajectory = table.run(endless, longest=longest)
        assert (trajectory.outcome, trajectory.truncated) == (Outcome.TRUNCATED, True)
        assert trajectory.reward == 0.5 * turns == 0.5 * len(table.engine.said)
        assert len(trajectory.tokens) <= table.budget.context
        check_recorded(table, trajectory)


def test_what_an_environment_catches_is_its_own_ending(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", turns=1)

    async def careful(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(prompt.messages)
        with pytest.raises(OutOfBudget, match=r"environment.max_turns=1"):
            await policy.reply([*prompt.messages, reply.message, MORE])
        return EpisodeResult(0.75)

    trajectory = table.run(careful)
    assert (trajectory.reward, trajectory.outcome) == (0.75, Outcome.TRUNCATED)


def test_replies_asked_for_together_are_all_sampled_or_none(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", "3", "4", "5", turns=4)

    async def several(policy: Policy, prompt: Prompt) -> EpisodeResult:
        replies = await policy.replies(3, prompt.messages)
        assert [reply.text for reply in replies] == ["2", "3", "4"]
        with pytest.raises(OutOfBudget, match=r"2 replies exceed the 1 turns left \(environment.max_turns=4\)"):
            await policy.replies(2, prompt.messages)
        assert len(table.engine.asked) == 3
        assert (await policy.reply([*prompt.messages, replies[2].message, MORE])).text == "5"
        return EpisodeResult(1.0)

    trajectory = table.run(several)
    assert [one.mask.sum() for one in trajectory.sequences()] == [2, 2, 4] and len(table.engine.asked) == 4
    assert {request for _, _, request in table.engine.asked} == {f"train-5-1-{turn}" for turn in range(4)}
    check_recorded(table, trajectory)


def test_replies_asked_for_together_without_room_for_one_are_not_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    """The first would go on from what was said, where nothing is left; the others would begin sequences, with room."""
    table = Table(tokenizer, CHATML, "2", "3", "4")

    async def several(policy: Policy, prompt: Prompt) -> EpisodeResult:
        first = await policy.reply(prompt.messages)
        with pytest.raises(OutOfBudget, match="max_new_tokens"):
            await policy.replies(2, [*prompt.messages, first.message, MORE])
        return EpisodeResult(1.0)

    trajectory = table.run(several, longest=2)
    assert len(table.engine.asked) == len(trajectory.sequences()) == 1
    check_recorded(table, trajectory)


def test_two_who_go_on_from_one_conversation_at_once_have_a_sequence_each(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", "3", "4", "5")

    async def both(policy: Policy, prompt: Prompt) -> EpisodeResult:
        first = await policy.reply(prompt.messages)
        more = [*prompt.messages, first.message, MORE]
        replies = await asyncio.gather(policy.reply(more), policy.reply(more))
        await policy.reply([*more, replies[0].message, MORE])  # its sequence is free again
        return EpisodeResult(1.0)

    trajectory = table.run(both)
    assert [sum(one.mask) for one in trajectory.sequences()] == [6, 2]
    for sequence, replies in zip(trajectory.sequences(), (["2", "3", "5"], ["4"]), strict=True):
        sampled = [table.text(part) for part in np.split(sequence.tokens, np.flatnonzero(np.diff(sequence.mask)) + 1)]
        assert [part.removesuffix("</s>") for part in sampled[1::2]] == replies


def test_a_structure_and_stops_reach_the_engine(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2, 3", "4")
    shape = Structure('{"type": "object"}')

    async def held(policy: Policy, prompt: Prompt) -> EpisodeResult:
        (reply,) = await policy.replies(1, prompt.messages, stop=[","], structure=shape)
        assert reply.text == "2"
        await policy.reply(prompt.messages)
        return EpisodeResult(1.0)

    table.run(held)
    assert [params.structure for _, params, _ in table.engine.asked] == [shape, None]


def test_failures_are_told_apart_and_are_no_zeros(tokenizer: PreTrainedTokenizerFast) -> None:
    async def fails(policy: Policy, prompt: Prompt) -> EpisodeResult:
        await policy.reply(prompt.messages)
        policy.add_reward(1.0)
        raise KeyError("the board")

    async def silent(policy: Policy, prompt: Prompt) -> EpisodeResult:
        return EpisodeResult(1.0)

    for play, words in ((fails, "KeyError: 'the board'"), (silent, "Playing ended before the first completion")):
        table = Table(tokenizer, CHATML, "2")
        trajectory = table.run(play)
        assert (trajectory.outcome, trajectory.reward) == (Outcome.ENVIRONMENT_ERROR, None)
        assert words in trajectory.error and table.environment.closed == 1


def test_an_episode_that_others_ended_begins_anew(tokenizer: PreTrainedTokenizerFast) -> None:
    for losses, outcome in ((2, Outcome.FINISHED), (3, Outcome.ENVIRONMENT_ERROR)):
        left = [losses]

        async def unlucky(policy: Policy, prompt: Prompt, left: list[int] = left) -> EpisodeResult:
            await policy.reply(prompt.messages)
            left[0] -= 1
            if left[0] >= 0:
                raise ProcessLost("its process was ended for another episode")
            return EpisodeResult(1.0)

        table = Table(tokenizer, CHATML, "2", "3", "4")
        trajectory = table.run(unlucky)
        assert trajectory.outcome is outcome and table.environment.closed == 1
        assert len(trajectory.sequences()) == 1  # nothing of what was lost is trained on


async def given_up(table: Table, policy: Policy, messages: list[Message]) -> None:
    """Ask, and leave before there is an answer, as an agent does that was closed."""
    table.engine.delay = 1000.0
    asked = asyncio.create_task(policy.reply(messages))
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    table.engine.delay = 0.0


def test_a_reward_goes_to_the_last_token_sampled_even_after_a_request_that_was_given_up(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    table = Table(tokenizer, CHATML, "2")

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(prompt.messages)
        await given_up(table, policy, [*prompt.messages, reply.message, MORE])
        return EpisodeResult(1.0)

    (sample,) = to_samples(table.run(play))
    sample.values = torch.zeros(sample.length())
    gae([sample], AlgorithmConfig())
    assert sample.token_rewards[sample.mask].tolist()[-1] == 1.0 and sample.token_rewards.sum() == 1.0
    assert sample.advantages[sample.mask][-1] == 1.0 and sample.mask[-1]  # nothing was heard without a reply


def test_a_request_that_is_made_again_goes_on_with_its_sequence(tokenizer: PreTrainedTokenizerFast) -> None:
    table = Table(tokenizer, CHATML, "2", "4")

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        await given_up(table, policy, prompt.messages)
        reply = await policy.reply(prompt.messages)
        more = [*prompt.messages, reply.message, MORE]
        await given_up(table, policy, more)
        await policy.reply(more)
        return EpisodeResult(1.0)

    trajectory = table.run(play)
    assert len(trajectory.sequences()) == 1 and not trajectory.branches
    assert [turn["content"] for turn in trajectory.turns] == ["2", "and 2+2?", "4"]
    check_recorded(table, trajectory)


def test_a_reward_that_fails_after_a_request_was_given_up_fails_the_episode_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    table = Table(tokenizer, CHATML, "2")

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(prompt.messages)
        await given_up(table, policy, [*prompt.messages, reply.message, MORE])
        raise RewardFailure("no verdict")

    trajectory = table.run(play)
    assert (trajectory.outcome, trajectory.error) == (Outcome.REWARD_ERROR, "no verdict")
    assert [turn["content"] for turn in trajectory.turns] == ["2"]  # a transcript has what was said all the same


def test_an_engine_that_fails_fails_the_run(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(IndexError):  # it has nothing more to say
        Table(tokenizer, CHATML, "2").run(two_turns)


def test_the_budget_that_ended_an_episode_is_told_in_full(tokenizer: PreTrainedTokenizerFast) -> None:
    turns, tokens, context = "environment.max_turns", "rollout.max_new_tokens", "rollout.max_prompt_tokens"
    for budget, longest, limit, words in (
        ({"turns": 1}, 200, turns, "the episode has used all its turns (environment.max_turns=1)"),
        ({}, 2, tokens, "the policy has sampled all 2 tokens of a sequence (rollout.max_new_tokens=2)"),
        (
            {"context": 35},
            200,
            context,
            " leave no room for a reply: a sequence may have 35 (rollout.max_prompt_tokens",
        ),
        ({"context": 9}, 200, context, "a sequence may have 9 (rollout.max_prompt_tokens + rollout.max_new_tokens)"),
    ):
        trajectory = Table(tokenizer, CHATML, *"23456789", **budget).run(two_turns, longest=longest)
        assert words in trajectory.cut_off and trajectory.truncated and trajectory.limit == limit


def test_the_limit_that_cut_a_reply_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    """The narrowest one; where several cut replies of an episode, the last."""
    whole = Table(tokenizer, CHATML, "2", "4").run(two_turns)
    assert (whole.truncated, whole.limit) == (False, "")
    asked = int(np.flatnonzero(whole.mask)[0])
    for budget, longest, limit in (
        ({"turn_tokens": 3}, 200, "environment.max_turn_tokens"),
        ({"turn_tokens": 30}, 6, "rollout.max_new_tokens"),
        ({"context": asked + 5}, 200, "rollout.max_prompt_tokens"),
        ({"turn_tokens": 3, "turns": 1}, 200, "environment.max_turns"),
    ):
        trajectory = Table(tokenizer, CHATML, "forty-two", "forty-two", **budget).run(two_turns, longest=longest)
        assert trajectory.truncated and trajectory.limit == limit


def test_the_replies_of_a_sequence_share_its_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """What the environment inserts counts towards the context alone."""
    table = Table(tokenizer, CHATML, "2", "forty-two")
    trajectory = table.run(two_turns, longest=6)
    assert table.text(trajectory.tokens[trajectory.mask]) == "2</s>fort" and trajectory.truncated
    assert len(trajectory.tokens) > 6 + 2 * len("1+1=")


def test_what_was_heard_before_another_reply_closes_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(prompt.messages)
        policy.hear([MORE])
        await policy.reply([*prompt.messages, reply.message, MORE])
        return EpisodeResult(1.0)

    trajectory = Table(tokenizer, CHATML, "2", "4").run(play)
    assert [turn["content"] for turn in trajectory.turns] == ["2", "and 2+2?", "4"]


@pytest.mark.parametrize(("more", "turns"), [(0, 1), (1, 2)])
def test_a_turn_needs_room_for_one_token_of_a_reply(more: int, turns: int, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = Table(tokenizer, CHATML, "2", "4").run(two_turns)
    before_second = int(np.flatnonzero(np.diff(whole.mask))[2]) + 1  # tokens that stand before the second reply
    cut = Table(tokenizer, CHATML, "2", "4", context=before_second + more).run(two_turns)
    assert cut.metrics["episode/turns"] == turns
    assert ("leave no room for a reply" in cut.cut_off) is (turns == 1)


@pytest.mark.parametrize("turns", [1, 4])
def test_later_turns_tell_the_pool_what_an_engine_has_of_their_sequence(
    turns: int, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence has a number of its own; an episode of one turn continues nothing."""
    told: list[tuple[int, SequencePlace | None]] = []
    generate = EnginePool.generate

    async def spy(self: EnginePool, tokens: list[int], *args: Any) -> Completion:
        told.append((len(tokens), args[3]))
        return await generate(self, tokens, *args)

    monkeypatch.setattr(EnginePool, "generate", spy)

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        if turns == 1:
            await policy.reply(prompt.messages)
            return EpisodeResult(1.0)
        await policy.reply([MORE])
        return await two_turns(policy, prompt)

    table = Table(tokenizer, None, "ab", "cd", "ef", turns=turns)
    trajectory = table.run(play)
    assert trajectory.outcome.is_scored, trajectory.error
    if turns == 1:
        assert [place for _, place in told] == [None]
        return
    first, second, third = told
    assert first[1] == SequencePlace(1, 0) and second[1] == SequencePlace(2, 0)
    assert third[1] == SequencePlace(2, second[0] + len(table.engine.said[1])) and third[0] > third[1].known
