"""RL steps of a random-weight model on one GPU, through Ray, vLLM and DeepSpeed: seconds per phase, log-prob gaps.

    python benchmarks/gpu_rl.py FOLDER [--verb ppo] [--reward-model] [--steps 5] [--tiny] [key=value ...]

The model has the shape of a 0.5B-parameter Qwen2 and random weights; --tiny shrinks it for a try on a CPU. With
--reward-model a reward model of that shape scores the completions.
Exits 1 if the mean log-prob gap between engine and trainer reaches 0.05 after any update.
"""

import sys
from pathlib import Path

from random_model import make_model, make_parser, make_prompts, read_steps, run_words
from transformers import Qwen2ForSequenceClassification

from trueline.cli import main as trueline

LARGEST_GAP = 0.05


def report(folder: Path) -> int:
    steps = read_steps(folder / "run")
    for row in steps:
        phases = "  ".join(f"{key[5:]} {value:.2f}" for key, value in row.items() if key.startswith("time/"))
        gap, canary = row["mismatch/logprob_gap_mean"], row["sync/canary_gap"]
        tokens = row["speed/tokens_per_second"]
        print(f"step {row['step']}: gap mean {gap:.4f} canary {canary:.4f} {tokens:.0f} tokens/s  {phases}", flush=True)
        print(f"        memory {row['memory/peak_gib']:.1f} GiB (policy)", flush=True)
    worst = max(max(row["mismatch/logprob_gap_mean"], row["sync/canary_gap"]) for row in steps)
    print(f"largest mean gap {worst:.4f} (limit {LARGEST_GAP})")
    return int(worst >= LARGEST_GAP)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verb", default="grpo")
    parser.add_argument("--reward-model", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    shape = "tiny" if options.tiny else "0.5B"
    make_model(folder / "model", shape)
    if options.reward_model:
        make_model(folder / "reward_model", shape, Qwen2ForSequenceClassification)
    make_prompts(folder)
    words = run_words(folder, options.steps, "reward_model" if options.reward_model else "reward.py:reward")
    keys = ["rollout.max_prompt_tokens=128", "training.learning_rate=1e-5"]
    return trueline([options.verb, *words, *keys, *overrides]) or report(folder)


if __name__ == "__main__":
    sys.exit(main())
