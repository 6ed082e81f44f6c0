from pathlib import Path

from tests.support.mistakes.home import GRPO, LOCAL, TRY, Mistake

FLAWS = """
import asyncio
import os
import sys
import time

import numpy as np

shortest = lambda reply: -float(len(reply))


class Scorer:
    def __call__(self, reply):
        return float(len(reply))


scorer = Scorer()


async def waits(reply):
    await asyncio.sleep(0)
    return float(len(reply))


def yields(reply):
    yield 1.0


def prints(reply):
    print("x" * 1_000_000)
    return float(len(reply))


def leaves(reply):
    exit()


def dies(reply):
    os._exit(7)


def moves(reply):
    os.chdir("/")
    return float(len(reply))


def places(*args):
    return 1.0


def unnamed(reply, wanted, /):
    return float(wanted in reply)


def text(reply):
    return "1.0"


def array(reply):
    return np.array([float(len(reply))])


def named(reply):
    return {"format": 1.0, "right": 0.0}


def endless(reply):
    return float("inf")


def undefined(reply):
    return float("nan")


def needs_gpu(reply):
    raise RuntimeError("No CUDA GPUs are available")


def lable(reply, lable="", scale=1.0):
    return float(len(reply))


def sleeps(reply):
    time.sleep(60)


def thirds(reply):
    if sum(map(ord, reply)) % 3 == 0:
        raise ValueError(f"cannot read {reply!r}")
    return float(len(reply))


def held_out(reply, part="train"):
    return {"train": float(len(reply))}[part]


def trl(prompts, completions, **kwargs):
    return [float(len(one)) for one, wanted in zip(completions, kwargs["wanted"])]


def trl_messages(completions, **kwargs):
    return [float(len(one[0]["content"])) for one in completions]


def openrlhf(queries, prompts, labels, **kwargs):
    return {"rewards": [float(len(one)) for one in queries], "scores": [0.0]}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "acc": True}


class Flaky:
    def reset(self, wanted):
        return None

    def step(self, reply):
        if sum(map(ord, reply)) % 3 == 0:
            raise ValueError("a broken game")
        return float(len(reply))
"""
FLAW = [*GRPO, "--reward"]
TALK = '{"prompt": [{"role": "user", "content": "2+2="}], "label": "4"}\n'
VERL = '{"prompt": "2+2=", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "4"}}\n'
# A cause with the function's own line, the file of its call, and the total in the end.
FAILED = (
    r"{} of the last \d+ completions got no reward \({}: .*\(flaws.py, line \d+\)\); reproduce .*failures/1.json .*{}"
)
TOTAL = r"failed \d+ of \d+ completions got no reward: \d+ x "
SOME = FAILED.format(r"warning: \d+", "reward_error: ValueError", TOTAL)
SAMPLED = ["--model", "model", "--reward", "flaws.py:thirds", "reward.max_failure_share=1", *LOCAL[:1]]
SHORT = "rollout.max_new_tokens=8"


