"""Mistakes of jobs that sample, tasks on given rows, and verbs that look at or hand on what runs have left."""

import json
import shutil
import socket
from pathlib import Path

from tests.support.mistakes.home import Mistake
from trueline.cli import main

QUIET = ["monitoring.tensorboard=false", "runtime=local"]
REWARD = ["--reward", "mine.py:digits"]
MODEL, PROMPTS = ["--model", "model", "runtime=local", "rollout.max_new_tokens=4"], ["--data", "prompts.jsonl"]
GENERATE = ["generate", *MODEL, *PROMPTS]
EVAL = ["eval", *MODEL, "--eval-data", "prompts.jsonl"]
RAFT = ["raft", *MODEL, *PROMPTS, "rounds=1"]
ITERATIVE = ["iterative_dpo", *RAFT[1:]]
TASK = ["--model", "model", *QUIET, "samples_per_step=1", "steps=1", "training.learning_rate=1e-2"]
DISTILL = ["distill", *TASK, "--data", "sft.jsonl"]
SERVE = ["serve-reward", "--model", "judge"]
TAKEN = socket.create_server(("127.0.0.1", 0))  # for as long as the tests run
PORT = str(TAKEN.getsockname()[1])

ROWS = {
    "pairs.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "b", "rejected": "e"}],
    "good.jsonl": [{"prompt": prompt, "completion": "b", "label": True} for prompt in "ac"],
    "steps.jsonl": [{"prompt": "a", "completions": ["one", "two"], "labels": [True, False]}],
}


