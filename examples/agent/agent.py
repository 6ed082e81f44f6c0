"""An agent that knows nothing of training: it asks a model through OpenAI's client, runs its tool and counts.

    trueline grpo --model MODEL --data FOLDER/practice.jsonl --agent examples/agent/agent.py:main

MODEL and FOLDER as in examples/tools. `client` is an openai.OpenAI whose address and key are those of this episode.
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
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[DRAW])
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(drawn != "" and message.content == drawn)
        messages.append(message)
        for call in message.tool_calls:
            drawn = random.choice("abcdefgh")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": drawn})
    return 0.0
