"""Encode messages as tokens and masks, and decode sampled tokens."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from trueline.config.base import ConfigError
from trueline.data.messages import Message, Tool, called_functions, content_of, texts_of
from trueline.data.pictures import Picture, Pictures, PictureTokens, Shown, count_placeholders, image_parts
from trueline.data.template import (
    END_OF_THOUGHT,
    MARK,
    REMEDY,
    Template,
    Written,
    add_reasoning,
    check_completion,
    learned_text,
    reader_of,
    unseen_fields,
)
from trueline.monitoring.findings import Finding

Learn = Literal["all", "last"]
Piece = tuple[list[int], bool]  # tokens, and whether they are learned
UNLIKE_ANY = "\0"  # no completion begins with it
COUNTED = 1000  # prompts tokenized at a time
MOST_BEGUN = 256


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: list[int]
    mask: list[bool]  # True on the tokens to learn
    pictures: Pictures = ()  # that its image tokens stand for


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    """A prompt that waits for a reply, and all that the next one is made from."""

    tokens: list[int]  # that come behind those of the sequence
    text: str = ""  # the whole rendering
    messages: list[Message] = field(default_factory=list)
    shaped: list[Message] = field(default_factory=list)  # the same, as the template takes them
    tools: Sequence[Tool] = ()
    shown: Shown | None = None  # the pictures of these tokens


class ChatFormat:
    """A tokenizer, its chat template if that is used, and the tokens that end a completion."""

    vision: PictureTokens | None = None  # of a model that reads pictures

    def __init__(
        self,
        tokenizer: Any,
        use_template: bool,
        stop_ids: Collection[int] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.templated = use_template and bool(tokenizer.chat_template)
        self.stop_ids = frozenset({*stop_ids, tokenizer.eos_token_id})
        self.template = Template(tokenizer, arguments or {})
        self.read_reply = reader_of(self.template.source) if self.templated else None
        self.variants: dict[str, ChatFormat] = {}
        self.begun: dict[tuple[str, Pictures], tuple[list[int], Shown | None]] = {}  # the last prompts
        # What it has done so far: joined messages by line breaks, rendered a system message, rendered a call
        self.joins = self.systems = self.calls = False
        self.left_out: set[str] = set()  # fields of the data that some rendering did not show
        self.lost: dict[str, list[str]] = {}  # names of tools -> parts of a conversation that the template drops
        self.unseen: dict[tuple[str, ...], list[str]] = {}  # names of tools -> those that the template drops

    def prompt_tokens(self, messages: list[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return a prompt's tokens; a template has added the tokens that begin a text already."""
        return self._tokens(self.prompt_text(messages, tools), special=not self.templated)

    def prompt_text(self, messages: list[Message], tools: Sequence[Tool] = ()) -> str:
        if self.templated:
            return self._render(messages, tools, open_turn=True)
        self.joins = True
        return "\n".join(self._plain_text(message) for message in messages)

    def prompt_lengths(self, texts: list[str]) -> list[int]:
        """Count the tokens of many prompts, in fast batches."""
        special = not self.templated
        if not self.tokenizer.is_fast:
            return [len(self._tokens(text, special=special)) for text in texts]
        encode = self._backend.encode_batch_fast
        parts = (texts[at : at + COUNTED] for at in range(0, len(texts), COUNTED))
        return [len(one) for part in parts for one in encode(part, add_special_tokens=special)]

    def is_picture(self, token: int) -> bool:
        return self.vision is not None and token == self.vision.token

    def sampled_stops(self) -> tuple[int, ...]:
        """Return the tokens that end a completion; a picture's, which no model may go on from, is one of them."""
        return tuple(sorted({*self.stop_ids, *([self.vision.token] if self.vision is not None else [])}))

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatFormat":
        """Return the same format with more template arguments than the run's."""
        if not arguments:
            return self
        merged = {**self.template.arguments, **arguments}
        name = repr(sorted(merged.items()))
        if name not in self.variants:
            self.variants[name] = ChatFormat(self.tokenizer, self.templated, self.stop_ids, merged)
            self.variants[name].vision = self.vision
        return self.variants[name]

    def begin(self, messages: list[Message], tools: Sequence[Tool] = (), pictures: Pictures = ()) -> OpenPrompt:
        """Return the prompt that begins a sequence; the completions of a group begin with the same one."""
        text = self.prompt_text(messages, tools)
        if (text, pictures) not in self.begun:
            if count_placeholders(self.vision, text, messages) != len(pictures):
                raise ConfigError(f"it shows {sum(1 for _ in image_parts(messages))} pictures, but has {len(pictures)}")
            brief = self._tokens(text, special=not self.templated)
            self.begun[text, pictures] = self._shown_tokens(text, brief, pictures)
        if len(self.begun) > MOST_BEGUN:
            del self.begun[next(iter(self.begun))]
        tokens, shown = self.begun[text, pictures]
        shaped = self.template.shape(messages) if self.templated else []
        return OpenPrompt(tokens, text, messages, shaped, [Written(tool) for tool in tools], shown)

    def _shown_tokens(
        self, text: str, brief: list[int], pictures: Pictures, skipped: int = 0
    ) -> tuple[list[int], Shown | None]:
        """Return the tokens of a text but the first, and its pictures; `brief` has one placeholder for each."""
        if not pictures or self.vision is None:
            return brief[skipped:], None
        tokens = self.vision.tokens(text, pictures)[skipped:]
        return tokens, Shown(pictures, brief[skipped:], len(tokens))

    def continuation(
        self, messages: list[Message], new: list[Message], tools: Sequence[Tool] = (), last: int | None = None
    ) -> list[int] | None:
        """Return the tokens of `follow`, where the last message is the sampled reply."""
        before = self.begin(messages[:-1], tools) if self.templated else OpenPrompt([])
        following = self.follow(before, messages[-1], new, last)
        return None if following is None else following.tokens

    def follow(
        self, before: OpenPrompt, reply: Message, new: list[Message], last: int | None, pictures: Pictures = ()
    ) -> OpenPrompt | None:
        """Return the next prompt; its tokens go from the end of the sampled reply to the next turn.

        They begin with what ends a reply, unless `last`, the last sampled token, already does. None: the template
        rewrites earlier turns, so that nothing can be appended to the sampled tokens.
        """
        if not self.templated:
            text = "".join(f"\n{self._plain_text(message)}" for message in new)
            count_placeholders(self.vision, text, new)
            return OpenPrompt([self._end()] * (last not in self.stop_ids) + self.text_tokens(text))
        write, shape_one, messages = self.template.write, self.template.shape_one, [*before.messages, reply, *new]
        shaped = [*before.shaped, shape_one(reply), *map(shape_one, new)]
        whole = write(shaped, before.tools, open_turn=True)
        if not whole.startswith(before.text):  # a template may write the time
            before = replace(before, text=write(before.shaped, before.tools, open_turn=True))
        if not whole.startswith(before.text):
            self._note(messages, whole)
            return None
        self._note(messages[len(before.messages) :], whole, len(before.text))
        closed = write(shaped[: len(before.shaped) + 1], before.tools, open_turn=False)
        if (behind := self._text_behind(before, reply, closed, whole, last)) is None:
            return None
        text, repeated = behind
        count_placeholders(self.vision, text, new)
        brief = self.text_tokens(text)
        skipped = int(repeated is not None and brief[:1] == [repeated])
        tokens, shown = self._shown_tokens(text, brief, pictures, skipped)
        return OpenPrompt(tokens, whole, messages, shaped, before.tools, shown)

    def _text_behind(
        self, before: OpenPrompt, reply: Message, closed: str, whole: str, last: int | None
    ) -> tuple[str, int | None] | None:
        """Return the text from a reply, which ends `closed`, to the next turn; and `last` if it may begin so."""
        if not closed.startswith(before.text):
            return None
        stop = self._stop_span(closed, len(before.text), reply)
        end = len(closed) if stop is None else stop[1]
        if not whole.startswith(closed[:end]):
            return None
        if stop is not None:
            return whole[end if last in self.stop_ids else stop[0] :], None
        # The stop token of a reply comes before the next message, or nowhere; the template may close the reply itself.
        marked = [*before.messages, {"role": "assistant", "content": MARK}]
        _, found, closing = self.template.render(marked, before.tools, open_turn=False).rpartition(MARK)
        return whole[end - len(closing) if found and closed.endswith(closing) else end :], last

    def unseen_tools(self, messages: list[Message], tools: Sequence[Tool]) -> list[str]:
        """Return the names of tools that neither the template nor a system message shows the model."""
        names = tuple(str(tool.get("function", tool).get("name")) for tool in tools)
        if names not in self.unseen:
            question = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            given = [self.template.render(question, some, open_turn=True) for some in (tools, ()) if self.templated]
            self.unseen[names] = [name for name in names if not given or given[0].count(name) <= given[1].count(name)]
        described = " ".join(content_of(message) for message in messages if message["role"] == "system")
        return [name for name in self.unseen[names] if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", described)]

    def lost_parts(self, tools: Sequence[Tool]) -> list[str]:
        """Return what the template drops from a conversation of several turns, with a call if there are tools."""
        names = repr([tool.get("function", tool).get("name") for tool in tools])
        if names not in self.lost:
            self.lost[names] = self.template.lost_parts(tools) if self.templated else []
        return self.lost[names]

    def check_rounds(self, tools: Sequence[Tool]) -> None:
        """Refuse a template that drops calls, their results or other messages."""
        if tools and (lost := self.lost_parts(tools)):
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out {', '.join(lost)} of a conversation "
                f"with tools: {REMEDY}"
            )

    def check_tools(self, messages: list[Message], tools: Sequence[Tool], *, column: bool = True) -> None:
        """Refuse tools that the model would never see; `column`: they come from the row."""
        if not tools or not (unseen := self.unseen_tools(messages, tools)):
            return
        model = self.tokenizer.name_or_path
        why = f"the chat template of {model} drops them" if self.templated else f"{model} has no chat template"
        raise ConfigError(
            f"the model would not see the tools {', '.join(unseen)}, because {why}: set data.chat_template=FILE to a "
            "Jinja file that writes `tools`, or describe them by name in data.system_prompt"
            + column
            * ", or rename the column 'tools'"
        )

    def rewrites(self) -> str:
        """Describe what the template rewrites in earlier turns; empty if it only appends."""
        question = [{"role": "user", "content": "a"}]
        kinds = {"all of them": "b", "their reasoning": f"<think>\n{MARK}\n</think>\n\nb"}
        for kind, text in kinds.items():
            if self.continuation([*question, {"role": "assistant", "content": text}], question) is None:
                return kind
        return ""

    def around_reply(self) -> tuple[str, list[int]]:
        """Return what the template writes between a prompt and its reply, and the tokens after the reply."""
        question = [{"role": "user", "content": "a"}]
        prompt = self.template.render(question, (), open_turn=True)
        full = self.template.render([*question, {"role": "assistant", "content": MARK}], (), open_turn=False)
        before, _, behind = full.rpartition(MARK)
        return before[len(prompt) :] if before.startswith(prompt) else "", self.text_tokens(behind)

    def findings(self) -> list[Finding]:
        """Return what the user may not expect of the messages encoded so far."""
        left_out = f"the chat template leaves out, at least in places: {', '.join(sorted(self.left_out))}"
        spelled = "the chat template shows no tool calls: they become text, as <tool_call>{...}</tool_call>"
        folded = "the chat template has no system role: the system prompt is put before the first user message"
        found = {
            "no_chat_template": ("no chat template: messages are joined by line breaks, without roles", self.joins),
            "template_drops_fields": (left_out, bool(self.left_out)),
            "template_without_tool_calls": (spelled, self.calls and not self.template.shows_calls),
            "template_without_system_role": (folded, self.systems and self.template.folds_system),
        }
        remedy, key = "data.chat_template=FILE sets a Jinja file", "data.chat_template"
        return [Finding("watch", code, what, remedy, key) for code, (what, holds) in found.items() if holds]

    def completion_tokens(self, text: str) -> list[int]:
        """Return the tokens of a completion, its end included."""
        return [*self.text_tokens(text), self._end()]

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text that continues others, without special tokens."""
        return self._tokens(text, special=False)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        if not self.tokenizer.is_fast:
            return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return list(encoded.ids)

    def reply_text(self, tokens: list[int]) -> str:
        """Decode a completion without special tokens; reasoning is in thinking tags."""
        if self.read_reply is None:
            return self._decode(tokens, skip_special=True)
        return self._special.sub("", self.read_reply(self.raw_text(tokens)))

    def raw_text(self, tokens: list[int], said: str | None = None) -> str:
        """Decode a completion with its special tokens, except the last one that ends it; `said` is its `reply_text`."""
        ended = bool(tokens) and tokens[-1] in self.stop_ids
        body = tokens[:-1] if ended else tokens
        is_plain = self._special_ids.isdisjoint(body) and (not ended or tokens[-1] in self._special_ids)
        if said is not None and self.read_reply is None and is_plain:
            return said
        return self._decode(body, skip_special=False)

    def _decode(self, tokens: list[int], *, skip_special: bool) -> str:
        if not self.tokenizer.is_fast or self.tokenizer.clean_up_tokenization_spaces:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special))
        return str(self._backend.decode(tokens, skip_special_tokens=skip_special))

    @cached_property
    def _backend(self) -> Any:
        """Return what a fast tokenizer calls; its first call here makes it neither cut nor pad."""
        self.tokenizer("")
        return self.tokenizer.backend_tokenizer

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return any_of(self.tokenizer.all_special_tokens)

    @cached_property
    def _stops(self) -> re.Pattern[str]:
        return any_of(self.tokenizer.decode([token], skip_special_tokens=False) for token in self.stop_ids)

    def encode(
        self,
        messages: list[Message],
        learn: Learn,
        start: int = 0,
        tools: Sequence[Tool] = (),
        pictures: Sequence[Picture] = (),
    ) -> list[Encoded]:
        """Encode assistant turns from message `start` on, each after exactly what the model sees at inference.

        Turns share a sequence as long as the template only appends; where it rewrites earlier turns (for example drops
        their reasoning) a new sequence starts. A first message is not learned: it has no prompt.
        """
        self.check_tools(messages, tools)
        earliest = max(start, 1)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at >= earliest]
        turns = turns[-1:] if learn == "last" else turns
        if self.templated:
            return self._encode_templated(messages, turns, tools, pictures)
        if pictures:
            raise ConfigError("only a chat template can show its pictures: set data.chat_template=FILE")
        return self._encode_plain(messages, turns, tools)

    def encode_document(self, text: str) -> Encoded:
        """Encode a whole text with its begin and end tokens."""
        count_placeholders(self.vision, text, [])
        tokens = list(self.tokenizer(text)["input_ids"])
        if tokens[-1:] != [self._end()]:
            tokens.append(self._end())
        return join_pieces([(tokens, True)])

    def _plain_text(self, message: Message) -> str:
        if called := called_functions(message):
            raise ConfigError(
                f"a message calls {', '.join(called)}, which only a chat template can show: set data.chat_template=FILE"
            )
        self.left_out |= unseen_fields({**message, "role": "assistant"}, "")
        count_placeholders(self.vision, content_of(message), [])
        return content_of(message)

    def _encode_plain(self, messages: list[Message], turns: list[int], tools: Sequence[Tool]) -> list[Encoded]:
        completions = [self.completion_tokens(self._plain_text(messages[turn])) for turn in turns]
        prompts = [self.prompt_tokens(messages[:turn], tools) for turn in turns]
        return [join_pieces([(one, False), (other, True)]) for one, other in zip(prompts, completions, strict=True)]

    def _encode_templated(
        self, messages: list[Message], turns: list[int], tools: Sequence[Tool], pictures: Sequence[Picture]
    ) -> list[Encoded]:
        sequences: list[list[Piece]] = []
        shown: list[int] = []  # pictures in each of them
        spelled: str | None = None  # the text of the open sequence, while it is exactly the template's
        for turn in turns:
            prompt = self._render(messages[:turn], tools, open_turn=True)
            full = self._render(messages[: turn + 1], tools, open_turn=False)
            if spelled is None or not prompt.startswith(spelled):
                sequences.append([])
                shown.append(0)
                spelled = ""
            seen, shown[-1] = shown[-1], count_placeholders(self.vision, prompt, messages[:turn])
            count_placeholders(self.vision, full, messages[: turn + 1])
            completion = self._completion(prompt, full, messages[: turn + 1], tools)
            check_completion(completion, messages[turn], turn, shows_calls=self.template.shows_calls)
            stop = self._stop_span(completion, 0, messages[turn])
            completion = completion[: stop[1]] if stop else completion  # what follows is never sampled
            behind = prompt[len(spelled) :]
            new, _ = self._shown_tokens(behind, self.text_tokens(behind), tuple(pictures[seen : shown[-1]]))
            # A reply whose template writes no end of its own ends where the next message begins.
            last = sequences[-1][-1][0][-1:] if sequences[-1] else []
            ends = bool(last) and self.stop_ids.isdisjoint(last) and not self.stop_ids.isdisjoint(new[:1])
            sequences[-1] += [(new[:ends], True), (new[ends:], False), (self.text_tokens(completion), True)]
            spelled = prompt + completion if full.startswith(prompt + completion) else None
        for pieces in sequences:
            completion_tokens, _ = pieces[-1]
            if completion_tokens[-1] not in self.stop_ids:
                completion_tokens.append(self._end())
        both = zip(map(join_pieces, sequences), shown, strict=True)
        return [replace(encoded, pictures=tuple(pictures[:count])) for encoded, count in both]

    def _completion(self, prompt: str, full: str, messages: list[Message], tools: Sequence[Tool]) -> str:
        """Return the text of the last message as the policy would write it after the prompt."""
        message, said = messages[-1], (texts_of(messages[-2]) or [""])[-1].strip()
        if full.startswith(prompt):
            found = full[len(prompt) :]
        elif spans := self.template.generation_spans(messages, tools)[1]:
            text = full[slice(*spans[-1])]
            opened = prompt[max(prompt.rfind(said), 0) + len(said) :]
            found = next((text[size:] for size in range(len(opened), 0, -1) if opened.endswith(text[:size])), text)
        else:
            other = [*messages[:-1], {"role": "assistant", "content": UNLIKE_ANY}]
            found = learned_text(prompt, full, partial(self.template.render, other, tools, open_turn=False), said)
        return add_reasoning(found, message, prompt)

    def _stop_span(self, text: str, start: int, message: Message) -> tuple[int, int] | None:
        """Return the span of the stop token that ends a message's text, which begins at `start`."""
        said = content_of(message).rpartition(END_OF_THOUGHT)[2].strip()
        for part in (said, *called_functions(message)[-1:]):
            if part and (at := text.rfind(part, start)) >= 0:
                start = max(start, at + len(part))
        found = self._stops.search(text, start)
        return found.span() if found else None

    def _render(self, messages: list[Message], tools: Sequence[Tool], open_turn: bool) -> str:
        text = self.template.render(messages, tools, open_turn=open_turn)
        self._note(messages, text)
        return text

    def _note(self, messages: list[Message], text: str, start: int = 0) -> None:
        """Note what a rendering shows and leaves out of messages, most of which is behind `start`."""
        self.systems = self.systems or any(message["role"] == "system" for message in messages)
        self.calls = self.calls or any(message.get("tool_calls") for message in messages)
        end = text[start:]
        for message in messages:
            if unseen_fields(message, end) - self.left_out:
                self.left_out |= unseen_fields(message, text)

    def _end(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token: set its eos_token")
        return int(self.tokenizer.eos_token_id)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or r"(?!)")


def join_pieces(pieces: list[Piece]) -> Encoded:
    tokens = [token for piece, _ in pieces for token in piece]
    if mask := [learned for piece, learned in pieces for _ in piece]:
        mask[0] = False  # the first token has no log-prob
    return Encoded(tokens, mask)
