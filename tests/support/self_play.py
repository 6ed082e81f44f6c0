"""A game of two roles for random models: who writes more letters wins, and the second player moves twice."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.support.architectures import make_model
from tests.support.letters import letters_command

GAME = """
def letters(reply):
    return sum("a" <= character <= "z" for character in reply) / 4


class Race:
    roles = ("first", "second")

    def reset(self, prompt):
        self.moves = []
        return {"role": "first", "messages": prompt}

    def step(self, reply, role):
        self.moves.append(reply)
        if len(self.moves) < 3:
            return {"role": "second", "messages": f"{len(self.moves)}."}
        first, *second = map(letters, self.moves)
        return {"reward": {"first": first - max(second), "second": max(second) - first}, "done": True}
"""
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role[0] }}{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


def race_command(folder: Path, *words: str, kind: str = "llama") -> list[str]:
    """A run of a random model against itself."""
    if not (folder / "model").exists():
        make_model(folder / "model", kind)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "model")
    (folder / "game.py").write_text(GAME)
    played = ["--environment", f"{folder}/game.py:Race", "environment.max_turn_tokens=4", "environment.processes=1"]
    own = ["algorithm.group_size=4", "prompts_per_step=4", "algorithm.advantage=moving_average", *played, *words]
    command = letters_command(folder, "dr_grpo", *own)
    at = command.index("--reward")
    return command[:at] + command[at + 2 :]
