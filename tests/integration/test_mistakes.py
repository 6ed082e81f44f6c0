"""Mistakes that a newcomer makes, typed at the command line: each is told in one sentence that names the way out."""

import json
import re
from pathlib import Path

import pytest

from tests.support.disk import files_up_to
from tests.support.reward_models import make_reward_model
from tests.support.tiny import make_tiny_model
from trueline.cli import main

Screen = pytest.CaptureFixture[str]
LOCAL = ["runtime=local", "monitoring.tensorboard=false", "rollout.max_new_tokens=4", "checkpoint.every=0"]
SMALL = ["prompts_per_step=2", "algorithm.group_size=2", "steps=1", "training.learning_rate=1e-3"]
GRPO = ["grpo", "--model", "model", "--data", "prompts.jsonl", "--reward", "mine.py:digits", *LOCAL, *SMALL]
SFT = ["sft", "--model", "model", "runtime=local"]
TRY = ["reward", "try", "--data", "prompts.jsonl", "--reward"]

FUNCTIONS = """
def digits(reply: str, wanted: str) -> float:
    return sum(character == wanted for character in reply) / max(len(reply), 1)


def solution(reply, solution):
    return 0.0


def equal(reply, label):
    return float(reply == label)


def raises(reply):
    return {"good": 1.0}[reply]


def nothing(reply):
    reply.strip()


def listed(reply):
    return [1.0]


def constant(reply):
    return 0.5
"""
TEXTS = {
    "mine.py": FUNCTIONS,
    "broken.py": "import nonsense\n",
    "empty.jsonl": "",
    "bad.jsonl": '{"prompt": "a"}\n{"prompt": "b"\n',
    "columns.jsonl": '{"frage": "a", "antwort": "b"}\n',
    "blank.jsonl": '{"prompt": "a"}\n{"prompt": "  "}\n',
    "long.jsonl": json.dumps({"prompt": "x" * 300}) + "\n",
    "labels.jsonl": '{"prompt": "2+2=", "label": 4}\n' * 4,
    "same.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "b"}\n',
    "calls.jsonl": json.dumps(
        {
            "messages": [
                {"role": "user", "content": "1+1"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
            ]
        }
    )
    + "\n",
    "bad.yaml": "steps: [1\n",
    "list.yaml": "- steps\n- 5\n",
    "notes.txt": "a\n",
    "split/train.jsonl": '{"prompt": "a"}\n',
    "split/test.jsonl": '{"prompt": "b"}\n',
}

# what is typed, the exit status, what is said
MISTAKES: list[tuple[list[str], int, str]] = [
    # words
    (["train"], 2, r"unknown verb 'train'; "),
    (["GRPOTrainer"], 2, r"unknown verb 'GRPOTrainer'; did you mean 'grpo'"),
    ([*GRPO, "--num_generations", "8"], 2, r"unknown option --num_generations; .*key=value.*algorithm.group_size"),
    ([*GRPO, "steps"], 2, r"'steps' is not an override: write it as section.key=value"),
    ([*GRPO, "rollout.max_new_token=8"], 2, r"unknown key 'rollout.max_new_token'; did you mean 'rollout.max_new_t"),
    ([*GRPO, "per_device_train_batch_size=8"], 2, r"unknown key 'per_device_train_batch_size'; .*`prompts_per_step`"),
    ([*GRPO, "learning_rate=1e-5"], 2, r"unknown key 'learning_rate'; did you mean 'training.learning_rate'"),
    ([*GRPO, "training.learning_rate=fast"], 2, r"training.learning_rate: .*number.*\(got 'fast'\)"),
    ([*GRPO, "steps=0"], 2, r"steps: .*greater than.*\(got 0\)"),
    ([*GRPO, "rollout.engine=vlm"], 2, r"rollout.engine=vlm.*vllm"),
    ([*GRPO, "--config", "bad.yaml"], 2, r"--config bad.yaml: not valid YAML"),
    ([*GRPO, "--config", "list.yaml"], 2, r"--config list.yaml: expected `key: value` lines, found list"),
    ([*GRPO, "--config", "none.yaml"], 2, r"--config none.yaml: cannot be read .*give a YAML file"),
    ([*GRPO, "algorithm.group_size=1"], 2, r"algorithm.advantage=\w+ compares .*algorithm.group_size"),
    ([*GRPO, "minibatches=3"], 2, r"minibatches=3 does not divide the 4 \w+ of a step"),
    ([*GRPO, "runtime=ray", "training.ranks=400"], 2, r"needs about .* GiB of memory .*training.ranks"),
    # models
    ([*GRPO, "model.path="], 2, r"model.path is empty: name a model, e.g. --model"),
    ([*GRPO, "--model", "nothere"], 2, r"model.path=nothere: there is no such folder or run .*owner/name"),
    ([*GRPO, "--model", "runs/none"], 2, r"model.path=runs/none: there is no such folder or run \(looked in"),
    (
        [*GRPO, "--model", "runs/begun"],
        2,
        r"model.path=runs/begun is a run of sft without a checkpoint yet: .*--resume",
    ),
    ([*GRPO, "--model", "owner/name"], 2, r"model.path=owner/name: cannot be opened \(.*name a folder"),
    ([*GRPO, "--model", "bare"], 2, r"model.path=bare: no tokenizer \(.*save one into the folder"),
    ([*GRPO, "--model", "split"], 2, r"model.path=split: no config.json.*name a folder that"),
    (
        [*GRPO, "--model", "judge", "--reward", "model"],
        2,
        r"model: its config.json says Llama.*no reward model: train one",
    ),
    (["distill", *SFT[1:], "--data", "sft.jsonl"], 2, r"distill.teacher is empty: name the model to learn from"),
    # data
    ([*GRPO, "--data", "nowhere.jsonl"], 2, r"data.path=nowhere.jsonl: there is no such file or folder \(looked in"),
    ([*GRPO, "--data", "gsm8k"], 2, r"data.path=gsm8k: there is no such file or folder .*owner/name"),
    ([*GRPO, "--data", "openai/gsm8k"], 2, r"data.path=openai/gsm8k: neither a file nor a dataset .*name a file"),
    ([*GRPO, "--data", "empty.jsonl"], 2, r"data.path=empty.jsonl: the dataset is empty; at least one row"),
    ([*GRPO, "--data", "notes.txt"], 2, r"data.path=notes.txt: ending '.txt' is not known; use one of"),
    ([*GRPO, "--data", "bad.jsonl"], 2, r"bad.jsonl, line 2: not valid JSON .*mend or remove it"),
    ([*GRPO, "--data", "columns.jsonl"], 2, r"columns.jsonl, line 1 has none of .*frage.*data.prompt_column="),
    ([*GRPO, "--data", "blank.jsonl"], 2, r"blank.jsonl, line 2: column 'prompt' must be non-empty text"),
    ([*GRPO, "--data", "split"], 2, r"data.path=split: test.jsonl looks held out .*evaluation.data=split/test.jsonl"),
    (
        [*GRPO, "--data", "long.jsonl", "--reward", "mine.py:constant"],
        2,
        r"row 1 of long.jsonl has 300 tokens; .*the limit",
    ),
    ([*GRPO, "data.prompt_column=quest"], 2, r"data.prompt_column=quest: .*prompts.jsonl, line 1 has no such column"),
    ([*GRPO, "--eval-data", "held.jsonl"], 2, r"evaluation.data=held.jsonl: there is no such file"),
    ([*GRPO, "rollout.max_prompt_tokens=200", "rollout.max_new_tokens=100"], 2, r"exceed the model's context of 256"),
    ([*SFT, "--data", "prompts.jsonl"], 2, r"prompts.jsonl.* has the columns prompt, wanted, .*data.<part>_column="),
    (
        [*SFT, "--data", "calls.jsonl"],
        2,
        r"calls.jsonl, line 1: .*calls add, which only a chat template can show.*FILE",
    ),
    (["dpo", *SFT[1:], "--data", "same.jsonl"], 2, r"same.jsonl, line 1: chosen and rejected are the same"),
    # rewards
    ([*GRPO, "--reward", ""], 2, r"reward.function is empty: give --reward"),
    ([*GRPO, "--reward", "accuracy"], 2, r"reward.function=accuracy: not a built-in \(code, .*file.py:function"),
    ([*GRPO, "--reward", "runs/none"], 2, r"reward.function=runs/none: .*nor file.py:function.* or a folder"),
    ([*GRPO, "--reward", "their.py:f"], 2, r"their.py:f: there is no file their.py \(looked in"),
    ([*GRPO, "--reward", "mine.py:digit"], 2, r"mine.py has no function 'digit'; it has digits, solution"),
    ([*GRPO, "--reward", "mine.py:solution"], 2, r"no value for its parameter 'solution'; a reward is given .*rename"),
    ([*GRPO, "--reward", "broken.py:f"], 2, r"broken.py:f: .*ModuleNotFoundError: No module named 'nonsense'"),
    ([*GRPO, "--reward", "judge"], 2, r"judge.url"),
    ([*GRPO, "--reward", "mine.py:raises"], 1, r"reward.max_failure_share.*KeyError"),
    ([*GRPO, "--reward", "mine.py:nothing"], 1, r"a reward must be a finite number, got None of type NoneType"),
    ([*GRPO, "--reward", "mine.py:listed"], 1, r"a reward must be a finite number, got \[1.0\] of type list"),
    ([*TRY, "mine.py:listed"], 1, r"reward none: .*a reward must be a finite number, got \[1.0\]"),
    ([*TRY, "judge"], 2, r"judge.url"),
    ([*TRY, "./judge"], 2, r"reward.function=./judge is a reward model, which must be loaded: .*`trueline eval`"),
    ([*GRPO, "--reward", "mine.py:constant", "steps=11"], 0, r"all answers have one reward.*in 10 steps in a row all "),
    ([*GRPO, "--reward", "mine.py:constant", "steps=2"], 0, r"in 2 steps in a row all completions had the same rew"),
    (
        [*GRPO, "--data", "labels.jsonl", "--reward", "mine.py:equal", "--dry-run"],
        0,
        r"warning: reward.function=mine.py:equal of labels.jsonl: the label 4 is of type int .*str\(label\)",
    ),
    # folders
    ([*GRPO, "name=taken"], 2, r"taken exists: add --resume to go on with that run, or choose another --name"),
    ([*GRPO, "name=a/b"], 2, r"name: .*\(got 'a/b'\)"),
    ([*GRPO, "folder=notes.txt"], 2, r"folder=notes.txt: .* cannot be written .*choose another place"),
    ([*GRPO, "--resume", "--name", "never"], 2, r"never is not a run that can be resumed .*leave --resume out"),
    ([*GRPO, "--resume", "folder=nowhere"], 2, r"no grpo run to resume in .*nowhere: name its place with folder="),
    ([*GRPO, "--restart"], 2, r"--restart starts a run over that --resume finds: give both, or neither"),
    (["export", "split", "out"], 2, r"split: neither a checkpoint nor a run folder with checkpoints in it"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model", tied=True)
    make_reward_model(folder / "judge", "reward")
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    rows = [{"prompt": f"Say {number}", "wanted": str(number % 10)} for number in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).write_bytes((folder / "model" / name).read_bytes())
    for name in ("taken", "begun"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text("# trueline sft\nname: begun\n")
    return folder


def told(words: list[str], screen: Screen) -> tuple[int, str]:
    """The exit status and all that was said."""
    try:
        status = main(words)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = screen.readouterr()
    return status, out + err


def test_every_mistake_is_told_in_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen) -> None:
    monkeypatch.chdir(home)
    wrong = []
    for number, (words, status, message) in enumerate(MISTAKES):
        named = [f"name=m{number}"] if words[: len(GRPO)] == GRPO and "--resume" not in words else []
        found, said = told([*words[:1], *named, *words[1:]], capsys)
        ours = re.search(r'File ".*/trueline/\w+/', said)
        if found != status or ours or not re.search(message, " ".join(said.split())):
            wrong.append(f"{words} -> {found}, not {status} and {message}:\n{said}")
    assert not wrong, "\n\n".join(wrong)


def test_a_full_disk_is_told_in_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen) -> None:
    monkeypatch.chdir(home)
    with files_up_to(50_000):
        status, said = told([*GRPO, "name=full"], capsys)
    assert status == 1
    assert re.search(r"step_000001 could not be saved \(.*\).* make room on the disk", said), said
    assert "Traceback" not in said
