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
    ([*PLAN, "8xT5"], 2, r"--devices 8xT5: T5 is not known \(near are .*2x8x80GiB@990TFLOPs"),
    ([*PLAN, "8"], 2, r"--devices 8: write NODESxGPUSxNAME"),
    ([*PLAN, "8xH100", "--devices", "x"], 2, r"--devices 8xH100 is ignored: --devices x follows"),
    ([*PLAN, "8xH100", "--model", "model"], 2, r"--model-shape llama-8b and --model model: give only one of them"),
    ([*PLAN[:-1]], 2, r"arguments are required: --devices"),
    (["plan", "--devices", "8xH100"], 2, r"--devices needs a verb before it: write `trueline plan VERB"),
    (["plan", "gpro", "--devices", "8xH100"], 2, r"unknown verb 'gpro'; did you mean 'grpo'"),
    (
        ["plan", "eval", "--devices", "8xH100", "--data", "x"],
        2,
        r"plan eval: plan takes verbs that train one model; .*--dry-run",
    ),
    ([*PREVIEW], 2, r"data.path is empty: name a dataset"),
    ([*PREVIEW, "--data", "prompts.jsonl", "--rows", "0"], 2, r"--rows: '0' is not a whole number above 0"),
    ([*PREVIEW, "--data", "prompts.jsonl", "--model.path", "m"], 2, r"unknown option --model.path; .*'model.path'"),
    ([*PREVIEW, "--data", "columns.jsonl"], 2, r"has none of the columns messages, prompt, question"),
    ([*PREVIEW, "--data", "repeated.jsonl"], 2, r"repeated.jsonl, line 1: the key 'prompt' is repeated"),
    ([*PREVIEW, "--data", "twice.csv"], 2, r"twice.csv, line 1: the column 'prompt' is repeated"),
    ([*PREVIEW, "--data", "splits"], 2, r"data.path=splits has the splits a, b and no train: choose one of them"),
    ([*PREVIEW, "--data", "runs/begun"], 2, r"data.path=runs/begun is a run of sft, which writes no data"),
    (["data", "preview", "--task", "dop"], 2, r"unknown verb 'dop'; did you mean 'dpo'"),
    (["data", "previw"], 2, r"invalid choice: 'previw'"),
    (["data"], 2, r"arguments are required: preview"),
    (["watch", "nosuch"], 2, r"nosuch: neither it nor runs/nosuch is the folder of a run"),
    (["watch", "begun", "--port", "99999"], 2, r"port=99999: cannot listen there"),
    (["report", "--mean", "0"], 2, r"--mean: '0' is not a whole number above 0"),
    (["report", "--svg"], 2, r"--svg: expected one argument"),
    (["explain", "nosuch"], 2, r"nosuch: neither it nor runs/nosuch is the folder of a run"),
    (["explain", "runs/a", "runs/b"], 2, r"unexpected word 'runs/b'; trueline explain takes no options"),
    (["demo", "--folder", "model"], 2, r"--folder \S*model: cannot be created .*name a new folder"),
    (["demo", "--steps=0"], 2, r"--steps: '0' is not a whole number above 0"),
    (["demo", "steps=3"], 2, r"unexpected word 'steps=3'; .* did you mean '--steps 3'"),
    (["demo", "--seed", "x"], 2, r"--seed: invalid int value: 'x'"),
    (["export", "runs/begun"], 2, r"arguments are required: target"),
    (["export", "runs/none", "out"], 2, r"runs/none: neither it nor .* is a folder: name a run"),
    (["export", "runs/begun", "out", "--dtype", "int4"], 2, r"--dtype: invalid choice: 'int4'"),
    (["serve-reward"], 2, r"model.path is empty: name a model"),
    (["serve-reward", "--model", "judge", "--max_length", "8"], 2, r"unknown option --max_length; .*'max_tokens'"),
    (["config", "gpro"], 2, r"unknown verb 'gpro'; did you mean 'grpo'"),
    (["config", "grpo", "lerning"], 2, r"no key of grpo has 'lerning' in .*; similar: training.learning_rate"),
    (["config", "grpo", "--filter", "lr"], 2, r"no key of grpo has 'lr' in .*did you mean 'training.learning_rate'"),
    (["config", "learning"], 2, r"unknown verb 'learning'; .*`trueline config grpo learning`"),
]
