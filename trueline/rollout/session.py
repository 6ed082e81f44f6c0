"""The policy as an environment sees it in one episode: token in, token out, over all turns."""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trueline.data.chat import ChatFormat
from trueline.data.messages import Message, Talk, Tool, content_of
from trueline.data.types import Completion, Dialogue, Prompt, Trajectory
from trueline.environments.base import OutOfBudget, Reply, Structure, as_said
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool

TURNS, TURN_TOKENS = "environment.max_turns", "environment.max_turn_tokens"  # keys of limits
TOKENS, CONTEXT = "rollout.max_new_tokens", "rollout.max_prompt_tokens"


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
    """How long an episode may become, besides the tokens that the policy may sample in each sequence."""

    context: int  # tokens of one sequence, its prompt and all that is inserted included
    turns: int = 1
    turn_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Thread:
    """One sequence of tokens, and the conversation that it spells."""

    record: Trajectory
    chat: ChatFormat
    tools: list[Tool]
    asked: int  # messages that it began with
    opening: int  # of these, before the policy's first reply in the episode
    said: list[Message] = field(default_factory=list)  # as those who talk to the policy have it
    spelled: list[Message] = field(default_factory=list)  # the same, with replies as they were sampled, to their stop
    rendered: list[Message] = field(
        default_factory=list
    )  # the same, as the template takes them: with calls and reasoning
    busy: bool = False

    def sampled(self) -> int:
        return int(self.record.mask.sum())

    def goes_on(self, messages: list[Message], tools: Sequence[Tool], chat: ChatFormat) -> bool:
        """Tell whether these messages begin with the whole conversation so far, and add to it."""
        return not self.busy and self.comes_before(messages, tools, chat)

    def comes_before(self, messages: list[Message], tools: Sequence[Tool], chat: ChatFormat) -> bool:
        count, alike = len(self.said), self.chat is chat and self.tools == list(tools)
        return alike and count < len(messages) and self.begins(messages, count)

    def begins(self, messages: list[Message], count: int) -> bool:
        return all(map(alike, self.said[:count], self.spelled[:count], messages))


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation is rendered: the format with its arguments, and the tools."""

    chat: ChatFormat
    tools: list[Tool]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a thread is asked: it becomes a part of the thread once there is a reply."""

    thread: Thread
    new: list[Message]
    tokens: list[int]  # that they add

    def length(self) -> int:
        return len(self.thread.record.tokens) + len(self.tokens)


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
        self.threads: list[Thread] = []  # in the order of their first replies
        self.last: Thread | None = None  # that spoke last
        self.closing: list[Message] = []  # what it heard after that
        self.turns = 0
        self.engine_failures: list[BaseException] = []

    async def reply(
        self,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Callable[[str], Message] = as_said,
        stop: Sequence[str] = (),
    ) -> Reply:
        return (await self.replies(1, messages, tools, worded, stop))[0]

    async def replies(
        self,
        count: int,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Callable[[str], Message] = as_said,
        stop: Sequence[str] = (),
        structure: Structure | None = None,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[Reply]:
        """Begin all turns before any is sampled; when one of them fails, the others still end."""
        chat = self.chat.with_arguments(template_arguments or {})
        known = max(
            (one for one in self.threads if one.goes_on(messages, tools, chat)), key=said_messages, default=None
        )
        try:
            turns = self._turns(count, known, messages, Opening(chat, list(tools)))
        except OutOfBudget as error:
            self.trajectory.truncated, self.trajectory.cut_off = True, str(error)
            self.trajectory.limit = error.limit
            if known is not None and known is self.last:
                self.hear(messages[len(known.said) :])
            raise
        first, self.turns = self.turns, self.turns + count
        params = replace(self.params, stop=(*self.params.stop, *stop), structure=structure)
        for turn in turns:  # at once: others may ask before any of these begins to sample
            turn.thread.busy = True
        try:
            sampled = [self._take_turn(turn, number, worded, params) for number, turn in enumerate(turns, first)]
            found = await asyncio.gather(*sampled, return_exceptions=True)
        finally:
            for turn in turns:
                turn.thread.busy = False
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Reply)]

    async def _take_turn(
        self, turn: Turn, number: int, worded: Callable[[str], Message], params: SamplingParams
    ) -> Reply:
        completion = await self._sample(turn, number, params)
        chat = turn.thread.chat
        completion, text = ended(completion, params.stop, chat.reply_text)
        raw = before_stop(chat.raw_text(completion.tokens.tolist()), params.stop)
        message = as_said(text) if worded is as_said else worded(raw)
        return self._record(turn, completion, text, message, raw)

    async def _sample(self, turn: Turn, number: int, params: SamplingParams) -> Completion:
        before, request = [*turn.thread.record.tokens.tolist(), *turn.tokens], self.ticket.request(number)
        sampling = replace(params, seed=self.ticket.turn_seed(number), max_new_tokens=min(self._rooms(turn).values()))
        asked = asyncio.ensure_future(self.pool.generate(before, sampling, self.ticket.group, request))
        asked.add_done_callback(self._note_failure)
        return await asked

    def _note_failure(self, asked: "asyncio.Future[Completion]") -> None:
        if not asked.cancelled() and (failure := asked.exception()):
            self.engine_failures.append(failure)

    def _record(self, turn: Turn, completion: Completion, text: str, message: Message, raw: str) -> Reply:
        thread, before = turn.thread, turn.length()
        if completion.finish_reason == "length":
            rooms = self._rooms(turn)
            self.trajectory.truncated, self.trajectory.limit = True, min(rooms, key=lambda key: rooms[key])
        if thread not in self.threads:
            self._add_thread(thread)
        thread.record.add_observation(turn.tokens)
        thread.record.add_action(completion)
        self.trajectory.reply, self.last, self.closing = text, thread, []
        spelled = as_said(thread.chat.reply_text(completion.tokens.tolist()))
        thread.said += [*turn.new, message]
        thread.spelled += [*turn.new, spelled]
        structured = bool(message.get("tool_calls")) and thread.chat.template.shows_calls
        thread.rendered += [*turn.new, message if structured else spelled]
        return Reply(text, message, completion, before, raw)

    def _add_thread(self, thread: Thread) -> None:
        if self.threads:
            self.trajectory.branches.append(thread.record)
        else:
            thread.record = self.trajectory
        self.threads.append(thread)

    def add_reward(self, reward: float) -> None:
        assert self.last is not None, "a reward before the first reply"
        self.trajectory.add_reward(reward, self.last.record)

    def hear(self, messages: list[Message]) -> None:
        self.closing = list(messages)

    def talk(self) -> Talk:
        return self._talk(self.last.said) if self.last else Talk()

    def _talk(self, messages: list[Message]) -> Talk:
        assert self.last is not None
        count = self.last.opening
        return Talk(messages[:count], messages[count:], self.closing, self.trajectory.reply)

    def tell(self) -> None:
        """Put what was said in the sequence that ended last into the trajectory."""
        if self.last is not None:
            self.trajectory.talk = self.talk()
            self.trajectory.turns = self._talk(self.last.spelled).after_opening()

    def dialogues(self) -> list[Dialogue]:
        """Return each conversation that no other goes on from, with all replies in it as they were sampled."""
        found: dict[Thread, Dialogue] = {}
        continued: list[Thread] = []
        for thread in self.threads:
            before = max(
                (one for one in found if one.comes_before(thread.said, thread.tools, thread.chat)),
                key=said_messages,
                default=None,
            )
            if before is not None:
                prompt, said = found[before].prompt, [*found[before].completion, *thread.spelled[len(before.said) :]]
                continued.append(before)
            else:
                prompt, said = thread.spelled[: thread.asked], thread.spelled[thread.asked :]
            found[thread] = Dialogue(prompt, said, thread.tools)
        return [dialogue for thread, dialogue in found.items() if thread not in continued]

    def _turns(self, count: int, known: Thread | None, messages: list[Message], opening: Opening) -> list[Turn]:
        """Return so many turns of these messages, or refuse all of them where one has no room.

        Only the first may go on from a known conversation: the others begin sequences.
        """
        left = self.budget.turns - self.turns
        if count > left:
            had = f"{count} replies are more than {left} turns left" if left else "the episode has had all its turns"
            raise OutOfBudget(f"{had} ({TURNS}={self.budget.turns})", TURNS)
        others = [self._first_turn(messages, opening) for _ in range(count - 1)]
        return [self._turn(known, messages, opening), *others]

    def _turn(self, known: Thread | None, messages: list[Message], opening: Opening) -> Turn:
        """Return what these messages add to the thread that they go on from, or to a new one."""
        if known is not None:
            new, last = messages[len(known.said) :], int(known.record.tokens[-1])
            following = known.chat.continuation(known.rendered, new, known.tools, last)
            if following is not None:
                return self._next_turn(known, new, following)
        return self._first_turn(messages, opening)

    def _next_turn(self, thread: Thread, new: list[Message], following: list[int]) -> Turn:
        turn, longest = Turn(thread, new, following), self.params.max_new_tokens
        if turn.length() >= self.budget.context:
            raise OutOfBudget(
                f"{len(following)} more tokens after {len(thread.record.tokens)} leave no room for a reply: "
                f"{self._context_words()}",
                CONTEXT,
            )
        if thread.sampled() >= longest:
            raise OutOfBudget(f"the policy has said all {longest} tokens of a sequence ({TOKENS}={longest})", TOKENS)
        return turn

    def _first_turn(self, messages: list[Message], opening: Opening) -> Turn:
        tokens = opening.chat.prompt_tokens(messages, opening.tools)
        if len(tokens) >= self.budget.context:
            raise OutOfBudget(
                f"a conversation of {len(tokens)} tokens leaves no room for a reply: {self._context_words()}", CONTEXT
            )
        record = Trajectory(self.trajectory.prompt, self.ticket.group)
        thread = Thread(record, opening.chat, opening.tools, len(messages), self._opening(messages))
        return Turn(thread, messages, tokens)

    def _context_words(self) -> str:
        return f"a sequence may have {self.budget.context} (rollout.max_prompt_tokens + rollout.max_new_tokens)"

    def _opening(self, messages: list[Message]) -> int:
        """Count the messages before the policy's first reply: those that another thread began with too, or all."""
        known = [one.opening for one in self.threads if one.begins(messages, one.opening)]
        return max((count for count in known if count < len(messages)), default=len(messages))

    def _rooms(self, turn: Turn) -> dict[str, int]:
        """Return how many tokens each limit leaves to a reply."""
        left = self.params.max_new_tokens - turn.thread.sampled()
        return {
            TOKENS: left,
            CONTEXT: self.budget.context - turn.length(),
            TURN_TOKENS: self.budget.turn_tokens or left,
        }


def said_messages(thread: Thread) -> int:
    return len(thread.said)


def alike(said: Message, spelled: Message, sent: Message) -> bool:
    """Tell whether a message says what is known, whatever else a client has put into it.

    Some put the text at which a reply was stopped back behind it, as it was sampled.
    """
    return sent is said or told(sent) in (told(said), told(spelled))


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


def before_stop(text: str, stops: Sequence[str]) -> str:
    place = stop_place(text, stops)
    return text if place < 0 else text[:place]


def stop_place(text: str, stops: Sequence[str]) -> int:
    """Return where the first stop string of a text begins, or -1."""
    return min((text.find(stop) for stop in stops if stop in text), default=-1)
