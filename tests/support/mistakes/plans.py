"""Mistakes about plans, previews, reports and what else looks at runs without starting one."""

import json
from pathlib import Path

from tests.support.mistakes.home import Mistake

PLAN = ["plan", "grpo", "--model-shape", "llama-8b", "--devices"]
PREVIEW = ["data", "preview", "grpo", "--model", "model"]


def add_files(folder: Path) -> None:
    (folder / "twice.yaml").write_text("steps: 3\ntraining:\n  learning_rate: 1\n  ranks: 1\n  learning_rate: 2\n")
    (folder / "repeated.jsonl").write_text('{"prompt": "a", "prompt": "b"}\n')
    (folder / "twice.csv").write_text("prompt,prompt\na,b\n")
    (folder / "splits").mkdir()
    (folder / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["a", "b"]}))


MISTAKES: list[Mistake] = [
    ([*PLAN, "8xT5"], r"--devices 8xT5: T5 is not known \(near are .*2x8x80GiB@990TFLOPs"),
    ([*PLAN, "8"], r"--devices 8: write NODESxGPUSxNAME"),
    ([*PLAN, "8xH100", "--devices", "x"], r"--devices 8xH100 is ignored: --devices x follows"),
    ([*PLAN, "8xH100", "--model", "model"], r"--model-shape llama-8b and --model model: give only one of them"),
    ([*PLAN[:-1]], r"arguments are required: --devices"),
    (["plan", "--devices", "8xH100"], r"--devices needs a verb before it: write `trueline plan VERB"),
    (["plan", "gpro", "--devices", "8xH100"], r"unknown verb 'gpro'; did you mean 'grpo'"),
    (
        ["plan", "eval", "--devices", "8xH100", "--data", "x"],
        r"plan eval: plan takes verbs that train one model; .*--dry-run",
    ),
    ([*PREVIEW], r"data.path is empty: name a dataset"),
    ([*PREVIEW, "--data", "prompts.jsonl", "--rows", "0"], r"--rows: '0' is not a whole number above 0"),
    ([*PREVIEW, "--data", "prompts.jsonl", "--model.path", "m"], r"unknown option --model.path; .*'model.path'"),
    ([*PREVIEW, "--data", "columns.jsonl"], r"has none of the columns messages, prompt, question"),
    ([*PREVIEW, "--data", "repeated.jsonl"], r"repeated.jsonl, line 1: the key 'prompt' is repeated"),
    ([*PREVIEW, "--data", "twice.csv"], r"twice.csv, line 1: the column 'prompt' is repeated"),
    ([*PREVIEW, "--data", "splits"], r"data.path=splits has the splits a, b and no train: choose one of them"),
    ([*PREVIEW, "--data", "runs/begun"], r"data.path=runs/begun is a run of sft, which writes no data"),
    (["data", "preview", "--task", "dop"], r"unknown verb 'dop'; did you mean 'dpo'"),
    (["data", "previw"], r"invalid choice: 'previw'"),
    (["data"], r"arguments are required: preview"),
    (["watch", "nosuch"], r"nosuch: neither it nor runs/nosuch is the folder of a run"),
    (["watch", "begun", "--port", "99999"], r"port=99999: cannot listen there"),
    (["report", "--mean", "0"], r"--mean: '0' is not a whole number above 0"),
    (["report", "--svg"], r"--svg: expected one argument"),
    (["explain", "nosuch"], r"nosuch: neither it nor runs/nosuch is the folder of a run"),
    (["explain", "runs/a", "runs/b"], r"unexpected word 'runs/b'; trueline explain takes no options"),
    (["demo", "--folder", "model"], r"--folder \S*model: cannot be created .*name a new folder"),
    (["demo", "--steps=0"], r"--steps: '0' is not a whole number above 0"),
    (["demo", "steps=3"], r"unexpected word 'steps=3'; .* did you mean '--steps 3'"),
    (["demo", "--seed", "x"], r"--seed: invalid int value: 'x'"),
    (["export", "runs/begun"], r"arguments are required: target"),
    (["export", "runs/none", "out"], r"runs/none: neither it nor .* is a folder: name a run"),
    (["export", "runs/begun", "out", "--dtype", "int4"], r"--dtype: invalid choice: 'int4'"),
    (["serve-reward"], r"model.path is empty: name a model"),
    (["serve-reward", "--model", "judge", "--max_length", "8"], r"unknown option --max_length; .*'max_tokens'"),
    (["config", "gpro"], r"unknown verb 'gpro'; did you mean 'grpo'"),
    (["config", "grpo", "lerning"], r"no key of grpo has 'lerning' in .*; similar: training.learning_rate"),
    (["config", "grpo", "--filter", "lr"], r"no key of grpo has 'lr' in .*did you mean 'training.learning_rate'"),
    (["config", "learning"], r"unknown verb 'learning'; .*`trueline config grpo learning`"),
]
