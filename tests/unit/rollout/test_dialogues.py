"""What was said in an episode, as trainers are given it: every conversation once, replies as they were sampled."""

from transformers import PreTrainedTokenizerFast

from tests.unit.data.test_chat import CHATML, FORGETS_REASONING
from tests.unit.rollout.test_session import ASKED, MORE, Table, two_turns
from trueline.data.messages import Message
from trueline.data.types import Dialogue, Prompt, Trajectory
from trueline.environments.base import EpisodeResult, Policy

AGAIN: Message = {"role": "user", "content": "and again?"}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_an_episode_that_only_goes_on_is_one_dialogue(tokenizer: PreTrainedTokenizerFast) -> None:
    trajectory = Table(tokenizer, CHATML, "2", "4").run(two_turns)
    assert trajectory.dialogues == [Dialogue(ASKED, [said("2"), MORE, said("4")])]


def test_a_rewritten_history_keeps_what_was_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    """The second sequence shows the template's form of the first reply; who learns it has to see its reasoning."""

    async def three_turns(policy: Policy, prompt: Prompt) -> EpisodeResult:
        messages = prompt.messages
        for more in (MORE, AGAIN):
            reply = await policy.reply(messages, worded=lambda text: {**said(text), "name": "policy"})
            messages = [*messages, reply.message, more]
        await policy.reply(messages)
        return EpisodeResult(1.0)

    texts = ["<think>easy</think>2", "<think>hard</think>4", "<think>so</think>6"]
    trajectory = Table(tokenizer, FORGETS_REASONING, *texts).run(three_turns)
    assert len(trajectory.sequences()) == 3
    first, second, third = map(said, texts)
    assert trajectory.dialogues == [Dialogue(ASKED, [first, MORE, second, AGAIN, third])]


def test_what_the_policy_was_asked_first_is_the_prompt_whatever_the_row_says(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Two messages in place of one, then a question of its own, and a fork from the first reply."""
    opening: list[Message] = [{"role": "system", "content": "play"}, {"role": "user", "content": "begin"}]

    async def play(policy: Policy, prompt: Prompt) -> EpisodeResult:
        reply = await policy.reply(opening)
        await policy.reply([*opening, reply.message, MORE])
        await policy.reply(ASKED)
        await policy.reply([*opening, reply.message, AGAIN])
        return EpisodeResult(1.0)

    trajectory = Table(tokenizer, CHATML, "a", "b", "c", "d").run(play)
    assert trajectory.dialogues == [
        Dialogue(opening, [said("a"), MORE, said("b")]),
        Dialogue(ASKED, [said("c")]),
        Dialogue([*opening, said("a"), AGAIN], [said("d")]),
    ]


def test_an_episode_of_one_turn_and_one_out_of_turns_have_theirs(tokenizer: PreTrainedTokenizerFast) -> None:
    def played(turns: int) -> Trajectory:
        return Table(tokenizer, CHATML, "2", "4", turns=turns).run(two_turns)

    assert played(1).dialogues == [Dialogue(ASKED, [said("2")])]
    assert played(2).dialogues == [Dialogue(ASKED, [said("2"), MORE, said("4")])]
