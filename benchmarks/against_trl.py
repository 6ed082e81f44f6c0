"""Train the same rows with Trueline and with TRL: is every step's loss the same, and which of the two is faster?

    python benchmarks/against_trl.py --model FOLDER --data FOLDER --trl-python PATH --out DIR [--tasks sft,dpo,kto,rm]
        [--steps 20] [--batch 8] [--rounds 3] [--random-shape 384x6x32000]

--data is a folder with GSM8K's train.jsonl and example_model_solutions.jsonl. --trl-python is a Python that has TRL and
runs trl_side.py. Both sides compute on the CPU with one thread, in turns. --random-shape trains a Llama with random
weights, of so many hidden units, layers and words, with the tokenizer of --model. Writes results.json
and results.md into DIR.
Exits 1 if a loss differs by more than 1e-4 at any step.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from trueline.config.base import merge
from trueline.config.model import ModelConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.types import Sample
from trueline.models.loading import load_tokenizer, padding_token
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.offline import build
from trueline.offline.build import fill_reference
from trueline.plan.offline import SupervisedPlan, plan_supervised
from trueline.verbs import TASK_VERBS

LARGEST_GAP = 1e-4
MAX_TOKENS = 512
RATES = {"sft": 1e-4, "dpo": 1e-5, "kto": 1e-5, "rm": 1e-4}
COMPLETIONS = {
    "sft": ["completion"],
    "kto": ["completion"],
    "dpo": ["chosen", "rejected"],
    "rm": ["chosen", "rejected"],
}
GRADED = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One run of one side; times and speeds of steps leave out the first, which warms up."""

    losses: list[float]
    tokens: list[int]
    step_seconds: list[float]
    tokens_per_second: float
    tokens_per_processor_second: float  # hardly changed by what else the machine does
    run_seconds: float  # from the loaded model to the end of the last step, scoring by the reference included


@dataclass(frozen=True)
class Job:
    """One task on one model, as both sides are given it."""

    task: str
    model: Path
    text: Path
    ids: Path
    steps: int
    batch: int


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def completion_rows(folder: Path) -> list[Row]:
    rows = read_jsonl(folder / "train.jsonl")
    return [{"prompt": row["question"] + "\n", "completion": row["answer"]} for row in rows]


def pair_rows(folder: Path) -> list[Row]:
    """One right and one wrong solution of every question that has both."""
    pairs: list[Row] = []
    for row in read_jsonl(folder / "example_model_solutions.jsonl"):
        found = {row[name]["is_correct"]: row[name]["solution"] for name in GRADED}
        if len(found) == 2:
            pairs.append({"prompt": row["question"] + "\n", "chosen": found[True], "rejected": found[False]})
    return pairs


def rated_rows(folder: Path) -> list[Row]:
    """One solution of every question, of the four models in turn; so no two rows have the same prompt."""
    rated: list[Row] = []
    for number, row in enumerate(read_jsonl(folder / "example_model_solutions.jsonl")):
        given = row[GRADED[number % len(GRADED)]]
        rated.append({"prompt": row["question"] + "\n", "completion": given["solution"], "label": given["is_correct"]})
    return rated


TEXT: dict[str, Callable[[Path], list[Row]]] = {
    "sft": completion_rows,
    "dpo": pair_rows,
    "kto": rated_rows,
    "rm": pair_rows,
}


