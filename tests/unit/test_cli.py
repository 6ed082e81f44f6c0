"""Help texts, and what the command line prints for unknown words; nothing here loads a model."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.cli import load_options, main, make_parser
from trueline.config.algorithm import PRESETS
from trueline.config.base import ConfigError
from trueline.config.foreign_names import FOREIGN_VERBS
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig
from trueline.monitoring.run_folder import RunFolder
from trueline.options import default_text
from trueline.verbs import GROUPS, TOOLS, VERBS


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error line of a command that ends with status 2."""
    try:
        status = main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


def load_words(*words: str) -> RunConfig:
    options, options.overrides = (parsed := make_parser().parse_known_args(words))[0], parsed[1]
    return load_options(options)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("gpro", "'grpo'"),  # though gspo has as many letters in place
        ("GRPO", "'grpo'"),
        ("stf", "'sft'"),
        ("iterative-dpo", "'iterative_dpo'"),
        ("serve_reward", "'serve-reward'"),
        ("ppo_trainer", "'ppo'"),
        ("GRPOTrainer", "'grpo'"),
        ("train_ppo_ray", "'ppo'"),
        ("train_rm", "'rm'"),
        ("reward_model", "'rm'"),
        ("RewardTrainer", "'rm'"),
        ("train", "'sft' or 'dpo' or 'grpo'"),
        ("finetune", "'sft'"),
        ("evaluate", "'eval'"),
    ],
)
def test_an_unknown_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    assert error_of(capsys, word, "steps=3") == f"trueline: error: unknown verb {word!r}; did you mean {meant}?"


def test_an_unknown_verb_is_not_swamped_by_the_list_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("xyzzy", "foo", "banana", "steps=3"):
        assert error_of(capsys, word) == f"trueline: error: unknown verb {word!r}; `trueline -h` lists every verb"
    with pytest.raises(SystemExit):
        main(["gpro"])
    assert capsys.readouterr().err.splitlines()[0] == "usage: trueline [-h] [--version] VERB ..."
    for words in (["config", "gpro"], ["data", "preview", "--task", "dop"]):
        line = error_of(capsys, *words)
        assert f"unknown verb {words[-1]!r}; did you mean '{words[-1][0]}" in line
        assert "choose from" not in line


def test_verbs_that_others_use_lead_to_verbs_that_there_are() -> None:
    verbs = make_parser().get_default("verbs")
    assert {verb for answers in FOREIGN_VERBS.values() for verb in answers} <= set(verbs)
    assert not set(FOREIGN_VERBS) & set(verbs)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--num_generations", "8"], "'algorithm.group_size'"),
        (["--per-device-train-batch-size=8"], "`prompts_per_step`"),
        (["--seed", "3"], "'seed'"),
        (["--modle", "x"], "'--model'"),
        (["--xyzzy"], "`trueline config` lists every key"),
    ],
)
def test_an_unknown_option_gets_a_suggestion(capsys: pytest.CaptureFixture[str], words: list[str], meant: str) -> None:
    line = error_of(capsys, "grpo", *words)
    assert f"unknown option {words[0]}; keys are written as key=value; " in line
    assert meant in line


def test_an_unknown_option_of_a_verb_without_keys_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    takes = "trueline demo takes --seed, --steps, --folder, and no keys"
    assert error_of(capsys, "demo", "--lr").endswith(f"unknown option --lr; {takes}")
    assert error_of(capsys, "demo", "--stps", "3").endswith(f"unknown option --stps; {takes}; did you mean '--steps'?")
    assert error_of(capsys, "demo", "steps=3").endswith(f"'steps=3'; {takes}; did you mean '--steps 3'?")
    assert "argument --steps: '0' is not a whole number above 0" in error_of(capsys, "demo", "--steps", "0")
    line = error_of(capsys, "serve-reward", "--max_length")
    assert line.endswith("unknown option --max_length; keys are written as key=value; did you mean 'max_tokens'?")


def test_an_unknown_key_is_reported_before_anything_heavy_is_loaded() -> None:
    program = (
        "import sys; from trueline.cli import main\n"
        "assert main(['grpo', 'learning_rate=1e-5', 'beta=0.1', 'trainer.total_epochs=2']) == 2\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:2] == [
        "error: unknown key 'learning_rate'; did you mean 'training.learning_rate'?",
        "unknown key 'beta'; did you mean 'algorithm.kl.coefficient'?",
    ]
    assert done.stderr.splitlines()[2].startswith("unknown key 'trainer.total_epochs'; set `steps`")


