"""A word game of three turns: the game shows a letter, the model replies with the next one of the circle a b c d.

    python examples/environment/prepare.py FOLDER
    trueline sft --model FOLDER/model --data FOLDER/teacher.jsonl --name sft folder=FOLDER
    trueline ppo --model FOLDER/sft/... --data FOLDER/practice.jsonl --environment examples/environment/game.py:Circle

Every turn has its own reward.
"""

import random

LETTERS = "abcd"


class Circle:
    def __init__(self, turns: int = 3) -> None:
        self.left = turns
        self.shown = ""

    def reset(self, prompt: str) -> str:
        self.shown = random.choice(LETTERS)
        return f"{prompt}{self.shown}"

    def step(self, reply: str) -> dict[str, object]:
        wanted = LETTERS[(LETTERS.index(self.shown) + 1) % len(LETTERS)]
        reward = float(reply == wanted) / 3
        self.left -= 1
        self.shown = random.choice(LETTERS)
        return {"messages": self.shown, "reward": reward, "done": self.left == 0}
