"""Runs that are named as models, which checkpoint is taken, for which keys; and who sees how many pictures."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.config.rl import RLConfig
from trueline.config.sampling import ServingConfig
from trueline.config.supervised import DistillRunConfig
from trueline.data.pictures import Picture
from trueline.data.types import Prompt
from trueline.plan.inputs import check_sight, most_pictures, resolve_run_as_model


def make_run(folder: Path, losses: dict[int, float], checkpoint: str = "{}") -> Path:
    """A run folder as far as it is looked at: its head, and checkpoints with a metric."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"# trueline sft\ncheckpoint: {checkpoint}\n")
    for step, loss in losses.items():
        saved = folder / "checkpoints" / f"step_{step:06d}"
        (saved / "model").mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        (saved / "metrics.json").write_text(json.dumps({"evaluation/loss": loss}))
    return folder


def model_of(run: Path, step: int) -> str:
    return str(run / "checkpoints" / f"step_{step:06d}" / "model")


def test_every_key_of_a_model_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, judge = make_run(tmp_path / "runs/sft", {20: 1.0, 100: 2.0}), make_run(tmp_path / "runs/judge", {5: 0.0})
    config, lines = resolve_run_as_model(
        RLConfig.parse(
            {
                "model": {"path": "runs/sft"},
                "critic": {"path": "runs/sft/checkpoints/step_000020"},
                "teacher": {"path": "runs/judge"},
                "reward": {"parts": {"right": {"function": "math"}, "kind": {"function": "runs/judge", "weight": 2.0}}},
            }
        )
    )
    assert (config.model.path, config.critic.path) == (model_of(run, 100), model_of(run, 20))
    assert config.teacher.path == config.reward.parts["kind"].function == model_of(judge, 5)
    assert (config.reward.parts["right"].function, config.reward.parts["kind"].weight) == ("math", 2.0)
    assert lines[0].startswith("taken      model.path=runs/sft: step_000100, the newest checkpoint")
    assert [line.split()[1].partition("=")[0] for line in lines[1:]] == [
        "critic.path",
        "teacher.path",
        "reward.parts.kind.function",
    ]
    alone, lines = resolve_run_as_model(RLConfig.parse({"reward": {"function": "runs/judge"}}))
    assert alone.reward.function == model_of(judge, 5) and len(lines) == 1
    distilled, _ = resolve_run_as_model(DistillRunConfig.parse({"distill": {"teacher": "runs/sft"}}))
    assert distilled.distill.teacher == model_of(run, 100)
    served, _ = resolve_run_as_model(ServingConfig.parse({"model": {"path": "runs/judge"}}))
    assert served.model.path == model_of(judge, 5)


def test_the_best_checkpoint_is_taken_where_the_best_were_kept(tmp_path: Path) -> None:
    least = make_run(tmp_path / "least", {1: 3.0, 2: 1.0, 3: 2.0}, "{keep_best: 1}")
    most = make_run(tmp_path / "most", {1: 3.0, 2: 1.0, 3: 2.0}, "{keep_best: 2, metric: -evaluation/loss}")
    for run, step, metric in ((least, 2, "evaluation/loss"), (most, 1, "-evaluation/loss")):
        config, (line,) = resolve_run_as_model(RLConfig.parse({"model": {"path": str(run)}}))
        assert config.model.path == model_of(run, step)
        assert f"the best checkpoint by {metric}" in line


def test_a_run_without_a_checkpoint_is_refused_and_other_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "new", {})
    with pytest.raises(ConfigError, match=r"model.path=new is a run of sft without a checkpoint yet: .*--resume"):
        resolve_run_as_model(RLConfig.parse({"model": {"path": "new"}}))
    make_run(tmp_path / "bare", {}, "{save: false}")
    with pytest.raises(
        ConfigError, match=r"model.path=bare is a run of sft that saved nothing \(checkpoint.save=false"
    ):
        resolve_run_as_model(RLConfig.parse({"model": {"path": "bare"}}))
    make_run(tmp_path / "math", {1: 0.0})  # a built-in wins over a folder of its name
    (tmp_path / "model").mkdir()
    config = RLConfig.parse({"model": {"path": "model"}, "teacher": {"path": "a/b"}, "reward": {"function": "math"}})
    assert resolve_run_as_model(config) == (config, [])


def test_later_turns_show_no_pictures_where_a_model_of_the_run_reads_none() -> None:
    """A critic would value what it has not seen; text is no matter."""
    played = EnvironmentConfig(function="file.py:Game")
    families = {"critic one": "", "reward model two": "idefics3"}
    assert check_sight(played, [[]], families) == {"environment": {"max_images": 0}}
    assert (
        check_sight(played, [[]], {"critic one": "idefics3"}) == check_sight(EnvironmentConfig(), [[]], families) == {}
    )


def test_engines_admit_the_pictures_of_later_turns() -> None:
    chat: Any = SimpleNamespace(vision=object())
    prompts = [[Prompt(0, [], pictures=(Picture(b"", 1, 1),) * count) for count in (0, 3)]]
    played = EnvironmentConfig(tools=["python"], max_images=5)
    assert most_pictures(prompts, chat, EnvironmentConfig(max_images=5)) == 3
    assert most_pictures(prompts, chat, played) == 8
    chat.vision = None
    assert most_pictures(prompts, chat, played) == 0
