"""Turn records into training samples that fit: exact tokens, what is learnt of them, what is done with long ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat, Encoded, Learn
from trueline.data.formats import Conversation, Document, Pair, Rated, StepRated
from trueline.data.messages import Message, Tool
from trueline.data.types import Sample

Policy = Literal["error", "truncate", "drop"]


@dataclass(frozen=True, slots=True)
class Encodings:
    """Samples, and counts: rows read, sequences truncated, sequences (or pairs) dropped, mismatched ones cut."""

    samples: list[Sample]
    counts: dict[str, int]


CUT_IN_TWO = "steps that hold data.step_separator, at which a reply would be cut in two"


class Fitting:
    """The length limit, and the tally of what it did."""

    def __init__(self, max_tokens: int, policy: Policy) -> None:
        self.max_tokens, self.policy = max_tokens, policy
        self.tally = {"truncated": 0, "dropped": 0}

    def fit(self, encoded: Encoded, place: str) -> Encoded | None:
        """Return the sequence, cut if need be, or None where it is to be dropped."""
        if len(encoded.tokens) > self.max_tokens:
            return TOO_LONG[self.policy](self, encoded, place)
        return encoded if any(encoded.mask) else self.nothing_to_learn(place, "no token of it can be learnt")

    def refuse(self, encoded: Encoded, place: str) -> Encoded | None:
        raise ConfigError(
            f"{place}: {len(encoded.tokens)} tokens are more than max_tokens={self.max_tokens}: shorten the row, raise "
            "max_tokens, or set data.too_long to truncate or drop"
        )

    def truncate(self, encoded: Encoded, place: str) -> Encoded | None:
        shortened = cut(encoded, self.max_tokens)
        if not any(shortened.mask):
            return self.nothing_to_learn(place, f"its first max_tokens={self.max_tokens} tokens hold none to learn")
        self.tally["truncated"] += 1
        return shortened

    def drop(self, encoded: Encoded, place: str) -> Encoded | None:
        return None

    def nothing_to_learn(self, place: str, reason: str) -> Encoded | None:
        if self.policy != "drop":
            raise ConfigError(f"{place}: {reason}: change the row, raise max_tokens, or set data.too_long=drop")
        return None

    def result(self, samples: list[Sample], rows: int) -> Encodings:
        if not samples:
            raise ConfigError(
                f"data.too_long=drop left none of {rows} rows: raise max_tokens={self.max_tokens} or shorten the rows"
            )
        return Encodings(samples, {"rows": rows, **self.tally})


TOO_LONG: dict[Policy, Callable[[Fitting, Encoded, str], Encoded | None]] = {
    "error": Fitting.refuse,
    "truncate": Fitting.truncate,
    "drop": Fitting.drop,
}


def encode_conversations(
    records: list[Conversation | Document], chat: ChatFormat, max_tokens: int, learn: Learn, policy: Policy
) -> Encodings:
    """Make one sample per sequence; a conversation whose template rewrites earlier turns becomes several."""
    fitting = Fitting(max_tokens, policy)
    fitting.tally |= unlearnt_ends(records)
    samples: list[Sample] = []
    for record in records:
        for encoded in encode_text(record, chat, learn):
            fitted = fitting.fit(encoded, record.place)
            fitting.tally["dropped"] += fitted is None
            samples += [to_tensors(fitted)] if fitted else []
    return fitting.result(samples, len(records))


def unlearnt_ends(records: list[Conversation | Document]) -> dict[str, int]:
    """Count conversations with a first or last message that is not learnt, though one may expect it, in words."""
    talks = [record.messages for record in records if isinstance(record, Conversation)]
    found = {
        "with a last message that nothing answers": sum(talk[-1]["role"] != "assistant" for talk in talks),
        "with a first message that answers nothing": sum(talk[0]["role"] == "assistant" for talk in talks),
    }
    return {what: count for what, count in found.items() if count}


def encode_pairs(records: list[Pair], chat: ChatFormat, max_tokens: int, policy: Policy) -> Encodings:
    """Make sample 2i of pair i's chosen completion, 2i + 1 of the rejected one; a pair is dropped as a whole."""
    fitting = Fitting(max_tokens, policy)
    samples: list[Sample] = []
    for record in records:
        completions = [
            encode_completion(chat, record.prompt, completion, record.place, record.tools)
            for completion in (record.chosen, record.rejected)
        ]
        fitted = [kept for completion in completions if (kept := fitting.fit(completion, record.place))]
        if len(fitted) == 2 and fitted[0].tokens == fitted[1].tokens:
            fitting.nothing_to_learn(record.place, "chosen and rejected have the same tokens")
            fitted = []
        fitting.tally["dropped"] += len(fitted) < 2
        samples += [to_tensors(encoded, record.margin) for encoded in fitted] if len(fitted) == 2 else []
    return fitting.result(samples, len(records))


