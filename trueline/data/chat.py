"""Messages -> tokens: the only file that touches chat templates."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from trueline.config.base import ConfigError
from trueline.data.types import Message

Learn = Literal["all", "last"]
Piece = tuple[list[int], int]  # tokens, and how many of them, from the left, are learnt


@dataclass(frozen=True, slots=True)
class Encoded:
    """One training sequence."""

    tokens: list[int]
    mask: list[bool]  # True on the tokens to learn


class ChatFormat:
    """A tokenizer, the decision whether its chat template is used, and the tokens that end an answer."""

    def __init__(self, tokenizer: Any, use_template: bool, stop_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.templated = use_template and bool(tokenizer.chat_template)
        self.stop_ids = frozenset({*stop_ids, tokenizer.eos_token_id})
        self.joins = False  # whether it has joined messages by line breaks

    def prompt_tokens(self, messages: list[Message]) -> list[int]:
        if self.templated:
            return self.text_tokens(self._render(messages, open_turn=True))
        self.joins = True
        text = "\n".join(message["content"] for message in messages)
        return list(self.tokenizer(text)["input_ids"])

    def remarks(self) -> list[str]:
        """Lines for the plan: what the user may not expect of the messages encoded so far."""
        joined = "none: messages are joined by line breaks, without roles; data.chat_template=FILE takes a Jinja file"
        return [f"template   {joined}"] if self.joins else []

    def completion_tokens(self, text: str) -> list[int]:
        """The tokens of an answer, its end included."""
        return [*self.text_tokens(text), self._end()]

    def text_tokens(self, text: str) -> list[int]:
        """The tokens of a text that goes on from others: nothing is put in front."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def reply_text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def encode(self, messages: list[Message], learn: Learn, start: int = 0) -> list[Encoded]:
        """The assistant's turns from message `start` on, each after exactly what the model is shown at inference.

        Turns share a sequence as long as the template only appends; where it rewrites what came before
        (say, leaves out earlier reasoning) a new sequence starts. A turn that nothing precedes answers
        nothing and is not learnt.
        """
        earliest = max(start, 1)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at >= earliest]
        encode_turns = self._encode_templated if self.templated else self._encode_plain
        return encode_turns(messages, turns[-1:] if learn == "last" else turns)

    def encode_document(self, text: str) -> Encoded:
        """All of a text and its end, with what the tokenizer puts in front of texts."""
        tokens = list(self.tokenizer(text)["input_ids"])
        if tokens[-1:] != [self._end()]:
            tokens.append(self._end())
        return joined([(tokens, len(tokens))])

    def _encode_plain(self, messages: list[Message], turns: list[int]) -> list[Encoded]:
        answers = [self.completion_tokens(messages[turn]["content"]) for turn in turns]
        prompts = [self.prompt_tokens(messages[:turn]) for turn in turns]
        return [joined([(prompt, 0), (answer, len(answer))]) for prompt, answer in zip(prompts, answers, strict=True)]

    def _encode_templated(self, messages: list[Message], turns: list[int]) -> list[Encoded]:
        sequences: list[list[Piece]] = []
        spelled: str | None = None  # the text of the open sequence, as long as it is the template's own
        for turn in turns:
            prompt = self._render(messages[:turn], open_turn=True)
            full = self._render(messages[: turn + 1], open_turn=False)
            if spelled is None or not prompt.startswith(spelled):
                sequences.append([])
                spelled = ""
            answer = learnt_text(prompt, full, messages[turn]["content"])
            if not answer.strip():
                raise ConfigError(
                    f"the chat template leaves out the text of message {turn}: change the row or template"
                )
            sequences[-1] += [(self.text_tokens(prompt[len(spelled) :]), 0), self._answer_piece(answer)]
            spelled = full if full.startswith(prompt) else None
        return [self._closed(pieces) for pieces in sequences]

    def _answer_piece(self, text: str) -> Piece:
        """What the template puts after the last end token is never sampled, so it is not learnt."""
        tokens = self.text_tokens(text)
        ends = [at for at, token in enumerate(tokens) if token in self.stop_ids]
        return tokens, ends[-1] + 1 if ends else len(tokens)

    def _closed(self, pieces: list[Piece]) -> Encoded:
        """The sequence ends where its last answer does: with an end token."""
        tokens, learnt = pieces[-1]
        last = tokens[:learnt]
        if last[-1] not in self.stop_ids:
            last.append(self._end())
        return joined([*pieces[:-1], (last, len(last))])

    def _render(self, messages: list[Message], open_turn: bool) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages) or "no messages"
            raise ConfigError(
                f"the chat template refuses {roles}: {error}; change the row, or set data.chat_template to a Jinja "
                "file or never"
            ) from error

    def _end(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token (eos_token), so no answer could end: set one")
        return int(self.tokenizer.eos_token_id)


def learnt_text(prompt: str, full: str, content: str) -> str:
    """What `full` says beyond `prompt`, the same conversation with the assistant's turn only opened."""
    if full.startswith(prompt):
        return full[len(prompt) :]
    pairs = enumerate(zip(prompt, full, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(full)))
    if prompt[shared:].strip():  # the opened turn's own text may by chance begin as the answer does
        begin = full.rfind(content.strip())
        shared = shared if begin < 0 else min(shared, begin)
    return full[shared:]


def joined(pieces: list[Piece]) -> Encoded:
    tokens = [token for piece, _ in pieces for token in piece]
    mask = [at < learnt for piece, learnt in pieces for at in range(len(piece))]
    if mask:
        mask[0] = False  # nothing comes before the first token, so it has no log-prob
    return Encoded(tokens, mask)
