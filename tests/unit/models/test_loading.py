import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.models.loading import TOKENIZER_FILES, check_model, load_model, load_tokenizer, stop_tokens


@pytest.fixture
def copied(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def refused(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(ModelConfig(path=str(path)))
    return str(caught.value)


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_facts_are_told_without_loading(model_folder: Path) -> None:
    facts = check_model(ModelConfig(path=str(model_folder)))
    model = load_model(ModelConfig(path=str(model_folder)), torch.float32)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.context, facts.heads, facts.head_size, facts.hidden_size, facts.layers) == (64, 2, 16, 32, 2)
    assert facts.vocabulary == model.get_input_embeddings().num_embeddings


def test_no_path_and_no_folder_are_refused(tmp_path: Path) -> None:
    assert "model.path is empty" in refused("")
    message = refused(tmp_path / "none")
    assert f"model.path={tmp_path / 'none'}" in message
    assert "no such folder" in message


def test_a_folder_without_its_config_is_refused(copied: Path) -> None:
    (copied / "config.json").unlink()
    assert f"model.path={copied}: no config.json" in refused(copied)


def test_a_folder_without_a_tokenizer_is_refused(copied: Path) -> None:
    for name in TOKENIZER_FILES:
        (copied / name).unlink(missing_ok=True)
    assert f"model.path={copied}: no tokenizer" in refused(copied)


def test_a_folder_without_safetensors_is_refused(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    message = refused(copied)
    assert str(copied) in message
    assert ".safetensors" in message


def test_a_config_of_no_known_architecture_is_refused(copied: Path) -> None:
    change(copied / "config.json", model_type="no_such_architecture", architectures=["NoSuchModel"])
    assert f"model.path={copied}" in refused(copied)


def test_a_config_that_is_no_json_is_refused(copied: Path) -> None:
    (copied / "config.json").write_text("{")
    assert f"model.path={copied}" in refused(copied)


def test_rescaled_logits_are_refused_by_name(copied: Path) -> None:
    change(copied / "config.json", logit_scale=0.25)
    assert "logit_scale" in refused(copied)


def test_a_tokenizer_without_an_end_is_refused(copied: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    settings = json.loads((copied / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (copied / "tokenizer_config.json").write_text(json.dumps(settings))
    (copied / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"model\.path=.*end-of-sequence"):
        load_tokenizer(ModelConfig(path=str(copied)))


def test_stop_tokens_are_those_of_tokenizer_and_generation_settings(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config, end = ModelConfig(path=str(copied)), tokenizer.eos_token_id
    change(copied / "generation_config.json", eos_token_id=[17, end])
    assert stop_tokens(config, tokenizer) == sorted([17, end])
    change(copied / "generation_config.json", eos_token_id=19)
    assert stop_tokens(config, tokenizer) == sorted([19, end])
    (copied / "generation_config.json").unlink()
    assert stop_tokens(config, tokenizer) == [end]


def test_dropout_is_off_even_in_training(copied: Path) -> None:
    change(copied / "config.json", attention_dropout=0.5)
    model = load_model(ModelConfig(path=str(copied)), torch.float32).train()
    tokens = torch.tensor([[5, 80, 33, 7]])
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)