def encode_rated(records: list[Rated], chat: ChatFormat, max_tokens: int, policy: Policy, block: int) -> Encodings:
    """Label samples 1 for desirable, else 0; a sample's companion has its prompt and another row's completion.

    No row is at fault where a prompt and a foreign completion are too long together: that completion is cut.
    """
    fitting = Fitting(max_tokens, policy)
    own = [
        fitting.fit(encode_completion(chat, row.prompt, row.completion, row.place, row.tools), row.place)
        for row in records
    ]
    kept = [(row, encoded) for row, encoded in zip(records, own, strict=True) if encoded]
    partners = [kept[number][0] for number in mismatched_rows([row for row, _ in kept], block)]
    others = [
        encode_completion(
            chat, row.prompt, partner.completion, f"{row.place} with the answer of {partner.place}", row.tools
        )
        for (row, _), partner in zip(kept, partners, strict=True)
    ]
    fitting.tally["dropped"] = len(records) - len(kept)
    fitting.tally["mismatched_truncated"] = sum(len(other.tokens) > max_tokens for other in others)
    samples = [to_tensors(encoded, float(row.desirable)) for row, encoded in kept]
    for sample, other in zip(samples, others, strict=True):
        sample.companion = to_tensors(cut(other, max_tokens))
    return fitting.result(samples, len(records))


def encode_steps(
    records: list[StepRated], chat: ChatFormat, max_tokens: int, policy: Policy, separator: str
) -> Encodings:
    """Put the label of a step at its last token: the separator's, where there is one."""
    fitting = Fitting(max_tokens, policy)
    fitting.tally[CUT_IN_TWO] = 0
    samples: list[Sample] = []
    for record in records:
        encoded, labels = encode_labelled(record, chat, separator)
        fitted = fitting.fit(encoded, record.place)
        fitting.tally["dropped"] += fitted is None
        fitting.tally[CUT_IN_TWO] += sum(separator in step for step in record.steps)
        if fitted is not None:
            sample = to_tensors(fitted)
            sample.step_labels = torch.tensor(labels[: len(fitted.tokens)], dtype=torch.float32)
            samples.append(sample)
    return fitting.result(samples, len(records))


def cut(encoded: Encoded, length: int) -> Encoded:
    return Encoded(encoded.tokens[:length], encoded.mask[:length])


def to_tensors(encoded: Encoded, label: float = 0.0) -> Sample:
    return Sample(torch.tensor(encoded.tokens), torch.tensor(encoded.mask), label=label)


@contextmanager
def naming(place: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def encode_text(record: Conversation | Document, chat: ChatFormat, learn: Learn) -> list[Encoded]:
    with naming(record.place):
        if isinstance(record, Document):
            return [chat.encode_document(record.text)]
        sequences = chat.encode(record.messages, learn, tools=record.tools)
        if not sequences:
            raise ConfigError("no message of the assistant answers another, so nothing can be learnt: add one")
    return sequences


def encode_completion(
    chat: ChatFormat, prompt: list[Message], completion: list[Message], place: str, tools: Sequence[Tool] = ()
) -> Encoded:
    with naming(place):
        sequences = chat.encode([*prompt, *completion], "all", start=len(prompt), tools=tools)
        if len(sequences) != 1:
            raise ConfigError(
                f"an answer of {len(completion)} messages becomes {len(sequences)} sequences, for the chat template "
                "rewrites earlier turns: move all messages but the last into the prompt"
            )
    return sequences[0]


def encode_labelled(record: StepRated, chat: ChatFormat, separator: str) -> tuple[Encoded, list[float]]:
    with naming(record.place):
        chat.check_tools(record.prompt, record.tools)
        tokens = chat.prompt_tokens(record.prompt, record.tools)
    mask, labels = [False] * len(tokens), [0.0] * len(tokens)
    end = chat.text_tokens(separator)  # apart from the step, so that it is the same token after every one
    for step, label in zip(record.steps, record.labels, strict=True):
        added = chat.text_tokens(step) + end
        tokens += added
        mask += [False] * (len(added) - 1) + [True]
        labels += [0.0] * (len(added) - 1) + [label]
    return Encoded(tokens, mask), labels


def mismatched_rows(records: list[Rated], block: int) -> list[int]:
    """Find for each row the one before it in its block, in a circle, or the nearest before that with another prompt."""
    prompts = [record.prompt for record in records]
    if records and all(prompt == prompts[0] for prompt in prompts):
        raise ConfigError(
            f"{records[0].place} to {records[-1].place}: all {len(records)} rows have the same prompt, so none can be "
            "paired with the answer to another: add rows with other prompts"
        )
    back = last_others(prompts)
    partners = []
    for row in range(len(prompts)):
        start = row - row % block
        partner = start + (row - start - 1) % min(block, len(prompts) - start)
        partners.append(back[partner] if prompts[partner] == prompts[row] else partner)
    return partners


def last_others(prompts: list[list[Message]]) -> list[int]:
    """Find for each row the nearest one before it, in a circle, that has another prompt."""
    back = [-1] * len(prompts)
    for at in range(1 - len(prompts), len(prompts)):  # the first round only fills in what the second looks up
        before = at - 1
        back[at] = back[before] if prompts[before] == prompts[at] else before % len(prompts)
    return back