def make_random(folder: Path, shape: tuple[int, int, int], tokenizer: Any) -> Path:
    """A Llama with random weights: heads of 64, half as many for keys as for queries."""
    hidden, layers, vocabulary = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=padding_token(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_classifier(folder: Path, model: Path, tokenizer: Any) -> Path:
    """The model with a scoring head, so that both sides start from the same one."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=padding_token(tokenizer), dtype=torch.float32
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_config(job: Job, folder: str) -> SupervisedConfig:
    verb = TASK_VERBS[job.task]
    training = {"learning_rate": RATES[job.task], "betas": [0.9, 0.999], "schedule": "constant", "max_grad_norm": 1.0}
    given = {
        "name": job.task,
        "folder": folder,
        "runtime": "local",
        "steps": job.steps,
        "samples_per_step": job.batch,
        "max_tokens": MAX_TOKENS,
        "model": {"path": str(job.model), "dtype": "float32"},
        "data": {"path": str(job.text), "shuffle": False, "too_long": "drop"},
        "training": training,
        "monitoring": {"tensorboard": False},
    }
    return verb.kind.parse(merge(verb.defaults, given))


def token_rows(job: Job, plan: SupervisedPlan) -> list[Row]:
    """The rows that the steps will use, as token ids: what Trueline trains on is what TRL is given."""
    train, needed = plan.material.train, job.steps * job.batch
    if train.rows() < needed:
        raise SystemExit(f"{job.task}: {train.rows()} rows fit into {MAX_TOKENS} tokens; the steps need {needed}")
    rows: list[Row] = []
    for number in range(needed):
        samples = train.take([number])
        row: Row = {"prompt_ids": split_ids(samples[0])[0]}
        row |= {
            f"{name}_ids": split_ids(sample)[1] for name, sample in zip(COMPLETIONS[job.task], samples, strict=True)
        }
        rows.append(row | ({"label": samples[0].label > 0.5} if job.task == "kto" else {}))
    if job.task == "kto":
        check_mismatched(rows, [sample.companion for sample in train.samples], job.batch)
    return rows


def split_ids(sample: Sample) -> tuple[list[int], list[int]]:
    """Return prompt and completion."""
    start = sample.mask.tolist().index(True)
    return sample.tokens[:start].tolist(), sample.tokens[start:].tolist()


def check_mismatched(rows: list[Row], mismatched: list[Sample | None], batch: int) -> None:
    """TRL pairs each prompt with the completion of the row before it, in a circle within the batch."""
    for number, row in enumerate(rows):
        before = number - 1 if number % batch else number + batch - 1
        expected = (row["prompt_ids"] + rows[before]["completion_ids"])[:MAX_TOKENS]
        other = mismatched[number]
        if other is None or other.tokens.tolist() != expected:
            raise SystemExit(f"kto: row {number} is paired with another completion than in TRL")


@contextmanager
def timed_reference() -> Iterator[list[float]]:
    """Seconds of scoring by the reference, which comes between loading the model and the first step."""
    seconds: list[float] = []

    def timed(*arguments: Any) -> None:
        start = time.perf_counter()
        fill_reference(*arguments)
        seconds.append(time.perf_counter() - start)

    with patch.object(build, "fill_reference", timed):
        yield seconds


def run_trueline(job: Job) -> Result:
    with tempfile.TemporaryDirectory() as folder, timed_reference() as reference:
        plan = plan_supervised(make_config(job, folder))
        run = RunFolder(Path(folder) / job.task).open(plan.config, job.task, resume=False)
        progress = Progress(job.task, job.steps, Console(quiet=True))
        with build.supervised_trainer(plan, run, progress) as trainer:
            trainer.guard.watch()
            losses, ends = [], [clocks()]
            for rows in step_rows(job):
                losses.append(trainer.learn(rows)["loss"])
                ends.append(clocks())
    tokens = [sum(sample.length() for sample in plan.material.train.take(rows)) for rows in step_rows(job)]
    walls, processor = zip(*ends, strict=True)
    seconds = [end - start for start, end in pairwise(walls)]
    speeds = [sum(tokens[1:]) / (times[-1] - times[1]) for times in (walls, processor)]
    return Result(losses, tokens, seconds[1:], speeds[0], speeds[1], sum(reference) + sum(seconds))


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def step_rows(job: Job) -> list[list[int]]:
    return [list(range(step * job.batch, (step + 1) * job.batch)) for step in range(job.steps)]


def run_trl(job: Job, python: str, out: Path) -> Result:
    options = {"steps": job.steps, "batch_size": job.batch, "learning_rate": RATES[job.task], "max_length": MAX_TOKENS}
    script = Path(__file__).with_name("trl_side.py")
    command = [python, str(script), job.task, str(job.model), str(job.ids), str(out), json.dumps(options)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"trl_side.py ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(out.read_text(encoding="utf-8"))
    return Result(**{name: found[name] for name in Result.__dataclass_fields__})


def compare(job: Job, rounds: int, python: str, out: Path) -> Row:
    """Both sides in turns, and what they differ by."""
    ours: list[Result] = []
    theirs: list[Result] = []
    loads: list[float] = []
    for number in range(rounds):
        ours.append(run_trueline(job))
        theirs.append(run_trl(job, python, out / f"trl-{job.task}.json"))
        loads.append(os.getloadavg()[0])
        gap = largest_gap(ours[-1], theirs[-1])
        speeds = f"{ours[-1].tokens_per_second:.0f} and {theirs[-1].tokens_per_second:.0f} tokens/s"
        print(f"{job.task} round {number + 1}: largest loss difference {gap:.1e}, {speeds}", flush=True)
    if any(mine.tokens != other.tokens for mine, other in zip(ours, theirs, strict=True)):
        raise SystemExit(f"{job.task}: the two sides did not see the same tokens")
    return summary(job, ours, theirs) | {
        "load": loads,
        "trueline": [asdict(result) for result in ours],
        "trl": [asdict(result) for result in theirs],
    }


def largest_gap(ours: Result, theirs: Result) -> float:
    """Infinite where a loss is not a number, which `max` might pass over."""
    gaps = [abs(mine - other) for mine, other in zip(ours.losses, theirs.losses, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def summary(job: Job, ours: list[Result], theirs: list[Result]) -> Row:
    gap = max(largest_gap(*results) for results in zip(ours, theirs, strict=True))
    speeds = [median(result.tokens_per_second for result in results) for results in (ours, theirs)]
    processor = [median(result.tokens_per_processor_second for result in results) for results in (ours, theirs)]
    whole = [median(result.run_seconds for result in results) for results in (ours, theirs)]
    return {
        "task": job.task,
        "largest_gap": gap,
        "same_losses": gap <= LARGEST_GAP,
        "trueline_tokens_per_second": speeds[0],
        "trl_tokens_per_second": speeds[1],
        "step_ratio": speeds[0] / speeds[1],
        "processor_ratio": processor[0] / processor[1],
        "run_ratio": whole[1] / whole[0],
    }


def table(rows: list[Row]) -> str:
    speeds = "Trueline tokens/s | TRL tokens/s | steps | steps, processor time | whole run"
    lines = [f"| task | largest loss difference | at most 1e-4 | {speeds} |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        speeds = f"{row['trueline_tokens_per_second']:.0f} | {row['trl_tokens_per_second']:.0f}"
        ratios = f"{row['step_ratio']:.2f}x | {row['processor_ratio']:.2f}x | {row['run_ratio']:.2f}x"
        verdict = "yes" if row["same_losses"] else "NO"
        lines.append(f"| {row['task']} | {row['largest_gap']:.1e} | {verdict} | {speeds} | {ratios} |")
    return "\n".join(lines) + "\n"


def prepare(task: str, model: Path, given: argparse.Namespace) -> Job:
    """Write the task's rows twice: as text for Trueline, as the tokens it makes of them for TRL."""
    out: Path = given.out
    job = Job(task, model, out / f"{task}.jsonl", out / f"{task}-ids.jsonl", given.steps, given.batch)
    write_jsonl(job.text, TEXT[task](given.data)[: 4 * given.steps * given.batch])  # more than needed: some are long
    write_jsonl(job.ids, token_rows(job, plan_supervised(make_config(job, str(out)))))
    return job


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TEXT))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--random-shape", type=lambda text: tuple(map(int, text.split("x"))))
    given = parser.parse_args()
    if unknown := set(given.tasks) - set(TEXT):
        parser.error(f"unknown tasks: {', '.join(sorted(unknown))}")
    if given.random_shape and (len(given.random_shape) != 3 or given.random_shape[0] % 128):
        parser.error("--random-shape is HIDDENxLAYERSxWORDS, e.g. 384x6x32000; HIDDEN must be a multiple of 128")
    if given.steps < 2:
        parser.error("--steps must be 2 or more: the first one is not timed")
    return given


def main() -> int:
    given = read_arguments()
    torch.set_num_threads(1)
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(ModelConfig(path=str(given.model)))
    model = make_random(out / "random", given.random_shape, tokenizer) if given.random_shape else given.model
    rows: list[Row] = []
    for task in given.tasks:
        start = make_classifier(out / "classifier", model, tokenizer) if task == "rm" else model
        rows.append(compare(prepare(task, start, given), given.rounds, given.trl_python, out))
    (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(table(rows), encoding="utf-8")
    print(table(rows), end="")
    return 0 if all(row["same_losses"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
