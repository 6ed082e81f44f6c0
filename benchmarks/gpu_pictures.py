"""Prompts with pictures on one GPU: log-probs of vLLM and of the trainer, and RL steps with their forecast of memory.

    python benchmarks/gpu_pictures.py FOLDER [--family qwen2_5_vl] [--shape small | 3B | tiny] [--steps 3]
        [--out FILE] [key=value ...]

Makes a model of that family with random weights. First vLLM and the trainer score the same prompts in one process: one
with text alone, one with two pictures, and the latter once more while vLLM gets other pictures (--steps 0 ends here).
Then GRPO runs with three flags, one picture to a prompt. Exits 1 if pictures add more than half to the gap of
log-probs, if other pictures are not noticed, or if the forecast of memory is wrong by more than 15 %.
"""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch
from gpu_memory import forecast_memory, report
from picture_model import FAMILIES, TEXTS, make_picture_model
from PIL import Image
from random_model import REWARD, make_parser, run_words, write_result

from trueline import cli
from trueline.api import quiet_libraries
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.chat import OpenPrompt
from trueline.data.pictures import Picture, encode
from trueline.data.types import Sample
from trueline.models.loading import load_chat
from trueline.rollout.engine import EngineSpec
from trueline.rollout.vllm_engine import VllmEngine
from trueline.runtime.actors import LocalActor
from trueline.runtime.event_loop import EventLoop
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker, WorkerSpec

PROMPTS, SIDE = 64, 224
MOST = 1.5  # of the gap of a text is the gap with pictures
NOTICED = 2.0  # times that gap is the one with other pictures, at least


def draw(seed: int) -> Picture:
    """Draw coarse noise, which no two seeds share."""
    cells = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Picture(encode(Image.fromarray(cells).resize((SIDE, SIDE), Image.Resampling.NEAREST)), SIDE, SIDE)


def compare_scores(model: Path) -> dict[str, float]:
    """Return mean gaps between the log-probs of vLLM and of the trainer: of texts, pictures, and other pictures."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    config, ranks = (
        ModelConfig.parse({"path": str(model), "dtype": dtype}),
        TrainingConfig.parse({"engine": "torch", "learning_rate": 1e-6}),
    )
    group = ModelGroup("policy", [LocalActor("policy", Worker(WorkerSpec(config, ranks, 0, 1, 100, 0)))], ranks, 300.0)
    group.start()
    spec = EngineSpec(str(model), dtype, 2048, 1, 16, 0, 0.3, False, False, trust_remote_code=False, pictures=2)
    engine, loop, chat = VllmEngine(spec), EventLoop(300.0), load_chat(config, "auto")
    parts = [{"type": "image"}, {"type": "text", "text": "What differs in these? " * 8}, {"type": "image"}]
    shown = chat.begin([{"role": "user", "content": parts}], (), (draw(1), draw(2)))
    plain = chat.begin([{"role": "user", "content": "What differs in these? " * 24}])

    def gap(prompt: OpenPrompt, pictures: tuple[Picture, ...]) -> float:
        tokens, seen = torch.tensor(prompt.tokens), prompt.shown.pictures if prompt.shown else ()
        sample = Sample(tokens, torch.arange(len(tokens)) > 0, pictures=pictures)
        found = torch.tensor(loop.run(engine.score(prompt.tokens, prompt.shown), "scoring"))
        text = tokens[1:] != (chat.vision.token if seen and chat.vision is not None else -1)
        return (found - group.score([sample], 1.0)[0][1:])[text].abs().mean().item()

    found = {
        "text": gap(plain, ()),
        "pictures": gap(shown, (draw(1), draw(2))),
        "others": gap(shown, (draw(1), draw(3))),
    }
    loop.stop()
    return found


def make_prompts(folder: Path) -> None:
    (folder / "pictures").mkdir(exist_ok=True)
    rows = [{"prompt": f"Describe number {at}.", "image": f"pictures/{at}.png"} for at in range(PROMPTS)]
    for at, row in enumerate(rows):
        (folder / row["image"]).write_bytes(draw(at).data)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="qwen2_5_vl", choices=FAMILIES)
    parser.add_argument("--shape", default="small", choices=TEXTS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    make_picture_model(folder / "model", options.family, options.shape)
    make_prompts(folder)
    quiet_libraries()
    gaps = compare_scores(folder / "model")
    print(options.family, options.shape, *(f"{name} {value:.2g}" for name, value in gaps.items()), flush=True)
    write_result(options.out, {"gaps": gaps})
    if gaps["pictures"] > MOST * gaps["text"] + 1e-5 or gaps["others"] < NOTICED * gaps["pictures"]:
        return 1
    if not options.steps:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    words = [*run_words(folder, options.steps), *overrides]
    forecast = forecast_memory(["grpo", *words])
    return cli.main(["grpo", *words]) or report(forecast, folder / "run")


if __name__ == "__main__":
    sys.exit(main())
