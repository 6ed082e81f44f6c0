"""Read rows as prompts; those of a large dataset are made, measured and admitted when they are drawn."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Tool
from trueline.data.pictures import COLUMNS, take_pictures
from trueline.data.readers import LABEL_COLUMNS, choose_column, read_messages, read_tools, value_of
from trueline.data.rows import TEXT, Lazy, Located, Row, is_large, naming, sizes_of
from trueline.data.types import Prompt, with_tools

PROMPT_COLUMNS = ("messages", "prompt", "question")
SAMPLED, LONGEST = 5000, 1000  # rows of a large dataset that are looked at before the start; of these, the longest
UNKNOWN, UNREADABLE = -1, -2  # in place of a length
LOOK_SECONDS = 10.0  # between two looks at what was measured meanwhile


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Makes the prompt of a row."""

    prompt_column: str
    label_column: str  # may be empty
    system_prompt: str | None
    source: str
    max_pixels: int

    def read(self, number: int, located: Located) -> Prompt:
        messages = read_messages(located, self.prompt_column, self.system_prompt)
        messages, pictures = take_pictures(located, messages, self.max_pixels)
        label = value_of(located, self.label_column) if self.label_column else None
        columns = located.row
        if pictures:  # which rewards get as `images`; in messages, there are placeholders
            columns = {name: value for name, value in columns.items() if name not in COLUMNS}
            if not isinstance(columns[self.prompt_column], str):
                columns[self.prompt_column] = messages
        return Prompt(number, messages, label, self.source, columns, read_tools(located), pictures)


def read_prompts(rows: Sequence[Located], config: PromptDataConfig, source: str) -> Sequence[Prompt]:
    """Read prompts: all of them, or of a large dataset a sample."""
    reader = reader_of(rows, config, source)
    if not is_large(len(rows)):
        return [reader.read(number, located) for number, located in enumerate(rows)]
    numbers = sample_numbers(sizes_of(rows, reader.prompt_column))
    return LazyPrompts(rows, reader, [reader.read(number, rows[number]) for number in numbers])


def reader_of(rows: Sequence[Located], config: PromptDataConfig, source: str) -> PromptReader:
    """Choose the columns to read, by the first row."""
    first = rows[0]
    usual = (TEXT,) if first.bare else PROMPT_COLUMNS
    prompt_column = choose_column(first, config.prompt_column, usual, "data.prompt_column")
    label_column = choose_column(first, config.label_column, LABEL_COLUMNS, "data.label_column", required=False)
    inferred = label_column and config.label_column is None
    if inferred and all(located.row.get(label_column) is None for located in rows):
        label_column = ""  # `generate` writes an empty label column if the prompts had none
    return PromptReader(prompt_column, label_column, config.system_prompt, source, config.max_pixels)


class PromptTooLong(LookupError):
    """A drawn prompt has too many tokens, and `data.too_long=drop` drops it."""


@dataclass(slots=True)
class LengthLimit:
    """Admits the prompts of a large dataset by their lengths, as far as others have measured them already."""

    chat: ChatFormat
    most: int
    too_long: str
    lengths: np.ndarray | None = None  # of all rows; UNKNOWN where none is known yet
    looked: float = 0.0

    def check(self, prompt: Prompt) -> None:
        known = UNKNOWN if self.lengths is None else int(self.lengths[prompt.id])
        (length,) = (known,) if known >= 0 else prompt_lengths([prompt], self.chat)
        if not is_fitting(prompt, length, self.most, self.too_long):
            raise PromptTooLong(prompt.place())

    def offenders(self) -> np.ndarray:
        """Return the rows, of those measured in the background, that no run may have; it looks now and then."""
        if self.lengths is None or time.monotonic() < self.looked + LOOK_SECONDS:
            return np.zeros(0, int)
        self.looked = time.monotonic()
        return refused_rows(self.lengths, self.most, self.too_long)


