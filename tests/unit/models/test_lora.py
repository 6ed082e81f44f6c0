"""Adapters against peft itself: what is added, merged, switched off and saved."""

import importlib.util
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.support.architectures import make_model
from tests.support.tiny import as_bytes, make_tiny_model
from trueline.config.base import ConfigError
from trueline.config.model import LoraConfig, ModelConfig
from trueline.models.loading import CLASSES, LABELS, load_model
from trueline.models.lora import (
    SETTINGS,
    adapters_off,
    add_lora,
    arriving_share,
    check_targets,
    dequantize,
    first_change,
    load_adapter,
    merge_adapters,
    merged_model,
    save_adapter,
)
from trueline.models.scorer import Scorer

TOKENS = torch.tensor([5, 80, 33, 7, 120, 64, 9, 41])
LORA = LoraConfig(rank=3, alpha=12.0)
SCALE = 4.0  # alpha / rank
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model(folder: Path, head: str = "language") -> Any:
    torch.manual_seed(7)  # a scoring head is new and random
    return load_model(ModelConfig(path=str(folder)), torch.float32, head).eval()


def adapted(folder: Path, lora: LoraConfig = LORA, head: str = "language") -> tuple[Any, Any]:
    """A model with adapters that say something: B is not zero, as it is at the start of training."""
    model = base_model(folder, head)
    described = add_lora(model, lora, head, str(folder))
    torch.manual_seed(8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model, described


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS[None]).logits[0]


def trained(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}


def peft_name(name: str) -> str:
    return f"base_model.model.{name.replace('.default.', '.')}"


def test_only_the_added_matrices_are_trained(model_folder: Path) -> None:
    model, _ = adapted(model_folder)
    names = trained(model)
    assert len(names) == 2 * 2 * len(LINEAR)  # two matrices in two layers
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name in names)
    assert all(min(tensor.shape) == LORA.rank for tensor in names.values())


def test_at_the_start_the_model_is_the_one_it_started_from(model_folder: Path) -> None:
    model = base_model(model_folder)
    before = logits(model)
    add_lora(model, LORA, "language", str(model_folder))
    assert torch.equal(logits(model), before)


def test_targets_are_chosen_by_name(model_folder: Path) -> None:
    model, _ = adapted(model_folder, LoraConfig(rank=2, targets="q_proj,v_proj"))
    assert {name.split(".")[-4] for name in trained(model)} == {"q_proj", "v_proj"}


