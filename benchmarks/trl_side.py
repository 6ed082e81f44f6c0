"""Train with TRL what Trueline trains, on the same tokens in the same order, and write every step's loss and the speed.

    OMP_NUM_THREADS=1 PYTHON_WITH_TRL benchmarks/trl_side.py TASK MODEL_FOLDER DATA.jsonl OUT.json ['{"steps": 20}']

TASK is sft, dpo, kto or rm; the last argument overrides OPTIONS. Rows are token ids, taken as they are: nothing is
added, cut or dropped, so an end token must already be the last id of every completion.

    sft      {"prompt_ids", "completion_ids"}             loss on the completion only
    kto      {"prompt_ids", "completion_ids", "label"}    label: true if desirable
    dpo, rm  {"prompt_ids", "chosen_ids", "rejected_ids"}

Rows of text (the same names without _ids) go through TRL's own tokenization instead, which appends the end token.
For rm the model folder should hold a sequence classifier; of a causal model, the head is drawn from the seed.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

OPTIONS: dict[str, Any] = {
    "steps": 20,
    "batch_size": 8,
    "learning_rate": 1e-4,
    "schedule": "constant",  # or linear, cosine
    "warmup_steps": 0,
    "seed": 0,
    "beta": 0.1,  # dpo and kto
    "max_length": 512,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,  # 0: no clipping
    "trl": {},  # further arguments of TRL's config, by its names
}
TRL_NAMES = {"steps": "max_steps", "batch_size": "per_device_train_batch_size", "schedule": "lr_scheduler_type"}
TRL_NAMES |= {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
COMPLETIONS = {
    "sft": ["completion"],
    "kto": ["completion"],
    "dpo": ["chosen", "rejected"],
    "rm": ["chosen", "rejected"],
}
Row = dict[str, Any]


@dataclass
class Record:
    """What each step left: its loss, its real tokens, and the time at which it ended."""

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    processor_ends: list[float] = field(default_factory=list)  # the same in processor time
    start: float = 0.0

    def speed(self) -> Row:
        """Of each step but the first, which warms up: its time, and the tokens per second over all of them."""
        seconds = [end - start for start, end in pairwise(self.ends)]
        times = {"": sum(seconds), "processor_": self.processor_ends[-1] - self.processor_ends[0]}
        tokens = sum(self.tokens[1:])
        speeds = {f"tokens_per_{name}second": tokens / spent if spent else None for name, spent in times.items()}
        return {"step_seconds": seconds, "run_seconds": self.ends[-1] - self.start} | speeds


class Recorded:
    """Put before a TRL trainer: keeps a Record, and leaves rows of token ids alone."""

    record: Record

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        """TRL's loss, written down; each row's tokens count once, whatever forwards the loss needs."""
        real = int(inputs["attention_mask"].sum())
        loss = super().compute_loss(model, inputs, *rest, **named)  # type: ignore[misc]
        self.record.losses.append(loss.item())
        self.record.tokens.append(real)
        return loss

    def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:
        return super()._prepare_dataset(dataset, *rest) if "prompt" in dataset.column_names else dataset  # type: ignore


def read_rows(task: str, path: Path, options: Row) -> list[Row]:
    """The rows that the steps will use: enough of them, and none of token ids too long."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    needed = options["steps"] * options["batch_size"]
    if len(rows) < needed:
        raise SystemExit(f"{path.name} has {len(rows)} rows; the steps need {needed}")
    for number, row in enumerate(rows[:needed], start=1):
        longest = max(len(row.get("prompt_ids", [])) + len(row.get(f"{a}_ids", [])) for a in COMPLETIONS[task])
        if longest > options["max_length"]:
            raise SystemExit(f"{path.name}:{number}: {longest} tokens, over max_length {options['max_length']}")
    return rows[:needed]


def trl_rows(task: str, rows: list[Row], batch_size: int) -> list[Row]:
    """Rows of token ids in the columns TRL's collators read; rows of text unchanged."""
    if "prompt" in rows[0] or task == "dpo":
        return rows
    if task == "sft":
        return [_sft_row(row["prompt_ids"], row["completion_ids"]) for row in rows]
    if task == "kto":  # in TRL each prompt's mismatched completion is that of the row before it, within its batch
        starts = range(0, len(rows), batch_size)
        before = [i + batch_size - 1 if i in starts else i - 1 for i in range(len(rows))]
        return [row | {"KL_completion_ids": rows[i]["completion_ids"]} for row, i in zip(rows, before, strict=True)]
    return [{f"{a}_ids": row["prompt_ids"] + row[f"{a}_ids"] for a in COMPLETIONS[task]} for row in rows]


def _sft_row(prompt: list[int], completion: list[int]) -> Row:
    return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


def make_config(task: str, config: Any, options: Row, folder: str) -> Any:
    """TRL's config: float32 on the CPU, rows in order, the micro-batch the whole batch, nothing logged or saved."""
    fixed = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    left_out = {"trl"} if task in ("dpo", "kto") else {"trl", "beta"}
    chosen = {TRL_NAMES.get(name, name): value for name, value in options.items() if name not in left_out}
    return config(output_dir=folder, **fixed | quiet | chosen | options["trl"])


def train(task: str, model: str, rows: list[Row], options: Row) -> Record:
    """Run TRL's trainer over the rows, once."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            record.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            record.ends.append(time.perf_counter())
            record.processor_ends.append(time.process_time())

    record = Record()
    name = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "rm": "Reward"}[task]
    kind = type(f"Recorded{name}", (Recorded, getattr(trl, f"{name}Trainer")), {"record": record})
    data = Dataset.from_list(trl_rows(task, rows, options["batch_size"]))
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(task, getattr(trl, f"{name}Config"), options, folder)
        trainer = kind(model=model, args=config, train_dataset=data, callbacks=[Clock()])
        if len(trainer.train_dataset) != len(rows):
            raise SystemExit(f"TRL kept {len(trainer.train_dataset)} of {len(rows)} rows")
        trainer.train()
    return record


def read_arguments() -> argparse.Namespace:
    """The command line; the options come back whole, what was given laid over the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(COMPLETIONS))
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("options", type=json.loads, nargs="?", default={})
    given = parser.parse_args()
    if unknown := set(given.options) - set(OPTIONS):
        parser.error(f"unknown options: {', '.join(sorted(unknown))}")
    given.options = OPTIONS | given.options
    return given


def main() -> None:
    """Train, then write the result."""
    given = read_arguments()
    options = given.options
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    record = train(given.task, str(given.model), read_rows(given.task, given.data, options), options)
    versions = {name: version(name) for name in ("trl", "transformers", "torch", "accelerate", "datasets")}
    result = {"task": given.task, "losses": record.losses, "tokens": record.tokens}
    result |= record.speed() | {"threads": torch.get_num_threads(), "options": options, "versions": versions}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