def add_files(folder: Path) -> None:
    texts = {
        "flaws.py": FLAWS,
        "with-dash.py": "from neighbour import scale\n\n\ndef f(reply):\n    return scale * len(reply)\n",
        "neighbour.py": "scale = 2.0\n",
        "colon.py": "def f(reply)\n    return 1.0\n",
        "both.jsonl": '{"prompt": "a", "label": "1", "answer": "2"}\n{"prompt": "b", "label": "2", "answer": "2"}\n',
        "talk.jsonl": TALK * 4,
        "verl.jsonl": VERL * 4,
        "rubric.yaml": "items: [{name: a, criterion: It is a.}, {name: b, criterion: It is b., points: many}]\n",
        "whole_rubric.yaml": "items: [{name: a, criterion: It is a.}]\n",
        "held_out.jsonl": '{"prompt": "Say 1", "part": "test"}\n' * 2,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


MISTAKES: list[Mistake] = [
    ([*GRPO, "--reward", ""], r"reward.function is empty: give --reward"),
    ([*GRPO, "--reward", "accuracy"], r"reward.function=accuracy: not a built-in \(code, .*file.py:function"),
    ([*GRPO, "--reward", "runs/none"], r"reward.function=runs/none: .*nor file.py:function.* or a folder"),
    ([*GRPO, "--reward", "their.py:f"], r"their.py:f: there is no file their.py \(looked in"),
    ([*GRPO, "--reward", "mine.py:digit"], r"mine.py has no function 'digit'; it has digits, solution"),
    ([*GRPO, "--reward", "mine.py:solution"], r"no value for its parameter 'solution'; a reward is given .*rename"),
    ([*GRPO, "--reward", "broken.py:f"], r"broken.py:f: .*ModuleNotFoundError: No module named 'nonsense'"),
    ([*GRPO, "--reward", "judge"], r"judge.url"),
    ([*TRY, "mine.py:listed"], r"reward none: .*a reward must be a finite number, got \[1.0\]", 1),
    ([*TRY, "judge"], r"judge.url"),
    ([*TRY, "./judge"], r"reward.function=./judge is a reward model, which must be loaded: .*`trueline eval`"),
    ([*GRPO, "--reward", "mine.py:constant", "steps=11"], r"completions have the same reward.*in 10 steps in a row", 0),
    ([*GRPO, "--reward", "mine.py:constant", "steps=2"], r"in 2 steps in a row all completions had the same rew", 0),
    (
        [*GRPO, "--data", "labels.jsonl", "--reward", "mine.py:equal", "--dry-run"],
        r"warning: reward.function=mine.py:equal of labels.jsonl: the label 4 is of type int .*str\(label\)",
        0,
    ),
    # Every call fails, or returns no number.
    ([*FLAW, "mine.py:raises"], r"mine.py:raises gave no reward in any of \d+ calls .*KeyError: .* \(mine.py, line 15"),
    ([*FLAW, "mine.py:nothing"], r"calls .*: a reward must be a finite number, got None of type NoneType: a `return`"),
    ([*FLAW, "mine.py:listed"], r"calls .*: a reward must be a finite number, got \[1.0\] of type list: return the nu"),
    ([*FLAW, "flaws.py:yields"], r"got <generator .* of type generator: write `return` in place of `yield`"),
    ([*FLAW, "flaws.py:text"], r"got '1.0' of type str: return float\(...\) of it; fix it.*reward.probe=false"),
    ([*FLAW, "flaws.py:named"], r"got {'format': 1.0, 'right': 0.0} of type dict: .*reward.parts"),
    ([*FLAW, "flaws.py:endless"], r"a reward must be a finite number, got inf of type float"),
    ([*FLAW, "flaws.py:undefined"], r"a reward must be a finite number, got nan of type float"),
    ([*FLAW, "flaws.py:leaves"], r"gave no reward in any of \d+ calls before the start: SystemExit.*flaws.py, line"),
    ([*FLAW, "flaws.py:dies"], r"gave no reward in any of \d+ calls before the start: its process died with exit sta"),
    ([*FLAW, "flaws.py:needs_gpu"], r"RuntimeError: No CUDA GPUs are available \(flaws.py, line \d+\)"),
    (["eval", "--eval-data", "prompts.jsonl", *SAMPLED, "--reward", "flaws.py:text"], r"any of \d+ calls .*type str"),
    (["generate", "--data", "prompts.jsonl", *SAMPLED, "--reward", "flaws.py:text"], r"any of \d+ calls .*type str"),
    (["raft", "--data", "prompts.jsonl", *SAMPLED, "--reward", "flaws.py:text"], r"any of \d+ calls .*type str"),
    ([*FLAW, "flaws.py:text", "reward.probe=false"], r"reward.max_failure_share.*got '1.0' of type str", 1),
    (
        [*FLAW, "flaws.py:sleeps", "reward.timeout_seconds=1", "--dry-run"],
        r"warning: .*any of 1 calls .*more than 1 s",
        0,
    ),
    # What can be loaded and is no function, and what looks odd and is one.
    ([*FLAW, "flaws.py"], r"flaws.py: name a function of it, as flaws.py:FUNCTION; it has shortest, Scorer"),
    ([*FLAW, "flaws.py:Scorer"], r"Scorer is a class, not a function: .*reward = Scorer\(\).*--reward flaws.py:reward"),
    ([*FLAW, "flaws.py:Scorer.__call__"], r"flaws.py has no function 'Scorer.__call__'; it has shortest"),
    ([*FLAW, "flaws.py:places"], r"it takes only \*args, but values are passed by name: name its parameters"),
    ([*FLAW, "colon.py:f"], r"reward.function=colon.py:f: File .*colon.py\", line 1 .*SyntaxError: expected ':'"),
    ([*FLAW, "mine.py:digits,mine.py:constant"], r"names one reward: name several with reward.parts.NAME.function="),
    *(([*FLAW, f"flaws.py:{name}", "--dry-run"], "engines", 0) for name in ("shortest", "scorer", "waits", "prints")),
    *(([*FLAW, f"flaws.py:{name}", "--dry-run"], "engines", 0) for name in ("moves", "unnamed", "array")),
    ([*FLAW, "with-dash.py:f", "--dry-run"], "engines", 0),
    # Parameters, labels, parts.
    (
        [*FLAW, "flaws.py:lable", "--data", "labels.jsonl", "--dry-run"],
        r"keeps the default of scale: no such column .*parameter 'lable' keeps its default, .*did you mean 'label'\?",
        0,
    ),
    (
        [*FLAW, "exact", "--data", "both.jsonl", "--dry-run"],
        r"label column label of both.jsonl; answer: given under its own name .*warning: row 1 of both.jsonl: column "
        r"label is '1', answer is '2'; they differ in 1 of 2 rows.*set data.label_column=label or answer",
        0,
    ),
    (
        ["grpo", *GRPO[1:5], "reward.parts.good.function=mine.py:digits", "reward.parts.god.weight=2"],
        r"reward.parts.god: it has no function: .*did you mean reward.parts.good\?",
    ),
    ([*GRPO, "reward.weights=[1,2]"], r"unknown key 'reward.weights'"),
    # Functions of other projects.
    (
        [*FLAW, "flaws.py:trl", "--dry-run"],
        r"has TRL's parameters \(prompts, completions\): each call has one comple",
        0,
    ),
    ([*FLAW, "flaws.py:trl_messages"], r"string indices .*it is called as TRL does, with messages where the prompts"),
    ([*FLAW, "flaws.py:trl_messages", "--data", "talk.jsonl"], r"has TRL's parameters .*1/1 reward", 0),
    (
        [*FLAW, "flaws.py:openrlhf"],
        r"has OpenRLHF's parameters \(queries, prompts, labels\): .*lists of one .*1/1 rew",
        0,
    ),
    (
        [*FLAW, "flaws.py:compute_score", "--data", "verl.jsonl"],
        r"has verl's parameters \(data_source, solution_str, ",
        0,
    ),
    (
        [*FLAW, "flaws.py:compute_score"],
        r"no value for its parameter 'data_source'; a reward is given .*reward.options",
    ),
    # Rubrics.
    (
        [*FLAW, "none.yaml"],
        r"reward.function=none.yaml: cannot be read \(No such file or directory\); give a YAML file",
    ),
    (
        [*FLAW, "rubric.yaml"],
        r"reward.function=rubric.yaml: item 2: points: input should be a valid number.*got 'many'",
    ),
    ([*TRY, "rubric.yaml"], r"reward.function=rubric.yaml: item 2: points: input should be a valid number.*got 'many'"),
    ([*FLAW, "whole_rubric.yaml"], r"judge.url=: not an address"),
    (
        [*FLAW, "whole_rubric.yaml", "reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.model=any"],
        r"judge.url=http://127.0.0.1:9/v1: the server cannot be reached \(.*refused\): start it",
    ),
    # Servers.
    ([*FLAW, "http://127.0.0.1:9/"], r"reward.function=http://127.0.0.1:9/: the server cannot be reached \(.*refused"),
    ([*TRY, "http://127.0.0.1:9/"], r"http://127.0.0.1:9/: the server cannot be reached \(.*refused"),
    (
        [*FLAW, "judge", "reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.model=any"],
        r"judge.url=http://127.0.0.1:9/v1: the server cannot be reached \(.*refused\): start it",
    ),
    (
        [*FLAW, "http://127.0.0.1:9/", "reward.remote.token_variable=NO_SUCH_KEY"],
        r"remote.token_variable=NO_SUCH_KEY: the environment has no NO_SUCH_KEY: export it",
    ),
    # Some calls fail, in every kind of run.
    ([*FLAW, "flaws.py:thirds", "reward.max_failure_share=1", "steps=3"], SOME, 0),
    (
        [*FLAW, "flaws.py:held_out", "--eval-data", "held_out.jsonl"],
        FAILED.format("warning: 4", "reward_error: KeyError", "failed 4 of 8 completions"),
        0,
    ),
    (["eval", "--eval-data", "prompts.jsonl", *SAMPLED, SHORT], SOME, 0),
    (["generate", "--data", "prompts.jsonl", *SAMPLED, "samples=4", SHORT], SOME, 0),
    (
        ["raft", "--data", "prompts.jsonl", *SAMPLED, "samples=4", SHORT, "rounds=1", "training.learning_rate=1e-2"],
        SOME,
        0,
    ),
    (
        ["grpo", *GRPO[1:5], *GRPO[7:], "environment.function=flaws.py:Flaky", "reward.max_failure_share=1", "steps=3"],
        FAILED.format(r"warning: \d+", "environment_error: ValueError", TOTAL),
        0,
    ),
    # Trying one.
    ([*TRY, "mine.py:digits", "--rows", "0"], r"argument --rows: '0' is not a whole number above 0"),
    ([*TRY, "mine.py:digits", "--rows", "100"], r"row 8 of .*rows prompts.jsonl has only 8 of 100 rows", 0),
    ([*TRY, "mine.py:digits", "7"], r"'7' is neither an option nor key=value: give a reply as --reply '7'"),
    (["reward", "try", "--reward", "mine.py:digits"], r"data.path is empty: name a dataset"),
    ([*TRY, "flaws.py:trl", "--reply", "abc"], r"reward 3 .*has TRL's parameters", 0),
]
