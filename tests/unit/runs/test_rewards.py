"""Rewards as a run opens them."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.disk import files_up_to
from tests.support.reward_models import local_group, make_reward_model
from trueline import plan
from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.config.model import FrozenConfig, ModelConfig
from trueline.config.reward import RewardConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.plan.resolve import reward_models
from trueline.plan.rewards import RewardCheck, check_rewards
from trueline.rewards.base import Call
from trueline.rewards.combined import REWARD_KINDS, RewardKind
from trueline.rewards.function_reward import FunctionReward
from trueline.rewards.model import ModelReward
from trueline.rewards.remote import JudgeReward, ScorerReward
from trueline.rollout.failures import FailureBudget, RolloutFailure
from trueline.runs.processes import failure_files, model_reward, open_rewards


def failed(outcome: Outcome = Outcome.REWARD_ERROR) -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "1:"}])
    return Trajectory(prompt, 0, outcome=outcome, error="cannot grade this")


def stopped(folder: Path, outcome: Outcome = Outcome.REWARD_ERROR) -> str:
    with pytest.raises(RolloutFailure) as caught:
        FailureBudget(0.0, 1, failure_files(RewardConfig(function="reward.py:f"), folder)).add([failed(outcome)])
    return str(caught.value)


def test_an_episode_whose_environment_failed_is_kept_and_not_offered_for_replay(tmp_path: Path) -> None:
    """Its reward function was never asked, so asking it now would show a number and no fault."""
    assert "replay" not in stopped(tmp_path, Outcome.ENVIRONMENT_ERROR)
    kept = json.loads((tmp_path / "failures" / "1.json").read_text())
    assert (kept["episode"], kept["error"], kept["call"]["prompt"]) == ("failed", "cannot grade this", "1:")
    assert "function" not in kept


def test_a_failed_call_is_written_below_the_run_folder(tmp_path: Path) -> None:
    assert f"python -m trueline.rewards.replay {tmp_path}/failures/1.json" in stopped(tmp_path)
    assert "cannot grade this" in (tmp_path / "failures" / "1.json").read_text()


def test_a_full_disk_does_not_hide_why_a_run_stops(tmp_path: Path) -> None:
    with files_up_to(5):
        said = stopped(tmp_path)
    assert "cannot grade this" in said and "replay" not in said


TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


def test_a_reward_model_takes_a_template_file(tmp_path: Path) -> None:
    folder, file = make_reward_model(tmp_path / "model", "reward"), tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    config = RewardConfig(function=str(folder), chat_template=str(file))
    (role,) = reward_models(config, FrozenConfig(engine="torch"), ModelConfig(path=str(folder)))
    reward = model_reward(config, config, role, local_group(folder, "reward"))
    assert reward.chat.templated and reward.chat.tokenizer.chat_template == TEMPLATE


def test_every_kind_is_opened_with_the_keys_of_the_run(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", "reward")
    judge = {"url": "http://127.0.0.1:1/v1", "model": "judge"}
    config = RewardConfig.parse(
        {
            "parts": {
                "right": {"function": "exact"},
                "asked": {"function": "http://127.0.0.1:1/score", "remote": {"concurrency": 3}},
                "graded": {"function": "judge", "judge": judge},
                "learnt": {"function": str(folder)},
            },
            "batch": 7,
            "timeout_seconds": 5,
        }
    )
    roles = reward_models(config, FrozenConfig(engine="torch"), ModelConfig(path=str(folder)))
    groups = {"reward_model-learnt": local_group(folder, "reward")}
    opened = {name: reward for name, (reward, _) in open_rewards(config, roles, groups, tmp_path).parts.items()}
    right, asked, graded, learnt = (opened[name] for name in config.parts)
    assert isinstance(right, FunctionReward) and right.config is config
    assert {host.log for host in right.hosts} == {tmp_path / "reward-right.log"}
    assert isinstance(asked, ScorerReward) and (asked.batch, asked.address.timeout_seconds) == (7, 5)
    assert isinstance(graded, JudgeReward) and (graded.batch, graded.judge.address.timeout_seconds) == (1, 5)
    assert isinstance(learnt, ModelReward) and learnt.batch == 7


class Constant:
    def __init__(self, value: str) -> None:
        self.value = float(value)

    async def score(self, call: Call) -> float:
        return self.value

    async def stop(self) -> None: ...


def check_constant(*given: object) -> None:
    raise ConfigError(f"checked with {given[2]}")


def test_a_row_is_all_that_a_new_kind_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RewardKind(
        lambda part: part.function.startswith("constant "),
        check_constant,
        lambda part, *_: Constant(part.function.split()[1]),
    )
    function = REWARD_KINDS["function"]
    monkeypatch.delitem(REWARD_KINDS, "function")  # which takes all that the rows before it leave
    monkeypatch.setitem(REWARD_KINDS, "constant", own)
    monkeypatch.setitem(REWARD_KINDS, "function", function)
    config = RewardConfig(function="constant 0.5")
    row = Prompt(0, [{"role": "user", "content": "1:"}], label="2", source="rows", columns={"level": 3})
    with pytest.raises(ConfigError, match=r"checked with {'rows': {'level': 3, .* 'label': '2'}}"):
        check_rewards(config, [[row]], PromptDataConfig())
    verdict = asyncio.run(open_rewards(config, [], {}, tmp_path).score({"reply": "x"}))
    assert verdict.reward == 0.5


# Before the start

PROBED = """
import time
from pathlib import Path

with Path(__file__).with_suffix(".loads").open("a") as loads:
    loads.write("loaded\\n")


def asked(reply):
    with Path(__file__).with_suffix(".calls").open("a") as calls:
        calls.write(repr(reply) + "\\n")


