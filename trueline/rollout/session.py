"""The policy as an environment sees it in one episode: token in, token out, over all turns."""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat, OpenPrompt
from trueline.data.messages import Message, Talk, Tool, content_of
from trueline.data.pictures import MOST_PIXELS, Picture, Setting, Shown, bare, payloads_of, read_data_url
from trueline.data.types import Completion, Dialogue, Trajectory
from trueline.environments.base import OutOfBudget, Policy, Reply, Structure, as_said
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool, RolloutKey, SequencePlace

TURNS, TURN_TOKENS = "environment.max_turns", "environment.max_turn_tokens"  # keys of limits
TOKENS, CONTEXT, IMAGES = "rollout.max_new_tokens", "rollout.max_prompt_tokens", "environment.max_images"
Wording = Callable[[str], Message]  # makes the message by which others know a reply from its text


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How long an episode may become, besides the tokens that the policy may sample in each sequence."""

    context: int  # tokens of one sequence, with its prompt and all observations
    turns: int = 1
    turn_tokens: int | None = None
    images: int = 0  # of one sequence, beside those of the row
    max_pixels: int = MOST_PIXELS  # of one of them; a larger one is made smaller


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence of tokens, and its conversation."""

    record: Trajectory
    chat: ChatFormat
    tools: list[Tool]
    prompt_messages: int  # messages at its start
    opening: int  # of these, before the policy's first reply in the episode
    prompt: OpenPrompt  # the last one
    reply: Message = field(default_factory=dict)  # to it, for the template: with calls and reasoning
    said: list[Message] = field(default_factory=list)  # messages as the environment has them
    spelled: list[Message] = field(default_factory=list)  # the same, with replies as sampled, up to their stop
    sampled: int = 0  # tokens
    number: int = 0  # in the episode
    role: str = ""
    busy: bool = False
    shown: Shown | None = None  # its pictures

    def is_prefix_of(self, messages: list[Message], tools: Sequence[Tool], chat: ChatFormat) -> bool:
        """Tell whether these messages begin with the whole conversation and add to it."""
        count, same = len(self.said), self.chat is chat and self.tools == list(tools)
        return same and count < len(messages) and self.matches(messages, count)

    def matches(self, messages: list[Message], count: int) -> bool:
        """Compare what a client sent with `count` known messages, whatever else the client put into it.

        Some clients put the stop string back behind a reply, as it was sampled.
        """
        if messages[:count] == self.said[:count]:  # at once where they are the same objects
            return True
        known = zip(self.said[:count], self.spelled[:count], messages, strict=False)
        return all(
            sent == said or message_key(sent) in (message_key(said), message_key(spelled))
            for said, spelled, sent in known
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """New messages of a sequence; the sequence records them once there is a reply."""

    sequence: TokenSequence
    new: list[Message]
    prompt: OpenPrompt  # its tokens are those of the new messages

    def length(self) -> int:
        return len(self.sequence.record.tokens) + len(self.prompt.tokens)

    def pictures(self) -> Shown | None:
        """Return the pictures of the sequence, with those of the new messages."""
        before, added = self.sequence.shown, self.prompt.shown
        if added is None or not len(self.sequence.record.tokens):
            return added or before
        return added.behind(before, self.sequence.record.tokens.tolist())


@dataclass(slots=True, eq=False)
class Session(Policy):
    """The policy in one episode. A conversation that continues a known one keeps its tokens."""

    pool: EnginePool
    chat: ChatFormat
    trajectory: Trajectory
    key: RolloutKey
    params: SamplingParams
    limits: EpisodeLimits
    sequences: list[TokenSequence] = field(default_factory=list)  # in the order of their first replies
    last: TokenSequence | None = None  # of the last reply
    closing: list[Message] = field(default_factory=list)  # messages after that reply
    role: str = ""  # in which it speaks now
    latest: dict[str, TokenSequence] = field(default_factory=dict)  # of each role's last reply
    turns: int = 0
    begun: int = 0  # sequences, with those that were never sampled
    engine_failures: list[BaseException] = field(default_factory=list)

    async def replies(
        self,
        count: int,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Wording = as_said,
        stop: Sequence[str] = (),
        structure: Structure | None = None,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[Reply]:
        """Begin all turns before any is sampled; if one of them fails, the others still finish."""
        chat = self.chat.with_arguments(template_arguments or {})
        own = [one for one in self.sequences if one.role == self.role and not one.busy]
        idle = [one for one in own if one.is_prefix_of(messages, tools, chat)]
        known = longest(idle)
        try:
            turns = self._begin_turns(count, known, messages, list(tools), chat)
        except OutOfBudget as error:
            self.trajectory.truncated, self.trajectory.cut_off = True, str(error)
            self.trajectory.limit = error.limit
            if known is not None and known is self.last:
                self.hear(messages[len(known.said) :])
            raise
        first, self.turns = self.turns, self.turns + count
        params = self.params
        if stop or structure is not None:
            params = replace(params, stop=(*params.stop, *stop), structure=structure)
        for turn in turns:  # before any of them is sampled: other requests may come meanwhile
            turn.sequence.busy = True
        try:
            sampled = [self._take_turn(turn, number, worded, params) for number, turn in enumerate(turns, first)]
            if count == 1:  # without a task of its own
                return [await sampled[0]]
            found = await asyncio.gather(*sampled, return_exceptions=True)
        finally:
            for turn in turns:
                turn.sequence.busy = False
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Reply)]

    async def _take_turn(self, turn: Turn, number: int, worded: Wording, params: SamplingParams) -> Reply:
        chat, whole = turn.sequence.chat, await self._sample(turn, number, params)
        completion, text = cut_at_stop(whole, params.stop, chat.reply_text)
        message = spelled = as_said(text)
        if completion is not whole:  # with the stop string, which is sampled too
            spelled = as_said(chat.reply_text(completion.tokens.tolist()))
        if worded is not as_said:
            raw = chat.raw_text(completion.tokens.tolist(), spelled["content"])
            place = stop_place(raw, params.stop)
            message = worded(raw if place < 0 else raw[:place])
        return self._record(turn, completion, text, message, spelled)

    async def _sample(self, turn: Turn, number: int, params: SamplingParams) -> Completion:
        """Sample from the tokens of the sequence, which engines may have cached, and those of the new messages."""
        sampling = replace(params, seed=self.key.turn_seed(number), max_new_tokens=min(self._room(turn).values()))
        known, new = turn.sequence.record.tokens, turn.prompt.tokens
        added = turn.prompt.shown
        place = SequencePlace(turn.sequence.number, len(known), added) if self.limits.turns > 1 else None
        with NotedFailure(self.engine_failures):
            return await self.pool.generate([*known.tolist(), *new], sampling, self.key, number, place, turn.pictures())

    def _record(self, turn: Turn, completion: Completion, text: str, message: Message, spelled: Message) -> Reply:
        sequence, before = turn.sequence, turn.length()
        if completion.finish_reason == "length":
            room = self._room(turn)
            self.trajectory.truncated, self.trajectory.limit = True, min(room, key=lambda key: room[key])
        if sequence not in self.sequences:
            if self.sequences:
                self.trajectory.branches.append(sequence.record)
            else:
                sequence.record = self.trajectory
            self.sequences.append(sequence)
            sequence.record.role = sequence.role
        sequence.shown = turn.pictures()
        sequence.record.pictures = sequence.shown.pictures if sequence.shown else ()
        sequence.record.add_action(completion, turn.prompt.tokens)
        sequence.sampled += len(completion.tokens)
        self.trajectory.reply, self.last, self.closing = text, sequence, []
        self.latest[sequence.role] = sequence
        sequence.said += [*turn.new, message]
        sequence.spelled += [*turn.new, spelled]
        structured = bool(message.get("tool_calls")) and sequence.chat.template.shows_calls
        sequence.prompt, sequence.reply = turn.prompt, message if structured else spelled
        return Reply(text, message, completion, before)

    def take_role(self, role: str) -> None:
        self.role = role

    def add_reward(self, reward: float, role: str = "") -> None:
        if not role:
            assert self.last is not None, "a reward before the first reply"
            self.trajectory.add_reward(reward, self.last.record)
            return
        earned = self.trajectory.role_rewards
        earned[role] = earned.get(role, 0.0) + reward
        if role in self.latest:  # else it has sampled nothing that could have led to this
            self.latest[role].record.put_reward(reward)

    def end_roles(self, rewards: dict[str, float]) -> None:
        """Add the last reward of every role; that of the first is the episode's."""
        for role, reward in rewards.items():
            self.add_reward(reward, role)
        trajectory, earned = self.trajectory, {role: self.trajectory.role_rewards[role] for role in rewards}
        trajectory.role_rewards, trajectory.reward = earned, next(iter(earned.values()))
        trajectory.metrics |= {f"role/{role}/reward": reward for role, reward in earned.items()}

    def hear(self, messages: list[Message]) -> None:
        self.closing = list(messages)

    def talk(self) -> Talk:
        if self.last is None:
            return Talk()
        said, count = self.last.said, self.last.opening
        return Talk(said[:count], said[count:], self.closing, self.trajectory.reply)

    def record_talk(self) -> None:
        if self.last is not None:
            self.trajectory.talk = self.talk()
            self.trajectory.turns = bare([*self.last.spelled[self.last.opening :], *self.closing])

    def dialogues(self) -> list[Dialogue]:
        """Return each conversation that no other continues, with all replies as sampled."""
        found: dict[TokenSequence, Dialogue] = {}
        continued: list[TokenSequence] = []
        for sequence in self.sequences:
            said, spelled = sequence.said, sequence.spelled
            own = [one for one in found if one.role == sequence.role]
            before = longest([one for one in own if one.is_prefix_of(said, sequence.tools, sequence.chat)])
            if before is not None:
                prompt, reply = found[before].prompt, [*found[before].completion, *spelled[len(before.said) :]]
                continued.append(before)
            else:
                prompt, reply = spelled[: sequence.prompt_messages], spelled[sequence.prompt_messages :]
            found[sequence] = Dialogue(prompt, reply, sequence.tools, sequence.role)
        return [dialogue for sequence, dialogue in found.items() if sequence not in continued]

    def _begin_turns(
        self, count: int, known: TokenSequence | None, messages: list[Message], tools: list[Tool], chat: ChatFormat
    ) -> list[Turn]:
        """Return so many turns of these messages, or refuse all of them if one has no room.

        Only the first may continue a known conversation: the others begin sequences.
        """
        left = self.limits.turns - self.turns
        if count > left:
            reason = f"{count} replies exceed the {left} turns left" if left else "the episode has used all its turns"
            raise OutOfBudget(f"{reason} ({TURNS}={self.limits.turns})", TURNS)
        others = [self._first_turn(messages, tools, chat) for _ in range(count - 1)]
        following = None
        if known is not None:
            new, last = messages[len(known.said) :], int(known.record.tokens[-1])
            # A picture's token that the policy sampled cannot stand within a prompt.
            if not chat.is_picture(last):
                pictures = self._pictures_of(new, known.said)
                following = known.chat.follow(known.prompt, known.reply, new, last, pictures)
        if known is None or following is None:
            return [self._first_turn(messages, tools, chat), *others]
        turn, most = Turn(known, new, following), self.params.max_new_tokens
        if turn.length() >= self.limits.context:
            tokens = f"{len(following.tokens)} more tokens after {len(known.record.tokens)}"
            raise OutOfBudget(f"{tokens} leave no room for a reply: {self._context_words()}", CONTEXT)
        if known.sampled >= most:
            raise OutOfBudget(f"the policy has sampled all {most} tokens of a sequence ({TOKENS}={most})", TOKENS)
        return [turn, *others]

    def _first_turn(self, messages: list[Message], tools: list[Tool], chat: ChatFormat) -> Turn:
        prompt = chat.begin(messages, tools, self._pictures_of(messages))
        if len(prompt.tokens) >= self.limits.context:
            raise OutOfBudget(
                f"a conversation of {len(prompt.tokens)} tokens leaves no room for a reply: {self._context_words()}",
                CONTEXT,
            )
        # The messages before the first reply of the episode: those that another sequence began with, or all.
        own = [one for one in self.sequences if one.role == self.role]
        openings = [one.opening for one in own if one.matches(messages, one.opening)]
        opening = max((count for count in openings if count < len(messages)), default=len(messages))
        record = Trajectory(self.trajectory.prompt, self.key.group)
        self.begun += 1
        sequence = TokenSequence(record, chat, tools, len(messages), opening, prompt, number=self.begun, role=self.role)
        return Turn(sequence, messages, prompt)

    def _pictures_of(self, messages: list[Message], before: Sequence[Message] = ()) -> tuple[Picture, ...]:
        """Return the pictures of messages behind others; image parts without one show those of the row, in order."""
        (known, new), row = map(payloads_of, (before, messages)), self.trajectory.prompt.pictures
        if new and self.chat.vision is None:
            model = self.chat.tokenizer.name_or_path
            raise ConfigError(f"it shows a picture, but {model} reads only text: leave it out, or use another model")
        if (unknown := [*known, *new].count(None) - len(row)) > 0:
            raise ConfigError(f"{unknown} image parts have no picture: give them one, as a data URL")
        if (shown := sum(one is not None for one in (*known, *new))) > self.limits.images:
            raise ConfigError(
                f"it shows {shown} pictures in one sequence, beside those of the row, but {IMAGES}="
                f"{self.limits.images} (0 if a critic, teacher or reward model reads none): raise it, or show fewer"
            )
        rest, setting = iter(row[known.count(None) :]), Setting("a picture", Path(), self.limits.max_pixels)
        return tuple(next(rest) if one is None else read_data_url(str(one), setting) for one in new)

    def _context_words(self) -> str:
        return f"a sequence may have {self.limits.context} (rollout.max_prompt_tokens + rollout.max_new_tokens)"

    def _room(self, turn: Turn) -> dict[str, int]:
        left, context = self.params.max_new_tokens - turn.sequence.sampled, self.limits.context - turn.length()
        return {TOKENS: left, CONTEXT: context, TURN_TOKENS: self.limits.turn_tokens or left}


