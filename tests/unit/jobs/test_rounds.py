"""The stages of a recipe: which runs they are, on which model and prompts, and how a stopped one goes on."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trueline.config.base import ConfigError, Tree
from trueline.config.run import CheckpointConfig
from trueline.config.sampling import IterativeDPOConfig, RaftConfig, RoundsConfig
from trueline.config.supervised import PreferenceRunConfig, SftConfig
from trueline.jobs.rounds import Recipe, Stage, plan_rounds, rounds_table, run_stages
from trueline.jobs.sample_file import write_json
from trueline.models.loading import check_model
from trueline.monitoring.progress import Progress
from trueline.plan.describe import describe_rounds
from trueline.plan.resolve import NAMES, suited_rate
from trueline.runs.launch import Job, Start

TREE: dict[str, Any] = {
    "rounds": 2,
    "samples": 6,
    "seed": 3,
    "runtime": "local",
    "timeout_seconds": 77.0,
    "model": {"path": "start"},
    "data": {"path": "prompts.jsonl", "chat_template": "never", "system_prompt": "Be brief.", "label_column": "gold"}
    | {"chat_template_kwargs": {"calm": True}},
    "reward": {"function": "exact"},
    "evaluation": {"data": "held_out.jsonl", "samples": 4, "temperature": 0.5},
    "rollout": {"max_new_tokens": 9, "top_p": 0.9, "stop": ["."]},
    "checkpoint": {"every": 9},
    "health": {"action": "stop"},
    "training": {"learning_rate": 0.5, "epochs": 3, "samples_per_step": 5, "warmup_steps": 2},
}


def saved(folder: Path, run: str) -> Path:
    """A finished training run, as far as its folder tells."""
    model = folder / run / "checkpoints" / "step_000007" / "model"
    model.mkdir(parents=True)
    return model


@pytest.fixture
def raft(tmp_path: Path) -> Recipe:
    for number in (1, 2):
        saved(tmp_path, f"round_{number}/sft")
    return Recipe(RaftConfig.parse(TREE | {"keep": "threshold", "threshold": 0.25}), tmp_path, prompts=10)


def test_stages_come_in_order_and_each_is_a_run_of_its_own(raft: Recipe, tmp_path: Path) -> None:
    stages = list(raft.stages())
    names = ["round_0/eval"]
    names += [f"round_{number}/{verb}" for number in (1, 2) for verb in ("generate", "sft", "eval")]
    assert [stage.name for stage in stages] == names
    assert [f"{stage.config.folder}/{stage.config.name}" for stage in stages] == [
        f"{tmp_path}/{name}" for name in names
    ]


def test_without_held_out_prompts_nothing_is_evaluated(raft: Recipe) -> None:
    plain = Recipe(raft.config.with_keys({"evaluation": {"data": ""}}), raft.folder, 10)
    assert [stage.name.split("/")[1] for stage in plain.stages()] == ["generate", "sft"] * 2


def test_each_stage_starts_from_the_model_of_the_rounds_before_it(raft: Recipe, tmp_path: Path) -> None:
    trained = [f"{tmp_path}/round_{number}/sft/checkpoints/step_000007/model" for number in (1, 2)]
    models = [stage.config.model_dump()["model"]["path"] for stage in raft.stages()]
    assert models == ["start", "start", "start", trained[0], trained[0], trained[0], trained[1]]


def test_each_round_takes_the_next_prompts(raft: Recipe) -> None:
    first, second = raft.generation(1), raft.generation(2)
    assert (first.skip, first.limit, second.skip, second.limit) == (0, 10, 10, 10)
    assert first.seed == second.seed == 3


def test_keys_reach_the_stages_that_they_are_for(raft: Recipe, tmp_path: Path) -> None:
    generation, training, evaluation = raft.generation(2), raft.training(2), raft.evaluation(2)
    assert (generation.samples, generation.keep, generation.threshold) == (6, "threshold", 0.25)
    assert generation.data == raft.config.data and generation.rollout.max_new_tokens == 9
    assert isinstance(training, SftConfig)
    assert (training.epochs, training.samples_per_step, training.steps) == (3, 5, None)
    assert (training.training.learning_rate, training.training.warmup_steps) == (0.5, 2)
    assert training.data.path == f"{tmp_path}/round_2/generate/kept.jsonl"
    assert (training.data.chat_template, training.data.system_prompt) == ("never", None)  # it is in the prompts already
    assert training.data.chat_template_kwargs == {"calm": True}
    assert evaluation.evaluation == raft.config.evaluation
    assert (generation.rollout.top_p, generation.rollout.stop) == (0.9, ["."])
    assert (evaluation.rollout.top_p, evaluation.rollout.stop) == (1.0, [])  # it would read neither
    assert evaluation.rollout.max_new_tokens == 9
    assert (evaluation.data.path, evaluation.data.label_column) == ("", "gold")
    assert {stage.config.timeout_seconds for stage in raft.stages()} == {77.0}
    assert (generation.checkpoint, training.checkpoint.every, evaluation.checkpoint) == (
        CheckpointConfig(),
        9,
        CheckpointConfig(),
    )
    assert {stage.config.runtime for stage in raft.stages()} == {"local"}


def test_a_bad_step_is_answered_where_something_is_trained(raft: Recipe) -> None:
    assert raft.training(1).health.action == "stop"
    assert raft.generation(1).health.action == raft.evaluation(1).health.action == "log"


def test_pairs_are_trained_on_with_the_preference_keys(tmp_path: Path) -> None:
    recipe = Recipe(IterativeDPOConfig.parse(TREE | {"preference": {"beta": 0.7}}), tmp_path, 10)
    training = recipe.training(1)
    assert isinstance(training, PreferenceRunConfig)
    assert training.preference.beta == 0.7
    assert (training.name, training.data.path) == ("dpo", f"{tmp_path}/round_1/generate/pairs.jsonl")
    assert recipe.generation(1).pairs


@pytest.mark.parametrize(("kind", "task"), [(RaftConfig, "sft"), (IterativeDPOConfig, "preference")])
def test_a_recipe_trains_at_the_default_rate_of_its_trainer(
    model_folder: Path, tmp_path: Path, kind: type[RoundsConfig], task: str
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    keys: Tree = {"model": {"path": str(model_folder)}, "runtime": "local", "rollout": {"max_new_tokens": 4}}
    reward = {"data": {"path": str(tmp_path / "data.jsonl")}, "reward": {"function": "math"}}
    recipe, plan = plan_rounds(kind.parse(keys | reward), tmp_path)
    expected = suited_rate(check_model(recipe.config.model).parameters, task, adapters=False)
    assert recipe.training(1).model_dump()["training"]["learning_rate"] == expected
    assert f"training.learning_rate={expected:g}: default for {NAMES.get(task, task)} on " in describe_rounds(
        recipe.config, plan, recipe.prompts
    )


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key .*; did you mean 'training.learning_rate'"):
        RaftConfig.parse({"training": {"learning_rat": 1.0}})


@dataclass(frozen=True, slots=True)
class Told(Recipe):
    """Three stages that end as they are told, each time they are started."""

    statuses: dict[str, list[int]] = field(default_factory=dict)
    started: list[tuple[str, bool]] = field(default_factory=list)

    def stages(self) -> Iterator[Stage]:
        for name in ("one", "two", "three"):
            yield Stage(1, name, self.prepare, RaftConfig(name=name, folder=str(self.folder / "round_1")))

    def prepare(self, config: RaftConfig, start: Start) -> Job:
        self.started.append((start.verb, start.resume))
        return Job(config, "", 1, lambda folder, progress: self.statuses[start.verb].pop(0))


def test_a_stage_that_ends_early_ends_the_recipe_and_is_taken_up_again(tmp_path: Path) -> None:
    quiet = Progress("raft", 1, Console(quiet=True))
    recipe = Told(RaftConfig(), tmp_path, 10, {"two": [130, 0], "one": [0], "three": [0]})
    assert run_stages(recipe, "raft", quiet) == 130
    assert recipe.started == [("one", False), ("two", False)]
    recipe.started.clear()
    assert run_stages(recipe, "raft", quiet) == 0
    assert recipe.started == [("two", True), ("three", False)]
    recipe.started.clear()
    assert run_stages(recipe, "raft", quiet) == 0
    assert recipe.started == []


def test_results_are_read_from_the_stages(raft: Recipe, tmp_path: Path) -> None:
    for number, reward in enumerate((0.1, 0.4, 0.9)):
        (tmp_path / f"round_{number}/eval").mkdir(parents=True)
        metrics = {"evaluation/reward": reward, "evaluation/reward_ci95": 0.01, "evaluation/response_length": 3.0}
        write_json(tmp_path / f"round_{number}/eval/evaluation.json", {"metrics": metrics})
    for number in (1, 2):
        (tmp_path / f"round_{number}/generate").mkdir()
        summary = {"reward_mean": 0.2 * number, "reward_best_mean": 0.5, "kept": 7 * number}
        write_json(tmp_path / f"round_{number}/generate/summary.json", summary)
    results = [raft.result(number) for number in range(3)]
    assert results[0] == {"round": 0, "evaluation/reward": 0.1, "evaluation/reward_ci95": 0.01}
    assert results[2]["learnt"] == 14
    cells = [list(column.cells) for column in rounds_table(results).columns]
    assert cells == [
        ["0", "1", "2"],
        ["0.100 ± 0.010", "0.400 ± 0.010", "0.900 ± 0.010"],
        ["-", "0.200", "0.400"],
        ["-", "0.500", "0.500"],
        ["-", "7", "14"],
    ]
