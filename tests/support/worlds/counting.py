"""An environment of verifiers up to 0.3: two turns, of which the last is scored."""

import os
from typing import Any

import verifiers as vf


async def right(completion: list[Any], answer: str, **others: Any) -> float:
    reply = completion[-1]["content"]
    if reply == "raises":
        raise KeyError("no scorer")
    if reply == "dies":
        os._exit(3)
    return float(answer in reply)


async def size(completion: list[Any], **others: Any) -> float:
    return float(len(completion[-1]["content"]))


class Counting(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **others: Any) -> list[Any]:
        return [{"role": "user", "content": "Sure?"}]


def load_environment(rows: int = 3) -> Any:
    from datasets import Dataset

    asked = [
        {"question": f"{number}+1=", "answer": str(number + 1), "info": {"number": number}} for number in range(rows)
    ]
    rubric = vf.Rubric(funcs=[right, size], weights=[1.0, 0.0])
    return Counting(dataset=Dataset.from_list(asked), rubric=rubric, max_turns=2, system_prompt="Count.")