class NotedFailure(AbstractContextManager[None]):
    """Notes a failure that leaves it, so that an engine's is known from one of the environment."""

    def __init__(self, failures: list[BaseException]) -> None:
        self.failures = failures

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.failures.append(error)


def longest(sequences: list[TokenSequence]) -> TokenSequence | None:
    return max(sequences, key=lambda one: len(one.said), default=None)


def message_key(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    named = [(call.get("name"), read_arguments(call.get("arguments"))) for call in calls]
    return message.get("role"), content_of(message), payloads_of([message]), named, message.get("tool_call_id")


def read_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object; some clients send text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def cut_at_stop(
    completion: Completion, stops: Sequence[str], text_of: Callable[[list[int]], str]
) -> tuple[Completion, str]:
    """Return the completion up to the token that completes a stop string, and its text before that string."""

    def text_up_to(length: int) -> str:
        return text_of(completion.tokens[:length].tolist())

    text = text_up_to(len(completion.tokens))
    if stop_place(text, stops) < 0:
        return completion, text
    # Whole prefixes are decoded: a token may be a part of a character, and a stop string several tokens.
    lengths = range(len(completion.tokens))
    length = bisect_left(lengths, True, key=lambda length: stop_place(text_up_to(length), stops) >= 0)
    text = text_up_to(length)
    return completion.shorten(length), text[: stop_place(text, stops)]


def stop_place(text: str, stops: Sequence[str]) -> int:
    """Return where the first stop string of a text begins, or -1."""
    return min((text.find(stop) for stop in stops if stop in text), default=-1)
