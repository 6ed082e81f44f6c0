"""The demo: a new model learns to add, first by supervised training, then by reinforcement learning."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from trueline.api import Run, RunFailed, train
from trueline.config.base import ConfigError, Tree
from trueline.config.supervised import SftConfig
from trueline.demo.material import make_data, make_model
from trueline.files import Row, read_rows
from trueline.monitoring.run_folder import RunFolder
from trueline.report.curves import smooth, svg_curve, terminal_curve

SCORE, REWARD = "evaluation/reward", "reward/mean"
WINDOW = 5  # steps whose rewards are averaged in the curve
SCORED: Tree = {"reward": {"function": "exact"}, "rollout": {"max_new_tokens": 5}}


def run(folder: Path, seed: int, steps: int) -> int:
    """Make a model in a new folder and train it, with this many steps of GRPO."""
    SftConfig.parse({"seed": seed})  # before anything is made
    console = Console(highlight=False)
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: cannot be created ({error.strerror}): name a new folder") from None
    parameters = make_model(folder / "model", seed)
    make_data(folder, seed)
    console.print(f"[bold]1. A random model[/] of {parameters:,} parameters and sums to add, in", end=" ")
    console.print(folder, markup=False, soft_wrap=True)
    common: Tree = {"folder": str(folder), "seed": seed, "monitoring": {"doctor": False}}
    try:
        console.print("[bold]2. Warm start[/] by supervised training (trueline sft)")
        # The teacher mostly forgets to carry. One small model needs no process of its own.
        files = {"model": {"path": str(folder / "model")}, "data": {"path": str(folder / "teacher.jsonl")}}
        rate = {"learning_rate": 2e-3, "warmup_steps": 20, "schedule": "linear"}
        keys = {"name": "warm_start", "runtime": "local", "steps": 250, "samples_per_step": 128}
        warm = finish("sft", common | files | keys | {"training": rate, "checkpoint": {"every": 0}})
        console.print("[bold]3. Reinforcement learning[/] with Ray, vLLM and DeepSpeed (trueline grpo)")
        # A DeepSpeed policy, its reference and a vLLM engine; held-out completions are greedy.
        files = {"model": {"path": str(warm.model)}, "data": {"path": str(folder / "practice.jsonl")}}
        rate = {"learning_rate": 2e-4, "warmup_steps": 5, "schedule": "linear"}
        keys = {"name": "grpo", "steps": steps, "prompts_per_step": 32, "minibatches": 2}
        tested = {"data": str(folder / "held_out.jsonl"), "every": 10}
        grpo = finish("grpo", common | SCORED | files | keys | {"training": rate, "evaluation": tested})
        console.print("[bold]4. Sampled completions[/] before and after GRPO (trueline eval)")
        tested = {"data": str(folder / "held_out.jsonl"), "temperature": 1.0, "samples": 4}
        common |= SCORED | {"runtime": "local", "evaluation": tested}
        before = finish("eval", common | {"name": "sampled_before", "model": {"path": str(warm.model)}})
        after = finish("eval", common | {"name": "sampled_after", "model": {"path": str(grpo.model)}})
    except RunFailed as failure:
        return failure.run.status or 1
    show_result(folder, (before.evaluation[SCORE], after.evaluation[SCORE]), console)
    return 0


def finish(verb: str, keys: Tree) -> Run:
    """Make a run from start to end; the demo ends where it is interrupted."""
    run = train(verb, keys)
    if run.status:
        raise RunFailed(run)
    return run


def show_result(folder: Path, sampled: tuple[float, float], console: Console) -> None:
    """Show held-out accuracy and three held-out completions, before and after, and the curve between the two."""
    grpo = RunFolder(folder / "grpo")
    rows = read_rows(grpo.metrics)
    rewards, greedy = ([(row["step"], row[key]) for row in rows if key in row] for key in (REWARD, SCORE))
    accuracies = {"greedy": (greedy[0][1], greedy[-1][1]), "sampled": sampled}
    shown = [row for row in read_rows(grpo.transcripts) if row["purpose"] == "evaluate"]
    before, after = ([row for row in shown if row["step"] == step] for step, _ in (greedy[0], greedy[-1]))
    table = Table("held-out sums", "before GRPO", "after GRPO")
    for name, (old, new) in accuracies.items():
        table.add_row(f"{name} accuracy", f"{old:.1%}", f"{new:.1%}")
    for first, last in zip(before, after, strict=True):
        table.add_row(first["prompt"], mark(first), mark(last))
    console.print(table)
    gains = [f"{100 * (new - old):+.1f} points {name}" for name, (old, new) in accuracies.items()]
    console.print(f"gain: {', '.join(gains)}")
    console.print("The teacher mostly forgot to carry. GRPO learns to, from right or wrong alone.\n")
    smoothed, curve = smooth(rewards, WINDOW), folder / "curve.svg"
    named = {f"reward, mean of {WINDOW} steps": smoothed, "held-out accuracy, greedy": greedy}
    curve.write_text(svg_curve(named, "GRPO learns to carry"))
    console.print(terminal_curve(smoothed, f"Reward of GRPO's completions, mean of {WINDOW} steps"), soft_wrap=True)
    places = f"curve        {curve}\nmetrics      {grpo.metrics}\ntranscripts  {grpo.transcripts}"
    runs = f"checkpoints  {grpo.checkpoints}\nTensorBoard  tensorboard --logdir {grpo.path}"
    # Neither wrapped nor read as markup, so that they can be copied.
    console.print(f"{places}\n{runs}", markup=False, soft_wrap=True)


def mark(row: Row) -> str:
    return f"{row['reply']} {'[green]right[/]' if row['reward'] else '[red]wrong[/]'}"
