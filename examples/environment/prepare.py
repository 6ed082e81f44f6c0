"""Make the small model of examples/tools, and conversations with mostly random replies to letters.

python examples/environment/prepare.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from prepare import make_model

LETTERS = "abcd"


def conversation(generator: random.Random) -> list[dict[str, str]]:
    messages = []
    for turn in range(3):
        shown, reply = generator.choice(LETTERS), generator.choice(LETTERS)
        if generator.random() < 0.25:
            reply = LETTERS[(LETTERS.index(shown) + 1) % len(LETTERS)]
        messages += [{"role": "user", "content": f"go {shown}" if turn == 0 else shown}]
        messages += [{"role": "assistant", "content": reply}]
    return messages


def main(folder: Path) -> None:
    make_model(folder / "model")
    generator = random.Random(0)
    rows = {
        "teacher": [{"messages": conversation(generator)} for _ in range(4000)],
        "practice": [{"prompt": "go "} for _ in range(32)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
