"""TRL's half of rl_step.py: GRPO on the model and the prompts of FOLDER; writes seconds and lengths of every step.

    PYTHON_WITH_TRL benchmarks/trl_grpo.py FOLDER '{"steps": 8, "prompts": 16, "group": 8, "tokens": 512, "cpu": false}'

On a GPU vLLM samples in the same process and sleeps while the model trains; on a CPU Transformers generates.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

MICRO_TOKENS = 16 * 1024  # of completions in a micro-batch: more do not fit


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.lengths: list[float] = []
        self.gib = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.gib = max(self.gib, (total - free) / 2**30)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])


def make_config(kind: Any, folder: Path, given: dict[str, Any]) -> Any:
    """Return a configuration of TRL's class."""
    completions = given["prompts"] * given["group"]
    micro_batch = min(MICRO_TOKENS // given["tokens"], 16)
    place = {"use_cpu": True, "bf16": False} if given["cpu"] else {"bf16": True, "use_vllm": True}
    if not given["cpu"]:
        place |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": True}
        place["vllm_max_model_length"] = 128 + given["tokens"]
    return kind(
        output_dir=str(folder / "trl"),
        max_steps=given["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=completions // micro_batch,
        num_generations=given["group"],
        max_completion_length=given["tokens"],
        learning_rate=1e-6,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
        **place,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    folder, given = arguments.folder, arguments.options

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=make_config(GRPOConfig, folder, given),
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
    seconds = [end - start for start, end in pairwise(clock.ends)]
    (folder / "trl.json").write_text(json.dumps({"seconds": seconds, "lengths": clock.lengths, "gib": clock.gib}))


if __name__ == "__main__":
    main()
