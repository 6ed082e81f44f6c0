"""One policy in several roles: each has its conversation, its tokens and its reward, and none is taken for another."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.environments.test_multi_turn import Stage, stage  # noqa: F401  (a fixture)
from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.config.rl import RLConfig
from trueline.config.sampling import EvalConfig, GenerateConfig
from trueline.data.types import Outcome, Prompt, Trajectory, to_samples
from trueline.environments.hosted import StepCode, load_code
from trueline.environments.opening import check_environment
from trueline.plan.inputs import check_roles
from trueline.rl.metrics import describe_spread
from trueline.rl.step import stored_samples
from trueline.rollout.rollouts import largest_gap
from trueline.rollout.summary import Parcels, SampledGroup, summarise, transcript
from trueline.usercode.failures import NoSuchFunction, WrongResult

CODE = """
class Duel:
    '''White moves, black moves twice, white moves; all are asked alike.'''

    roles = ("white", "black")

    def __init__(self, what=""):
        self.what, self.moves = what, 0

    def reset(self, prompt):
        return {
            "": {"role": "white", "messages": "move"},
            "bare": "move",
            "unknown": {"role": "red", "messages": "move"},
            "row": {"role": "black"},
        }[self.what if self.what in ("bare", "unknown", "row") else ""]

    def step(self, reply, role):
        self.moves += 1
        rewards = {"black": -1.0, "white": 1.0}
        if reply == "raises":
            raise KeyError(role)
        wrong = {
            "number": 1.0,
            "nobody": {"messages": "move"},
            "silent": {"role": "black"},
            "one": {"reward": {"white": 1.0}, "done": True},
            "stranger": {"reward": {**rewards, "red": 0.0}, "done": True},
            "both": {"reward": 1.0, "done": True},
            "goes on": {"role": "black", "messages": "x", "reward": 1.0},
            "replies": {"role": "black", "reward": rewards, "done": True},
            "no number": {"reward": {**rewards, "black": None}, "done": True},
        }
        if self.what in wrong:
            return wrong[self.what]
        if self.moves == 1:
            return {"role": "black", "messages": "move"}
        if self.moves == 2:
            return {"role": "black", "messages": "again", "reward": {"black": 0.25}}
        if self.moves == 3:
            return {"role": "white", "messages": "again"}
        return {"reward": rewards, "done": True, "messages": "over", "metrics": {"moves": self.moves}}


class Forgetful(Duel):
    def step(self, reply): ...


class Alone(Duel):
    roles = ("white",)


class Twice(Duel):
    roles = ("white", "white")


class Odd(Duel):
    roles = ("white", "a/b")
