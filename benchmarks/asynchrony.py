"""Samples per second and rewards of synchronous and asynchronous GRPO where a few completions take long.

    python benchmarks/asynchrony.py FOLDER [--seeds 3] [--steps 14] [--delay 0.005] [--tokens 600] [--modes NAME ...]
        [--out FILE]

A small random model through Ray, vLLM and DeepSpeed on CPUs. The engine (tests/support/slow_engine.py) sleeps before
each token, like a large model, and leaves the cores to the trainer. Lengths are heavy-tailed: half of the completions
have fewer than 40 tokens, one in thirty has the maximum. The runs of one seed follow each other. Prints medians over
seeds of the steps from the third on, and for each mode the range over seeds of the mean reward of the last ten steps.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from random_model import make_model, make_parser, make_prompts, read_steps, run_words, write_result

ROOT = Path(__file__).resolve().parents[1]
MODES = {
    "synchronous": [],
    "1 wait": ["rollout.max_staleness=1"],
    "1 interrupt": ["rollout.max_staleness=1", "rollout.on_update=interrupt"],
    "1 keep": ["rollout.max_staleness=1", "rollout.on_update=keep"],
    "3 wait": ["rollout.max_staleness=3"],
    "3 keep": ["rollout.max_staleness=3", "rollout.on_update=keep"],
}
WARM, LAST = 2, 10
WORDS = 260  # of the model, one of which ends a completion


def run(folder: Path, mode: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    name = f"{mode.replace(' ', '-')}-{seed}"
    words = [*run_words(folder, given.steps, name=name), f"seed={seed}", "prompts_per_step=4"]
    words += ["algorithm.group_size=4", f"rollout.max_new_tokens={given.tokens}", "training.learning_rate=3e-3"]
    words += ["algorithm.kl.coefficient=0", "checkpoint.save=false", *MODES[mode]]
    command = [sys.executable, "-m", "tests.support.slow_run", "grpo", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SECONDS_PER_TOKEN": str(given.delay)}
    environment["HEAVY_TAIL"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    steps = read_steps(folder / name)
    seconds = sum(row["time/step"] for row in steps[WARM:])
    return {
        "steps": len(steps),
        "warm": WARM,
        "samples_per_second": 16 * len(steps[WARM:]) / seconds,
        **{phase: fmean(row[f"time/{phase}"] for row in steps[WARM:]) for phase in ("step", "sync")},
        "rollouts": [row["time/rollout"] for row in steps],
        "reward": fmean(row["reward/mean"] for row in steps[-LAST:]),
        "first_reward": steps[0]["reward/mean"],
        "length": fmean(row["response_length/mean"] for row in steps),
        "staleness": fmean(row["rollout/staleness_mean"] for row in steps),
        "several_versions": fmean(row["rollout/several_versions_share"] for row in steps),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--delay", type=float, default=0.005)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    make_model(folder / "model", "tiny", vocabulary=WORDS)
    make_prompts(folder)
    found: dict[str, Any] = {}
    for seed in range(given.seeds):
        for mode in given.modes:
            found.setdefault(mode, []).append(run(folder, mode, seed, given))
            numbers = {name: value for name, value in found[mode][-1].items() if name != "rollouts"}
            print(mode, seed, {name: round(value, 3) for name, value in numbers.items()}, flush=True)
    for mode, runs in found.items():
        rewards = [one["reward"] for one in runs]
        speed = median(one["samples_per_second"] for one in runs)
        first = median(one["samples_per_second"] for one in found[given.modes[0]])
        print(
            f"{mode:<12} {speed:6.2f} samples/s ({speed / first:.2f})  reward {min(rewards):.3f} to {max(rewards):.3f}"
        )
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
