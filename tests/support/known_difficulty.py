"""A task whose difficulty is known: of each three rows one is always solved, one never, and one half of the time."""

import json
from pathlib import Path

from tests.support.letters import letters_command

REWARD = """
def known(reply: str, prompt: str) -> float:
    return {"e": 1.0, "h": 0.0}.get(prompt[0], float(sum(map(ord, reply)) % 2))
"""
SOLVED, RESTING = "ehm", "data.difficulty.enabled=true"


def known_command(folder: Path, *words: str, rows: int = 12) -> list[str]:
    """The command of a run that hardly learns, so that the difficulty stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "known.py").write_text(REWARD)
    prompts = [{"prompt": f"{SOLVED[number % 3]}{number}:"} for number in range(rows)]
    (folder / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    task = [f"data.path={folder}/known.jsonl", f"reward.function={folder}/known.py:known", "prompts_per_step=4"]
    small = ["rollout.max_new_tokens=4", "training.learning_rate=1e-6"]
    return letters_command(folder, "grpo", *task, *small, *words)
