"""A conversation that calls a tool, the tools it may call, and a chat template that shows both."""

from pathlib import Path
from typing import Any

from trueline.data.messages import Message, Tool

CALCULATOR = f"{Path(__file__).parents[2]}/examples/tools/calculator.py:calculator"
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }};{% endfor %}</s>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS: list[Tool] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def calling(name: str = "add", **arguments: Any) -> Message:
    """The assistant's turn, with nothing but a call in it."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


ASKED: Message = {"role": "user", "content": "1+1="}
RESULT: Message = {"role": "tool", "content": "2"}
TOOL_TALK: list[Message] = [ASKED, calling(a=1, b=1), RESULT, {"role": "assistant", "content": "two"}]
