"""What every reader of dataset rows shares: columns, texts, messages, tools."""

import json
import re
from collections.abc import Iterable
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.messages import Message, Tool
from trueline.data.rows import Located, Row

LABEL_COLUMNS = ("label", "answer", "solution")
ROLES = {  # a speaker's name in datasets, in lower case -> the role that chat templates know
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "ai", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
PYTHON_MESSAGES = re.compile(r"\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")  # a list of messages as text


def choose_column(first: Located, named: str | None, usual: tuple[str, ...], key: str, required: bool = True) -> str:
    """Return the named column, or the first usual one that the data has; empty if it is absent and optional."""
    columns = ", ".join(first.row)
    if named is not None and named not in first.row:
        raise ConfigError(f"{key}={named}: {first.place} has no such column: set one of {columns}", key=key)
    found = [column for column in usual if column in first.row] if named is None else [named]
    if not found and required:
        usual_ones = ", ".join(usual)
        raise ConfigError(f"{first.place} has none of the columns {usual_ones}: set {key} to one of {columns}", key=key)
    return found[0] if found else ""


def value_of(located: Located, column: str) -> Any:
    if column not in located.row:
        raise ConfigError(f"{located.place}: column {column!r} is missing: add it to the row")
    if (value := located.row[column]) is None:
        raise ConfigError(f"{located.place}: column {column!r} is empty: fill it in or delete the row")
    return value


def text_of(located: Located, column: str) -> str:
    value = value_of(located, column)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{located.place}: column {column!r} must be non-empty text, found {value!r:.80}")
    return value


def messages_or_text(located: Located, column: str) -> Any:
    """Return a column's value; messages as JSON text, as in CSV files, are parsed."""
    value = value_of(located, column)
    if not isinstance(value, str) or not PYTHON_MESSAGES.match(value.lstrip()):
        return value
    found = parse_json_text(value)
    if not isinstance(found, list):
        raise ConfigError(
            f"{located.place}: column {column!r} contains messages as text that is not JSON, {value!r:.80}: write them "
            "with json.dumps, or as a list in a JSONL file"
        )
    return found


def read_messages(located: Located, column: str, system_prompt: str | None) -> list[Message]:
    """Read a prompt: messages, or text as one user message, after the system prompt if there is one."""
    messages = read_turns(located, column, "user")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{located.place}: column {column!r}: remove the assistant message at the end of the prompt")
    return with_system(messages, system_prompt)


def with_system(messages: list[Message], prompt: str | None) -> list[Message]:
    return messages if prompt is None else [{"role": "system", "content": prompt}, *messages]


def read_turns(located: Located, column: str, role: str) -> list[Message]:
    """Read the messages of a column; text is one message of the role."""
    value = messages_or_text(located, column)
    if isinstance(value, list):
        return parse_messages(value, located, column)
    return [{"role": role, "content": text_of(located, column)}]


def parse_messages(value: Any, located: Located, column: str) -> list[Message]:
    """Parse every message with all of its fields."""
    where = f"{located.place}: column {column!r}"
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list of messages, found {value!r:.80}")
    if not value:
        raise ConfigError(f"{where} has no messages: add some or delete the row")
    entries = enumerate(without_nulls(value) if located.padded else value, 1)
    return [parse_message(entry, f"{where}, message {number}", pictures=True) for number, entry in entries]


def parse_message(entry: Any, where: str, *, pictures: bool = False) -> Message:
    """Parse one message: empty fields are dropped; ShareGPT's from and value become role and content."""
    fields = {name: value for name, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
    role = fields.pop("role", None)
    speaker = role or fields.pop("from", None)
    given = fields.pop("content" if "content" in fields else "value", None)
    content = read_content(given, where) if pictures else join_text(given, where)
    calls = parse_calls(fields.pop("tool_calls", None), where)
    if content is None and calls:
        content = ""  # most templates concatenate it
    if not isinstance(speaker, str) or not isinstance(content, str | list):
        raise ConfigError(f"{where}: expected role and content (or from and value) as text, found {entry!r:.80}")
    if speaker.lower() not in ROLES:
        raise ConfigError(f"{where}: unknown {'role' if role else 'from'} {speaker!r}: use one of {', '.join(ROLES)}")
    message = {"role": ROLES[speaker.lower()], "content": content, **fields}
    if not (calls or isinstance(content, list) or content.strip() or message["role"] == "tool"):
        raise ConfigError(f"{where}: its text is empty: fill it in or remove the message")
    return message | ({"tool_calls": calls} if calls else {})


def renamed_roles(rows: Iterable[Row]) -> str:
    """Describe which roles of the rows are renamed; empty if all have their usual names."""
    lists = [value for row in rows for value in row.values() if isinstance(value, list)]
    entries = [entry for value in lists for entry in value if isinstance(entry, dict)]
    speakers = dict.fromkeys(str(entry.get("role") or entry.get("from")) for entry in entries)
    renamed = {name: ROLES[name.lower()] for name in speakers if ROLES.get(name.lower(), name) != name}
    return ", ".join(f"{name} as {role}" for name, role in renamed.items())


def read_content(content: Any, where: str) -> Any:
    """Keep parts if there are pictures among them, OpenAI's as others; join those that are only text."""
    content = [as_image(part) for part in content] if isinstance(content, list) else content
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return join_text(content, where)
    join_text([{"type": "text", "text": ""} if is_picture(part) else part for part in content], where)  # checks texts
    return [part if is_picture(part) else {"type": "text", "text": part["text"]} for part in content]


def as_image(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    value = part.get("image_url")
    return {"type": "image", "image": value.get("url") if isinstance(value, dict) else value}


def is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def join_text(content: Any, where: str) -> Any:
    """Join the text of content that comes in parts; return other content unchanged."""
    if not isinstance(content, list):
        return content
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(f"{where}: part {number} of its content has type {kind!r}, not text: remove it")
    return "".join(part["text"] for part in content)


def parse_calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = [] if value is None else parse_json_text(value)
    if not isinstance(calls, list):
        raise ConfigError(f"{where}: tool_calls must be a list, found {value!r:.80}")
    return [parse_call(call, f"{where}, tool call {number}") for number, call in enumerate(calls, 1)]


def parse_call(call: Any, where: str) -> dict[str, Any]:
    """Parse a call as chat templates expect it: with arguments as an object, which OpenAI writes as text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name") or not isinstance(function["name"], str):
        raise ConfigError(f"{where}: expected a function name and its arguments, found {call!r:.80}")
    given = function.get("arguments")
    arguments = {} if given in (None, "") else parse_json_text(given)
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}: arguments must be an object, or JSON text of one, found {given!r:.80}")
    complete = {**function, "arguments": arguments}
    return complete if function is call else {**call, "function": complete}


def read_tools(located: Located) -> list[Tool]:
    """Read the tool schemas of column `tools`: a list, or JSON text of one."""
    value = located.row.get("tools")
    value = without_nulls(value) if located.padded else value
    tools = [] if value in (None, "") else parse_json_text(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{located.place}: column 'tools' must be a list of tool schemas or JSON text of one, found {value!r:.80}; "
            "fix it or rename the column"
        )
    return tools


def parse_json_text(value: Any) -> Any:
    """Parse text that is JSON; return anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return value