@dataclass(frozen=True, eq=False)
class LazyPrompts(Lazy[Prompt]):
    """The prompts of a large dataset, each made when it is drawn."""

    rows: Sequence[Located]
    reader: PromptReader
    sample: list[Prompt]  # that checks before the start look at
    tools: list[Tool] = field(default_factory=list)  # of every prompt, besides its own
    limit: LengthLimit | None = None  # None: not yet planned

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Prompt]:
        return (self._make(number, located) for number, located in enumerate(self.rows))

    def at(self, number: int) -> Prompt:
        for row in self.limit.offenders()[:1] if self.limit else ():
            self._make(int(row), self.rows[int(row)])
        return self._make(number, self.rows[number])

    def _make(self, number: int, located: Located) -> Prompt:
        prompt = with_tools(self.reader.read(number, located), self.tools)
        if self.limit is not None:
            self.limit.check(prompt)
        return prompt


def sample_numbers(sizes: np.ndarray) -> list[int]:
    """Choose rows to look at: the first and the last, those with the longest text, and others at random."""
    longest = np.argsort(sizes, kind="stable")[::-1][:LONGEST]
    others = np.random.default_rng(0).permutation(len(sizes))[: SAMPLED - LONGEST]
    return [int(number) for number in np.unique(np.concatenate([[0, len(sizes) - 1], longest, others]))]


def sample_of(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts that checks before the start look at: all, or the sample of a large dataset."""
    return prompts.sample if isinstance(prompts, LazyPrompts) else prompts


def offer_tools(prompts: Sequence[Prompt], tools: list[Tool]) -> Sequence[Prompt]:
    offered = [with_tools(prompt, tools) for prompt in sample_of(prompts)]
    return replace(prompts, sample=offered, tools=tools) if isinstance(prompts, LazyPrompts) else offered


def prompt_lengths(prompts: Sequence[Prompt], chat: ChatFormat) -> list[int]:
    lengths = chat.prompt_lengths([prompt_text(prompt, chat) for prompt in prompts])
    return [
        shown_length(prompt, chat) if chat.vision is not None else length
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def shown_length(prompt: Prompt, chat: ChatFormat) -> int:
    """Count the tokens of a prompt for a model that reads pictures, with those of its pictures."""
    with naming(prompt.place()):
        return len(chat.begin(prompt.messages, prompt.tools, prompt.pictures).tokens)


def prompt_text(prompt: Prompt, chat: ChatFormat) -> str:
    with naming(prompt.place()):
        chat.check_tools(prompt.messages, prompt.tools, column="tools" in prompt.columns)
        chat.check_rounds(prompt.tools)
        return chat.prompt_text(prompt.messages, prompt.tools)


def known_rates(prompts: Sequence[Prompt], column: str) -> list[float | None]:
    """Return the pass rate that a column gives of each prompt, where it does; no prompt is made for it."""
    if isinstance(prompts, LazyPrompts):
        return [known_rate(one.row, one.place, column) for one in prompts.rows]
    return [known_rate(one.columns, one.place(), column) for one in prompts]


def known_rate(columns: Row, place: str, column: str) -> float | None:
    if column not in columns:
        raise ConfigError(f"{place}: column {column!r} is missing: add it, or set data.difficulty.column=null")
    rate = columns[column]
    if rate is None or (isinstance(rate, int | float) and 0 <= rate <= 1):
        return rate
    raise ConfigError(f"{place}: {column}={rate!r} is no pass rate: set a number from 0 to 1, or leave it empty")


def refused_rows(lengths: np.ndarray, most: int, too_long: str) -> np.ndarray:
    """Return the rows that `is_fitting` refuses, or that cannot be read."""
    refused = (lengths == UNREADABLE) | (lengths == 0) | ((lengths > most) & (too_long == "error"))
    return np.flatnonzero(refused)


def is_fitting(prompt: Prompt, length: int, most: int, too_long: str) -> bool:
    """Tell whether a prompt is within the limit; a longer one is refused by its place, or to be dropped."""
    if length == 0 or (length > most and too_long == "error"):
        raise ConfigError(
            f"{prompt.place()} has {length} tokens; 1 to rollout.max_prompt_tokens={most} "
            "are allowed: change the row or the limit, or set data.too_long=drop",
            key="rollout.max_prompt_tokens",
        )
    return length <= most