def add_files(folder: Path) -> None:
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    change_model(folder, "wide", "config.json", '"vocab_size": 259', '"vocab_size": 300')
    change_model(folder, "spelled", "tokenizer.json", '"b"', '"bb"')
    named = [f"folder={folder}/runs", "--model", f"{folder}/model", "--data", f"{folder}/sft.jsonl"]
    assert main(["sft", *TASK, *named, "--name", "saved"]) == 0
    jobs = {"answered": "generate", "tested": "eval", "rounds": "raft"}
    for name, verb in jobs.items():
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "config.yaml").write_text(f"# trueline {verb}\nname: {name}\n")
    (folder / "runs/rounds/round_1/sft").mkdir(parents=True)
    (folder / "runs/rounds/round_1/sft/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')


def change_model(folder: Path, name: str, file: str, old: str, new: str) -> None:
    shutil.copytree(folder / "model", folder / name)
    text = (folder / name / file).read_text()
    assert old in text
    (folder / name / file).write_text(text.replace(old, new))


MISTAKES: list[Mistake] = [
    # generate
    (["generate"], r"data.path is empty: name a dataset"),
    (["generate", *PROMPTS], r"model.path is empty: name a model, e.g. --model"),
    ([*GENERATE, "samples=0"], r"samples: .*greater than or equal to 1 \(got 0\)"),
    ([*GENERATE, "rollout.temperature=-1"], r"rollout.temperature: .*greater than 0 \(got -1\)"),
    ([*GENERATE, "temperature=0.7"], r"unknown key 'temperature'; did you mean 'rollout.temperature'"),
    ([*GENERATE, "keep=best"], r"keep=best compares rewards: name one with --reward, or set keep=all$"),
    ([*GENERATE, "pairs=true"], r"pairs=true compares rewards: name one with --reward, or set pairs=false$"),
    (
        [*GENERATE, *REWARD, "pairs=true", "samples=1"],
        r"pairs=true needs two completions: .*samples to 2 or more \(got 1",
    ),
    ([*GENERATE, "--name", "taken"], r"taken exists: add --resume to continue that run, or choose another --name"),
    ([*GENERATE, "shard=2", "shards=2"], r"shard=2 is not in 0 to 1 \(shards=2\)"),
    ([*GENERATE, "shards=20", "shard=19"], r"shard=19 of shards=20 has none of the 8 prompts: lower shards"),
    (
        [*GENERATE, "--model", "judge"],
        r"model.path=judge is a reward model .*which generates no text: name the model that it was",
    ),
    ([*GENERATE, "--model", "runs/tested"], r"runs/tested is a run of eval, which trains no model: name one that"),
    (
        [*GENERATE, *REWARD, "keep=threshold", "threshold=5", "--name", "low"],
        r"warning: nothing was kept: no reward reached threshold=5 \(mean of the best 0.\d+\): low",
        0,
    ),
    ([*GENERATE, *REWARD, "keep=best", "samples=1", "--dry-run"], r"warning: samples=1 leaves keep=best nothing to", 0),
    (
        [*GENERATE, "--reward", "mine.py:constant", "pairs=true", "--name", "equal"],
        r"warning: no prompt has a pair: its completions have equal rewards .*raise samples",
        0,
    ),
    # eval
    (["eval", *MODEL, *REWARD], r"evaluation.data is empty: name prompts with --data"),
    ([*EVAL], r"reward.function is empty: give --reward"),
    ([*EVAL, *REWARD, "evaluation.samples=0"], r"evaluation.samples: .*greater than or equal to 1 \(got 0\)"),
    ([*EVAL, *REWARD, "samples=4"], r"unknown key 'samples'; did you mean 'evaluation.samples'"),
    ([*EVAL, *REWARD, "evaluation.temperature=-1"], r"evaluation.temperature: .*\(got -1\)"),
    ([*EVAL, *REWARD, "evaluation.samples=4"], r"samples=4 greedy completions would be identical: set evaluation.temp"),
    ([*EVAL, *REWARD, "--model", "runs/begun"], r"runs/begun is a run of sft without a checkpoint yet: .*--resume"),
    ([*EVAL, "--reward", "exact"], r"reward.function=exact: no value for its parameter 'label'; .*data.label_column"),
    (["eval", *MODEL, "--data", "nothing.jsonl", *REWARD], r"evaluation.data=nothing.jsonl: no such file"),
    # raft and iterative_dpo
    ([*RAFT], r"keep=best compares rewards: name one with --reward, or set keep=all$"),
    ([*RAFT, *REWARD, "rounds=0"], r"rounds: .*greater than or equal to 1 \(got 0\)"),
    ([*RAFT, *REWARD, "--model", "judge"], r"model.path=judge is a reward model .*which generates no text"),
    (
        [*RAFT, *REWARD, "keep=threshold", "threshold=9", "--name", "high"],
        r"round_1/generate has nothing for sft in kept.jsonl: nothing was kept: no reward reached threshold=9",
        1,
    ),
    ([*ITERATIVE], r"reward.function is empty: iterative_dpo prefers completions by their rewards: name one with"),
    ([*ITERATIVE, *REWARD, "samples=1"], r"pairs=true needs two completions: set samples to 2 or more"),
    (
        [*ITERATIVE, "--reward", "mine.py:constant", "--name", "even"],
        r"error: round_1/generate has nothing for dpo in pairs.jsonl: no prompt has a pair: its completions have equal",
        1,
    ),
    # tasks on given rows
    (["dpo", *TASK], r"data.path is empty: name a dataset"),
    (["dpo", *TASK, "--data", "sft.jsonl"], r"sft.jsonl, line 1 has the columns prompt, completion, .*chosen \+ reje"),
    (["dpo", *TASK, "--data", "pairs.jsonl", "preference.label_smoothing=0.6"], r"label_smoothing: .*\(got 0.6\)"),
    (
        ["dpo", *TASK, "--data", "pairs.jsonl", "--model", "judge"],
        r"model.path=judge is a reward model .*which generates no text",
    ),
    (["ipo", *TASK, "--data", "pairs.jsonl", "preference.label_smoothing=0.1"], r"label_smoothing=0.1 needs loss=si"),
    (["simpo", *TASK, "--data", "pairs.jsonl", "preference.gamma=-1"], r"preference.gamma: .*\(got -1\)"),
    (["kto", *TASK, "--data", "good.jsonl"], r"good.jsonl, line 1 to .*all 2 labels are true, .*add rows with the la"),
    (["kto", *TASK, "--data", "sft.jsonl"], r"sft.jsonl, line 1 has the columns .*rated: .*completion/answer/respon"),
    (["rm", *TASK, "--data", "same.jsonl"], r"same.jsonl, line 1: chosen and rejected are the same, 'b': fix or "),
    (
        ["rm", *TASK, "--data", "pairs.jsonl", "reward_model.margin_column=gap"],
        r"reward_model.margin_column=gap: pairs.jsonl, line 1 has no such column: set one of prompt, chosen, rejected",
    ),
    (["prm", *TASK, "--data", "steps.jsonl", "data.step_separator="], r"data.step_separator is empty: name the text"),
    (
        ["prm", *TASK, "--data", "steps.jsonl", "data.step_separator=wo", "--dry-run"],
        r"1 steps that contain data.step_separator, which would split them in two",
        0,
    ),
    (
        ["prm", *TASK, "--data", "steps.jsonl", "--model", "judge"],
        r"model.path=judge is a reward model .*whose head has the wrong shape",
    ),
    ([*DISTILL, "distill.teacher=nothere"], r"distill.teacher=nothere: no such folder or run"),
    ([*DISTILL, "distill.teacher=judge"], r"distill.teacher=\S*judge is a reward model .*which generates no text"),
    ([*DISTILL, "distill.teacher=wide"], r"distill.teacher=\S*wide: it knows 300 tokens and the student 259: choose"),
    ([*DISTILL, "distill.teacher=spelled"], r"distill.teacher=\S*spelled: its tokenizer is not that of model.path="),
    ([*DISTILL, "distill.teacher=runs/saved", "distill.top_k=1000"], r"distill.top_k=1000 is more than the 259 token"),
    ([*DISTILL, "distill.teacher=model", "--dry-run"], r"warning: distill.teacher=\S*model is the student itself", 0),
    # serve-reward
    ([*SERVE, "--model", "model"], r"model: LlamaForCausalLM in its config.json is no reward model: train"),
    ([*SERVE, "--model", "runs/begun"], r"runs/begun is a run of sft without a checkpoint yet"),
    ([*SERVE, "--port", "99999"], r"port: .*less than or equal to 65535 \(got 99999\)"),
    ([*SERVE, "--port", PORT], rf"port={PORT}: cannot listen there \(.*in use\): choose .* a port that is free"),
    ([*SERVE, "--host", "nohost.invalid"], r"host=nohost.invalid, .*cannot listen there \(.*\): choose a host that is"),
    # export
    (["export", "nowhere", "out"], r"nowhere: neither it nor runs/nowhere is a folder: name a run or a checkpoint"),
    (["export", "runs/begun", "out"], r"runs/begun: neither a checkpoint nor the folder of a run with checkpoints"),
    (["export", "saved", "model"], r"model exists: name a new folder"),
    (
        ["export", "saved", "notes.txt/out"],
        r"notes.txt/out: cannot be written, because notes.txt is not a folder.*name another",
    ),
    (["export", "saved", "out", "--merge"], r"step_000001 has no adapter \(model.lora.rank=0\).*leave out --merge"),
    (["export", "saved", "out", "--average"], r"has no moving average \(training.ema_decay=0\): leave out --average"),
    (["export", "saved", "out", "--dtype", "float16"], r"--dtype: invalid choice: 'float16' \(choose from"),
    # report, watch, explain
    (
        ["report", "runs/begun", "--out", "begun.html"],
        r"warning: begun has logged no step yet: the page shows only its plan",
        0,
    ),
    (["report", "runs/tested"], r"runs/tested is a run of eval, which logs no steps: look at .*evaluation.json"),
    (["report", "runs/rounds"], r"runs/rounds is a run of raft, whose rounds are .*name some of them, \S*round_1/sft"),
    (["report", "savd"], r"savd: neither it nor runs/savd is the folder of a run .*did you mean 'saved'"),
    (["report", "saved", "--svg", "lss"], r"--svg lss: no run has this metric \(did you mean 'loss'\?\); there are "),
    (["report", "saved", "--svg", ","], r"--svg names no metric; there are grad_norm, .*loss"),
    (["report", "begun", "--svg", "loss"], r"--svg loss: begun has logged no step yet"),
    (["report", "saved", "--svg", "loss", "--mean", "0"], r"--mean: '0' is not a whole number above 0"),
    (["report", "saved", "--mean", "5"], r"--mean 5 needs --svg; the page"),
    (
        ["report", "saved", "--svg", "loss", "--out", "a.png"],
        r"--out a.png: a picture of curves is not a .png file: let ",
    ),
    (["report", "saved", "--out", "a.svg"], r"--out a.svg: a page is not a .svg file: let the name end in .html"),
    (["report", "saved", "--out", "nowhere/a.html"], r"--out nowhere/a.html: cannot be written .*a folder that exists"),
    (["watch", "savd"], r"savd: neither it nor runs/savd is the folder of a run .*did you mean 'saved'"),
    (["watch", "saved", "--port", "99999"], r"port=99999: cannot listen there \(.*0-65535.*a port that is free"),
    (["watch", "saved", "--port", PORT], rf"port={PORT}: cannot listen there \(.*in use\)"),
    (["explain", "savd"], r"savd: neither it nor runs/savd is the folder of a run .*did you mean 'saved'"),
    (["explain", "begun"], r"runs/begun has no logs: name a run that was started"),
    # doctor and demo
    (["doctor", "nothing"], r"unknown verb 'nothing'; `trueline -h` lists every verb"),
    (["doctor", "export"], r"'export' starts no run: `trueline doctor -h` lists the verbs that do"),
    (["doctor", *EVAL, *REWARD, "--deep"], r"doctor eval --deep: .*drop --deep"),
    (["doctor", "dpo", *TASK, "--data", "sft.jsonl"], r"1 refused", 1),
    (["demo", "--folder", "split"], r"--folder \S*split: cannot be created \(File exists\): name a new folder"),
    (
        ["demo", "--folder", "notes.txt/new"],
        r"--folder \S*notes.txt/new: cannot be created \(Not a directory\): name a",
    ),
    (["demo", "--steps", "0"], r"--steps: '0' is not a whole number above 0"),
    (["demo", "--seed", "-1", "--folder", "seeded"], r"seed: .*greater than or equal to 0 \(got -1\)"),
    (["demo", "--seed", "9" * 20, "--folder", "seeded"], r"seed: .*less than or equal to \d+ \(got 9+\)"),
]
