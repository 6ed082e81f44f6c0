"""A real model learns two-digit sums on one GPU, with the three flags and the few keys below.

    python benchmarks/gpu_learning.py MODEL FOLDER [--verb ppo] [--steps 100] [key=value ...]

MODEL is a folder with an instruction-tuned model, for instance SmolLM2-135M-Instruct. Prints held-out greedy accuracy
over the steps and the gaps between engine and trainer; exits 1 below --least.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from trueline.cli import main as trueline

HELD_OUT = 300
REWARD = """
import re

def reward(reply: str, label: str) -> float:
    numbers = re.findall(r"\\d+", reply)
    return float(bool(numbers) and numbers[-1] == label)
"""


def make_data(folder: Path) -> None:
    pairs = [(one, other) for one in range(10, 100) for other in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rows = [
        {"prompt": f"What is {one} + {other}? Answer with the number only.", "label": str(one + other)}
        for one, other in pairs
    ]
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "reward.py").write_text(REWARD)


def report(folder: Path, least: float) -> int:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["evaluation/reward"]) for row in rows if "evaluation/reward" in row]
    gaps = [row["sync/canary_gap"] for row in rows if "sync/canary_gap" in row]
    steps = [row["time/step"] for row in rows if "loss" in row]
    print("held-out greedy accuracy: " + ", ".join(f"step {step} {100 * value:.1f} %" for step, value in curve))
    middle = sorted(steps)[len(steps) // 2]
    print(f"{len(gaps)} updates, largest gap of log-probs {max(gaps):.3f}, median step {middle:.2f} s")
    return int(curve[-1][1] < least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verb", default="grpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--least", type=float, default=0.7)
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    make_data(folder)
    command = [options.verb, "--model", options.model, "--data", f"{folder}/train.jsonl"]
    command += ["--reward", f"{folder}/reward.py:reward", "--name", "run", f"folder={folder}", f"steps={options.steps}"]
    command += ["prompts_per_step=32", "rollout.max_new_tokens=24", "training.learning_rate=5e-6"]
    command += [f"evaluation.data={folder}/held_out.jsonl", f"evaluation.every={max(options.steps // 5, 1)}"]
    return trueline([*command, "checkpoint.every=0", *overrides]) or report(folder, options.least)


if __name__ == "__main__":
    sys.exit(main())
