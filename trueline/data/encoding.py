"""Encode records as training samples: exact tokens, loss masks, and a policy for rows that are too long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trueline.config.base import ConfigError
from trueline.data.chat import ChatFormat, Encoded, Learn
from trueline.data.formats import Conversation, Document, Pair, Rated, StepRated
from trueline.data.messages import Message, Tool
from trueline.data.pictures import Picture, count_placeholders
from trueline.data.rows import naming
from trueline.data.types import Sample

Policy = Literal["error", "truncate", "drop"]


@dataclass(frozen=True, slots=True)
class Encodings:
    """Samples, and counts: rows read, sequences truncated, sequences (or pairs) dropped, mismatched ones cut."""

    samples: list[Sample]
    counts: dict[str, int]


class Fitting:
    """The length limit, and counts of what it did."""

    def __init__(self, max_tokens: int, policy: Policy) -> None:
        self.max_tokens, self.policy = max_tokens, policy
        self.tally = {"truncated": 0, "dropped": 0}

    def fit(self, encoded: Encoded, place: str) -> Encoded | None:
        """Return the sequence, truncated if necessary, or None to drop it."""
        length, reason = len(encoded.tokens), "it has no tokens to learn"
        if length > self.max_tokens:
            if self.policy == "drop":
                return None
            if self.policy == "error" or encoded.pictures:  # a picture's tokens belong together
                raise ConfigError(
                    f"{place} has {length} tokens, more than max_tokens={self.max_tokens}: shorten the row, raise "
                    f"max_tokens, or set data.too_long to {'drop' if encoded.pictures else 'truncate or drop'}"
                )
            encoded = shorten(encoded, self.max_tokens)
            reason = f"its first max_tokens={self.max_tokens} tokens contain none to learn"
        if not any(encoded.mask):
            self.drop(place, reason)
            return None
        self.tally["truncated"] += length > self.max_tokens
        return encoded

    def drop(self, place: str, reason: str) -> None:
        """Refuse a row with nothing to learn, unless the policy drops such rows."""
        if self.policy != "drop":
            raise ConfigError(f"{place}: {reason}: change the row, raise max_tokens, or set data.too_long=drop")

    def result(self, samples: list[Sample], rows: int) -> Encodings:
        if not samples:
            raise ConfigError(f"data.too_long=drop dropped all {rows} rows: raise max_tokens={self.max_tokens}")
        return Encodings(samples, {"rows": rows, **self.tally})


def encode_conversations(
    records: list[Conversation | Document], chat: ChatFormat, max_tokens: int, learn: Learn, policy: Policy
) -> Encodings:
    """Make one sample per sequence; if the template rewrites earlier turns, a conversation becomes several."""
    fitting = Fitting(max_tokens, policy)
    fitted: list[Encoded | None] = []
    for record in records:
        with naming(record.place):
            if isinstance(record, Document):
                sequences = [chat.encode_document(record.text)]
            elif not (sequences := chat.encode(record.messages, learn, tools=record.tools, pictures=record.pictures)):
                raise ConfigError("no assistant message follows another message, so there is nothing to learn: add one")
        fitted += [fitting.fit(one, record.place) for one in sequences]
    fitting.tally["dropped"] = fitted.count(None)
    talks = [record.messages for record in records if isinstance(record, Conversation)]
    unlearned = {  # the user may expect that these are learned
        "whose last message has no reply": sum(talk[-1]["role"] != "assistant" for talk in talks),
        "that begin with the assistant": sum(talk[0]["role"] == "assistant" for talk in talks),
    }
    fitting.tally |= {what: count for what, count in unlearned.items() if count}
    return fitting.result([to_tensors(one) for one in fitted if one], len(records))


def encode_pairs(records: list[Pair], chat: ChatFormat, max_tokens: int, policy: Policy) -> Encodings:
    """Make samples 2i (chosen) and 2i + 1 (rejected) of pair i; a pair is dropped as a whole."""
    fitting = Fitting(max_tokens, policy)
    samples: list[Sample] = []
    for record in records:
        completions = [
            encode_completion(chat, record.prompt, completion, record.place, record.tools, record.pictures)
            for completion in (record.chosen, record.rejected)
        ]
        fitted = [kept for completion in completions if (kept := fitting.fit(completion, record.place))]
        if len(fitted) == 2 and fitted[0].tokens == fitted[1].tokens:
            fitting.drop(record.place, "chosen and rejected have the same tokens")
        elif len(fitted) == 2:
            samples += [to_tensors(encoded, record.margin) for encoded in fitted]
    fitting.tally["dropped"] = len(records) - len(samples) // 2
    return fitting.result(samples, len(records))


def encode_rated(records: list[Rated], chat: ChatFormat, max_tokens: int, policy: Policy, block: int) -> Encodings:
    """Label samples 1 if desirable, else 0; companions have another row's completion, truncated if too long."""
    fitting = Fitting(max_tokens, policy)
    own = [
        fitting.fit(encode_completion(chat, row.prompt, row.completion, row.place, row.tools, row.pictures), row.place)
        for row in records
    ]
    kept = [(row, encoded) for row, encoded in zip(records, own, strict=True) if encoded]
    partners = [kept[number][0] for number in mismatched_rows([row for row, _ in kept], block)]
    both = [
        (row, other, f"{row.place} with that of {other.place}") for (row, _), other in zip(kept, partners, strict=True)
    ]
    others = [
        encode_completion(chat, row.prompt, other.completion, place, row.tools, row.pictures)
        for row, other, place in both
    ]
    fitting.tally["dropped"] = len(records) - len(kept)
    fitting.tally["mismatched_truncated"] = sum(len(other.tokens) > max_tokens for other in others)
    samples = [to_tensors(encoded, float(row.desirable)) for row, encoded in kept]
    for sample, other in zip(samples, others, strict=True):
        sample.companion = to_tensors(shorten(other, max_tokens))
    return fitting.result(samples, len(records))


