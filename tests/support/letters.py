"""A task that a tiny model learns in a few steps, as a user would give it to the command line: answer in letters."""

import json
from pathlib import Path
from typing import Any

from tests.support.tiny import make_tiny_model
from trueline.cli import main

REWARD = """
def letters(reply: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8


def some_uniform(reply: str, prompt: str) -> float:
    return 1.0 if int(prompt.rstrip(":")) % 3 == 0 else letters(reply)
"""


def run_letters(folder: Path, verb: str, *words: str, prompts: int = 30) -> int:
    """A run in this process, in `folder / "run"`; its exit status. Later words win."""
    return main(letters_command(folder, verb, *words, prompts=prompts))


def letters_command(folder: Path, verb: str, *words: str, prompts: int = 30) -> list[str]:
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", tied=True)
    rows = [{"prompt": f"{number}:"} for number in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    named = ["--model", f"{folder}/model", "--data", f"{folder}/prompts.jsonl"]
    named += ["--reward", f"{folder}/reward.py:letters"]
    small = ["prompts_per_step=8", "rollout.max_new_tokens=8", "training.learning_rate=1e-3", "checkpoint.every=0"]
    quiet = ["monitoring.tensorboard=false", "monitoring.doctor=false"]
    return [verb, *named, *small, "runtime=local", f"folder={folder}", "name=run", *quiet, *words]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What the run reported, step 0 included."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
