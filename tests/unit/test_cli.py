"""What the command line says to words it does not know; nothing here loads a model."""

import subprocess
import sys
from pathlib import Path

import pytest

from trueline.cli import load_options, main, make_parser
from trueline.config.foreign_names import FOREIGN_VERBS
from trueline.config.rl import RLConfig
from trueline.monitoring.run_folder import RunFolder


def said_to(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error line of a command that ends with status 2."""
    try:
        status = main(words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


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
    assert said_to(capsys, word, "steps=3") == f"trueline: error: unknown verb {word!r}; did you mean {meant}?"


@pytest.mark.parametrize("word", ["xyzzy", "foo", "banana", "steps=3"])
def test_a_verb_like_no_other_points_to_the_list(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert said_to(capsys, word) == f"trueline: error: unknown verb {word!r}; `trueline -h` lists every verb"


def test_an_unknown_verb_is_not_swamped_by_the_list_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpro"])
    assert capsys.readouterr().err.splitlines()[0] == "usage: trueline [-h] [--version] VERB ..."
    for words in (["config", "gpro"], ["data", "preview", "--task", "dop"]):
        line = said_to(capsys, *words)
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
    line = said_to(capsys, "grpo", *words)
    assert f"unknown option {words[0]}; keys are written as key=value; " in line
    assert meant in line


def test_options_of_verbs_without_keys_are_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    takes = "trueline demo takes --seed, --steps, --folder, and no keys"
    assert said_to(capsys, "demo", "--lr").endswith(f"unknown option --lr; {takes}")
    assert said_to(capsys, "demo", "--stps", "3").endswith(f"unknown option --stps; {takes}; did you mean '--steps'?")
    assert said_to(capsys, "demo", "steps=3").endswith(f"'steps=3'; {takes}; did you mean '--steps 3'?")
    line = said_to(capsys, "serve-reward", "--max_length")
    assert line.endswith("unknown option --max_length; keys are written as key=value; did you mean 'max_tokens'?")


def test_a_demo_takes_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --steps: '0' is not a whole number above 0" in said_to(capsys, "demo", "--steps", "0")


def test_an_unknown_key_is_told_before_anything_heavy_is_loaded() -> None:
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


def test_engines_follow_the_runtime_that_a_resumed_run_gets(tmp_path: Path) -> None:
    """All that the run had filled in for Ray goes, what is given now stays, and without a change nothing does."""
    ranks = {"ranks": 2}
    resolved = {"training": ranks, "critic": ranks, "rollout": {"engines": 3, "temperature": 0.5}}
    folder = RunFolder(tmp_path / "mine").open(
        RLConfig.parse(resolved | {"placement": "separate", "seed": 5}), "grpo", resume=False
    )
    (folder.checkpoints / "step_000001").mkdir(parents=True)

    def resumed(*overrides: str) -> RLConfig:
        words = ["grpo", "--resume", "--name", "mine", f"folder={tmp_path}", *overrides]
        options, options.overrides = (parsed := make_parser().parse_known_args(words))[0], parsed[1]
        config = load_options(options)
        assert isinstance(config, RLConfig) and (config.seed, config.rollout.temperature) == (5, 0.5)
        return config

    same, local, mixed = resumed(), resumed("runtime=local"), resumed("runtime=local", "critic.engine=deepspeed")
    assert same.engines() == RLConfig().engines()
    assert (same.training.ranks, same.rollout.engines, same.placement) == (2, 3, "separate")
    assert set(local.engines().values()) == {"hf", "torch"}
    assert (local.training.ranks, local.critic.ranks, local.rollout.engines) == (None, None, None)
    assert local.placement == "auto"
    assert mixed.engines() == local.engines() | {"critic": "deepspeed"}
