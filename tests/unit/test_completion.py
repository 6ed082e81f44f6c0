"""What bash offers behind the first words of a command, by the script of `trueline --print-completion bash`."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.cli import main
from trueline.config.base import keys_of
from trueline.config.rl import RLConfig
from trueline.config.sampling import ServingConfig
from trueline.verbs import TOOLS, VERBS


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "trueline.bash"
    command = [sys.executable, "-m", "trueline.cli", "--print-completion", "bash"]
    file.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return file


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words, with which the cursor stands."""
    line = shlex.join(["trueline", *words])
    program = (
        f"source {shlex.quote(str(script))}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _trueline\n"
        'printf "%s\\n" "${COMPREPLY[@]}"; exit 0'
    )
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_verbs_come_first(script: Path) -> None:
    assert {*VERBS, *TOOLS} <= set(offered(script, ""))
    assert set(offered(script, "serv")) == {"serve-reward"}
    assert set(offered(script, "reinforce++")) == {"reinforce++", "reinforce++_baseline"}
    assert offered(script, "--print") == ["--print-completion"]


def test_keys_and_flags_of_the_verb_follow(script: Path) -> None:
    words = offered(script, "grpo", "")
    assert [word.removesuffix("=") for word in words if not word.startswith("-")] == keys_of(RLConfig)
    assert offered(script, "grpo", "training.learning_r") == ["training.learning_rate="]
    assert offered(script, "dpo", "--dry-run", "preference.be") == ["preference.beta="]
    assert offered(script, "sft", "--da") == ["--data"] and not offered(script, "sft", "preference.be")
    assert {f"{key}=" for key in keys_of(ServingConfig)} < set(offered(script, "serve-reward", ""))


@pytest.mark.parametrize("tool", [["doctor"], ["plan"], ["data", "preview"]])
def test_a_tool_takes_the_command_of_a_run(script: Path, tool: list[str]) -> None:
    assert set(VERBS) <= set(offered(script, *tool, ""))
    assert offered(script, *tool, "grpo", "algorithm.kl.coef") == ["algorithm.kl.coefficient="]


def test_each_tool_has_its_options(script: Path) -> None:
    assert offered(script, "doctor", "grpo", "--de") == ["--deep"]
    assert offered(script, "config", "gr") == ["grpo"]
    assert offered(script, "reward", "") == ["try", "--help"]
    assert offered(script, "export", "--m") == ["--merge"]


def test_files_follow_flags_with_a_value_and_keys(script: Path) -> None:
    """Nothing is offered, so bash completes a path; it splits words at `=`."""
    for words in (["grpo", "--data", ""], ["grpo", "--resume", "g"], ["grpo", "data.path", "=", "d"]):
        assert not offered(script, *words)
    assert not offered(script, "grpo", "data.path", "=")


def test_the_script_pleases_shellcheck(script: Path) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, "-s", "bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "fish"])
    assert ended.value.code == 2 and "invalid choice: 'fish'" in capsys.readouterr().err