"""
ROW = Prompt(0, [{"role": "user", "content": "1+1="}])


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "duel.py").write_text(CODE)
    return f"{tmp_path}/duel.py"


def duel(stage: Stage, code: str, *texts: str, **keys: Any) -> Trajectory:  # noqa: F811
    config = stage.config("function", f"{code}:Duel", **keys)
    (played,) = stage.play(config, *texts, prompt=ROW)
    return played


def texts_of(stage: Stage, played: Trajectory) -> dict[str, str]:  # noqa: F811
    return {one.role: stage.table.text(one.tokens) for one in played.sequences()}


def test_roles_that_say_the_same_are_not_mixed_up(stage: Stage, code: str) -> None:  # noqa: F811
    """Both begin alike; black goes on first, in its own sequence."""
    played = duel(stage, code, "e4", "e4", "d5", "c3")
    assert (played.outcome, played.error) == (Outcome.FINISHED, "")
    turn = "<s>user\nmove</s>\n<s>assistant\ne4</s>\n<s>user\nagain</s>\n<s>assistant\n"
    assert texts_of(stage, played) == {"white": f"{turn}c3</s>", "black": f"{turn}d5</s>"}
    assert [one.role for one in played.dialogues] == ["white", "black"]
    assert [one.completion[-1]["content"] for one in played.dialogues] == ["c3", "d5"]
    assert played.metrics == {
        "role/white/reward": 1.0,
        "role/black/reward": -0.75,
        "environment/moves": 4.0,
        "episode/turns": 4.0,
        "episode/sequences": 2.0,
    }
    assert played.reward == 1.0  # of the first role that the class names
    check_samples(played)
    check_transcript(transcript(played, "train"))


def check_samples(played: Trajectory) -> None:
    """Each role is trained by its own reward."""
    white, black = to_samples(played, episode=3)
    assert (white.role, white.reward, white.task_reward) == ("white", 1.0, 1.0)
    assert (black.role, black.reward, black.task_reward) == ("black", -0.75, -0.75)
    assert white.token_rewards.nonzero()[:, 0].tolist() == [white.length() - 1]
    assert black.token_rewards[black.token_rewards != 0].tolist() == [0.25, -1.0]  # of its turns
    assert white.whose() != black.whose() and white.episode == black.episode == 3


def check_transcript(row: Any) -> None:
    assert [(one["role"], one["turns"][-1]["content"]) for one in row["conversations"]] == [
        ("white", "c3"),
        ("black", "d5"),
    ]
    assert (row["role/white/reward"], row["role/black/reward"]) == (1.0, -0.75)
    assert row["turns"][-1]["content"] == "over"


def test_numbers_of_a_step_know_the_roles_and_groups_are_uniform_in_all_of_them(stage: Stage, code: str) -> None:  # noqa: F811
    nowhere: Any = None
    summary = summarise(duel(stage, code, "e4", "e4", "d5", "c3"))
    groups = [SampledGroup([summary], Parcels(*[nowhere] * 5))]
    rows = stored_samples(groups, {"black": 0.5}).rows
    assert [(one.role, one.task_reward, one.baseline) for one in rows] == [("white", 1.0, 0.0), ("black", -0.75, 0.5)]
    assert rows[0].whose() != rows[1].whose()
    summary.baseline = 0.0  # of a greedy completion
    assert [one.baseline for one in stored_samples(groups, {"black": 0.5}).rows] == [0.0, 0.0]

    group = [summary, replace(summary, role_rewards={**summary.role_rewards})]
    assert largest_gap(group) == 0 and describe_spread([group]) == {"reward/uniform_groups_share": 1.0}
    group[1].role_rewards["black"] = 0.25
    assert largest_gap(group) == 1.0 and describe_spread([group]) == {"reward/uniform_groups_share": 0.0}


def test_a_failure_in_one_role_is_one_of_the_episode(stage: Stage, code: str) -> None:  # noqa: F811
    played = duel(stage, code, "e4", "raises")
    assert (played.outcome, played.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "KeyError: 'black'" in played.error
    assert not [name for name in played.metrics if name.startswith("role/")]


def test_an_episode_without_turns_left_keeps_the_rewards_of_its_turns(stage: Stage, code: str) -> None:  # noqa: F811
    played = duel(stage, code, "e4", "e4", max_turns=2)
    assert (played.outcome, played.role_rewards) == (Outcome.TRUNCATED, {"white": 0.0, "black": 0.25})
    left_out = duel(stage, code, "e4", "e4", max_turns=2, truncated="drop")
    assert (left_out.outcome, left_out.reward) == (Outcome.LEFT_OUT, None)
    assert not [name for name in left_out.metrics if name.startswith("role/")]


def test_the_row_opens_the_game_where_reset_has_no_messages(stage: Stage, code: str) -> None:  # noqa: F811
    played = duel(stage, code, "e4", "e4", "d5", "c3", options={"what": "row"})
    assert texts_of(stage, played)["black"].startswith("<s>user\n1+1=</s>")


REFUSED = {
    "bare": r"`reset` returned 'move', but this class has roles: return the role that replies next",
    "unknown": r"`reset` returned the role 'red': name one of white, black, which replies next",
    "number": r"`step` returned 1.0, but this class has roles: return the role",
    "nobody": r"`step` returned the role None: name one of white, black",
    "silent": r"without messages and without done=True nothing can follow",
    "one": r"`step` ended the episode without a reward for 'black': every role needs one",
    "stranger": r"`step` returned a reward for 'red', which is none of white, black",
    "both": r"`step` returned the reward 1.0: return the role",
    "goes on": r"`step` returned the reward 1.0: return the role",
    "replies": r"`step` returned the role 'black': nobody replies after done=True",
    "no number": r"the reward that `step` returned must be a finite number, got None",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_game_may_return_is_refused(what: str, code: str) -> None:
    async def play() -> None:
        found = load_code([f"{code}:Duel"], {"what": what})
        assert isinstance(found, StepCode) and found.describe()["roles"] == ["white", "black"]
        begun = await found.reset("1", {"prompt": "1+1=", "messages": ROW.messages})
        await found.step("1", "e4", begun["role"])

    with pytest.raises(WrongResult, match=REFUSED[what]):
        asyncio.run(play())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Forgetful", "`step` of Forgetful is given the reply and the role: write def step\\(self, reply, role\\)"),
        ("Alone", "Alone.roles is \\('white',\\): name two or more"),
        ("Twice", "Twice.roles is \\('white', 'white'\\): name two or more"),
        ("Odd", "Odd.roles is .*in letters, digits and underscores"),
    ],
)
def test_a_class_must_name_its_roles_and_take_them(name: str, said: str, code: str) -> None:
    with pytest.raises(NoSuchFunction, match=said):
        load_code([f"{code}:{name}"], {}).describe()


def test_a_trial_tells_the_roles_and_refuses_wrong_results(code: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED["one"]):
        check_environment(EnvironmentConfig(function=f"{code}:Duel", options={"what": "one"}), ROW, rewarded=False)
    found = check_environment(EnvironmentConfig(function=f"{code}:Duel"), ROW, rewarded=False)
    assert (found.roles, found.warnings) == (["white", "black"], [])


def test_a_plan_refuses_what_cannot_tell_roles_apart() -> None:
    played = {"environment": {"function": "duel.py:Duel"}}
    roles = ["white", "black"]
    (line,) = check_roles(RLConfig.parse(played | {"algorithm": {"preset": "grpo"}}), roles)
    assert line.startswith("roles      white, black: ") and line.endswith("reward/mean is that of white")
    assert check_roles(EvalConfig.parse(played), roles) and not check_roles(RLConfig.parse(played), [])
    for config, said in (
        (RLConfig.parse(played | {"reward": {"function": "math"}}), "leave out --reward"),
        (RLConfig.parse(played | {"algorithm": {"preset": "remax"}}), "algorithm.advantage=greedy_baseline, which has"),
        (GenerateConfig.parse(played), "completions are kept by one reward"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_roles(config, roles)
