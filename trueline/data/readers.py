"""Dataset row -> record, one function per task."""

from dataclasses import dataclass
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.data import DataConfig
from trueline.data.sources import Located
from trueline.data.types import Message, Prompt

PROMPT_COLUMNS = ("messages", "prompt", "question")
LABEL_COLUMNS = ("label", "answer", "solution")
COMPLETION_COLUMNS = ("completion", "answer", "response")


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn."""

    messages: list[Message]
    completion: str
    place: str


def read_prompts(rows: list[Located], config: DataConfig, source: str) -> list[Prompt]:
    prompt_column = choose_column(rows[0], config.prompt_column, PROMPT_COLUMNS, "data.prompt_column")
    label_column = choose_column(rows[0], config.label_column, LABEL_COLUMNS, "data.label_column", required=False)
    return [
        Prompt(
            id=number,
            messages=read_messages(located, prompt_column, config.system_prompt),
            label=value_of(located, label_column) if label_column else None,
            source=source,
            columns=located.row,
        )
        for number, located in enumerate(rows)
    ]


def read_examples(rows: list[Located], config: DataConfig, completion_column: str | None) -> list[Example]:
    prompt_column = choose_column(rows[0], config.prompt_column, PROMPT_COLUMNS, "data.prompt_column")
    completion = choose_column(rows[0], completion_column, COMPLETION_COLUMNS, "completion_column")
    assert prompt_column and completion
    return [
        Example(
            messages=read_messages(located, prompt_column, config.system_prompt),
            completion=text_of(located, completion),
            place=located.place,
        )
        for located in rows
    ]


def choose_column(first: Located, named: str | None, usual: tuple[str, ...], key: str, required: bool = True) -> str:
    """The named column, or the first usual one that the data has; empty when it may be absent and is."""
    columns = list(first.row)
    if named is not None:
        if named not in columns:
            raise ConfigError(f"{key}={named}: {first.place} has no such column; it has {', '.join(columns)}")
        return named
    found = [column for column in usual if column in columns]
    if not found and required:
        raise ConfigError(
            f"{first.place} has none of the columns {', '.join(usual)}; it has {', '.join(columns)}: "
            f"name the right one with {key}=..."
        )
    return found[0] if found else ""


def value_of(located: Located, column: str) -> Any:
    if column not in located.row:
        raise ConfigError(f"{located.place}: column {column!r} is missing")
    value = located.row[column]
    if value is None:
        raise ConfigError(f"{located.place}: column {column!r} is empty")
    return value


def text_of(located: Located, column: str) -> str:
    value = value_of(located, column)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{located.place}: column {column!r} must be non-empty text, found {value!r:.80}")
    return value


def read_messages(located: Located, column: str, system_prompt: str | None) -> list[Message]:
    value = value_of(located, column)
    messages = checked_messages(value, located, column) if isinstance(value, list) else None
    if messages is None:
        messages = [{"role": "user", "content": text_of(located, column)}]
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def checked_messages(value: list[Any], located: Located, column: str) -> list[Message]:
    where = f"{located.place}: column {column!r}"
    if not value:
        raise ConfigError(f"{where} holds no message")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ConfigError(f"{where}, message {number}: expected role and content, found {message!r:.80}")
    if value[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: a prompt must end with a message for the model to answer, not its own")
    return [{"role": message["role"], "content": message["content"]} for message in value]
