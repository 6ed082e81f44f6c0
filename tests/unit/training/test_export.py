"""Checkpoints as folders that plain transformers opens."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.architectures import make_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import ConfigError
from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig
from trueline.config.run import CheckpointConfig
from trueline.data.types import Sample
from trueline.models.loading import check_folder
from trueline.runtime.actors import LocalActor
from trueline.training.checkpoints import Checkpoints
from trueline.training.export import export, find_checkpoint
from trueline.training.group import ModelGroup, write_models
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

TOKENS = torch.tensor([[5, 80, 33, 7, 120, 64]])
LORA = LoraConfig(rank=2, alpha=8.0)


def make_group(folder: Path, lora: LoraConfig, decay: float) -> ModelGroup:
    training = TrainingConfig(engine="torch", learning_rate=1e-2, ema_decay=decay)
    worker = Worker(WorkerSpec(ModelConfig(path=str(folder), dtype="float32", lora=lora), training, 0, 1, 4, 0))
    worker.start(("", 0))
    return ModelGroup("model", [LocalActor("model-0", worker)], training, 60)


def make_run(
    folder: Path,
    run: Path,
    lora: LoraConfig = LoraConfig(),  # noqa: B008
    decay: float = 0.0,
    whole: bool = True,
) -> Path:
    """A run folder with the checkpoints of steps 1 and 2; returns the newer one."""
    group, checkpoints = make_group(folder, lora, decay), Checkpoints(run, CheckpointConfig())
    sample = Sample(TOKENS[0], torch.ones(6, dtype=torch.bool))
    set_weights([sample], "token_mean", 0)
    for step in (1, 2):
        group.update([sample], "sft", LossSettings())
        checkpoints.save(step, {"step": step}, lambda aside: write_models({"": group}, aside, whole))
    checkpoints.settle(wait=True)
    saved = checkpoints.newest()
    assert saved is not None
    return saved


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=TOKENS).logits


def weights(folder: Path, **settings: Any) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, **settings).named_parameters())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(other[name], tensor) for name, tensor in one.items())


def refused(source: Path, target: Path, **wanted: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        export(source, target, **wanted)
    assert not target.exists() or list(target.iterdir()) == []
    return str(caught.value)


def test_a_plain_export_is_the_trained_model(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run")
    made = export(checkpoint, tmp_path / "deep" / "model")
    assert made == tmp_path / "deep" / "model"
    assert same(weights(made), weights(checkpoint / "model"))
    assert not same(weights(made), weights(model_folder))
    assert AutoTokenizer.from_pretrained(made)("1+1=") == AutoTokenizer.from_pretrained(model_folder)("1+1=")
    assert [path.name for path in made.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("file_bytes", [2**32, 2**14])
def test_a_checkpoint_without_a_model_becomes_one(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    monkeypatch.setattr("trueline.training.export.FILE_BYTES", file_bytes)
    whole = make_run(model_folder, tmp_path / "whole", decay=0.75)
    bare = make_run(model_folder, tmp_path / "bare", decay=0.75, whole=False)
    assert not list((bare / "model").glob("*.safetensors*"))
    wishes: list[dict[str, Any]] = [{}, {"average": True}, {"dtype": "bfloat16"}]
    for number, wanted in enumerate(wishes):
        made = export(bare, tmp_path / f"made_{number}", **wanted)
        expected = export(whole, tmp_path / f"expected_{number}", **wanted)
        assert same(weights(made, dtype="auto"), weights(expected, dtype="auto"))
        assert (len(list(made.glob("*.safetensors"))) > 1) == (file_bytes < 2**32)
    with pytest.raises(ConfigError, match=r"trueline export .*step_000002 FOLDER"):
        check_folder(bare / "model")


def test_a_run_goes_on_from_a_checkpoint_without_a_model(model_folder: Path, tmp_path: Path) -> None:
    """And the checkpoint of an adapter always has it."""
    bare = make_run(model_folder, tmp_path / "bare", whole=False)
    again = make_group(model_folder, LoraConfig(), 0.0)
    again.call(Worker.load, str(bare))
    write_models({"": again}, tmp_path)(True)
    assert same(weights(tmp_path / "model"), weights(export(bare, tmp_path / "made")))
    adapted = make_run(model_folder, tmp_path / "adapted", LORA, whole=False)
    assert (adapted / "model" / "adapter_model.safetensors").is_file()


def test_of_a_run_the_newest_checkpoint_is_taken(model_folder: Path, tmp_path: Path) -> None:
    newest = make_run(model_folder, tmp_path / "run")
    assert newest.name == "step_000002"
    assert same(weights(export(tmp_path / "run", tmp_path / "out")), weights(newest / "model"))
    older = newest.with_name("step_000001")
    assert same(weights(export(older, tmp_path / "old")), weights(older / "model"))


def test_the_average_is_exported_in_place_of_the_weights(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run", decay=0.75)
    first, second = weights(checkpoint.with_name("step_000001") / "model"), weights(checkpoint / "model")
    found = weights(export(checkpoint, tmp_path / "out", average=True))
    for name, start in weights(model_folder).items():
        after_one = 0.75 * start + 0.25 * first[name]
        torch.testing.assert_close(found[name], 0.75 * after_one + 0.25 * second[name], rtol=1e-5, atol=1e-6)


def test_weights_are_exported_in_another_type(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run")
    made = export(checkpoint, tmp_path / "out", dtype="bfloat16")
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    found = weights(made, dtype="auto")
    expected = {name: tensor.bfloat16() for name, tensor in weights(checkpoint / "model").items()}
    assert same(found, expected)


def test_an_adapter_is_exported_as_an_adapter(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run", LORA)
    made = export(checkpoint, tmp_path / "out")
    assert not (made / "model.safetensors").exists()
    assert torch.equal(logits(made), logits(checkpoint / "model"))
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(base, made).eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(input_ids=TOKENS).logits, logits(made), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("average", [False, True])
def test_a_merged_export_says_what_the_adapter_says(model_folder: Path, tmp_path: Path, average: bool) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run", LORA, decay=0.5)
    adapter = export(checkpoint, tmp_path / "adapter", average=average)
    made = export(checkpoint, tmp_path / "merged", merge=True, average=average)
    assert not list(made.glob("adapter*"))
    assert weights(made).keys() == weights(model_folder).keys()
    torch.testing.assert_close(logits(made), logits(adapter), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(made), logits(model_folder), atol=1e-3)


def test_the_average_of_an_adapter_differs_from_the_adapter(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run", LORA, decay=0.5)
    last, average = (export(checkpoint, tmp_path / str(flag), average=flag) for flag in (False, True))
    assert not torch.allclose(logits(last), logits(average), atol=1e-3)


def test_a_merged_export_has_the_wanted_type(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run", LORA)
    made = export(checkpoint, tmp_path / "out", merge=True, dtype="bfloat16")
    assert {tensor.dtype for tensor in weights(made, dtype="auto").values()} == {torch.bfloat16}
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_refused(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run")
    (tmp_path / "there").mkdir()
    assert f"{tmp_path / 'there'} exists: name a new folder" in refused(checkpoint, tmp_path / "there")
    assert "has no adapter (model.lora.rank=0)" in refused(checkpoint, tmp_path / "out", merge=True)
    assert "(training.ema_decay=0): leave out --average" in refused(checkpoint, tmp_path / "out", average=True)
    empty = tmp_path / "there"
    assert f"{empty}: neither a checkpoint nor the folder of a run" in refused(empty, tmp_path / "out")
    assert "is a folder: name a run or a checkpoint" in refused(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "file").touch()
    assert "file is not a folder and cannot be created" in refused(checkpoint, tmp_path / "file" / "out")


def test_a_run_is_named_in_many_ways(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_run(model_folder, tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    found = Path("runs/first/checkpoints") / checkpoint.name
    assert find_checkpoint(Path("first")) == find_checkpoint(Path("runs/first")) == found
    assert find_checkpoint(found.parent) == find_checkpoint(found) == find_checkpoint(found / "model") == found


def test_of_rounds_the_last_one_is_taken(model_folder: Path, tmp_path: Path) -> None:
    for number in (2, 10):  # as numbers, not as words
        last = make_run(model_folder, tmp_path / f"run/round_{number}/sft")
    assert find_checkpoint(tmp_path / "run") == last


def test_a_refusal_leaves_nothing_behind(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run")
    refused(checkpoint, tmp_path / "out", merge=True)
    refused(checkpoint, tmp_path / "out", average=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_checkpoint_is_not_exported(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = make_run(model_folder, tmp_path / "run")
    file = checkpoint / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    assert "model/model.safetensors is missing or has changed" in refused(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_a_mixture_is_exported_under_its_names_on_disk(kind: str, tmp_path: Path) -> None:
    """From the training state alone, or as its average; what no training changes is there too."""
    folder = make_model(tmp_path / "model", kind)
    checkpoint = make_run(folder, tmp_path / "bare", whole=False)
    whole = make_run(folder, tmp_path / "whole", decay=0.5)
    bare = export(checkpoint, tmp_path / "exported")
    saved, start = load_file(whole / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert same(load_file(bare / "model.safetensors"), saved)
    assert saved.keys() == start.keys()
    average = load_file(export(whole, tmp_path / "average", average=True) / "model.safetensors")
    assert average.keys() == start.keys()
    expert = next(name for name in start if (".experts.0." in name and "w2" in name) or ".experts.0.down" in name)
    assert not torch.equal(average[expert], saved[expert])
    fixed = [name for name in start if name.endswith("e_score_correction_bias")]
    assert all(torch.equal(saved[name], start[name]) for name in fixed)
    assert bool(fixed) == (kind == "glm4_moe")
