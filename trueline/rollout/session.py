"""The policy as an environment sees it in one episode: token in, token out, over all turns."""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trueline.data.chat import ChatFormat
from trueline.data.messages import Message, Tool, content_of
from trueline.data.types import Completion, Dialogue, Prompt, Trajectory
from trueline.environments.base import OutOfBudget, Reply, as_said
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool


@dataclass(frozen=True, slots=True)
class Ticket:
    """Which episode this is: the completion's group, its place there, and its own seed."""

    group: int
    index: int
    seed: int | None
    purpose: str = "train"

    def request(self, turn: int) -> str:
        return f"{self.purpose}-{self.group}-{self.index}-{turn}"

    def turn_seed(self, turn: int) -> int | None:
        if self.seed is None or turn == 0:
            return self.seed
        return int(np.random.SeedSequence([self.seed, turn, 0]).generate_state(1)[0]) >> 1


@dataclass(frozen=True, slots=True)
class Budget:
    """How long an episode may become."""

    context: int  # tokens of one sequence, its prompt included
    turns: int = 1
    turn_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Thread:
    """One sequence of tokens, and the conversation that it spells."""

    record: Trajectory
    tools: list[Tool]
    said: list[Message] = field(default_factory=list)  # as those who talk to the policy have it
    spelled: list[Message] = field(default_factory=list)  # the same, with replies as they were sampled, to their stop
    opening: int = 0  # tokens of the prompt that it began with
    busy: bool = False
    asked: int = 0  # messages of that prompt

    def goes_on(self, messages: list[Message], tools: Sequence[Tool]) -> bool:
        """Tell whether these messages begin with the whole conversation so far, and add to it."""
        return not self.busy and self.tools == list(tools) and begins(self, messages)


class Session:
    """The policy in one episode. Where a conversation goes on from one that it knows, the tokens of that are kept."""

    def __init__(
        self,
        pool: EnginePool,
        chat: ChatFormat,
        prompt: Prompt,
        ticket: Ticket,
        params: SamplingParams,
        budget: Budget,
    ) -> None:
        self.pool, self.chat, self.ticket, self.params, self.budget = pool, chat, ticket, params, budget
        self.trajectory = Trajectory(prompt, ticket.group)
        self.threads: list[Thread] = []
        self.last: Thread | None = None  # that spoke last
        self.turns = 0
        self.asked = 0  # requests that engines have not answered; it stays above 0 where one failed

    async def reply(
        self,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Callable[[str], Message] = as_said,
        stop: Sequence[str] = (),
    ) -> Reply:
        if self.turns == self.budget.turns:
            raise self._exhausted(f"the episode has had all its turns (environment.max_turns={self.budget.turns})")
        thread = self._thread(messages, list(tools))
        turn, self.turns = self.turns, self.turns + 1
        thread.busy = True
        try:
            completion, text = await self._sample(thread, turn, [*self.params.stop, *stop])
            return self._record(thread, completion, text, worded(text))
        finally:
            thread.busy = False

    async def _sample(self, thread: Thread, turn: int, stops: list[str]) -> tuple[Completion, str]:
        before, request = thread.record.tokens.tolist(), self.ticket.request(turn)
        sampling = replace(self.params, seed=self.ticket.turn_seed(turn), max_new_tokens=self._room(thread))
        self.asked += 1
        completion = await self.pool.generate(before, sampling, self.ticket.group, request)
        self.asked -= 1
        return ended(completion, stops, self.chat.reply_text)

    def _record(self, thread: Thread, completion: Completion, text: str, message: Message) -> Reply:
        before = len(thread.record.tokens)
        thread.record.add_action(completion)
        self.trajectory.truncated |= completion.finish_reason == "length"
        self.trajectory.reply, self.last = text, thread
        thread.said.append(message)
        thread.spelled.append(as_said(self.chat.reply_text(completion.tokens.tolist())))
        return Reply(text, message, completion, before)

    def _exhausted(self, reason: str) -> OutOfBudget:
        self.trajectory.truncated = True
        return OutOfBudget(reason)

    def add_reward(self, reward: float) -> None:
        assert self.last is not None, "a reward before the first reply"
        self.last.record.rewards[-1] += reward
        self.trajectory.reward = (self.trajectory.reward or 0.0) + reward

    def conversation(self) -> list[Message]:
        """Return what was said after the prompt in the sequence that ended last."""
        return self.last.spelled[len(self.trajectory.prompt.messages) :] if self.last else []

    def dialogues(self) -> list[Dialogue]:
        """Return each conversation that no other goes on from, with all replies in it as they were sampled."""
        found: dict[Thread, Dialogue] = {}
        ended: list[Thread] = []
        for thread in self.threads:
            earlier = [one for one in found if one.tools == thread.tools and begins(one, thread.said)]
            if earlier:
                before = max(earlier, key=lambda one: len(one.said))
                prompt, said = found[before].prompt, [*found[before].completion, *thread.spelled[len(before.said) :]]
                ended.append(before)
            else:
                prompt, said = thread.spelled[: thread.asked], thread.spelled[thread.asked :]
            if any(message["role"] == "assistant" for message in said):
                found[thread] = Dialogue(prompt, up_to_reply(said), thread.tools)
        return [dialogue for thread, dialogue in found.items() if thread not in ended]

    def _thread(self, messages: list[Message], tools: list[Tool]) -> Thread:
        """Return the thread that these messages continue, with them in it, or a new one."""
        known = [thread for thread in self.threads if thread.goes_on(messages, tools)]
        if known:
            thread = max(known, key=lambda one: len(one.said))
            new = messages[len(thread.said) :]
            following = self.chat.continuation(thread.spelled, new, tools)
            if following is not None:
                self._append(thread, new, following)
                return thread
        return self._new_thread(messages, tools)

    def _append(self, thread: Thread, new: list[Message], following: list[int]) -> None:
        if thread.record.tokens[-1] in self.chat.stop_ids:
            following = self.chat.without_end(following)
        if len(thread.record.tokens) + len(following) >= self._end(thread):
            raise self._exhausted(f"{len(following)} more tokens of the environment leave no room for a reply")
        thread.record.add_observation(following)
        thread.said += new
        thread.spelled += new

    def _new_thread(self, messages: list[Message], tools: list[Tool]) -> Thread:
        tokens = self.chat.prompt_tokens(messages, tools)
        if len(tokens) >= self.budget.context:
            raise self._exhausted(f"{len(tokens)} tokens leave no room for a reply within {self.budget.context}")
        first = not self.threads
        record = self.trajectory if first else Trajectory(self.trajectory.prompt, self.ticket.group)
        thread = Thread(record, tools, list(messages), list(messages), len(tokens), asked=len(messages))
        record.add_observation(tokens)
        self.threads.append(thread)
        if not first:
            self.trajectory.branches.append(record)
        return thread

    def _end(self, thread: Thread) -> int:
        """Return the length that the thread may reach."""
        return min(thread.opening + self.params.max_new_tokens, self.budget.context)

    def _room(self, thread: Thread) -> int:
        left = self._end(thread) - len(thread.record.tokens)
        return min(left, self.budget.turn_tokens or left)