def test_every_verb_prints_its_first_line_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    """The program ends each command where it would print for the first time."""
    commands = [
        ["-h"],
        ["grpoo"],
        ["grpo", "-h"],
        ["grpo", "steps=many"],
        ["grpo", "--modl", "model/"],
        ["plan", "grpo"],
    ]
    commands += [[name, "--model", "model/", *shlex.split(verb.example)] for name, verb in VERBS.items()]
    commands += [shlex.split(example) for _, example in TOOLS.values()]
    program = (
        "import sys, trueline.cli\n"
        "class FirstLine(BaseException): pass\n"
        "class Screen:\n"
        "    flush = staticmethod(lambda: None)\n"
        "    def write(self, text): raise FirstLine(text)\n"
        "screen, sys.stdout, sys.stderr = sys.stdout, Screen(), Screen()\n"
        f"for words in {commands}:\n"
        "    try:\n"
        "        trueline.cli.main(words)\n"
        "    except FirstLine as line:\n"
        "        heavy = {'torch', 'ray', 'transformers', 'vllm', 'datasets', 'deepspeed'} & set(sys.modules)\n"
        "        screen.write(f'{words[0]} {heavy or line}\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.split(" ")[0] in {*VERBS, *TOOLS, "-h", "grpoo"}]
    assert [line.split(" ")[0] for line in lines] == [words[0] for words in commands]
    assert not re.search(r"^\S+ \{", done.stdout, re.MULTILINE), done.stdout
    assert sum(line.endswith(" loading    libraries") for line in lines) == len(VERBS) + 9


def test_engines_follow_the_runtime_that_a_resumed_run_gets(tmp_path: Path) -> None:
    """All that the run had filled in for Ray goes, what is given now stays, and without a change nothing does."""
    ranks = {"ranks": 2}
    resolved = {"training": ranks, "critic": ranks, "rollout": {"engines": 3, "temperature": 0.5}}
    folder = RunFolder(tmp_path / "mine").open(
        RLConfig.parse(resolved | {"placement": "separate", "seed": 5}), "grpo", resume=False
    )
    (folder.checkpoints / "step_000001").mkdir(parents=True)

    def resumed(*overrides: str) -> RLConfig:
        config = load_words("grpo", "--resume", "--name", "mine", f"folder={tmp_path}", *overrides)
        assert isinstance(config, RLConfig) and (config.seed, config.rollout.temperature) == (5, 0.5)
        return config

    same, local, mixed = resumed(), resumed("runtime=local"), resumed("runtime=local", "critic.engine=deepspeed")
    assert same.engines() == RLConfig().engines()
    assert (same.training.ranks, same.rollout.engines, same.placement) == (2, 3, "separate")
    assert set(local.engines().values()) == {"hf", "torch"}
    assert (local.training.ranks, local.critic.ranks, local.rollout.engines) == (None, None, None)
    assert local.placement == "auto"
    assert mixed.engines() == local.engines() | {"critic": "deepspeed"}


def test_every_foreign_word_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num_generations", "8", "--per_device_train_batch_size", "4", "--bf16", "True", "beta=0.1", "steps"]
    error_of(capsys, "grpo", *words)
    with pytest.raises(SystemExit):
        main(["grpo", *words, "--stop", "a", "b", "--x", "-1"])
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.partition(";")[0].removeprefix("trueline grpo: error: ") for line in lines] == [
        *(f"unknown option --{name}" for name in ("num_generations", "per_device_train_batch_size", "bf16")),
        "unknown option --stop",
        "unknown option --x",
        "'steps' is not an override: write section.key=value, e.g. training.ranks=2",
        "unknown key 'beta'",
    ]


@pytest.mark.parametrize("verb", [[], ["doctor"]])
def test_eval_takes_its_prompts_as_data(verb: list[str], tmp_path: Path) -> None:
    def evaluated(*words: str) -> str:
        config = load_words(*verb, "eval", *words)
        assert isinstance(config, EvalConfig) and not config.data.path
        return config.evaluation.data

    assert evaluated("--data", "a") == evaluated("--eval-data", "a") == "a"
    assert evaluated("--data", "a", "--eval-data", "a") == "a"


