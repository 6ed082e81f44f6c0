"""Dataset row -> prompt to answer, and what every reader of rows shares: columns, texts, messages."""

from typing import Any

from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.data.sources import Located
from trueline.data.types import Message, Prompt

PROMPT_COLUMNS = ("messages", "prompt", "question")
LABEL_COLUMNS = ("label", "answer", "solution")
COMPLETION_COLUMNS = ("completion", "answer", "response")
ROLES = {  # a speaker's name, as datasets have it -> the role that chat templates know
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}


def read_prompts(rows: list[Located], config: PromptDataConfig, source: str) -> list[Prompt]:
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
    messages = parse_messages(value, located, column)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{located.place}: column {column!r}: a prompt must end with a message for the model to answer, not its own"
        )
    return messages


def parse_messages(value: Any, located: Located, column: str) -> list[Message]:
    """Role and content, or ShareGPT's from and value, of every message; other keys of theirs are left out."""
    where = f"{located.place}: column {column!r}"
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list of messages, found {value!r:.80}")
    if not value:
        raise ConfigError(f"{where} holds no message")
    return [parse_message(entry, f"{where}, message {number}") for number, entry in enumerate(value)]


def parse_message(entry: Any, where: str) -> Message:
    fields = entry if isinstance(entry, dict) else {}
    role, speaker = fields.get("role"), fields.get("role") or fields.get("from")
    content = fields.get("value") if fields.get("content") is None else fields["content"]
    if not isinstance(content, str) or not isinstance(speaker, str):
        raise ConfigError(f"{where}: expected role and content (or from and value) as text, found {entry!r:.80}")
    if not content.strip():
        raise ConfigError(f"{where}: its text is empty; fill it in or leave the message out")
    if not role and speaker not in ROLES:
        raise ConfigError(f"{where}: from={speaker!r} is not known; use one of {', '.join(ROLES)}")
    return {"role": ROLES.get(speaker, speaker), "content": content}
