"""A small model learns from pictures through the command line, and what it saves opens in Transformers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.model_table import WITH_PICTURES, check_cell
from tests.support.pictures import MAKERS, make_picture, make_tiny_idefics, make_tiny_qwen
from trueline.cli import main
from trueline.config.model import ModelConfig
from trueline.models.lora import ADAPTER
from trueline.models.vision import VISION_FAMILIES, load_processor
from trueline.rewards.model import reward_model_head
from trueline.training.export import export

STEPS, ROWS, LEARNS = 12, 8, "learns, and opens in Transformers"


def row(number: int, verb: str, picture: str) -> dict[str, Any]:
    """The answer can be read off the picture alone."""
    good, bad = ("abab", "12") if number % 2 else ("cdcd", "345")
    asked = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}]
    if verb == "sft":
        return {"prompt": asked, "completion": good}
    if verb == "prm":
        return {"prompt": asked, "completions": ["abab", "cdcd"], "labels": [number % 2, 1 - number % 2]}
    if verb == "kto":
        return {"prompt": asked, "completion": good if number < ROWS // 2 else bad, "label": number < ROWS // 2}
    return {"prompt": asked, "chosen": good, "rejected": bad}


def train(folder: Path, verb: str, *words: str, make: Callable[[Path], Path] = make_tiny_idefics) -> int:
    if not (folder / "model").exists():
        make(folder / "model")
        for number in range(ROWS):
            make_picture(number % 2, 40 + number).save(folder / f"{number}.png")
    data = folder / f"{verb}.jsonl"
    data.write_text("".join(json.dumps(row(number, verb, f"{number}.png")) + "\n" for number in range(ROWS)))
    return main([verb, "--model", f"{folder}/model", "--name", verb, *common(folder, verb), *words])


def common(folder: Path, verb: str) -> list[str]:
    keys = ["samples_per_step=8", "training.learning_rate=3e-3", "checkpoint.every=0", "evaluation.every=0"]
    keys += ["runtime=local", f"folder={folder}", f"steps={STEPS}", "monitoring.tensorboard=false"]
    return ["--data", f"{folder}/{verb}.jsonl", "--eval-data", f"{folder}/{verb}.jsonl", *keys]


def losses(folder: Path, verb: str) -> tuple[float, float]:
    rows = [json.loads(line) for line in (folder / verb / "metrics.jsonl").read_text().splitlines()]
    return rows[0]["evaluation/loss"], rows[-1]["evaluation/loss"]


def first_letters(folder: Path) -> str:
    """What is most likely after either picture, by what `from_pretrained` makes of a folder."""
    found = next_logprobs(AutoModelForImageTextToText.from_pretrained(folder), folder).argmax(-1)
    return str(load_processor(ModelConfig(path=str(folder)), family_in(folder)).tokenizer.decode(found))


def next_logprobs(model: Any, folder: Path) -> torch.Tensor:
    """The log-probs after either picture, [2, V]."""
    processor = load_processor(ModelConfig(path=str(folder)), model.config.model_type)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    batch = processor(text=[text] * 2, images=[[make_picture(0, 42)], [make_picture(1, 41)]], return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits[:, -1].log_softmax(-1)


@pytest.mark.models
@pytest.mark.parametrize("verb", ["sft", "dpo", "simpo", "kto"])
def test_a_task_learns_from_pictures(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, verb) == 0
    said = capsys.readouterr().out
    assert f"({ROWS} with pictures)" in said
    assert "duplicate" not in said  # rows have the same words, and other pictures
    first, last = losses(tmp_path, verb)
    assert last < 0.9 * first
    saved = tmp_path / verb / "checkpoints" / f"step_{STEPS:06d}" / "model"
    if verb == "sft":
        assert first_letters(saved) == "ca"  # the pictures tell which
    start = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
    found = AutoModelForImageTextToText.from_pretrained(saved).state_dict()
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    assert changed and not any("vision_model" in name or "connector" in name for name in changed)
    check_cell(WITH_PICTURES["idefics3"], LEARNS, "yes")


@pytest.mark.slow
@pytest.mark.models
def test_a_model_with_positions_in_three_dimensions_learns(tmp_path: Path) -> None:
    """Its checkpoint, with its processor, opens in Transformers and says what was learned; adapters do so too."""
    assert train(tmp_path, "sft", "steps=40", make=make_tiny_qwen) == 0
    first, last = losses(tmp_path, "sft")
    assert last < 0.9 * first
    saved = tmp_path / "sft" / "checkpoints" / "step_000040" / "model"
    assert first_letters(saved) == "ca"
    assert train(tmp_path, "dpo", "model.lora.rank=4", "steps=2") == 0
    adapter = load_file(tmp_path / "dpo" / "checkpoints" / "step_000002" / "model" / "adapter_model.safetensors")
    assert adapter and all(".language_model." in name for name in adapter)
    check_cell(WITH_PICTURES["qwen2_5_vl"], LEARNS, "yes")


@pytest.mark.models
def test_recurrent_layers_are_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "sft", make=MAKERS["qwen3_5"]) == 2
    refused = re.search(r"error: (training\.packing=true .*) \(.*\): set", capsys.readouterr().err)
    assert refused
    check_cell(WITH_PICTURES["qwen3_5"], "packed", f"refused: {refused[1]}")


@pytest.mark.parametrize(("trained", "parts"), [("projector", {"connector"}), ("all", {"connector", "vision_model"})])
def test_more_of_the_model_is_trained_if_a_key_says_so(trained: str, parts: set[str], tmp_path: Path) -> None:
    assert train(tmp_path, "sft", f"model.train_vision={trained}", "steps=2") == 0
    saved = tmp_path / "sft" / "checkpoints" / "step_000002" / "model"
    start = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
    found = AutoModelForImageTextToText.from_pretrained(saved).state_dict()
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    assert {name.split(".")[1] for name in changed if name.startswith("model.")} == {"text_model", *parts}


@pytest.mark.slow
def test_a_process_reward_model_learns_from_pictures(tmp_path: Path) -> None:
    """The answer is right or wrong by what the picture shows, so the text alone tells nothing."""
    assert train(tmp_path, "prm") == 0
    first, last = losses(tmp_path, "prm")
    assert last < 0.1 < first
    saved = tmp_path / "prm" / "checkpoints" / f"step_{STEPS:06d}" / "model"
    assert reward_model_head(str(saved)) == "steps"


@pytest.mark.parametrize("make", [make_tiny_idefics, make_tiny_qwen])
def test_adapters_on_all_are_merged(make: Callable[[Path], Path], tmp_path: Path) -> None:
    keys = ["model.lora.rank=4", "model.train_vision=all", "steps=3", "training.learning_rate=3e-2"]
    assert train(tmp_path, "sft", *keys, make=make) == 0
    saved = tmp_path / "sft" / "checkpoints" / "step_000003" / "model"
    adapter, layout = load_file(saved / "adapter_model.safetensors"), VISION_FAMILIES[family_in(tmp_path / "model")]
    learned = {
        name.removeprefix("base_model.model.") for name, one in adapter.items() if "lora_B" in name and one.any()
    }
    assert {layout.part(name) for name in learned} == {"", "tower", "projector"}
    merged = AutoModelForImageTextToText.from_pretrained(export(tmp_path / "sft", tmp_path / "merged", merge=True))
    start = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(start, saved)
    found, expected = (next_logprobs(one, saved) for one in (merged, adapted))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    with adapted.disable_adapter():
        assert (next_logprobs(adapted, saved) - expected).abs().max() > 1e-3


@pytest.mark.slow
def test_adapters_of_a_reward_model_are_merged_with_its_head(tmp_path: Path) -> None:
    """Without `model.train_vision`, tower and projector have no adapters here either."""
    assert train(tmp_path, "rm", "model.lora.rank=8", "training.learning_rate=2e-2") == 0
    first, last = losses(tmp_path, "rm")
    assert last < 0.5 * first
    saved = tmp_path / "rm" / "checkpoints" / f"step_{STEPS:06d}" / "model"
    assert not any("vision_model" in name or "connector" in name for name in load_file(saved / ADAPTER))
    merged = export(tmp_path / "rm", tmp_path / "merged", merge=True)
    assert reward_model_head(str(merged)) == "reward"
    again = ["model.lora.rank=0", "steps=1", "training.learning_rate=1e-9"]
    assert main(["rm", "--model", str(merged), *common(tmp_path, "rm"), *again, "--name", "again"]) == 0
    assert losses(tmp_path, "again")[0] == pytest.approx(last, abs=1e-4)


def family_in(folder: Path) -> str:
    return str(AutoConfig.from_pretrained(folder).model_type)


def test_adapters_are_added_to_the_language_model_and_merged(tmp_path: Path) -> None:
    assert train(tmp_path, "sft", "model.lora.rank=8", "training.learning_rate=2e-2") == 0
    first, last = losses(tmp_path, "sft")
    assert last < 0.9 * first
    adapter = tmp_path / "sft" / "checkpoints" / f"step_{STEPS:06d}" / "model"
    named = (adapter / "adapter_model.safetensors").read_bytes()
    assert b"text_model" in named and b"vision_model" not in named and b"connector" not in named
    assert first_letters(export(tmp_path / "sft", tmp_path / "merged", merge=True)) == "ca"


RANKS = "runtime=ray training.engine=deepspeed training.ranks=2"
REFUSED = {
    f"model.tensor_parallel=2 {RANKS}": "model.tensor_parallel=2 does not work with a vision-language model",
    f"model.context_parallel=2 {RANKS}": "model.context_parallel=2 does not work with a vision-language model",
    "model.lora.quantize=true model.lora.rank=2": "model.lora.quantize=true does not work with a vision-language model",
    "model.train_vision=projector model.lora.rank=2": "model.train_vision=projector with model.lora.rank=2 (adap",
    "checkpoint.model=last": "checkpoint.model=last keeps only what is trained until the end",
}


@pytest.mark.parametrize("words", REFUSED)
def test_keys_that_do_not_work_are_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "sft", *words.split()) != 0
    assert REFUSED[words] in " ".join(capsys.readouterr().err.split())


def test_distillation_refuses_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_idefics(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    keys = ["runtime=local", f"folder={tmp_path}", "--name", "run", f"distill.teacher={tmp_path}/model"]
    assert main(["distill", "--model", f"{tmp_path}/model", "--data", str(data), *keys]) != 0
    assert "is a vision-language model, which" in " ".join(capsys.readouterr().err.split())
