"""Supervised steps of a random-weight model on one GPU: packed against padded, tokens per second, MFU and memory.

    python benchmarks/gpu_sft.py FOLDER [--steps 8] [--tiny] [key=value ...]

The model has the shape of a 1.5B-parameter Qwen2 and random weights, the rows 64 to 2048 tokens; --tiny shrinks both
for a try on a CPU. Every line is the median of the steps after the third.
"""

import json
import math
import random
import shutil
import sys
from pathlib import Path
from statistics import median

from random_model import make_model, make_parser

from trueline.cli import main as trueline

VARIANTS = {
    "packed": [],
    "packed, checkpointed": ["model.gradient_checkpointing=true"],
    "padded, checkpointed": ["model.gradient_checkpointing=true", "training.packing=false"],
    "packed, checkpointed, LoRA 16": ["model.gradient_checkpointing=true", "model.lora.rank=16"],
}
SHOWN = ("speed/tokens_per_second", "speed/mfu", "memory/peak_gib", "time/train", "loss")


def make_data(folder: Path, rows: int, longest: int) -> None:
    """Lengths are spread evenly on a logarithmic scale."""
    generator = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(rows):
            length = int(math.exp(generator.uniform(math.log(64), math.log(longest))))
            text = "".join(generator.choices("abcdefgh 0123456789", k=length - 4))
            file.write(json.dumps({"prompt": text[: length // 4], "completion": text[length // 4 :]}) + "\n")


def measure(folder: Path, name: str, options: list[str]) -> dict[str, float]:
    run = name.replace(",", "").replace(" ", "_")
    words = ["sft", "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--name", run]
    ended = trueline([*words, f"folder={folder}", "checkpoint.every=0", "training.micro_batch_tokens=16384", *options])
    if ended:
        raise SystemExit(f"{name}: exit code {ended}")
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / run / "checkpoints")  # 20 GB each
    steps = [line for line in lines if "loss" in line][3:]
    return {key: median(step[key] for step in steps) for key in SHOWN if key in steps[0]}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    options, overrides = parser.parse_known_args()
    options.folder.mkdir(parents=True)
    make_model(options.folder / "model", "tiny" if options.tiny else "1.5B")
    make_data(options.folder, rows=512, longest=256 if options.tiny else 2048)
    sizes = [f"steps={options.steps}", f"samples_per_step={16 if options.tiny else 128}", *overrides]
    found = {name: measure(options.folder, name, [*sizes, *keys]) for name, keys in VARIANTS.items()}
    for name, numbers in found.items():
        print(f"{name:32}" + "  ".join(f"{key.rpartition('/')[2]} {value:.4g}" for key, value in numbers.items()))
    (options.folder / "result.json").write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
