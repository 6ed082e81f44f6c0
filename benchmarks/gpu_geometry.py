"""A random vision-language model learns by GRPO to measure rectangles, on one GPU.

    python benchmarks/gpu_geometry.py FOLDER [--family qwen2_5_vl] [--shape small] [--steps 120] [--rows 2000]
        [--least 0.8] [--out FILE] [key=value ...]

A picture has a rectangle of 1 to 4 cells a side; the answer is "WIDTHxHEIGHT", and each right side is half of the
reward. First the model learns by SFT to write such answers, from a teacher that guesses. Prints the held-out greedy
reward before and after, also with pictures that were exchanged; exits 1 if it ends below --least.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from picture_model import FAMILIES, TEXTS, make_picture_model
from PIL import Image, ImageDraw
from random_model import make_parser, run_words, write_result

from trueline import cli
from trueline.data.pictures import encode
from trueline.files import read_rows

CELL, CELLS, HELD_OUT = 28, 4, 200
REWARD = """
def reward(reply: str, label: str) -> float:
    sides = reply.strip().split("x")
    return sum(one == other for one, other in zip(sides, label.split("x"))) / 2 if len(sides) == 2 else 0.0
"""


def draw(width: int, height: int, generator: random.Random) -> Image.Image:
    shade, colour = (tuple(generator.randrange(*ends) for _ in range(3)) for ends in ((0, 90), (150, 256)))
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), shade)
    left, top = (CELL * generator.randrange(CELLS - side + 1) for side in (width, height))
    ImageDraw.Draw(image).rectangle((left, top, left + CELL * width - 1, top + CELL * height - 1), colour)
    return image


def make_data(folder: Path, count: int) -> None:
    generator, rows = random.Random(0), []
    (folder / "pictures").mkdir()
    for number in range(count):
        sides, file = (1 + number % CELLS, 1 + number // CELLS % CELLS), f"pictures/{number}.png"
        (folder / file).write_bytes(encode(draw(*sides, generator)))
        rows.append({"prompt": "Measure it.", "image": file, "label": "{}x{}".format(*sides)})
    held_out, trained = rows[:HELD_OUT], rows[HELD_OUT:]
    others = generator.sample(held_out, len(held_out))
    exchanged = [{**row, "image": other["image"]} for row, other in zip(held_out, others, strict=True)]
    guessed = ["x".join(str(1 + generator.randrange(CELLS)) for _ in range(2)) for _ in trained]
    taught = [
        {"prompt": row["prompt"], "image": row["image"], "completion": text}
        for row, text in zip(trained, guessed, strict=True)
    ]
    for name, lines in {"prompts": trained, "teacher": taught, "held_out": held_out, "exchanged": exchanged}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)


def report(run: Path, least: float) -> dict[str, Any]:
    rows = [row for row in read_rows(run / "metrics.jsonl") if "evaluation/held_out/reward" in row]
    curves = {name: [row[f"evaluation/{name}/reward"] for row in rows] for name in ("held_out", "exchanged")}
    print("held out", *(f"step {row['step']} {row['evaluation/held_out/reward']:.3f}" for row in rows))
    print("exchanged", *(f"{value:.3f}" for value in curves["exchanged"]))
    return {"steps": [row["step"] for row in rows], **curves, "learned": curves["held_out"][-1] >= least}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="qwen2_5_vl", choices=FAMILIES)
    parser.add_argument("--shape", default="small", choices=TEXTS)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--least", type=float, default=0.8)
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    make_picture_model(folder / "start", options.family, options.shape)
    make_data(folder, options.rows + HELD_OUT)
    words = ["--model", f"{folder}/start", "--data", f"{folder}/teacher.jsonl", "--name", "sft", f"folder={folder}"]
    words += ["samples_per_step=64", "epochs=2", "training.learning_rate=3e-4", "checkpoint.every=0", *overrides]
    if cli.main(["sft", *[word for word in words if not word.startswith(("rollout.", "algorithm."))]]):
        return 1
    (taught,) = (folder / "sft" / "checkpoints").glob("step_*/model")
    words = [*run_words(folder, options.steps), f"model.path={taught}", "model.train_vision=all", "prompts_per_step=32"]
    words += ["rollout.max_new_tokens=6", "training.learning_rate=1e-4", "algorithm.kl.coefficient=0"]
    words += [f"evaluation.sets.{name}={folder}/{name}.jsonl" for name in ("held_out", "exchanged")]
    words += [f"evaluation.every={max(options.steps // 4, 1)}", "checkpoint.every=0", *overrides]
    if cli.main(["grpo", *words]):
        return 1
    found = report(folder / "run", options.least)
    write_result(options.out, found)
    return int(not found["learned"])


if __name__ == "__main__":
    sys.exit(main())
