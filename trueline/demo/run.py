"""The demo: a model that does not exist yet learns to add, by supervised training and then by reinforcement."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trueline.config.base import Tree
from trueline.config.rl import RLConfig
from trueline.config.supervised import SftConfig
from trueline.demo.material import make_data, make_model
from trueline.monitoring.run_folder import RunFolder
from trueline.offline.launch import prepare_supervised
from trueline.rl.launch import prepare_rl
from trueline.runs.launch import launch
from trueline.training.checkpoints import Checkpoints

SHOWN_TRANSCRIPTS = 3


def warm_start_settings(folder: Path, seed: int) -> Tree:
    """`trueline sft` on a teacher who is right half the time. One small model needs no process of its own."""
    return {
        "name": "warm_start",
        "folder": str(folder),
        "seed": seed,
        "runtime": "local",
        "steps": 250,
        "samples_per_step": 128,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "teacher.jsonl")},
        "training": {"learning_rate": 2e-3, "warmup_steps": 20, "schedule": "linear"},
        "checkpoint": {"every": 0},
    }


def grpo_settings(folder: Path, seed: int, model: Path) -> Tree:
    """`trueline grpo`: Ray places a DeepSpeed policy, its reference and a vLLM engine."""
    return {
        "name": "grpo",
        "folder": str(folder),
        "seed": seed,
        "steps": 80,
        "prompts_per_step": 32,
        "minibatches": 2,
        "model": {"path": str(model)},
        "data": {"path": str(folder / "practice.jsonl")},
        "evaluation": {"data": str(folder / "held_out.jsonl"), "temperature": 1.0},
        "reward": {"function": "exact"},
        "rollout": {"max_new_tokens": 5},
        "training": {"learning_rate": 2e-4, "warmup_steps": 5, "schedule": "linear"},
    }


def run(folder: Path, seed: int) -> int:
    console = Console(highlight=False)
    folder = folder.resolve()
    folder.mkdir(parents=True)
    parameters = make_model(folder / "model", seed)
    make_data(folder, seed)
    console.print(f"[bold]1. A random model[/] of {parameters:,} parameters and sums to add, in", end=" ")
    console.print(folder, markup=False, soft_wrap=True)
    console.print("[bold]2. Warm start[/] by supervised training (trueline sft)")
    failed = launch(SftConfig.parse(warm_start_settings(folder, seed)), "sft", prepare_supervised)
    if failed:
        return failed
    console.print("[bold]3. Reinforcement[/] with Ray, vLLM and DeepSpeed (trueline grpo)")
    config = RLConfig.parse(grpo_settings(folder, seed, newest_model(folder / "warm_start")))
    failed = launch(config, "grpo", prepare_rl)
    if failed:
        return failed
    show_result(RunFolder(folder / "grpo"), console)
    return 0


def newest_model(run_folder: Path) -> Path:
    newest = Checkpoints(run_folder, SftConfig().checkpoint).newest()
    assert newest is not None
    return newest / "model"


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def show_result(folder: RunFolder, console: Console) -> None:
    """Held-out accuracy and three held-out answers, before and after."""
    scores = {row["step"]: row["evaluation/reward"] for row in read_lines(folder.metrics) if "evaluation/reward" in row}
    shown = [row for row in read_lines(folder.transcripts) if row["purpose"] == "evaluate"]
    first, last = min(scores), max(scores)
    table = Table(title="Held-out sums, sampled at temperature 1", title_justify="left")
    for column in ("", "before GRPO", "after GRPO"):
        table.add_column(column)
    table.add_row("accuracy", f"{scores[first]:.1%}", f"{scores[last]:.1%}")
    before, after = ([row for row in shown if row["step"] == step] for step in (first, last))
    for old, new in list(zip(before, after, strict=True))[:SHOWN_TRANSCRIPTS]:
        table.add_row(old["prompt"], mark(old), mark(new))
    console.print(table)
    console.print(f"gain: {100 * (scores[last] - scores[first]):+.1f} points in sampled answers")
    console.print("GRPO unlearns the teacher's random slips; the most likely (greedy) answer was mostly right before.")
    places = f"metrics      {folder.metrics}\ntranscripts  {folder.transcripts}\ncheckpoints  {folder.checkpoints}"
    # Neither cut at the width of the screen nor read as markup, so that they can be copied.
    console.print(f"{places}\nTensorBoard  tensorboard --logdir {folder.path}", markup=False, soft_wrap=True)


def mark(row: dict[str, Any]) -> str:
    return f"{row['reply']} {'[green]right[/]' if row['reward'] else '[red]wrong[/]'}"
