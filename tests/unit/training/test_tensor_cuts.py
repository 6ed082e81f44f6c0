"""Which layers tensor parallelism splits, by the plan in a model's configuration, and which part a rank has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.architectures import make_model
from trueline.config.base import ConfigError
from trueline.training.engines.tensor_cuts import PARTIAL, Cuts, layer_styles


def model_of(folder: Path, kind: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(make_model(folder / kind, kind))


def test_the_plan_of_a_model_names_every_layer_that_is_split(tmp_path: Path) -> None:
    columns = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    for kind in ("qwen2", "qwen3"):
        model = model_of(tmp_path, kind)
        model.config.num_key_value_heads = 2
        styles = {layer.rpartition(".")[2]: style for layer, style in layer_styles(model, 2).items()}
        assert {layer for layer, style in styles.items() if style == "colwise"} == columns
        assert {layer for layer, style in styles.items() if style == "rowwise"} == {"o_proj", "down_proj"}
        # Qwen3 normalises each head, by weights that every rank has.
        assert {layer for layer, style in styles.items() if style == PARTIAL} == (
            {"q_norm", "k_norm"} if kind == "qwen3" else set()
        )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("phi3", r"model.tensor_parallel=2: phi3 needs \w+ of .*; set it to 1"),
        ("mixtral", r"model.tensor_parallel=2: mixtral needs \w+ of .*experts.*; set it to 1"),
        ("qwen2", "model.tensor_parallel=2 does not divide the model's num_key_value_heads=1"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(kind: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        layer_styles(model_of(tmp_path, kind), 2)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen2")
    model.config.base_model_tp_plan = None
    with pytest.raises(ConfigError, match="qwen2 has no tensor-parallel plan; set 1"):
        layer_styles(model, 2)


def test_parts_are_where_their_regions_say() -> None:
    """A matrix of 4 x 6, cut along either dimension, and a vector that every rank has."""
    whole = torch.arange(24.0).view(4, 6)
    for dim in (0, 1):
        laid = torch.full((24,), torch.nan)
        for rank in range(2):
            cuts = Cuts(2, {"w": dim}, rank=rank)
            part = cuts.part("w", whole)
            assert part.shape == ((2, 6), (4, 3))[dim]
            cuts.region("w", tuple(part.shape)).lay(part.flatten(), laid)
        assert torch.equal(laid.view(4, 6), whole)
    assert Cuts(2, {"w": 0}).part("b", whole) is whole and Cuts(2, {"w": 0}).region("b", (4, 6)).size() == 24
