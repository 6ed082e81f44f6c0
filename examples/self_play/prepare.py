"""Make the small model of examples/tools, and a teacher that poses sums and forgets most carries when it adds.

python examples/self_play/prepare.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from prepare import make_model

POSE = "pose"
FORGETS = 0.7  # share of the carries


def taught(generator: random.Random) -> list[dict[str, str]]:
    left, right = generator.randint(0, 9), generator.randint(0, 9)
    if generator.random() < 0.3:
        asked, reply = POSE, f"{left}+{right}"
    else:
        forgets = left + right > 9 and generator.random() < FORGETS
        asked, reply = f"{left}+{right}=", str(left + right - 10 * forgets)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]


def main(folder: Path) -> None:
    make_model(folder / "model")
    generator = random.Random(0)
    rows = {
        "teacher": [{"messages": taught(generator)} for _ in range(8000)],
        "practice": [{"prompt": POSE} for _ in range(32)],
        "held_out": [{"prompt": POSE, "sum": f"{left}+{right}"} for left in range(10) for right in range(10)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
