"""Rubrics against a real HTTP server in a thread that answers as their judge."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripted import Reply, Scripted, Serve, grader, said
from tests.support.scripted import serve as serve
from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.config.reward import RemoteConfig, RewardConfig, RewardPartConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.single_turn import score_reply
from trueline.jobs.preview import describe_result
from trueline.jobs.sample_file import completion_of
from trueline.plan.rewards import check_rewards
from trueline.rewards.base import Graded, RewardFailure, RewardResult, RewardTimeout, RewardUnreachable
from trueline.rewards.combined import CombinedReward, kind_of
from trueline.rewards.rubric import Rubric, RubricReward, all_or_nothing, check_rubric, gate, read_rubric, weighted_sum
from trueline.rl.metrics import describe_parts
from trueline.rollout.evaluation import environment_names

ROOT = Path(__file__).resolve().parents[3]
ITEMS: list[dict[str, Any]] = [
    {"name": "right", "criterion": "It is right.", "points": 5},
    {"name": "short", "criterion": "It is short.", "points": 3},
    {"name": "rude", "criterion": "It insults.", "points": -4},
]
NEEDS = [{**ITEMS[0], "required": True}, ITEMS[1], {**ITEMS[2], "required": True}]
CALL = {"reply": "four", "prompt": "2+2=", "messages": [{"role": "user", "content": "2+2="}], "label": None}


def write_rubric(folder: Path, items: Any = ITEMS, **keys: Any) -> Path:
    file = folder / "rubric.yaml"
    file.write_text(yaml.safe_dump({"items": items, **keys}, sort_keys=False))
    return file


def part_of(file: Path, url: str, attempts: int = 3, **keys: Any) -> RewardConfig:
    judge = {"url": f"{url}/v1", "model": "wise"}
    remote = RemoteConfig(attempts=attempts, backoff_seconds=0.01)
    return RewardConfig.parse({"function": str(file), "judge": judge, "remote": remote.model_dump(), **keys})


def graded(part: RewardPartConfig, call: dict[str, Any] = CALL, seconds: float = 20) -> Graded | Exception:
    async def ask() -> Any:
        reward = RubricReward(part, seconds)
        (found,) = await asyncio.gather(reward.score(call), return_exceptions=True)
        await reward.stop()
        return found

    found: Graded | Exception = asyncio.run(ask())
    return found


def test_points_add_up_in_three_ways() -> None:
    """Of 5 + 3 points at the most; the pitfall takes 4."""
    items = Rubric.parse({"items": NEEDS, "aggregation": "gate"}).items
    by_verdicts = {
        (True, True, False): (1.0, 1.0, 1.0),
        (True, False, False): (5 / 8, 5 / 8, 0.0),
        (True, True, True): (4 / 8, 0.0, 0.0),  # a required pitfall must be avoided
        (False, True, False): (3 / 8, 0.0, 0.0),
        (False, False, False): (0.0, 0.0, 0.0),
        (False, False, True): (-4 / 8, -4 / 8, 0.0),  # a closed gate never raises a reward
        (False, True, True): (-1 / 8, -1 / 8, 0.0),
    }
    for verdicts, expected in by_verdicts.items():
        met = list(verdicts)
        assert (weighted_sum(items, met), gate(items, met), all_or_nothing(items, met)) == expected, verdicts


@pytest.mark.parametrize(
    ("keys", "reward"),
    [({}, 1 / 8), ({"aggregation": "gate", "items": NEEDS}, 0.0), ({"aggregation": "all_or_nothing"}, 0)],
)
def test_one_request_grades_all_items(serve: Serve, tmp_path: Path, keys: dict[str, Any], reward: float) -> None:
    server = serve(grader(lambda criterion, *_: criterion != "It is short."))
    found = graded(part_of(write_rubric(tmp_path, **keys), server.url))
    assert found == Graded(reward, {"rubric/item/right": 1.0, "rubric/item/short": 0.0, "rubric/item/rude": 1.0})
    [asked] = server.asked
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "wise", 0)
    text = asked["messages"][0]["content"]
    assert "[Criteria]\n1. It is right.\n2. It is short.\n3. It insults.\n" in text
    assert '[Conversation]\n[{"role": "user", "content": "2+2="}]\n' in text and "[Reply]\nfour\n" in text
    assert '{"1": true, "2": false}' in text  # as it is written in the prompt: no field


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("All of them are met.", "no JSON object came back (3 tries): All of them"),
        ('{"1": true, "2": tr', "no JSON object came back (3 tries)"),
        ("", "no JSON object came back (3 tries)"),
        (None, "no JSON object came back (3 tries)"),
        ('{"1": true, "3": false}', "no verdict, true or false, on item 2 (short) (3 tries): {"),
        ('{"right": true, "short": true, "rude": false}', "no verdict, true or false, on item 1 (right)"),
        ('{"1": true, "2": "yes", "3": false}', "no verdict, true or false, on item 2 (short)"),
        ('{"1": true, "2": 0, "3": false}', "no verdict, true or false, on item 2 (short)"),
        ('{"1": true, "2": null, "3": false}', "no verdict, true or false, on item 2 (short)"),
        ('{"1": true, "2": true, "3": false, "4": true}', "a verdict on item 4 of 3 items (3 tries)"),
        ('{"0": true, "1": true, "2": true, "3": false}', "a verdict on item 0 of 3 items (3 tries)"),
        ("{" * 3000, "no JSON object came back (3 tries)"),
        ('{"1": true, "2": {"met": true}, "3": false}', "no verdict, true or false, on item 1 (right)"),
        ('{"a":' * 3000, "no JSON object came back (3 tries)"),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_failure(serve: Serve, tmp_path: Path, text: Any, cause: str) -> None:
    server = serve(said(text))
    found = graded(part_of(write_rubric(tmp_path), server.url))
    assert type(found) is RewardFailure and cause in str(found)
    assert str(found).startswith(f"{server.url}/v1/chat/completions: ") and len(str(found)) < 700
    assert len(server.asked) == 3


def test_an_answer_is_asked_for_again(serve: Serve, tmp_path: Path) -> None:
    replies = [
        '{"1": true}',
        "no",
        '{"1": false, "2": false, "3": false} No: {"1": true, "2": true, "3": false, "why": 1}',
    ]
    server = serve(lambda body, number: said(replies[number])(body, number))
    found = graded(part_of(write_rubric(tmp_path), server.url))
    assert isinstance(found, Graded) and found.reward == 1.0  # the last object of an answer counts
    assert len(server.asked) == 3


def test_failures_of_the_server_are_those_of_judges(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rubric(tmp_path)
    busy = serve(lambda body, number: (503, {}, "loading"))
    found = graded(part_of(file, busy.url))
    assert type(found) is RewardUnreachable and "status 503: loading (3 tries)" in str(found) and len(busy.asked) == 3
    monkeypatch.setenv("JUDGE_KEY", "s3cret-token")
    echo = serve(said("s3cret-token"))
    found = graded(part_of(file, echo.url).with_keys({"remote": {"token_variable": "JUDGE_KEY"}}))
    assert "3 tries): ***" in str(found) and set(echo.tokens) == {"Bearer s3cret-token"}


def test_the_time_limit_is_for_all_requests_of_a_reply(serve: Serve, tmp_path: Path) -> None:
    """Each answer takes less than the limit, and the three or two of a reply take more."""

    def slow(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.4)
        return said("no" if number < 4 else '{"1": true, "2": true, "3": true}')(body, number)

    server = serve(slow)
    began = time.monotonic()
    for gradings in (1, 2):
        found = graded(part_of(write_rubric(tmp_path, gradings=gradings), server.url, attempts=9), seconds=0.7)
        assert type(found) is RewardTimeout and "within reward.timeout_seconds=0.7" in str(found)
    assert time.monotonic() - began < 4


def test_two_gradings_disagree_on_some_items(serve: Serve, tmp_path: Path) -> None:
    """The second has the items in reverse, and this judge is fond of what it reads first."""
    server = serve(grader(lambda criterion, number, _: number == 1 or criterion == "It is short."))
    found = graded(part_of(write_rubric(tmp_path, gradings=2), server.url))
    listings = [asked["messages"][0]["content"].partition("[Criteria]\n")[2][:18] for asked in server.asked]
    assert listings == ["1. It is right.\n2.", "1. It insults.\n2. "]
    assert isinstance(found, Graded)
    assert found.reward == pytest.approx((8 / 8 + (3 - 4) / 8) / 2)
    assert found.metrics == {
        "rubric/item/right": 0.5,
        "rubric/item/short": 1.0,
        "rubric/item/rude": 0.5,
        "rubric/disagreement": pytest.approx(2 / 3),
    }
    steady = serve(grader(lambda criterion, *_: criterion == "It is right."))
    found = graded(part_of(write_rubric(tmp_path, gradings=2), steady.url))
    assert isinstance(found, Graded) and (found.reward, found.metrics["rubric/disagreement"]) == (5 / 8, 0.0)


# Items of a row

ROWS = [  # as two published data sets have them
    {"title": "Calm", "description": "It is calm.", "weight": 2},
    {"criterion": "It insults.", "points": -1, "tags": ["axis:tone"], "title": None},
]


def test_a_rows_own_items_follow_those_of_the_file(serve: Serve, tmp_path: Path) -> None:
    server = serve(grader(lambda criterion, *_: criterion != "It is short."))
    file = write_rubric(tmp_path, ITEMS[:2], column="rubric")
    found = graded(part_of(file, server.url), {**CALL, "rubric": ROWS})
    assert isinstance(found, Graded) and found.reward == pytest.approx((5 + 2 - 1) / (5 + 3 + 2))
    rows = {"rubric/row_item/1 Calm": 1.0, "rubric/row_item/2": 1.0}
    assert found.metrics == {"rubric/item/right": 1.0, "rubric/item/short": 0.0, **rows}
    assert "3. It is calm.\n4. It insults.\n" in server.asked[0]["messages"][0]["content"]
    only = graded(part_of(write_rubric(tmp_path, [], column="rubric"), server.url), {**CALL, "rubric": ROWS})
    assert only == Graded(pytest.approx(1 / 2), rows)


@pytest.mark.parametrize(
    ("given", "said_of_it"),
    [
        (None, "rubric.yaml: this row: column rubric: expected a list of items with a criterion and points, got None"),
        ("It is calm.", "column rubric: expected a list of items with a criterion and points, got 'It is calm.'"),
        ([{"title": "Calm", "weight": 2}], "column rubric: item 1: criterion: field required"),
        ([{**ROWS[0], "weight": "high"}], "column rubric: item 1: points: input should be a valid number"),
        ([ROWS[1]], "column rubric: no item has points above 0"),
        ([], "column rubric: there are no items"),
    ],
)
def test_a_row_without_usable_items_has_no_reward(serve: Serve, tmp_path: Path, given: Any, said_of_it: str) -> None:
    server = serve(grader(lambda *_: True))
    file = write_rubric(tmp_path, [], column="rubric")
    part, call = part_of(file, server.url), {**CALL, "rubric": given}
    found = graded(part, call)
    assert type(found) is RewardFailure and said_of_it in str(found) and server.asked == []
    with pytest.raises(ConfigError, match=r"rubric.yaml: the first row of rows.jsonl: column rubric: "):
        check_rubric(part, part, {"rows.jsonl": call}, set(call), None)


# Before the start


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"items": []}, "there are no items: write at least one, or name a column"),
        ({"items": ITEMS, "agregation": "gate"}, "agregation: unknown key: there are items, column, aggregation"),
        ({"items": ITEMS, "aggregation": "mean"}, "aggregation=mean: write one of weighted_sum, gate, all_or_nothing"),
        ({"items": ITEMS, "gradings": 3}, "gradings: input should be less than or equal to 2 (got 3): correct it"),
        ({"items": [{"name": "a"}]}, "item 1: criterion: field required"),
        ({"items": ["polite"]}, "item 1: input should be a valid dictionary"),
        ({"items": "polite"}, "items: input should be a valid list (got 'polite')"),
        ({"items": [*ITEMS, {"criterion": "It is calm."}]}, "item 4 (It is calm.) has no name: give it one"),
        ({"items": [*ITEMS, ITEMS[0]]}, "item 4 (right): another item has this name: give each its own"),
        ({"items": [*ITEMS, {**ITEMS[0], "points": "many"}]}, "item 4: points: input should be a valid number"),
        (
            {"items": [{**ITEMS[0], "points": float("inf")}]},
            "item 1: points: input should be a finite number (got inf)",
        ),
        ({"items": [{**ITEMS[0], "points": 0}]}, "item 1 (right): points=0 leaves it without effect: give it points"),
        ({"items": [{**ITEMS[0], "pionts": 1}]}, "item 1: pionts: unknown key: there are name, criterion, points, req"),
        ({"items": ITEMS[2:]}, "no item has points above 0, by which weighted_sum divides: add one"),
        ({"items": NEEDS}, "item 1 (right): required=true needs aggregation=gate (got weighted_sum): set it"),
        ({"items": ITEMS, "aggregation": "gate"}, "aggregation=gate without an item that has required=true: set it"),
    ],
)
def test_bad_files_are_refused_by_file_item_and_value(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    file = tmp_path / "rubric.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as refused:
        read_rubric(str(file))
    assert str(refused.value).startswith(f"reward.function={file}: ") and message in str(refused.value)


def test_files_that_are_no_rubric(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.function=none.yaml: cannot be read \(No such file or directory\)"):
        read_rubric("none.yaml")
    for text, message in (
        ("- right", "expected `key: value`"),
        ("items: [", "not valid YAML"),
        ("a: 1\na: 2", "'a' is"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_rubric(str(tmp_path / "bad.yaml"))


def test_keys_and_prompts_that_cannot_work_are_refused(tmp_path: Path) -> None:
    def check(config: RewardConfig) -> list[str]:
        return check_rubric(config, config, {}, {"reply", "messages"}, None)

    url, quiet = "http://127.0.0.1:1", {"probe": False}
    part = part_of(write_rubric(tmp_path), url, **quiet)
    assert check(part) == [f"rubric     {part.function}: 3 items of 8 points, weighted_sum, by wise"]
    wrong: dict[str, dict[str, Any]] = {
        "judge.scale has no effect with a rubric, whose file may have a prompt: delete judge.scale": {"scale": 1.0},
        "judge.model is empty": {"model": ""},
        "judge.url=: not an address": {"url": ""},
    }
    for message, keys in wrong.items():
        with pytest.raises(ConfigError, match=message):
            check(part.with_keys({"judge": keys}))
    for prompt, message in {
        "{reply} {messages}": "prompt does not show the items: put {items} into it",
        "{items} {messages}": "prompt does not show the reply",
        "{items} {reply} {level}": "prompt: no value for {level}; there are items, messages, reply",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check(part_of(write_rubric(tmp_path, prompt=prompt), url, **quiet))


def test_a_prompt_of_ones_own_shows_columns(serve: Serve, tmp_path: Path) -> None:
    server = serve(said('{"1": true, "2": true, "3": true}'))
    file = write_rubric(tmp_path, prompt="{level}: {items} / {reply}")
    found = graded(part_of(file, server.url), {**CALL, "level": 2, "reply": "{items}"})
    assert isinstance(found, Graded) and found.reward == 4 / 8
    listed = "1. It is right.\n2. It is short.\n3. It insults."
    assert server.asked[0]["messages"][0]["content"] == f"2: {listed} / {{items}}"


def planned(config: RewardConfig, **keys: Any) -> list[str]:
    row = Prompt(0, [{"role": "user", "content": "2+2="}], source="rows.jsonl")
    return check_rewards(config, [[row]], PromptDataConfig(), **keys).lines


def test_a_plan_shows_the_rubric_and_tries_its_judge_once(serve: Serve, tmp_path: Path) -> None:
    server = serve(grader(lambda criterion, *_: criterion == "It is short."))
    file = write_rubric(tmp_path, gradings=2)
    config = part_of(file, server.url)
    described = f"rubric     {file}: 3 items of 8 points, weighted_sum, graded twice, by wise"
    assert planned(config) == [
        described,
        "trial      an empty reply gets 0.375 (right 0, short 1, rude 0, disagreement 0)",
    ]
    assert [asked["path"] for asked in server.asked] == ["/v1/models", *["/v1/chat/completions"] * 2]
    assert "[Reply]\n\n" in server.asked[1]["messages"][0]["content"]
    assert planned(config, probe=False) == [described] == planned(config.with_keys({"probe": False}))


def test_a_judge_that_cannot_grade_is_refused_before_the_start(serve: Serve, tmp_path: Path) -> None:
    file = write_rubric(tmp_path)
    server = serve(lambda body, number: said("Fine!")(body, number) if body else (404, {}, ""))
    message = r"the judge cannot grade an empty reply: .*no JSON object .*Fine!: name another judge .*probe=false"
    with pytest.raises(ConfigError, match=message) as refused:
        planned(part_of(file, server.url))
    assert str(refused.value).startswith(f"reward.function={file}: ") and refused.value.key == "reward.function"
    other = serve(lambda body, number: (200, {}, {"data": [{"id": "other"}]}))
    with pytest.raises(ConfigError, match=r"judge.model=wise: .* has no such model; it has other"):
        planned(part_of(file, other.url))
    busy = serve(lambda body, number: (503, {}, "loading"))  # it may well be up when it is needed
    assert planned(part_of(file, busy.url))[1].startswith(
        f"trial      none: {busy.url}/v1/chat/completions: status 503"
    )


def test_the_kind_is_known_by_the_ending(tmp_path: Path) -> None:
    kinds = {name: kind_of(RewardPartConfig(function=name)) for name in ("a.yaml", "b/a.yml", "a.json", "a.py:f")}
    assert list(kinds.values()) == ["rubric", "rubric", "rubric", "function"]
    assert kind_of(RewardPartConfig(function="http://127.0.0.1/a.yaml")) == "scorer"


def test_the_example_is_a_rubric() -> None:
    """And the page says of it what it is."""
    rubric = read_rubric(str(ROOT / "examples/rubric/rubric.yaml"))
    assert rubric.describe() == "4 items of 8 points, gate"
    assert [item.points for item in rubric.items] == [4, 3, 1, -4]
    page = (ROOT / "docs/reward_models.md").read_text()
    assert "4 items of 8 points, gate" in page
    for block in page.split("```yaml\n")[1:]:
        tree = yaml.safe_load(block.partition("```")[0])
        if "items" in tree:
            Rubric.parse(tree)


# What becomes of the items


def combined(server: Scripted, file: Path, names: list[str], **keys: Any) -> CombinedReward:
    part = part_of(file, server.url, **keys)
    return CombinedReward({name: (RubricReward(part, 20), part) for name in names}, 0.0)


def test_items_of_several_rubrics_have_the_name_of_their_reward(serve: Serve, tmp_path: Path) -> None:
    server, file = serve(grader(lambda *_: True)), write_rubric(tmp_path, ITEMS[:2])
    one = asyncio.run(combined(server, file, ["tone"], weight=3.0, clip=0.5).score(CALL))
    assert one == RewardResult(1.5, {"tone": 0.5}, metrics={"rubric/item/right": 1.0, "rubric/item/short": 1.0})
    two = asyncio.run(combined(server, file, ["tone", "facts"]).score(CALL))
    assert (two.reward, two.parts) == (2.0, {"tone": 1.0, "facts": 1.0})
    assert set(two.metrics) == {f"rubric/item/{item}/{name}" for item in ("right", "short") for name in two.parts}
    assert describe_result(one) == "1.5 (rubric/item/right 1, rubric/item/short 1)"


def test_items_are_in_results_and_means_and_those_of_rows_in_results_alone(serve: Serve, tmp_path: Path) -> None:
    server = serve(grader(lambda criterion, number, prompt: number == 1 and "four" in prompt))
    reward = combined(server, write_rubric(tmp_path, ITEMS[:1], column="own"), ["reward"])
    row = Prompt(0, CALL["messages"], columns={"own": ROWS})
    results = [asyncio.run(score_reply(reward, row, reply)) for reply in ("four", "five", "six")]
    expected = {"rubric/item/right": 1.0, "rubric/row_item/1 Calm": 0.0, "rubric/row_item/2": 0.0}
    assert results[0].metrics == expected | {"reward/reward": pytest.approx(5 / 7)}
    assert describe_parts([one.metrics for one in results]) == {"rubric/item/right": pytest.approx(1 / 3)}
    done = Trajectory(row, 0, outcome=Outcome.FINISHED, metrics=results[0].metrics)
    assert environment_names([[done]]) == ["rubric/item/right"]
    sampled = completion_of(done, scored=True)
    assert json.loads(json.dumps(sampled["rubric"])) == {"item/right": 1.0, "row_item/1 Calm": 0.0, "row_item/2": 0.0}
