"""An agent that knows nothing of training: it calls a model through OpenAI's client, and runs its tool.

    trueline grpo --model MODEL --data FOLDER/practice.jsonl --agent examples/agent/agent.py:main

MODEL and FOLDER as in examples/tools. `client` is an openai.OpenAI whose address and key belong to this episode.
"""

import random
from typing import Any

DRAW = {
    "type": "function",
    "function": {"name": "draw", "description": "Draw a card.", "parameters": {"type": "object", "properties": {}}},
}
TURNS = 3


def main(prompt: str, client: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    drawn = ""
    for _ in range(TURNS):
        response = client.chat.completions.create(model="policy", messages=messages, tools=[DRAW])
        message = response.choices[0].message
        if not message.tool_calls:
            return float(drawn != "" and message.content == drawn)
        messages.append(message)
        for call in message.tool_calls:
            drawn = random.choice("bcdefghk")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": drawn})
    return 0.0