def raises(reply):
    asked(reply)
    raise KeyError("never")


def digits_only(reply):
    return 1 / any(one.isdigit() for one in reply)


def last_row_only(reply, wanted):
    return 1 / (wanted == "9")


def hangs(reply):
    asked(reply)
    time.sleep(60)


def turns(reply, turns):
    return turns[5]


def misspelt(reply, lable="", wnted="", scale=1.0):
    return len(reply)


def keeps(reply, label, labels=None):
    return len(reply)


def equal(reply, label):
    return float(reply == label)


def blind(reply):
    return len(reply)


def compared(completions, **kwargs):
    return [1.0]
"""


@pytest.fixture
def probed(tmp_path: Path) -> Path:
    (tmp_path / "probed.py").write_text(PROBED)
    return tmp_path / "probed.py"


def rows(count: int = 10, **columns: str) -> list[Prompt]:
    return [
        Prompt(at, [{"role": "user", "content": "?"}], columns.get("label"), "rows", {"wanted": str(at), **columns})
        for at in range(count)
    ]


def check(
    probed: Path, name: str, sources: list[list[Prompt]] | None = None, *, played: bool = False, **settings: object
) -> RewardCheck:
    config = RewardConfig.parse({"function": f"{probed}:{name}", **settings})
    return check_rewards(config, sources or [rows()], PromptDataConfig(), played=played)


def test_a_function_that_fails_at_every_call_is_refused_after_few_calls(probed: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(probed, "raises")
    said = str(caught.value)
    count = len(probed.with_suffix(".calls").read_text().splitlines())
    assert 4 < count <= 12 and f"probed.py:raises gave no reward in any of {count} calls before the start" in said
    assert "KeyError: 'never' (probed.py, line 16)" in said and "reward.probe=false" in said
    assert "Traceback" not in said


def test_a_function_that_fails_at_some_calls_is_warned_of(probed: Path) -> None:
    for name, cause in (("digits_only", "ZeroDivisionError"), ("last_row_only", "ZeroDivisionError")):
        (warning,) = check(probed, name).warnings
        assert f"{name} gave no reward in " in warning.what and " calls before the start: " in warning.what
        assert f"{cause}: division by zero (probed.py, line " in warning.what and warning.code == "reward_trial"


def test_the_file_is_loaded_once_however_many_datasets_there_are(probed: Path) -> None:
    check(probed, "blind", [rows(), rows(3)])
    assert probed.with_suffix(".loads").read_text().count("loaded") == 1


def test_a_function_that_takes_long_is_not_refused(probed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.rewards, "TRIAL_SECONDS", 1.0)
    found = check(probed, "hangs")
    assert found.warnings == [] and found.trials["reward"].slow == 1.0
    (warning,) = check(probed, "hangs", timeout_seconds=0.5).warnings
    assert "took more than 0.5 s" in warning.what
    assert len(probed.with_suffix(".calls").read_text().splitlines()) == 2


def test_nobody_is_asked_where_probe_is_false_and_nobody_refused_where_episodes_are_played(probed: Path) -> None:
    assert check(probed, "raises", probe=False).warnings == []
    assert not probed.with_suffix(".calls").exists()
    with pytest.raises(ConfigError, match="IndexError"):
        check(probed, "turns")
    (warning,) = check(probed, "turns", played=True).warnings
    assert "gave no reward in any of" in warning.what


def test_parameters_that_keep_their_default_are_named(probed: Path) -> None:
    found = check(probed, "misspelt", [rows(label="1")])
    assert [one.what.partition(": ")[2] for one in found.warnings] == [
        "parameter 'lable' keeps its default, because there is no such value: did you mean 'label'?",
        "parameter 'wnted' keeps its default, because there is no such value: did you mean 'wanted'?",
    ]
    assert found.lines == [f"reward     {probed}:misspelt keeps the default of scale: no such column"]
    found = check(probed, "keeps", [rows(label="1")])  # what is near has a parameter of its own
    assert found.warnings == [] and "keeps the default of labels" in found.lines[0]
    assert check(probed, "blind").lines == []
    assert check_rewards(RewardConfig(function="format"), [rows()], PromptDataConfig()).lines == []


def test_which_column_is_the_label_is_reported_where_several_might_be(probed: Path) -> None:
    other = [*rows(2, label="1", answer="1 "), *rows(1, label="1", answer="2")]
    found = check(probed, "equal", [other])
    assert found.lines == [
        "label      column label of rows; answer: given under its own name (data.label_column chooses)"
    ]
    (warning,) = found.warnings
    assert "column label is '1', answer is '2'; they differ in 1 of 3 rows" in warning.what
    assert "set data.label_column=label or answer" in warning.why
    assert check(probed, "blind", [other]).lines == []  # which reads no label
    assert len(check(probed, "compared", [other]).warnings) == 1
    config, chosen = RewardConfig(function=f"{probed}:equal"), PromptDataConfig(label_column="answer")
    assert check_rewards(config, [other], chosen).lines == []


def test_held_out_rows_need_the_same_columns(probed: Path) -> None:
    bare = [Prompt(0, [{"role": "user", "content": "?"}], source="held")]
    with pytest.raises(ConfigError, match=r"no value for its parameter 'wanted'; .* with rows of held: rename"):
        check(probed, "last_row_only", [rows(), bare])


def test_a_part_without_a_function_is_a_misspelt_name(probed: Path) -> None:
    parts = {"right": {"function": f"{probed}:blind"}, "rihgt": {"weight": 2.0}}
    with pytest.raises(
        ConfigError, match=r"reward.parts.rihgt: it has no function: .* did you mean reward.parts.right?"
    ):
        check_rewards(RewardConfig.parse({"parts": parts}), [rows()], PromptDataConfig())
