"""Seconds in which new weights reach the engines, are proven and used, in steps of a run that samples next to nothing.

    python benchmarks/weight_sync.py FOLDER [--shape 1.5B] [--steps 8] [--out FILE] [key=value ...]

Prints medians of the steps from the third on: the whole sync (engines wake, weights travel, sums of both sides are
compared, a few tokens are scored by both), and the part in which weights travel and are compared.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from random_model import SHAPES, make_model, make_prompts, write_result

from trueline.cli import main as trueline

WARM = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given, overrides = parser.parse_known_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    make_model(folder / "model", given.shape)
    make_prompts(folder)
    words = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/prompts.jsonl",
        "--reward",
        f"{folder}/reward.py:reward",
    ]
    words += ["--name", "run", f"folder={folder}", f"steps={given.steps}", "rollout.max_new_tokens=8"]
    words += ["prompts_per_step=2", "checkpoint.save=false", "monitoring.tensorboard=false", *overrides]
    if trueline(["grpo", *words]):
        return 1
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row][WARM:]
    names = {"seconds": "time/sync", "sent_and_compared": "sync/seconds", "gb_per_second": "sync/gb_per_second"}
    found = {name: median(row[key] for row in steps) for name, key in names.items()}
    print(json.dumps(found))
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