def encode_steps(
    records: list[StepRated], chat: ChatFormat, max_tokens: int, policy: Policy, separator: str
) -> Encodings:
    """Put the label of a step at its last token, which is the separator's if there is one."""
    fitting = Fitting(max_tokens, policy)
    samples: list[Sample] = []
    for record in records:
        encoded, labels = encode_labelled(record, chat, separator)
        if fitted := fitting.fit(encoded, record.place):
            samples.append(to_tensors(fitted))
            samples[-1].step_labels = torch.tensor(labels[: len(fitted.tokens)], dtype=torch.float32)
    fitting.tally["dropped"] = len(records) - len(samples)
    cut_in_two = "steps that contain data.step_separator, which would split them in two"
    fitting.tally[cut_in_two] = sum(separator in step for record in records for step in record.steps)
    return fitting.result(samples, len(records))


def shorten(encoded: Encoded, length: int) -> Encoded:
    return Encoded(encoded.tokens[:length], encoded.mask[:length], encoded.pictures)


def to_tensors(encoded: Encoded, label: float = 0.0) -> Sample:
    return Sample(torch.tensor(encoded.tokens), torch.tensor(encoded.mask), label=label, pictures=encoded.pictures)


def encode_completion(
    chat: ChatFormat,
    prompt: list[Message],
    completion: list[Message],
    place: str,
    tools: Sequence[Tool] = (),
    pictures: Sequence[Picture] = (),
) -> Encoded:
    with naming(place):
        sequences = chat.encode([*prompt, *completion], "all", start=len(prompt), tools=tools, pictures=pictures)
        if len(sequences) != 1:
            raise ConfigError(
                f"a completion of {len(completion)} messages becomes {len(sequences)} sequences, as the chat template "
                "rewrites earlier turns: move all messages but the last into the prompt"
            )
    return sequences[0]


def encode_labelled(record: StepRated, chat: ChatFormat, separator: str) -> tuple[Encoded, list[float]]:
    with naming(record.place):
        chat.check_tools(record.prompt, record.tools)
        count_placeholders(chat.vision, separator.join(record.steps), [])
        tokens = [*chat.begin(record.prompt, record.tools, record.pictures).tokens]
    mask, labels = [False] * len(tokens), [0.0] * len(tokens)
    end = chat.text_tokens(separator)  # encoded separately, so that it is the same token after every step
    for step, label in zip(record.steps, record.labels, strict=True):
        added = chat.text_tokens(step) + end
        tokens += added
        mask += [False] * (len(added) - 1) + [True]
        labels += [0.0] * (len(added) - 1) + [label]
    return Encoded(tokens, mask, record.pictures), labels


def mismatched_rows(records: list[Rated], block: int) -> list[int]:
    """Find for each row the previous one of its block, cyclically, or the nearest before that with another prompt."""
    prompts = [(record.prompt, record.pictures) for record in records]
    if records and all(prompt == prompts[0] for prompt in prompts):
        raise ConfigError(
            f"{records[0].place} to {records[-1].place}: all {len(records)} rows have the same prompt, but KTO needs "
            "completions of other prompts: add rows with other prompts"
        )
    # For each row, the nearest one before it, cyclically, that has another prompt
    back = [-1] * len(prompts)
    for at in range(1 - len(prompts), len(prompts)):  # the first round fills in what the second looks up
        back[at] = back[at - 1] if prompts[at - 1] == prompts[at] else (at - 1) % len(prompts)
    partners = []
    for row in range(len(prompts)):
        start = row - row % block
        partner = start + (row - start - 1) % min(block, len(prompts) - start)
        partners.append(back[partner] if prompts[partner] == prompts[row] else partner)
    return partners
