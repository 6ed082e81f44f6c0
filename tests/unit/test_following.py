"""Code that follows a run from Python: it hears of every step, may stop the run, and loads what it trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trueline
from tests.support.tiny import make_tiny_model
from trueline.config.rl import RLConfig
from trueline.monitoring.progress import Follower, Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.runs.launch import Job, Start, launch
from trueline.runs.rescue import RolledBack

ROWS = [{"prompt": f"{number}:", "answer": str(number)} for number in range(8)]
TEXTS = [f"{number} and {number + 1}" for number in range(16)]
SAMPLED = {"data": ROWS, "reward": "exact", "prompts_per_step": 2, "rollout": {"max_new_tokens": 4}}
VERBS: dict[str, dict[str, Any]] = {"grpo": SAMPLED, "sft": {"data": TEXTS, "samples_per_step": 2, "epochs": 1}}
RATE = {"training.learning_rate": 1e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, tied=True)
    return folder


@pytest.fixture
def small(model: Path, tmp_path: Path) -> dict[str, Any]:
    keys = {"runtime": "local", "monitoring": {"tensorboard": False}, "checkpoint": {"every": 100}}
    return {**keys, **RATE, "model": model, "folder": tmp_path, "name": "run"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_step_is_told_and_a_run_stops_where_it_is_asked_to(verb: str, small: dict[str, Any]) -> None:
    heard: list[dict[str, Any]] = []
    folders: list[Path] = []

    def hear(run: trueline.Run, metrics: dict[str, Any]) -> None:
        heard.append(metrics)

    def stop(run: trueline.Run, metrics: dict[str, Any]) -> None:
        folders.append(run.folder)
        if metrics["step"] == 2:
            run.stop()

    run = trueline.train(verb, on_step=[hear, stop], steps=4, **VERBS[verb], **small)
    rows = list(RunFolder(run.folder).rows())
    assert run.status == 130 and [row["step"] for row in heard] == [1, 2] and folders == [run.folder] * 2
    assert heard == [row for row in rows if row["step"] > 0]
    assert run.model.parent.name == "step_000002"
    resumed = trueline.train(verb, name="run", folder=small["folder"], resume=True, on_step=hear)
    assert resumed.status == 0 and [row["step"] for row in heard] == [1, 2, 3, 4]


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_of_the_function_ends_the_run_and_loses_no_step(verb: str, small: dict[str, Any]) -> None:
    def fail(run: trueline.Run, metrics: dict[str, Any]) -> None:
        if metrics["step"] == 2:
            raise LookupError("not in my table")

    with pytest.raises(LookupError, match="not in my table"):
        trueline.train(verb, on_step=fail, steps=4, **VERBS[verb], **small)
    assert trueline.Run(small["folder"] / "run").model.parent.name == "step_000002"
    assert trueline.train(verb, name="run", folder=small["folder"], resume=True).status == 0


@pytest.mark.parametrize("verb", VERBS)
def test_a_tracker_keeps_keys_and_report_of_a_whole_run(
    verb: str, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{small['folder']}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    small["monitoring"] = {"tensorboard": False, "mlflow": "tried"}
    run = trueline.train(verb, steps=1, **VERBS[verb], **small)
    [found] = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("tried").experiment_id])
    assert found.info.run_name == "run" and found.data.params["training.learning_rate"] == "0.001"
    report = Path(found.info.artifact_uri.removeprefix("file://")) / "report.html"
    assert report.read_bytes() == (run.folder / "report.html").read_bytes() and b"loss" in report.read_bytes()


def test_a_run_that_goes_back_is_followed_on(tmp_path: Path) -> None:
    heard: list[int] = []

    def work(folder: RunFolder, progress: Progress) -> int:
        progress.step(len(heard) + 1, {})
        if len(heard) == 1:
            raise RolledBack
        return 0

    def plan(config: RLConfig, start: Start) -> Job:
        return Job(config, "", 2, work)

    follower = Follower(lambda metrics: heard.append(metrics["step"]))
    assert launch(RLConfig(folder=str(tmp_path), name="run"), "grpo", plan, follower=follower) == 0 and heard == [1, 2]


def test_what_cannot_be_followed_or_stopped(small: dict[str, Any]) -> None:
    for verb in ("generate", "eval", "raft"):
        with pytest.raises(trueline.ConfigError, match=f"on_step .* and {verb} has none of its own"):
            trueline.train(verb, on_step=lambda run, metrics: None, **small)
    with pytest.raises(trueline.ConfigError, match="run can be stopped by its on_step alone; Ctrl-C"):
        trueline.Run(small["folder"] / "run").stop()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_is_loaded_as_it_was_exported(rank: int, small: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trueline.training.export import export

    keys = {"model.lora.rank": rank, "training.learning_rate": 1e-2, "model.path": small.pop("model")}
    run = trueline.train("sft", steps=2, **VERBS["sft"], **{**small, **keys})
    model, tokenizer = trueline.load(run)
    export(run.folder, tmp_path / "whole", merge=rank > 0)
    tokens = torch.tensor([tokenizer.encode("1 and 2")])
    first = AutoModelForCausalLM.from_pretrained(keys["model.path"])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(logits(model, tokens), logits(whole, tokens))
    assert not torch.allclose(logits(model, tokens), logits(first, tokens), atol=1e-4)
    again, _ = trueline.load(run.model, dtype="bfloat16")
    assert again.dtype == torch.bfloat16 and not again.training


def test_a_reward_model_is_loaded_with_its_head(small: dict[str, Any]) -> None:
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "x"} for row in ROWS]
    model, _ = trueline.load(trueline.train("rm", data=pairs, samples_per_step=2, steps=1, **small))
    assert type(model).__name__.endswith("ForSequenceClassification") and model.config.num_labels == 1


def test_what_cannot_be_loaded(model: Path, tmp_path: Path) -> None:
    with pytest.raises(trueline.ConfigError, match="no such folder: name a run, a checkpoint or a model"):
        trueline.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(trueline.ConfigError, match="has no weights: name a model, or write a run's with"):
        trueline.load(tmp_path / "empty")
    assert trueline.load(model)[1].eos_token_id is not None
