"""Shapes of published models: their parameters are those of the published weights."""

import json
from pathlib import Path

import pytest

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.models.loading import check_model
from trueline.models.shapes import SHAPES

PUBLISHED = {  # parameters of the safetensors files, tied tables once
    "smollm2-135m": 134_515_008,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_the_published_weights(name: str) -> None:
    facts = check_model(ModelConfig(path=f"shape:{name}"))
    assert facts.parameters == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_shape_is_told_from_its_row() -> None:
    facts = check_model(ModelConfig(path="shape:llama-70b"))
    assert (facts.hidden_size, facts.layers, facts.heads, facts.key_heads, facts.head_size) == (8192, 80, 64, 8, 128)
    assert (facts.intermediate_size, facts.vocabulary, facts.context) == (28672, 128256, 131072)


def test_an_unknown_shape_is_answered_with_the_table() -> None:
    with pytest.raises(ConfigError, match=r"--model-shape llama-7 is unknown: choose from .*llama-8b.*--model FOLDER"):
        check_model(ModelConfig(path="shape:llama-7"))


def test_of_a_folder_the_configuration_is_enough(model_folder: Path, tmp_path: Path) -> None:
    """And where there are weights, they are counted."""
    settings = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    whole, bare = (check_model(ModelConfig(path=f"shape:{folder}")) for folder in (model_folder, tmp_path))
    assert whole == check_model(ModelConfig(path=str(model_folder)))
    assert bare.parameters == pytest.approx(whole.parameters, rel=0.05)
    with pytest.raises(ConfigError, match="no tokenizer"):
        check_model(ModelConfig(path=str(tmp_path)))  # a run needs the rest
