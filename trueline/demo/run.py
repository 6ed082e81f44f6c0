"""The demo: a model that does not exist yet learns to add, by supervised training and then by reinforcement."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trueline.config.base import ConfigError, Tree
from trueline.config.rl import RLConfig
from trueline.config.sampling import EvalConfig
from trueline.config.supervised import SftConfig
from trueline.demo.material import make_data, make_model
from trueline.jobs.sampling import EVALUATION, prepare_eval
from trueline.monitoring.curves import smoothed, svg_curve, terminal_curve
from trueline.monitoring.run_folder import RunFolder
from trueline.offline.launch import prepare_supervised
from trueline.rl.launch import prepare_rl
from trueline.runs.launch import launch
from trueline.training.checkpoints import Checkpoints

Row = dict[str, Any]

SAMPLED = {"sampled_before": "warm_start", "sampled_after": "grpo"}  # name of the evaluation -> whose model
SCORE, REWARD = "evaluation/reward", "reward/mean"
WINDOW = 5  # steps whose rewards are averaged in the curve
SCORED: Tree = {"reward": {"function": "exact"}, "rollout": {"max_new_tokens": 5}}


def run(folder: Path, seed: int, steps: int) -> int:
    """Make a model in a new folder and train it, at last by so many steps of GRPO."""
    SftConfig.parse({"seed": seed})  # before anything is made
    console = Console(highlight=False)
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: cannot be made ({error.strerror}): name a new folder") from None
    parameters = make_model(folder / "model", seed)
    make_data(folder, seed)
    console.print(f"[bold]1. A random model[/] of {parameters:,} parameters and sums to add, in", end=" ")
    console.print(folder, markup=False, soft_wrap=True)
    stages: dict[str, Callable[[Tree, Path], int]] = {
        "2. Warm start[/] by supervised training (trueline sft)": warm_start,
        "3. Reinforcement[/] with Ray, vLLM and DeepSpeed (trueline grpo)": partial(reinforce, steps=steps),
        "4. Sampled answers[/] before and after reinforcement (trueline eval)": sample,
    }
    for title, start in stages.items():
        console.print(f"[bold]{title}")
        if failed := start({"folder": str(folder), "seed": seed}, folder):
            return failed
    show_result(folder, console)
    return 0


def warm_start(common: Tree, folder: Path) -> int:
    """Imitate a teacher who mostly forgets to carry. One small model needs no process of its own."""
    settings = {
        "name": "warm_start",
        "runtime": "local",
        "steps": 250,
        "samples_per_step": 128,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "teacher.jsonl")},
        "training": {"learning_rate": 2e-3, "warmup_steps": 20, "schedule": "linear"},
        "checkpoint": {"every": 0},
    }
    return launch(SftConfig.parse(common | settings), "sft", prepare_supervised)


def reinforce(common: Tree, folder: Path, steps: int) -> int:
    """Train through Ray: a DeepSpeed policy, its reference and a vLLM engine; held-out completions are greedy."""
    settings = {
        "name": "grpo",
        "steps": steps,
        "prompts_per_step": 32,
        "minibatches": 2,
        "model": {"path": newest_model(folder / "warm_start")},
        "data": {"path": str(folder / "practice.jsonl")},
        "evaluation": {"data": str(folder / "held_out.jsonl"), "every": 10},
        "training": {"learning_rate": 2e-4, "warmup_steps": 5, "schedule": "linear"},
    }
    return launch(RLConfig.parse(common | SCORED | settings), "grpo", prepare_rl)


def sample(common: Tree, folder: Path) -> int:
    """Sample the same held-out sums from the model before and after."""
    settings = {
        "runtime": "local",
        "evaluation": {"data": str(folder / "held_out.jsonl"), "temperature": 1.0, "samples": 4},
    }
    for name, trained in SAMPLED.items():
        model = {"name": name, "model": {"path": newest_model(folder / trained)}}
        if failed := launch(EvalConfig.parse(common | SCORED | settings | model), "eval", prepare_eval):
            return failed
    return 0


def newest_model(run_folder: Path) -> str:
    newest = Checkpoints(run_folder, SftConfig().checkpoint).newest()
    assert newest is not None
    return str(newest / "model")


def read_lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def show_result(folder: Path, console: Console) -> None:
    """Show held-out accuracy and three held-out completions, before and after, and the curve between the two."""
    grpo = RunFolder(folder / "grpo")
    rows = read_lines(grpo.metrics)
    rewards, greedy = ([(row["step"], row[key]) for row in rows if key in row] for key in (REWARD, SCORE))
    sampled = [json.loads((folder / when / EVALUATION).read_text())["metrics"][SCORE] for when in SAMPLED]
    accuracies = {"greedy": (greedy[0][1], greedy[-1][1]), "sampled": (sampled[0], sampled[1])}
    shown = [row for row in read_lines(grpo.transcripts) if row["purpose"] == "evaluate"]
    before, after = ([row for row in shown if row["step"] == step] for step, _ in (greedy[0], greedy[-1]))
    console.print(result_table(accuracies, list(zip(before, after, strict=True))))
    gains = [f"{100 * (new - old):+.1f} points {name}" for name, (old, new) in accuracies.items()]
    console.print(f"gain: {', '.join(gains)}")
    console.print("The teacher mostly forgot to carry; from right or wrong alone, GRPO learns to.\n")
    smooth, curve = smoothed(rewards, WINDOW), folder / "curve.svg"
    named = {f"reward, mean of {WINDOW} steps": smooth, "held-out accuracy, greedy": greedy}
    curve.write_text(svg_curve(named, "GRPO learns to carry"))
    console.print(terminal_curve(smooth, f"Reward of GRPO's answers, mean of {WINDOW} steps"), soft_wrap=True)
    places = f"curve        {curve}\nmetrics      {grpo.metrics}\ntranscripts  {grpo.transcripts}"
    runs = f"checkpoints  {grpo.checkpoints}\nTensorBoard  tensorboard --logdir {grpo.path}"
    # Neither cut at the width of the screen nor read as markup, so that they can be copied.
    console.print(f"{places}\n{runs}", markup=False, soft_wrap=True)


def result_table(accuracies: dict[str, tuple[float, float]], examples: list[tuple[Row, Row]]) -> Table:
    table = Table("held-out sums", "before GRPO", "after GRPO")
    for name, (old, new) in accuracies.items():
        table.add_row(f"{name} accuracy", f"{old:.1%}", f"{new:.1%}")
    for before, after in examples:
        table.add_row(before["prompt"], mark(before), mark(after))
    return table


def mark(row: Row) -> str:
    return f"{row['reply']} {'[green]right[/]' if row['reward'] else '[red]wrong[/]'}"
