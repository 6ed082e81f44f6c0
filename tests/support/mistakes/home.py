"""The folder in which mistakes are made, and the words that most of them begin with."""

import json
from pathlib import Path

from tests.support.reward_models import make_reward_model
from tests.support.tiny import make_tiny_model

Mistake = tuple[list[str], str] | tuple[list[str], str, int]  # words, what the screen must show, status if it is not 2
LOCAL = ["runtime=local", "monitoring.tensorboard=false", "rollout.max_new_tokens=4", "checkpoint.every=0"]
SMALL = ["prompts_per_step=2", "algorithm.group_size=2", "steps=1", "training.learning_rate=1e-3"]
GRPO = ["grpo", "--model", "model", "--data", "prompts.jsonl", "--reward", "mine.py:digits", *LOCAL, *SMALL]
SFT = ["sft", "--model", "model", "runtime=local"]
TRY = ["reward", "try", "--data", "prompts.jsonl", "--reward"]

FUNCTIONS = """
def digits(reply: str, wanted: str) -> float:
    return sum(character == wanted for character in reply) / max(len(reply), 1)


def solution(reply, solution):
    return 0.0


def equal(reply, label):
    return float(reply == label)


def raises(reply):
    return {"good": 1.0}[reply]


def nothing(reply):
    reply.strip()


def listed(reply):
    return [1.0]


def constant(reply):
    return 0.5
"""
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
TEXTS = {
    "mine.py": FUNCTIONS,
    "broken.py": "import nonsense\n",
    "empty.jsonl": "",
    "bad.jsonl": '{"prompt": "a"}\n{"prompt": "b"\n',
    "columns.jsonl": '{"frage": "a", "antwort": "b"}\n',
    "blank.jsonl": '{"prompt": "a"}\n{"prompt": "  "}\n',
    "long.jsonl": json.dumps({"prompt": "x" * 300}) + "\n",
    "labels.jsonl": '{"prompt": "2+2=", "label": 4}\n' * 4,
    "same.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "b"}\n',
    "calls.jsonl": json.dumps({"messages": [{"role": "user", "content": "1+1"}, CALL]}) + "\n",
    "bad.yaml": "steps: [1\n",
    "list.yaml": "- steps\n- 5\n",
    "notes.txt": "a\n",
    "split/train.jsonl": '{"prompt": "a"}\n',
    "split/test.jsonl": '{"prompt": "b"}\n',
}


def make_home(folder: Path) -> None:
    make_tiny_model(folder / "model", tied=True)
    make_reward_model(folder / "judge", "reward")
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    rows = [{"prompt": f"Say {number}", "wanted": str(number % 10)} for number in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).write_bytes((folder / "model" / name).read_bytes())
    for name in ("taken", "begun"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text("# trueline sft\nname: begun\n")
