"""Seconds of weight sync, verification included, in steps of a run that samples next to nothing.

    python benchmarks/weight_sync.py FOLDER [--shape 1.5B] [--steps 8] [--out FILE] [key=value ...]

Prints medians of the steps from the third on: the whole sync (engines wake, weights are sent, checksums are compared,
both sides score a few tokens), and the part that sends and compares weights.
"""

import json
import sys
from pathlib import Path
from statistics import median

from random_model import SHAPES, make_model, make_parser, make_prompts, read_steps, run_words, write_result

from trueline.cli import main as trueline

WARM = 2


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given, overrides = parser.parse_known_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    make_model(folder / "model", given.shape)
    make_prompts(folder)
    keys = ["rollout.max_new_tokens=8", "prompts_per_step=2", "checkpoint.save=false", *overrides]
    if trueline(["grpo", *run_words(folder, given.steps), *keys]):
        return 1
    steps = read_steps(folder / "run")[WARM:]
    names = {"seconds": "time/sync", "sent_and_compared": "sync/seconds", "gb_per_second": "sync/gb_per_second"}
    found = {name: median(row[key] for row in steps) for name, key in names.items()}
    print(json.dumps(found))
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