def test_a_run_is_named_behind_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, place in enumerate(("runs/first", "other/second")):
        folder = RunFolder(tmp_path / place).open(RLConfig.parse({"seed": number}), "grpo", resume=False)
        (folder.checkpoints / "step_000001").mkdir(parents=True)

    def resumed(*words: str) -> tuple[int, int, str, str]:
        config = load_words("grpo", *words)
        assert isinstance(config, RLConfig)
        return config.seed, config.steps, str(config.name), str(Path(config.folder).resolve())

    steps, runs, other = RLConfig().steps, str(tmp_path / "runs"), str(tmp_path / "other")
    assert resumed("--resume", "runs/first") == resumed("--resume", "first") == (0, steps, "first", runs)
    assert resumed("--resume", "steps=7", "minibatches=1") == (0, 7, "first", runs)
    assert resumed("steps=7", "--resume", str(tmp_path / "other/second")) == (1, 7, "second", other)
    with pytest.raises(ConfigError, match=r"checkpoints/step_000001 is inside a run, .*: give .*/runs/first$"):
        resumed("--resume", "runs/first/checkpoints/step_000001")


def test_keys_are_found_by_their_names_and_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> list[str]:
        assert main(["config", *words]) == 0
        return [line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]

    rates = shown("grpo", "learning_rate")
    assert "training.learning_rate" in rates and "critic.learning_rate" in rates and "steps" not in rates
    assert shown("grpo", "--filter", "LEARNING_RATE") == rates == shown("--filter", "learning_rate", "grpo")
    muon = shown("grpo", "learning_rate", "Muon")  # which is in the meaning alone
    assert muon and set(muon) <= set(rates)
    assert len(shown("sft")) > 50


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error(unbuffered: str) -> None:
    command = f"{sys.executable} -m trueline.cli config grpo | true; echo ${{PIPESTATUS[0]}}"
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=variables)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_plan_takes_the_command_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model", "shape:llama-8b", "--data", "none.jsonl", "--eval-data", "none.jsonl", "--name", "mine"]
    for verb in PRESETS:
        extra = ["--reward", "math", "--dry-run", *["teacher.path=llama-8b"] * (verb == "on_policy_distill")]
        command = [verb, *run, "--tools", "python", *extra, "model.lora.rank=8", "rollout.tensor_parallel=2"]
        assert main(["plan", "--devices", "8xH200", *command]) == 0, capsys.readouterr().err
        assert "expected   rollout" in capsys.readouterr().out
    for verb in ("generate", "eval", "raft", "iterative_dpo"):
        words = [verb, *run[:4], "--reward", "math", "--devices", "1xH100"]
        assert f"plan {verb}: plan takes verbs that train one model" in error_of(capsys, "plan", *words)


def read_help(capsys: pytest.CaptureFixture[str], *words: str, flag: str = "-h") -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_each_verb_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [verb for group in GROUPS.values() for verb in group]
    assert sorted(listed) == sorted(make_parser().get_default("verbs")) == sorted([*VERBS, *TOOLS])
    lines = read_help(capsys).splitlines()
    for title, verbs in GROUPS.items():
        below = lines[lines.index(f"{title}:") + 1 :][: len(verbs)]
        assert [line.split()[0] for line in below] == list(verbs)
        assert all(len(line.split()) > 3 for line in below)
    meanings = [*(verb.meaning for verb in VERBS.values()), *(meaning for meaning, _ in TOOLS.values())]
    assert len(set(meanings)) == len(meanings) and max(map(len, meanings)) < 80


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_run_explains_its_flags_and_most_used_keys(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    command, text = VERBS[verb], " ".join(read_help(capsys, verb).split())
    keys = {key.path: key for key in command.kind.parse(command.defaults).leaves()}
    assert len(set(command.keys)) == 5
    for path in command.keys:
        assert f"{path}={default_text(keys[path])} {' '.join(keys[path].meaning.split())}" in text
    for flag, path in command.flags.items():
        assert keys[path].meaning and f"(key {path})" in text and f"{flag} " in text
    words = text.rpartition("example: trueline ")[2].split()
    assert words[0] == verb and load_words(*words)


def test_every_command_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, (meaning, example) in TOOLS.items():
        text = read_help(capsys, verb)
        assert meaning in text and f"example:\n  trueline {example}" in text
        make_parser().parse_args(example.split())
    for words in (["data", "preview"], ["reward", "try"], ["plan", "grpo"], ["doctor", "sft"]):
        assert "usage: trueline" in read_help(capsys, *words)
    assert re.fullmatch(r"trueline \S+\n", read_help(capsys, flag="--version"))
