"""GRPO steps of Trueline and of TRL on the same random model and prompts, one after the other: seconds, tokens, memory.

    python benchmarks/rl_step.py FOLDER [--trl-python PATH] [--shape 1.5B] [--vocabulary N] [--tokens 512] [--steps 8]
        [--completions 16x8] [--cpu] [--out FILE] [key=value ...]

Random weights seldom end a completion, so all have --tokens tokens; with --vocabulary 1024 they end at random.
Without --trl-python only Trueline runs. --cpu takes a model of 256 hidden units and 4 layers, and TRL generates with
Transformers. Prints medians of the steps from the third on; they count if the mean lengths of both sides are within
10 % of each other. Further arguments are keys of Trueline's run.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from random_model import SHAPES, make_model, make_parser, make_prompts, read_size, read_steps, run_words, write_result

from trueline.cli import main as trueline

WARM = 2  # steps that are not counted
ALIKE = 0.1
OURS_ASIDE = dict(os.environ)  # before Trueline sets numbers of threads in it


@dataclass
class Side:
    """Medians of one side's steps."""

    seconds: float
    tokens: float  # sampled in a step
    length: float  # mean of all completions
    gib: float  # largest, of all processes on the GPU; on a CPU of the process that trains
    phases: dict[str, float] = field(default_factory=dict)

    def line(self, name: str) -> str:
        phases = " ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.phases.items())
        speed = f"{self.seconds:.2f} s a step, {self.tokens / self.seconds:.0f} tokens/s, length {self.length:.0f}"
        return f"{name}: {speed}, {self.gib:.1f} GiB  {phases}"


def run_trueline(folder: Path, options: argparse.Namespace, overrides: list[str]) -> Side:
    prompts, group = options.completions
    command = ["grpo", *run_words(folder, options.steps), "checkpoint.save=false"]
    command += [f"prompts_per_step={prompts}", f"algorithm.group_size={group}", "algorithm.kl.coefficient=0"]
    command += [f"rollout.max_new_tokens={options.tokens}", "rollout.temperature=1.0", "training.learning_rate=1e-6"]
    if trueline([*command, *overrides]):
        raise SystemExit("Trueline's side failed")
    steps = read_steps(folder / "run")[WARM:]
    names = [key for key in steps[-1] if key.startswith("time/") and key != "time/step"]
    lengths = [row["response_length/mean"] for row in steps]
    return Side(
        median(row["time/step"] for row in steps),
        median(lengths) * prompts * group,
        fmean(lengths),
        max(row.get("memory/device_gib", row["memory/peak_gib"]) for row in steps),
        {name.removeprefix("time/"): median(row.get(name, 0.0) for row in steps) for name in names},
    )


def run_trl(folder: Path, options: argparse.Namespace) -> Side:
    prompts, group = options.completions
    given = {"steps": options.steps, "prompts": prompts, "group": group, "tokens": options.tokens, "cpu": options.cpu}
    script = Path(__file__).with_name("trl_grpo.py")
    command = [options.trl_python, str(script), str(folder), json.dumps(given)]
    done = subprocess.run(command, env=OURS_ASIDE | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    (folder / "trl.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"trl_grpo.py ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads((folder / "trl.json").read_text())
    seconds, lengths = found["seconds"][WARM:], found["lengths"][WARM:]
    return Side(median(seconds), median(lengths) * prompts * group, fmean(lengths), found["gib"])


def compare(ours: Side, theirs: Side) -> dict[str, Any]:
    return {
        "step_ratio": ours.seconds / theirs.seconds,
        "token_ratio": (ours.seconds / ours.tokens) / (theirs.seconds / theirs.tokens),
        "counts": abs(ours.length / theirs.length - 1) <= ALIKE,
    }


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl-python")
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--completions", type=read_size, default=(16, 8))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args()
    if options.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}: the first ones are not counted")
    return options, overrides


def main() -> int:
    options, overrides = read_arguments()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    make_model(folder / "model", "small" if options.cpu else options.shape, vocabulary=options.vocabulary)
    make_prompts(folder)
    sides = {"trueline": run_trueline(folder, options, overrides)}
    print(sides["trueline"].line("trueline"), flush=True)
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    if options.trl_python:
        sides["trl"] = run_trl(folder, options)
        print(sides["trl"].line("trl"))
        found |= compare(sides["trueline"], sides["trl"])
    print(json.dumps(found))
    write_result(options.out, found | {name: asdict(side) for name, side in sides.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
