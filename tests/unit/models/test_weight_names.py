"""Weights have the names and shapes on disk that `save_pretrained` gives them, a few tensors at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

from tests.support.architectures import ARCHITECTURES, make_model
from tests.support.tiny import make_tiny_model
from trueline.config.base import ConfigError
from trueline.models.weight_names import WeightNames, described_model

FUSED = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe")


def named(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.detach()) for name, tensor in model.named_parameters())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_they_are_those_of_save_pretrained_and_go_back(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, kind)
    disk, model = load_file(folder / "model.safetensors"), AutoModelForCausalLM.from_pretrained(folder)
    names = WeightNames(model)
    assert same(dict(names.file_tensors(named(model))), disk)
    assert bool(names.groups) == (kind in FUSED)
    assert not names.resized  # numbers are only moved
    with torch.no_grad():
        for tensor in (*model.parameters(), *names.buffers.values()):
            tensor.normal_()
        for name, tensor in disk.items():
            names.load(name, tensor)
    names.buffers = {name: tensor for name, tensor in model.named_buffers() if name in names.buffers}
    assert same(dict(names.file_tensors(named(model))), disk)


@pytest.mark.parametrize("kind", FUSED)
def test_a_described_model_has_the_same_names(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, kind)
    model, described = AutoModelForCausalLM.from_pretrained(folder), described_model(folder)
    assert next(described.parameters()).is_meta
    assert same(dict(WeightNames(described).on_disk(named(model))), dict(WeightNames(model).on_disk(named(model))))


class Padding(WeightNames):
    """Adds a row of zeros to every expert on disk."""

    def _to_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = super()._to_disk(tensors)
        return {name: torch.cat([one, one[:1] * 0]) if ".w1." in name else one for name, one in found.items()}


def test_conversions_that_add_numbers_are_known_by_the_names_of_what_they_convert(tmp_path: Path) -> None:
    names = Padding(AutoModelForCausalLM.from_pretrained(make_model(tmp_path, "mixtral")))
    assert names.resized == {name for name in names.shapes if name.endswith("experts.gate_up_proj")}
    assert names.resized


def test_only_one_group_is_in_flight_at_a_time(tmp_path: Path) -> None:
    """A tensor is turned into those on disk before the next is asked for: under ZeRO 3 it is gone by then."""
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, "mixtral"))

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named(model):
            gathered = tensor.clone()
            yield name, gathered
            gathered.fill_(torch.nan)

    found = {name: tensor.clone() for name, tensor in WeightNames(model).file_tensors(passing())}
    assert same(found, load_file(tmp_path / "model.safetensors"))


def merging(model: Any, *renamed: tuple[str, str]) -> Any:
    """The model as if its checkpoint had one tensor for q, k and v."""
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    back = WeightConverter("self_attn.qkv.weight", parts, operations=[Concatenate(dim=0).reverse_op])
    model._weight_conversions = [back, *(WeightRenaming(one, other) for one, other in renamed)]
    return model


def test_tensors_that_are_one_on_disk_wait_for_each_other(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, tied=True))
    names = WeightNames(merging(model))
    found = dict(names.file_tensors(named(model)))
    attention = model.model.layers[1].self_attn
    whole = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(found["model.layers.1.self_attn.qkv.weight"], whole)
    assert not [name for name in found if "q_proj" in name]
    for name, tensor in found.items():
        names.load(name, tensor + 1)
    assert torch.equal(attention.k_proj.weight, whole[128:192] + 1)
    with pytest.raises(AssertionError, match="is incomplete"):
        dict(names.file_tensors(iter(list(named(model))[:2])))


def test_a_conversion_that_needs_the_whole_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    revert = core_model_loading.revert_weight_conversion

    def entangled(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = revert(model, tensors)
        return found | ({"extra": torch.zeros(1)} if len(tensors) > 3 else {})

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", entangled)
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, tied=True))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM: its weights cannot be saved a few .* because extra"):
        WeightNames(model)
