"""Environments of verifiers in an interpreter of their own: of stand-ins for both of its interfaces, or the real ones.

TRUELINE_CLASSIC_VERIFIERS_PYTHON names the Python of an environment that has verifiers up to 0.3, and
TRUELINE_VERIFIERS_PYTHON one that has a later version, and `uv` on its PATH; these tests then run on them.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.environments.test_multi_turn import Stage, started
from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.data.sources import open_source
from trueline.data.types import Outcome, Prompt
from trueline.environments.opening import check_environment

SUPPORT = Path(__file__).parents[2] / "support"
PYTHONS = {
    "classic": os.environ.get("TRUELINE_CLASSIC_VERIFIERS_PYTHON", ""),
    "current": os.environ.get("TRUELINE_VERIFIERS_PYTHON", ""),
}
MESSAGES = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="}]
ROW = Prompt(0, MESSAGES, label="2", columns={"answer": "2", "example_id": 1, "task_index": 1})


@dataclass
class Counting:
    """An environment that counts."""

    kind: str
    stage: Stage

    @property
    def python(self) -> str:
        return PYTHONS[self.kind] or sys.executable

    @property
    def name(self) -> str:
        return "counting" if self.kind == "classic" else "counting_tasks"

    @property
    def turns(self) -> list[str]:
        return ["well"] if self.kind == "classic" else []  # before the one that is scored

    def settings(self, **keys: Any) -> EnvironmentConfig:
        given = {"function": f"verifiers:{self.name}", "python": self.python, "processes": 1}
        return EnvironmentConfig(**(given | keys))


@pytest.fixture(params=["classic", "current"])
def counting(
    request: pytest.FixtureRequest, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Counting]:
    kind = request.param
    places = [SUPPORT / "worlds", *([] if PYTHONS[kind] else [SUPPORT / "standins" / kind])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [SUPPORT.parents[1], *places])))
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    yield Counting(kind, Stage(tmp_path, tokenizer))
    assert not started(str(tmp_path / "closed")), "an interpreter was left behind"


def test_an_episode_has_the_reward_and_metrics_of_the_environment(counting: Counting) -> None:
    (played,) = counting.stage.play(counting.settings(), *counting.turns, "it is 2", prompt=ROW)
    assert (played.outcome, played.reward, played.error) == (Outcome.FINISHED, 1.0, "")
    assert (played.metrics["environment/size"], played.metrics["episode/sequences"]) == (7.0, 1.0)
    said = [turn["content"] for turn in played.turns]
    assert said == (["well", "Sure?", "it is 2"] if counting.kind == "classic" else ["it is 2"])


@pytest.mark.slow
def test_episodes_at_once_have_their_own_rewards(counting: Counting) -> None:
    replies = [text for reply in ("2", "3", "2", "none") for text in (*counting.turns, reply)]
    settings = counting.settings(max_turns=2)
    all_played = counting.stage.play(settings, *replies, episodes=4, prompt=ROW)
    for played in all_played:
        assert played.reward == float("2" in played.turns[-1]["content"])
    assert {played.outcome for played in all_played} == {Outcome.FINISHED}


@pytest.mark.slow
def test_a_scorer_that_fails_is_no_reward(counting: Counting) -> None:
    (played,) = counting.stage.play(counting.settings(), *counting.turns, "raises", prompt=ROW)
    assert (played.outcome, played.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "VerifiersFailure: " in played.error and "no scorer" in played.error


@pytest.mark.slow
def test_an_interpreter_that_dies_is_started_again(counting: Counting) -> None:
    settings = counting.settings(episodes_per_process=1)
    replies = [*counting.turns, "dies", *counting.turns, "2"]
    both = counting.stage.play(settings, *replies, episodes=2, prompt=ROW)
    assert [played.reward for played in both] == [None, 1.0]
    assert "its process died with exit status 1" in both[0].error
    assert "ended with status 3" in (counting.stage.folder / "environment.log").read_text()


@pytest.mark.slow
def test_an_episode_without_room_for_a_turn_is_truncated(counting: Counting) -> None:
    if not counting.turns:
        pytest.skip("it has one turn")
    (played,) = counting.stage.play(counting.settings(max_turns=1), "well", prompt=ROW)
    assert (played.outcome, played.reward) == (Outcome.TRUNCATED, 0.0)


@pytest.mark.slow
def test_rows_are_those_of_the_environment(counting: Counting) -> None:
    rows = open_source(f"verifiers:{counting.name}?python={counting.python}&size=2", "data.path")
    assert len(rows) == 2
    if counting.kind == "classic":
        last = rows[1].row
        assert last["prompt"] == MESSAGES
        assert (last["answer"], last["info"], last["example_id"]) == ("2", {"number": 1}, 1)
        more = open_source(f"verifiers:{counting.name}?python={counting.python}&rows=5", "data.path")
        assert len(more) == 5  # an argument of the environment
    else:
        assert rows[1].row == {"prompt": "1+1=", "task_index": 1}
    with pytest.raises(ConfigError, match=r"verifiers cannot load it: .*no_such.*; install it into the environment of"):
        open_source(f"verifiers:no_such?python={counting.python}", "data.path")


@pytest.mark.slow
def test_an_episode_is_tried_before_the_start(counting: Counting) -> None:
    check_environment(counting.settings(), ROW, rewarded=False)
    with pytest.raises(ConfigError, match=r"verifiers cannot load it: .*no_such"):
        check_environment(counting.settings(function="verifiers:no_such"), ROW)


@pytest.mark.parametrize(
    ("python", "why"), [("", "its interpreter is unknown: set environment.python=/path"), ("/no/python", "no command")]
)
def test_an_interpreter_is_named(python: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_environment(EnvironmentConfig(function="verifiers:counting", python=python), ROW)


def test_another_environment_takes_no_interpreter() -> None:
    with pytest.raises(ValueError, match=r"environment.python=/bin/python is the Python of verifiers:NAME and openenv"):
        EnvironmentConfig(function="game.py:Game", python="/bin/python")
