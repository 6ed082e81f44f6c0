"""What sampling jobs keep on disk, what they select from it, and which prompts they take."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from tests.support.disk import files_up_to
from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.config.base import ConfigError
from trueline.config.data import DataConfig
from trueline.config.model import FrozenConfig, ModelConfig
from trueline.config.sampling import EvalConfig, GenerateConfig
from trueline.data.formats import Conversation, read_conversations, read_pairs
from trueline.data.sources import open_source
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.jobs.sample_file import (
    SampleFile,
    completion_of,
    pair_of,
    prompt_row,
    row_of,
    select_kept,
    write_json,
    write_selection,
)
from trueline.jobs.sampling import check_sampled, check_unchanged, evaluation_table, prepare_eval, prepare_generate
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.resolve import RoleModel
from trueline.plan.sampling import chosen_prompts, engine_count, plan_eval, plan_generate
from trueline.rollout.failures import RolloutFailure
from trueline.runs.launch import launch
from trueline.runtime.cluster import Machine

JUDGED = {"reward": {"function": "exact"}}


def config(**keys: Any) -> GenerateConfig:
    return GenerateConfig.parse(JUDGED | keys)


def row(number: int, *answers: tuple[str, float | None], **more: Any) -> dict[str, Any]:
    """Answers without a reward have failed."""
    usual = {"parts": {}, "outcome": "finished", "truncated": False, "tokens": 3}
    failed = {"outcome": "reward_error", "error": "no\n"}
    said = [{"reply": reply, "reward": reward} for reply, reward in answers]
    described = [one | usual | (failed if one["reward"] is None else {}) | more for one in said]
    return {"number": number, "prompt": [{"role": "user", "content": f"Say {number}"}], "completions": described}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


# The file of answers


def test_rows_are_found_again_in_any_order(tmp_path: Path) -> None:
    rows = {number: row(number, ("a\nü\u2028", 1.0)) for number in (3, 0, 7)}
    with SampleFile(tmp_path / "samples.jsonl") as file:
        for one in rows.values():
            file.add(one)
        assert list(file.rows([7, 3, 0])) == [rows[7], rows[3], rows[0]]
    with SampleFile(tmp_path / "samples.jsonl") as file:
        assert set(file.places) == {0, 3, 7}
        file.add(row(1, ("b", 0.0)))
        assert [one["number"] for one in file.rows([1, 7])] == [1, 7]


def test_a_kill_at_any_byte_of_a_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        file.add(row(0, ("ä", 1.0)))
        first = path.read_bytes()
        file.add(row(1, ("ö", 1.0)))
    whole = path.read_bytes()
    for cut in range(len(first), len(whole)):
        path.write_bytes(whole[:cut])
        with SampleFile(path) as file:
            assert set(file.places) == {0}
            file.add(row(1, ("ö", 1.0)))
        assert path.read_bytes() == whole


def test_a_row_is_in_the_file_before_the_next_is_sampled(tmp_path: Path) -> None:
    """A killed process writes nothing any more: what is still in its memory is lost."""
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.add(row(0, ("a", 1.0)))
        assert len(lines(tmp_path / "samples.jsonl")) == 1


def test_a_broken_line_in_the_middle_is_no_kills_doing(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"number": 0}\n\0\0\0\n{"number": 2}\n')
    with pytest.raises(ConfigError, match=r"samples.jsonl, line 2 is not a row .* remove the line"):
        SampleFile(path)
    assert path.stat().st_size == 32


def test_half_a_character_is_a_row_like_others(tmp_path: Path) -> None:
    one = row(0, ("half \ud800", 1.0))
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.add(one)
        assert list(file.rows([0])) == [one]
    assert write_selection([one], tmp_path, config())["kept"] == 1


def test_a_full_disk_is_the_error_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(RolloutFailure, match="cannot be written"), SampleFile(tmp_path / "samples.jsonl") as file:
        file.stream.close()
        file.stream = Path("/dev/full").open("ab")  # noqa: SIM115  (closing writes again, and fails again)
        file.add(row(0, ("a", 1.0)))


def test_a_file_that_a_full_disk_refuses_is_named_and_the_one_before_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"prompts": 1})
    with files_up_to(30), pytest.raises(OSError, match=r"summary\.json cannot be written: File too large"):
        write_json(tmp_path / "summary.json", {"prompts": "x" * 100})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"prompts": 1}


def test_what_a_row_says_of_an_answer() -> None:
    prompt = Prompt(4, [{"role": "user", "content": "hi"}], label="7", source="data.jsonl")
    fine = Trajectory(prompt, 0, mask=np.array([False, True, True]), reward=0.5, truncated=True, reply="x")
    fine.outcome, fine.metrics = Outcome.TRUNCATED, {"reward/length": 0.25}
    lost = Trajectory(prompt, 0, mask=np.array([False, True]), outcome=Outcome.REWARD_TIMEOUT, error="slow")
    written = row_of(12, [fine, lost], scored=True)
    assert {name: written[name] for name in ("number", "id", "source", "label")} == {
        "number": 12,
        "id": 4,
        "source": "data.jsonl",
        "label": "7",
    }
    kept = {"reply": "x", "reward": 0.5, "parts": {"length": 0.25}, "outcome": "truncated", "truncated": True}
    failed = {"reply": "", "reward": None, "parts": {}, "outcome": "reward_timeout", "truncated": False}
    assert written["completions"] == [kept | {"tokens": 2}, failed | {"tokens": 1, "error": "slow"}]
    assert completion_of(fine, scored=False)["reward"] is None


# Selection

ANSWERS = (("low", 0.1), ("high", 0.9), ("", 2.0), ("failed", None), ("high too", 0.9), ("middle", 0.5))


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"keep": "all"}, ["low", "high", "high too", "middle"]),
        ({"keep": "best"}, ["high"]),
        ({"keep": "threshold", "threshold": 0.5}, ["high", "high too", "middle"]),
        ({"keep": "threshold", "threshold": 0.91}, []),
    ],
)
def test_what_is_kept_never_failed_and_never_is_empty(keys: dict[str, Any], kept: list[str]) -> None:
    assert [answer["reply"] for answer in select_kept(row(0, *ANSWERS), config(**keys))] == kept


def test_without_rewards_everything_is_kept() -> None:
    unjudged = row(0, ("a", None), ("b", None), outcome="finished")
    assert [answer["reply"] for answer in select_kept(unjudged, GenerateConfig())] == ["a", "b"]


@pytest.mark.parametrize(
    ("answers", "pair"),
    [
        (ANSWERS, ("high", "low")),
        ([("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 0.0)], ("b", "a")),
        ([("a", 1.0), ("b", 1.0)], None),
        ([("same", 1.0), ("same", 0.0)], None),  # a judge may waver, but a pair of equals teaches nothing
        ([("a", 1.0), ("b", None)], None),
        ([("a", None)], None),
        ([(" ", 1.0), ("b", 0.0)], None),
    ],
)
def test_a_pair_is_the_best_against_the_worst(answers: Any, pair: tuple[str, str] | None) -> None:
    found = pair_of(row(0, *answers), config(pairs=True))
    assert (found and (found["chosen"], found["rejected"])) == pair


def test_a_cut_answer_can_be_barred_from_being_learnt_but_not_from_being_the_worse_one() -> None:
    cut = row(0, ("cut", 1.0), truncated=True)["completions"] + row(0, ("whole", 0.5))["completions"]
    cut += row(0, ("cut too", 0.0), truncated=True)["completions"]
    mixed = row(0) | {"completions": cut}
    keys = {"keep": "best", "pairs": True}
    assert [answer["reply"] for answer in select_kept(mixed, config(**keys))] == ["cut"]
    strict = config(**keys, keep_truncated=False)
    assert [answer["reply"] for answer in select_kept(mixed, strict)] == ["whole"]
    found = pair_of(mixed, strict)
    assert found is not None and (found["chosen"], found["rejected"]) == ("whole", "cut too")


def test_files_are_what_the_trainers_read(tmp_path: Path) -> None:
    """And the summary counts what is in them: means 0.5 and 1 over prompts, the best 0.9 and 1."""
    rows = [row(0, ("low", 0.1), ("high", 0.9), ("failed", None)), row(1, ("one", 1.0), ("two", 1.0), ("", 1.0))]
    summary = write_selection(rows, tmp_path, config(keep="best", pairs=True))
    (kept, kept_format) = read_conversations(open_source(str(tmp_path / "kept.jsonl"), "data.path"), DataConfig())
    assert kept_format == "completion (columns prompt, completion)"
    assert [[message["content"] for message in one.messages] for one in kept] == [["Say 0", "high"], ["Say 1", "one"]]
    (pair,), pair_format = read_pairs(open_source(str(tmp_path / "pairs.jsonl"), "data.path"), DataConfig())
    assert pair_format == "preference (columns prompt, chosen, rejected)"
    assert (pair.prompt, pair.chosen[0]["content"], pair.rejected[0]["content"]) == (rows[0]["prompt"], "high", "low")
    assert summary["errors"] == {"reward_error: no": 1}
    assert summary["truncated_by"] == {}
    numbers = {name: value for name, value in summary.items() if name not in ("errors", "truncated_by")}
    counts = {"prompts": 2, "completions": 6, "failed": 1, "empty": 1, "truncated": 0, "tokens": 18, "kept": 2}
    counts |= {"pairs": 1, "prompts_without_pair": 1}
    assert numbers == pytest.approx(counts | {"reward_mean": 0.75, "reward_best_mean": 0.95})


def test_tools_go_with_what_is_selected(tmp_path: Path) -> None:
    prompt = Prompt(4, TOOL_TALK[:3], source="data.jsonl", tools=TOOLS)
    said = [("two", 1.0), ("three", 0.0)]
    group = [Trajectory(prompt, 0, reward=reward, reply=reply) for reply, reward in said]
    write_selection([row_of(0, group, scored=True)], tmp_path, config(keep="best", pairs=True))
    (kept,), _ = read_conversations(open_source(str(tmp_path / "kept.jsonl"), "data.path"), DataConfig())
    (pair,), _ = read_pairs(open_source(str(tmp_path / "pairs.jsonl"), "data.path"), DataConfig())
    assert isinstance(kept, Conversation)
    assert (kept.messages, kept.tools) == (TOOL_TALK, TOOLS)
    assert (pair.prompt, pair.tools) == (TOOL_TALK[:3], TOOLS)


def test_pairs_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    summary = write_selection([row(0, ("a", 1.0), ("b", 0.0))], tmp_path, config())
    assert [file.name for file in tmp_path.iterdir()] == ["kept.jsonl"]
    assert "pairs" not in summary and summary["kept"] == 2


# Configuration


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pairs": True, "samples": 1}, r"samples to 2 or more \(got 1\)"),
        ({"shards": 2, "shard": 2}, r"shard=2 is not in 0 to 1 \(shards=2\)"),
    ],
)
def test_what_cannot_work_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerateConfig.parse(keys)


@pytest.mark.parametrize(("keys", "asked"), [({"keep": "best"}, "keep=best"), ({"pairs": True}, "pairs=true")])
def test_selection_needs_a_reward(keys: dict[str, Any], asked: str) -> None:
    with pytest.raises(ConfigError, match=f"{asked} compares rewards: name one with --reward"):
        plan_generate(GenerateConfig.parse(keys))


def test_one_process_needs_no_further_keys() -> None:
    local = GenerateConfig.parse({"runtime": "local"})
    assert (local.rollout.engine, local.reward_model.engine) == ("hf", "torch")


def test_eval_says_where_its_prompts_come_from() -> None:
    with pytest.raises(ConfigError, match=r"data.path=x.jsonl: eval reads evaluation.data \(--eval-data\)"):
        EvalConfig.parse({"data": {"path": "x.jsonl"}})
    with pytest.raises(ConfigError, match=r"evaluation.data is empty: name prompts with --data"):
        plan_eval(EvalConfig.parse(JUDGED))


# Which prompts


@pytest.fixture
def tree(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    rows = [{"prompt": f"{number}", "answer": "x"} for number in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return {
        "runtime": "local",
        "model": {"path": str(model_folder)},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "reward": {"function": "exact"},
        "folder": str(tmp_path),
        "name": "run",
    }


def chosen(tree: dict[str, Any], **keys: Any) -> list[tuple[int, int]]:
    """Numbers and ids."""
    plan = plan_generate(GenerateConfig.parse(tree | keys))
    return [(number, prompt.id) for number, prompt in chosen_prompts(plan)]


def test_every_prompt_is_taken_once_in_the_seeded_order(tree: dict[str, Any]) -> None:
    taken = chosen(tree)
    assert [number for number, _ in taken] == list(range(10))
    assert sorted(prompt for _, prompt in taken) == list(range(10)) != [prompt for _, prompt in taken]
    assert chosen(tree, limit=4) == taken[:4]
    assert chosen(tree, skip=4, limit=4) == taken[4:8]
    assert chosen(tree, skip=4) == taken[4:]
    assert chosen(tree, seed=1) != taken


def test_shares_make_up_the_whole(tree: dict[str, Any]) -> None:
    shares = [chosen(tree, shards=3, shard=shard) for shard in range(3)]
    assert [len(share) for share in shares] == [4, 3, 3]
    assert sorted(entry for share in shares for entry in share) == chosen(tree)


def test_the_order_goes_on_after_its_end(tree: dict[str, Any]) -> None:
    """The next rounds answer every prompt again, under numbers and so with seeds of their own."""
    again = chosen(tree, skip=10)
    assert [number for number, _ in again] == list(range(10, 20))
    assert sorted(prompt for _, prompt in again) == list(range(10))


def test_a_plan_is_resolved(tree: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_generate(GenerateConfig.parse(tree))
    assert (plan.config.rollout.engines, plan.config.rollout.dtype) == (1, "float32")
    assert plan.config.rollout.max_new_tokens == 32  # half of the model's context
    assert (plan.layout.policy_ranks, plan.layout.engines) == (0, 1)
    settings = Path(shutil.copytree(tree["model"]["path"], tmp_path / "wide")) / "config.json"
    settings.write_text(settings.read_text().replace('"max_position_embeddings": 64', '"max_position_embeddings": 512'))
    wide = plan_generate(GenerateConfig.parse({**tree, "model": {"path": str(tmp_path / "wide")}}))
    assert wide.config.rollout.max_prompt_tokens == 64  # prompts have one token


def test_a_plan_warns_of_idle_keys_and_crowded_cores(tree: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    cores = psutil.cpu_count()
    assert cores
    wanted = {"engine": "hf", "engines": cores + 1}
    asked = {**tree, "runtime": "ray", "checkpoint": {"every": 3}, "rollout": wanted}
    assert launch(GenerateConfig.parse(asked), "generate", prepare_generate, dry_run=True) == 0
    _, crowded, idle = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert f"rollout.engines={cores + 1}" in crowded
    assert "checkpoint.every=3 has no effect; nothing is trained" in idle
    assert launch(GenerateConfig.parse(tree), "generate", prepare_generate, dry_run=True) == 0
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "place", "expected"), [(8, "separate", 3), (8, "shared", 4), (0, "separate", 1)])
def test_engines_get_the_gpus_that_reward_models_leave(gpus: int, place: str, expected: int) -> None:
    facts: Any = None
    judge = RoleModel("reward_model", "reward_model", ModelConfig(), FrozenConfig(placement=place), "reward", facts, 2)
    there = Machine(cpus=8, memory_bytes=0, gpus=gpus, gpu_bytes=0)
    assert engine_count(config(rollout={"tensor_parallel": 2}), [judge], there) == expected


def test_going_on_with_another_model_or_temperature_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    before = plan_generate(GenerateConfig.parse(tree)).config
    folder = RunFolder(tmp_path / "run").open(before, "generate", resume=False)
    check_unchanged(before.with_keys({"keep": "best", "limit": 3, "reward": {"timeout_seconds": 1.0}}), folder)
    with pytest.raises(ConfigError, match=r"rollout.temperature was 1.0 when this run began and is 0.5 now"):
        check_unchanged(before.with_keys({"rollout": {"temperature": 0.5}}), folder)
    with pytest.raises(ConfigError, match=r"samples was 4 when this run began and is 8 now"):
        check_unchanged(before.with_keys({"samples": 8}), folder)
    for section, key, value in (
        ("rollout", "max_prompt_tokens", 3),
        ("rollout", "top_p", 0.5),
        ("rollout", "stop", ["."]),
        ("reward", "function", ""),
        ("reward", "options", {"a": 1}),
        ("reward", "weight", 2.0),
        ("reward", "policy_error", -1.0),
        ("reward", "steps", "mean"),
    ):
        with pytest.raises(ConfigError, match=rf"^{section}.{key} was .* choose another --name"):
            check_unchanged(before.with_keys({section: {key: value}}), folder)


def test_only_a_run_that_goes_on_is_compared_with_what_it_was(tree: dict[str, Any], tmp_path: Path) -> None:
    before, folder = GenerateConfig.parse({**tree, "name": "run"}), RunFolder(tmp_path / "run")
    folder.open(plan_generate(before).config, "generate", resume=False)
    other = before.with_keys({"folder": str(tmp_path), "rollout": {"temperature": 0.5}})
    with pytest.raises(ConfigError, match=r"rollout.temperature was 1.0"):
        launch(other, "generate", prepare_generate, dry_run=True, resume=True)
    assert launch(other, "generate", prepare_generate, dry_run=True) == 0


def test_going_on_with_other_rows_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    (number, prompt), *_ = chosen_prompts(plan_generate(GenerateConfig.parse(tree)))
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.add({"number": number, **prompt_row(prompt), "completions": []})
        check_sampled(file, [(number, prompt)])
        messages = [{"role": "user", "content": "other"}]
        for change in ({"id": 99}, {"source": "other.jsonl"}, {"messages": messages}, {"tools": TOOLS}):
            with pytest.raises(ConfigError, match="the data has changed since this run began; choose another --name"):
                check_sampled(file, [(number, replace(prompt, **change))])


def test_the_reward_is_checked_against_every_set(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "unlabelled.jsonl").write_text('{"prompt": "1"}\n')
    sets = {"labelled": tree["data"]["path"], "other": str(tmp_path / "unlabelled.jsonl")}
    with pytest.raises(ConfigError, match="no value for its parameter 'label'"):
        plan_eval(EvalConfig.parse({**tree, "data": {}, "evaluation": {"sets": sets}}))


def test_the_query_of_a_scorer_is_neither_shown_nor_saved(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCORER_QUERY", "key=s3cret")
    scorer = {"function": "http://127.0.0.1:1/score", "remote": {"query_variable": "SCORER_QUERY"}, "probe": False}
    config = GenerateConfig.parse({**tree, "reward": scorer})
    launch(config, "generate", prepare_generate, dry_run=True)
    shown = capsys.readouterr().out
    assert "reward     http://127.0.0.1:1/score\n" in shown
    folder = RunFolder(tmp_path / "run").open(config, "generate", resume=False)
    saved = GenerateConfig.load([folder.config], [])  # as --resume reads it
    assert saved.reward == config.reward and saved.reward.remote.query_variable == "SCORER_QUERY"
    assert "s3cret" not in shown + folder.config.read_text()


def test_the_table_has_a_row_for_each_set() -> None:
    metrics = {
        **{"evaluation/a/reward": 0.5, "evaluation/a/reward_ci95": 0.125, "evaluation/a/failed_share": 0.25},
        **{"evaluation/a/pass@2": 0.75, "evaluation/a/maj@2": 0.625},
        "evaluation/b/failed_share": 1.0,
    }
    table = evaluation_table(metrics, {"a": 3, "b": 1}, samples=2)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells == {
        "set": ["a", "b"],
        "prompts": ["3", "1"],
        "mean@2": ["0.500 ± 0.125", "-"],
        "pass@2": ["0.750", "-"],
        "maj@2": ["0.625", "-"],
        "failed": ["25.0%", "100.0%"],
    }
    screen, name = io.StringIO(), "long" * 30
    named = {f"evaluation/{name}/failed_share": 0.5}
    Console(file=screen, width=80).print(evaluation_table(metrics | named, {"a": 3, name: 1}, samples=2))
    assert "…" not in screen.getvalue()
    assert "0.500 ± 0.125" in screen.getvalue() and screen.getvalue().count("long") >= 25


def test_the_plan_tells_of_a_template_that_is_not_there_and_takes_one(tree: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_generate(GenerateConfig.parse(tree))
    assert [one.code for one in plan.findings] == ["no_chat_template"]
    file = tmp_path / "chat.jinja"
    file.write_text(TOOL_TEMPLATE)
    tree["data"]["chat_template"] = str(file)
    plan = plan_generate(GenerateConfig.parse(tree))
    assert plan.findings == []
    (prompts,) = plan.sets.values()
    assert prompts.longest == len("<user>0\n<assistant>") + 1  # the end is one token
    file.write_text("{{ greeting }}" + TOOL_TEMPLATE)
    tree["data"]["chat_template_kwargs"] = {"greeting": "hi"}
    (prompts,) = plan_generate(GenerateConfig.parse(tree)).sets.values()
    assert prompts.longest == len("hi<user>0\n<assistant>") + 1
    tree["data"]["chat_template_kwargs"] = {}
    tree["data"]["chat_template"] = "never"
    assert [one.code for one in plan_generate(GenerateConfig.parse(tree)).findings] == ["no_chat_template"]


def test_jobs_sample_with_the_controls_of_their_section(tree: dict[str, Any], tmp_path: Path) -> None:
    """From the likeliest token alone, so that answers agree; those of `eval` end before the third character."""
    narrow, few, short = {"temperature": 1.0, "top_k": 1}, {"limit": 1, "samples": 3}, {"max_new_tokens": 6}
    data = {"path": tree["data"]["path"], "shuffle": False}
    free = {**tree, **few, "data": data, "reward": {}, "rollout": {**short, **narrow}}
    assert launch(GenerateConfig.parse(free), "generate", prepare_generate) == 0
    (group,) = lines(tmp_path / "run/samples.jsonl")
    (reply,) = {answer["reply"] for answer in group["completions"]}
    held_out = {"data": data["path"], **few, **narrow, "stop": [reply[2]]}
    judged = {**tree, "name": "held_out", "data": {}, "rollout": short, "evaluation": held_out}
    assert launch(EvalConfig.parse(judged), "eval", prepare_eval) == 0
    (group,) = lines(tmp_path / "held_out/transcripts.jsonl")
    assert {answer["reply"] for answer in group["completions"]} == {reply.partition(reply[2])[0]}
    assert not any(answer["truncated"] for answer in group["completions"])
