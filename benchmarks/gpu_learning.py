"""A real model learns two-digit sums on one GPU, with the three flags and the few keys below.

    python benchmarks/gpu_learning.py MODEL FOLDER [--verb ppo] [--steps 100] [--kill-after 20] [key=value ...]

MODEL is a folder with an instruction-tuned model, for instance SmolLM2-135M-Instruct. Prints held-out greedy accuracy
over the steps and the gaps between engine and trainer; exits 1 below --least. --kill-after kills the engine twice
once that step is done: the process that samples, and the one that is started in its place.
"""

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from pathlib import Path

import psutil

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


def ray_processes(words: str) -> list[psutil.Process]:
    """Return Ray's processes below this one whose command begins with, or names, these words."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if words in " ".join(one.cmdline()):
                found.append(one)
    return found


def kill_engine_twice(metrics: Path, step: int) -> None:
    """Wait for a step; kill the engine, and the process that is started for it as soon as Ray has made one."""
    while not metrics.exists() or sum('"loss"' in line for line in metrics.read_text().splitlines()) < step:
        time.sleep(0.1)
    (engine,), known = ray_processes("ray::AsyncActorHost"), ray_processes("ray")
    engine.kill()
    began = time.monotonic()
    while not (again := [one for one in ray_processes("default_worker.py") if one not in known]):
        time.sleep(0.01)
    again[0].kill()
    print(f"killed the engine {engine.pid}, and {time.monotonic() - began:.2f} s later {again[0].pid}", flush=True)


def report(folder: Path, least: float) -> int:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["evaluation/reward"]) for row in rows if "evaluation/reward" in row]
    gaps = [row["sync/canary_gap"] for row in rows if "sync/canary_gap" in row]
    steps = [row["time/step"] for row in rows if "loss" in row]
    print("held-out greedy accuracy: " + ", ".join(f"step {step} {100 * value:.1f} %" for step, value in curve))
    middle = sorted(steps)[len(steps) // 2]
    sampled = sorted(row["time/rollout"] for row in rows if "loss" in row)[len(steps) // 2]
    print(f"{len(gaps)} updates, largest gap of log-probs {max(gaps):.3f}, median step {middle:.2f} s")
    drawn = [row for row in rows if "mismatch/sampler_z_run" in row]
    print(f"median rollout {sampled:.2f} s, sampler z {drawn[-1]['mismatch/sampler_z_run']:.1f}" if drawn else "")
    return int(curve[-1][1] < least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verb", default="grpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--least", type=float, default=0.7)
    parser.add_argument("--kill-after", type=int)
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    make_data(folder)
    if options.kill_after is not None:
        wait = threading.Thread(
            target=kill_engine_twice, args=(folder / "run" / "metrics.jsonl", options.kill_after), daemon=True
        )
        wait.start()
    command = [options.verb, "--model", options.model, "--data", f"{folder}/train.jsonl"]
    command += ["--reward", f"{folder}/reward.py:reward", "--name", "run", f"folder={folder}", f"steps={options.steps}"]
    command += ["prompts_per_step=32", "rollout.max_new_tokens=24", "training.learning_rate=5e-6"]
    command += [f"evaluation.data={folder}/held_out.jsonl", f"evaluation.every={max(options.steps // 5, 1)}"]
    return trueline([*command, "checkpoint.every=0", *overrides]) or report(folder, options.least)


if __name__ == "__main__":
    sys.exit(main())
