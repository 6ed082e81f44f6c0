"""Chat messages, without torch, because the processes of user code import this module."""

from dataclasses import dataclass, field
from typing import Any

# Role, content (text, empty if a turn only calls tools, or parts if there are pictures), all other fields of the data
Message = dict[str, Any]
Tool = dict[str, Any]  # a schema, as chat templates read it

TEMPLATE_ROLES = ("system", "user", "assistant", "tool")


def content_of(message: Message) -> str:
    """Return the text of a message's content, or empty text."""
    return "".join(texts_of(message))


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message: one, or those between its pictures."""
    content = message.get("content")
    if isinstance(content, list):
        return [str(part["text"]) for part in content if part.get("type") == "text"]
    return [str(content or "")]


def called_functions(message: Message) -> list[str]:
    return [call.get("function", call)["name"] for call in message.get("tool_calls") or []]


@dataclass(frozen=True, slots=True)
class Talk:
    """The conversation that a policy's last reply belongs to."""

    opening: list[Message] = field(default_factory=list)  # before its first reply
    turns: list[Message] = field(default_factory=list)  # from its first reply to its last
    closing: list[Message] = field(default_factory=list)  # after its last reply
    reply: str = ""  # the text of the last one

    def after_opening(self) -> list[Message]:
        return [*self.turns, *self.closing]

    def before_reply(self) -> list[Message]:
        return [*self.opening, *self.turns[:-1]]
