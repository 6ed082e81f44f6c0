"""OpenEnv's environments behind a server of their own: a stand-in with its protocol, or the real one.

TRUELINE_OPENENV_PYTHON names the Python of an environment that has `openenv`; these tests then run on it.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.environments.test_multi_turn import Stage, started
from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.data.types import Outcome, Prompt
from trueline.environments.opening import check_environment

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("TRUELINE_OPENENV_PYTHON", "")
ASKED = Prompt(0, [{"role": "user", "content": "Guess."}], label="yes", columns={"seed": 5, "highest": 9})
NUMBER = "9"  # the one of seed 5


@pytest.fixture
def stage(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    places = [
        ROOT / "tests" / "support" / "worlds",
        *([] if PYTHON else [ROOT / "tests" / "support" / "standins" / "server"]),
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ROOT, *places])))
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    yield Stage(tmp_path, tokenizer)
    assert not started(str(tmp_path / "closed")), "a server was left behind"


def config(app: str, **keys: Any) -> EnvironmentConfig:
    return EnvironmentConfig(function=f"openenv:{app}", **({"python": PYTHON, "processes": 1} | keys))


def options(**given: Any) -> dict[str, Any]:
    return {"options": {"observation": "text", **given}}


def test_an_episode_is_a_session_with_the_rewards_of_its_steps(stage: Stage) -> None:
    (played,) = stage.play(config("guessing:app", **options()), "tell", NUMBER, prompt=ASKED)
    assert (played.outcome, played.reward, played.error) == (Outcome.FINISHED, 1.25, "")
    assert [turn["content"] for turn in played.turns] == ["tell", NUMBER, NUMBER, "right"]
    assert played.rewards[played.rewards > 0].tolist() == [0.25, 1.0]
    first = stage.table.text(stage.table.engine.asked[0][0])
    assert first == "<s>user\nGuess.\n\nA number up to 9.</s>\n<s>assistant\n"
    assert stage.closed() == 1


@pytest.mark.slow
def test_columns_are_the_parameters_of_reset(stage: Stage) -> None:
    row = Prompt(0, ASKED.messages, columns={"seed": 5, "highest": 4})
    (played,) = stage.play(config("guessing:app", **options()), "0", "tell", "1", prompt=row)
    assert "A number up to 4." in stage.table.text(stage.table.engine.asked[0][0])
    assert [turn["content"] for turn in played.turns if turn["role"] == "user"] == ["wrong", "4", "wrong"]


@pytest.mark.slow
def test_a_group_begins_alike_without_a_seed_of_its_own(stage: Stage) -> None:
    def numbers(content: str) -> list[str]:
        prompt = Prompt(0, [{"role": "user", "content": content}], columns={"highest": 10**9})
        played = stage.play(config("guessing:app", max_turns=2, **options()), *["tell"] * 8, episodes=4, prompt=prompt)
        return [next(turn["content"] for turn in one.turns if turn["role"] == "user") for one in played]

    group, other = numbers("Guess."), numbers("Guess again.")
    assert len(set(group)) == len(set(other)) == 1 and group[0] != other[0]


def test_a_step_without_reward_goes_on_and_the_last_one_ends(stage: Stage) -> None:
    (played,) = stage.play(config("guessing:app"), "0", "0", "0", "0", prompt=ASKED)
    assert (played.outcome, played.reward, played.metrics["episode/turns"]) == (Outcome.FINISHED, 0.0, 3.0)
    seen = [json.loads(turn["content"]) for turn in played.turns if turn["role"] == "user"]
    assert seen == [{"text": "wrong", "left": left} for left in (2, 1, 0)]  # all fields, as none is named


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("raises", "failed in `step`: 'board' (EXECUTION_ERROR)"),
        pytest.param("unrewarded", "gave the episode no reward: set environment.options", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_no_reward(reply: str, why: str, stage: Stage) -> None:
    (played,) = stage.play(config("guessing:app"), reply, prompt=ASKED)
    assert (played.outcome, played.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "OpenEnvFailure: the server at http://127.0.0.1:" in played.error and why in played.error


@pytest.mark.slow
def test_a_server_that_dies_is_started_again(stage: Stage) -> None:
    settings = config("guessing:app", episodes_per_process=1)
    died, played = stage.play(settings, "dies", NUMBER, episodes=2, prompt=ASKED)
    assert (died.outcome, died.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert (played.outcome, played.reward) == (Outcome.FINISHED, 1.0)
    assert "ended with status 3" in (stage.folder / "environment.log").read_text()


@pytest.mark.slow
def test_a_run_with_a_reward_of_its_own_needs_none_of_the_server(stage: Stage) -> None:
    (played,) = stage.play(config("guessing:app", **options(rewards=False)), "tell", "unrewarded", prompt=ASKED)
    assert (played.outcome, played.reward) == (Outcome.FINISHED, 0.0)


@pytest.mark.slow
def test_actions_that_are_no_text_are_json_and_mistakes_are_told(stage: Stage) -> None:
    replies = ["left", '{"row": 1}', '{"row": 1, "column": 1}', '{"row": 0, "column": 1}']
    (played,) = stage.play(config("guessing:board"), *replies, prompt=ASKED)
    assert (played.outcome, played.reward) == (Outcome.FINISHED, 2.0)
    told = [turn["content"] for turn in played.turns if turn["role"] == "user"]
    assert told[:2] == ["error: reply with an action as one JSON object", "error: column: Field required"]
    assert played.metrics["environment/mistakes"] == 2.0


@pytest.mark.slow
def test_a_server_without_room_says_so(stage: Stage) -> None:
    played = stage.play(config("guessing:small"), *["0"] * 9, episodes=3, prompt=ASKED)
    failed = [one.error for one in played if one.outcome is Outcome.ENVIRONMENT_ERROR]
    assert len(failed) == 2 and all("no room for another session" in error for error in failed)
    assert all("max_concurrent_envs" in error for error in failed)
    (alone,) = stage.play(config("guessing:small", episodes_per_process=1), *["0"] * 9, prompt=ASKED)
    one_by_one = stage.play(config("guessing:small", episodes_per_process=1), *["0"] * 9, episodes=3, prompt=ASKED)
    assert {one.outcome for one in [alone, *one_by_one]} == {Outcome.FINISHED}


@pytest.mark.slow
def test_a_server_is_reached_at_its_address_too(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [PYTHON or sys.executable, "-m", "uvicorn", "guessing:app", "--fd", str(listener.fileno())]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()])
        port = listener.getsockname()[1]
    try:
        for target in (str(port), f"http://127.0.0.1:{port}/"):
            settings = EnvironmentConfig(function=f"openenv:{target}", processes=1)
            (played,) = stage.play(settings, NUMBER, prompt=ASKED)
            assert (played.outcome, played.reward) == (Outcome.FINISHED, 1.0)
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_an_episode_is_tried_before_the_start(stage: Stage) -> None:
    assert not check_environment(config("guessing:app"), ASKED).warnings
    with pytest.raises(ConfigError, match=r"failed in `reset`: no board \(EXECUTION_ERROR\)"):
        check_environment(config("guessing:broken"), ASKED)
    with pytest.raises(ConfigError, match=r"observation=seen: observations have text, left"):
        check_environment(config("guessing:app", options={"observation": "seen"}), ASKED)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("1", r"no server of OpenEnv answers at http://127.0.0.1:1/schema .*start it first"),
        ("http://me:secret@127.0.0.1:1", "the address has a user, password or query"),
        ("../guess", "is no environment of OpenEnv: write openenv:PACKAGE, openenv:MODULE:APP"),
        pytest.param("no_such_package", "does not serve it: .*name the Python that has", marks=pytest.mark.slow),
    ],
)
def test_what_names_no_server_is_refused(target: str, why: str, stage: Stage) -> None:
    with pytest.raises(ConfigError, match=why):
        check_environment(config(target), ASKED)


@pytest.mark.slow
def test_options_that_there_are_not_are_refused(stage: Stage) -> None:
    with pytest.raises(
        ConfigError, match=r"environment.options.field: there is no such option; there are server, action"
    ):
        check_environment(config("guessing:app", options={"field": "text"}), ASKED)
