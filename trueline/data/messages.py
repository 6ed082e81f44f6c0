"""What chats are made of; imported without torch, by processes of user code too."""

from typing import Any

Message = dict[str, Any]  # role, content (empty where a turn only calls tools), and all other fields of the data
Tool = dict[str, Any]  # a schema, as chat templates read it


def content_of(message: Message) -> str:
    """Return a message's content, or empty text where there is none, as in an environment's messages."""
    return str(message.get("content") or "")


def called_functions(message: Message) -> list[str]:
    return [call.get("function", call)["name"] for call in message.get("tool_calls") or []]