def test_targets_that_are_not_there_are_refused_by_key(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets=nowhere"):
        add_lora(base_model(model_folder), LoraConfig(rank=2, targets="nowhere"), "language", str(model_folder))


def test_the_product_is_scaled_by_alpha_over_rank(model_folder: Path) -> None:
    model, _ = adapted(model_folder)
    layer = model.model.layers[0].self_attn.q_proj
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    product = inputs @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    torch.testing.assert_close(layer(inputs), layer.base_layer(inputs) + SCALE * product, rtol=1e-5, atol=1e-5)


def test_merged_weights_are_those_of_peft(model_folder: Path) -> None:
    model, described = adapted(model_folder)
    found = {name: tensor.clone() for name, tensor in merge_adapters(iter(model.named_parameters()), SCALE)}
    theirs = peft.PeftModel(base_model(model_folder), described)
    peft.set_peft_model_state_dict(theirs, {peft_name(name): tensor for name, tensor in trained(model).items()})
    expected = dict(theirs.merge_and_unload().named_parameters())
    assert list(found) == [name for name, _ in base_model(model_folder).named_parameters()]  # plain names and order
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("change", "arrives"), [(1.5e-6, 0.01), (1.5e-5, 0.15), (1.4e-4, 0.76)])
def test_what_arrives_of_merged_adapters_is_what_the_plan_says(change: float, arrives: float) -> None:
    """Weights of deviation 0.02 in bfloat16, and products of two matrices of rank 16 merged into them."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(1024, 1024, generator=generator)).bfloat16()
    low, high = torch.rand(16, 1024, generator=generator) - 0.5, torch.randn(1024, 16, generator=generator)
    product = high @ low
    scale = change / float(product.std())
    tensors = {"q.base_layer.weight": weight, "q.lora_A.default.weight": low, "q.lora_B.default.weight": high}
    ((name, sent),) = merge_adapters(iter(tensors.items()), scale)
    got = sent.bfloat16().float() - weight.float()  # on the wire
    measured = 1 - float((got - scale * product).norm() / (scale * product).norm())
    assert name == "q.weight" and sent.dtype == torch.float32
    assert measured == pytest.approx(arriving_share(change, "bfloat16"), abs=0.01)
    assert measured == pytest.approx(arrives, abs=0.01)
    exact = float((sent - weight.float() - scale * product).norm() / (scale * product).norm())
    assert 1 - exact == pytest.approx(arriving_share(change, "float32"), abs=1e-3)


def test_the_size_of_a_first_update_is_that_of_adamw(tmp_path: Path) -> None:
    model = base_model(make_tiny_model(tmp_path, tied=True))
    lora, rate = LoraConfig(rank=16, alpha=48.0), 1e-4
    add_lora(model, lora, "language", str(tmp_path))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate, weight_decay=0)
    model(input_ids=TOKENS[None], labels=TOKENS[None]).loss.backward()
    optimizer.step()
    layer = model.model.layers[0].self_attn.q_proj
    product = lora.scale() * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert product.std().item() == pytest.approx(first_change(lora, rate, layer.in_features), rel=0.1)


def test_a_plain_model_with_the_merged_weights_says_the_same(model_folder: Path) -> None:
    model, _ = adapted(model_folder)
    plain = base_model(model_folder)
    before = logits(plain)
    plain.load_state_dict(dict(merge_adapters(iter(model.named_parameters()), SCALE)))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, logits(model), atol=1e-2)


def test_merging_keeps_biases(tmp_path: Path, model_folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model_folder)
    config.attention_bias = True
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    plain = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    add_lora(model, LORA, "language", "")
    found = dict(merge_adapters(iter(model.named_parameters()), SCALE))
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())  # B is zero


def test_switched_off_the_model_is_the_starting_one(model_folder: Path) -> None:
    model, _ = adapted(model_folder)
    having = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(base_model(model_folder)))
    assert torch.equal(logits(model), having)
    assert not torch.allclose(having, logits(base_model(model_folder)), atol=1e-2)
    assert trained(model)


def test_they_are_switched_on_again_after_an_error(model_folder: Path) -> None:
    model, _ = adapted(model_folder)
    having = logits(model)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(model):
        raise RuntimeError("inside")
    assert torch.equal(logits(model), having)


def test_the_scorer_sees_adapters_in_packed_sequences(model_folder: Path) -> None:
    model = load_model(ModelConfig(path=str(model_folder)), torch.float32, packed=True)
    add_lora(model, LORA, "language", str(model_folder))
    model.load_state_dict(adapted(model_folder)[0].state_dict())
    found = Scorer(model, 4)(TOKENS, as_bytes(torch.ones(8)), [8], 1.0)["logprobs"]
    scores = logits(adapted(model_folder)[0])[:-1].log_softmax(-1).gather(-1, TOKENS[1:, None])[:, 0]
    torch.testing.assert_close(found[1:], scores, rtol=1e-4, atol=1e-4)


def saved(folder: Path, target: Path, head: str = "language") -> Any:
    model, described = adapted(folder, head=head)
    target.mkdir()
    save_adapter(target, described, trained(model))
    model.config.save_pretrained(target / SETTINGS)
    return model


def test_peft_opens_the_saved_folder(model_folder: Path, tmp_path: Path) -> None:
    model = saved(model_folder, tmp_path / "adapter")
    opened = peft.PeftModel.from_pretrained(base_model(model_folder), tmp_path / "adapter")
    assert torch.equal(logits(opened), logits(model))


def test_transformers_opens_the_saved_folder(model_folder: Path, tmp_path: Path) -> None:
    model = saved(model_folder, tmp_path / "adapter")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-5, atol=1e-5)


EVERY_HEAD = pytest.mark.parametrize("head", ["language", "reward", "steps"])


@EVERY_HEAD
def test_a_saved_adapter_is_read_back_under_its_names(model_folder: Path, tmp_path: Path, head: str) -> None:
    expected = trained(saved(model_folder, tmp_path / "adapter", head))
    tensors, described = load_adapter(tmp_path / "adapter")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert (described.r, described.lora_alpha, described.base_model_name_or_path) == (3, 12.0, str(model_folder))


@EVERY_HEAD
def test_a_folder_is_merged_with_the_base_that_it_names(model_folder: Path, tmp_path: Path, head: str) -> None:
    model = saved(model_folder, tmp_path / "adapter", head)
    torch.manual_seed(99)
    plain = merged_model(tmp_path / "adapter", torch.float32).eval()
    assert not any("lora" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["reward", "steps"])
def test_a_new_scoring_head_is_trained_whole_and_opened_by_peft(model_folder: Path, tmp_path: Path, head: str) -> None:
    """The base model of whoever opens it has another random head, which the saved one must replace."""
    model = saved(model_folder, tmp_path / "adapter", head)
    names = [name for name in trained(model) if "lora" not in name]
    assert names == ["score.weight"] + (["score.bias"] if head == "steps" else [])
    torch.manual_seed(99)
    kind, labels = getattr(transformers, CLASSES[head]), LABELS[head]
    plain = kind.from_pretrained(model_folder, num_labels=labels, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_four_bits_as_plain_numbers_say_the_same(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "wide", tied=False)
    lora = LoraConfig(rank=2, quantize=True)
    model = load_model(ModelConfig(path=str(folder), lora=lora), torch.float32).train()
    add_lora(model, lora, "language", str(folder))
    before, plain = dict(base_model(folder).named_parameters()), base_model(folder)
    numbers = dict(merge_adapters(dequantize(iter(model.named_parameters()), model), 1.0))
    plain.load_state_dict(numbers)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)
    rounded = numbers["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert 0 < rounded.abs().max() < 0.1


def test_experts_have_no_adapters(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path, "glm4_moe"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    add_lora(model, LoraConfig(rank=2), "language", folder)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    named = ModelConfig(path=folder, lora=LoraConfig(rank=2, targets="q_proj,down_proj"))
    with pytest.raises(ConfigError, match=r"'down_proj' matches .*, an expert layer"):
        check_targets(named, "language")