def alike(said: Message, spelled: Message, sent: Message) -> bool:
    """Tell whether a message says what is known, whatever else a client has put into it.

    Some put the text at which a reply was stopped back behind it, as it was sampled.
    """
    return sent is said or told(sent) in (told(said), told(spelled))


def begins(thread: Thread, messages: list[Message]) -> bool:
    """Tell whether messages begin with all that was said in a thread, and add to it."""
    return len(thread.said) < len(messages) and all(map(alike, thread.said, thread.spelled, messages))


def up_to_reply(messages: list[Message]) -> list[Message]:
    """Return messages up to the last reply; one that was given up may have been asked for behind it."""
    return messages[: 1 + max(at for at, message in enumerate(messages) if message["role"] == "assistant")]


def told(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    named = [(call.get("name"), read_arguments(call.get("arguments"))) for call in calls]
    return message.get("role"), content_of(message), named, message.get("tool_call_id")


def read_arguments(arguments: Any) -> Any:
    """Return arguments as an object, which some write as text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def ended(completion: Completion, stops: Sequence[str], text_of: Callable[[list[int]], str]) -> tuple[Completion, str]:
    """Return the completion up to the token that completes a stop string, and its text before that string."""

    def text_up_to(length: int) -> str:
        return text_of(completion.tokens[:length].tolist())

    text = text_up_to(len(completion.tokens))
    if stop_place(text, stops) < 0:
        return completion, text
    lengths = range(len(completion.tokens))
    # Whole prefixes are decoded: a token may be a part of a character, and a stop string of several tokens.
    length = bisect_left(lengths, True, key=lambda length: stop_place(text_up_to(length), stops) >= 0)
    text = text_up_to(length)
    return completion.cut(length), text[: stop_place(text, stops)]


def stop_place(text: str, stops: Sequence[str]) -> int:
    """Return where the first stop string of a text begins, or -1."""
    return min((text.find(stop) for stop in stops if stop in text), default=-1)
