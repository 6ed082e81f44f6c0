import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, core_model_loading

from tests.support.architectures import make_model
from tests.support.tiny import make_tiny_model
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.models.loading import (
    SHAPE,
    SHAPES,
    ShareOut,
    check_model,
    check_settings,
    load_chat,
    load_model,
    load_tokenizer,
    padding_token,
)
from trueline.models.suitability import TOKENIZER_FILES


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
    assert facts.intermediate_size == model.model.layers[0].mlp.up_proj.out_features


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "qwen3"])
def test_experts_are_counted_with_and_without_weights(kind: str, tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", kind))
    held = load_model(ModelConfig(path=folder), torch.float32).named_parameters()
    experts = sum(one.numel() for name, one in held if ".mlp.experts." in name)
    assert check_model(ModelConfig(path=folder)).expert_parameters == experts
    if kind != "deepseek_v3":  # whose first layer is dense, which its shape alone does not tell
        assert check_model(ModelConfig(path=f"shape:{folder}")).expert_parameters == experts


def test_the_mlps_width_counts_every_expert_that_sees_a_token(tmp_path: Path) -> None:
    def width(**more: int) -> int:
        settings = dict(zip(SHAPE, (2, 8, 1, 9), strict=True)) | more
        return check_settings(ModelConfig(), tmp_path, settings).intermediate_size

    assert (width(), width(intermediate_size=20), width(intermediate_size=20, num_experts_per_tok=2)) == (32, 20, 40)
    assert width(intermediate_size=20, num_experts_per_tok=2, moe_intermediate_size=5) == 10


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


def test_a_chat_format_has_the_template_that_is_asked_for(copied: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "own: {{ messages[0].content }}"
    own.save_pretrained(copied)
    change(copied / "generation_config.json", eos_token_id=[17, own.eos_token_id])
    file = copied / "other.jinja"
    file.write_text("größer: {{ messages[0].content }}", encoding="utf-8")
    said = {"auto": "own: hi", "never": "hi", str(file): "größer: hi"}
    for template, text in said.items():
        chat = load_chat(ModelConfig(path=str(copied)), template)
        assert own.decode(chat.prompt_tokens([{"role": "user", "content": "hi"}])) == text
        assert chat.stop_ids == {17, own.eos_token_id}
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"data\.chat_template=.*other\.jinja: cannot be read"):
        load_chat(ModelConfig(path=str(copied)), str(file))


def test_stop_tokens_are_those_of_tokenizer_and_generation_settings(
    copied: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config, end = ModelConfig(path=str(copied)), tokenizer.eos_token_id
    change(copied / "generation_config.json", eos_token_id=[17, end])
    assert load_chat(config, "auto").stop_ids == {17, end}
    change(copied / "generation_config.json", eos_token_id=19)
    assert load_chat(config, "auto").stop_ids == {19, end}
    (copied / "generation_config.json").unlink()
    assert load_chat(config, "auto").stop_ids == {end}


def test_dropout_is_off_even_in_training(copied: Path) -> None:
    change(copied / "config.json", attention_dropout=0.5)
    model = load_model(ModelConfig(path=str(copied)), torch.float32).train()
    tokens = torch.tensor([[5, 80, 33, 7]])
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)


ARCHITECTURES: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "qwen3": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_facts_are_told_of_every_architecture(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Each has its own names for its sizes."""
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **ARCHITECTURES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
    tokenizer.save_pretrained(tmp_path / kind)
    facts = check_model(ModelConfig(path=str(tmp_path / kind)))
    assert (facts.heads, facts.head_size, facts.hidden_size, facts.layers) == (4, 8, 32, 2)
    assert facts.vocabulary == len(tokenizer)


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_scale_of_one_is_no_rescaling(copied: Path, key: str) -> None:
    change(copied / "config.json", **{key: 1.0})
    assert check_model(ModelConfig(path=str(copied))).layers == 2
    change(copied / "config.json", **{key: 2.0})
    assert key in refused(copied)


@pytest.mark.parametrize(
    ("kind", "settings"), [("recurrent_gemma", {"logits_soft_cap": 30.0}), ("falcon_h1", {"lm_head_multiplier": 0.5})]
)
def test_every_way_to_rescale_logits_is_refused(copied: Path, kind: str, settings: dict[str, float]) -> None:
    AutoConfig.for_model(kind, **settings).save_pretrained(copied)
    assert next(iter(settings)) in refused(copied)


@pytest.mark.parametrize(("head", "labels"), [("reward", 1), ("steps", 2)])
def test_a_scoring_head_has_its_number_of_scores(model_folder: Path, head: str, labels: int) -> None:
    model = load_model(ModelConfig(path=str(model_folder)), torch.float32, head)
    assert model.score.weight.shape == (labels, 32)
    assert model.config.pad_token_id != model.config.eos_token_id


def test_padding_is_no_end(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = copy.deepcopy(tokenizer)
    assert padding_token(plain) == tokenizer.pad_token_id != tokenizer.eos_token_id
    plain.pad_token = plain.eos_token  # as many models on the hub have it
    assert padding_token(plain) != plain.eos_token_id


def test_attention_is_chosen_by_key_or_by_packing(model_folder: Path) -> None:
    path = str(model_folder)
    found = [
        load_model(
            ModelConfig(path=path, attention=attention), torch.float32, packed=packed
        ).config._attn_implementation
        for attention, packed in (("auto", False), ("eager", False), ("eager", True))
    ]
    assert found == ["sdpa", "eager", "trueline_packed"]


def test_a_model_without_sdpa_can_be_loaded_padded(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Packing refuses bloom and says training.packing=false: doing so must work."""
    config = AutoConfig.for_model("bloom", vocab_size=len(tokenizer), **ARCHITECTURES["bloom"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_model(ModelConfig(path=str(tmp_path), attention="eager"), torch.float32) is not None
    assert load_model(ModelConfig(path=str(tmp_path)), torch.float32) is not None


@pytest.mark.parametrize("name", ["router_jitter_noise"])
def test_no_other_noise_is_left_on_in_training(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Scoring and training must see the same function: PhiMoE and Mixtral shake their routers while training."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("mixtral", vocab_size=len(tokenizer), **sizes, **experts, **{name: 0.5})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), torch.float32).train()
    tokens = torch.tensor([[5, 80, 33, 7]])
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)


class Shares(ShareOut):
    """One rank of two: what the first one reads is what the second one is handed, in the same order."""

    def __init__(self, reads: bool, handed: list[torch.Tensor]) -> None:
        self.reads, self.handed, self.left = reads, handed, [] if reads else handed[::-1]
        self.sharded: dict[int, torch.Tensor] = {}
        self.read: list[torch.Tensor] = []

    def note(self, read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any, **named: Any) -> torch.Tensor:
            self.read.append(read(*args, **named))
            return self.read[-1]

        return noted

    def shard(self, parameter: nn.Parameter) -> None:
        assert parameter.numel() and id(parameter) not in self.sharded
        self.hand_out(parameter.data)
        self.sharded[id(parameter)] = parameter.data
        parameter.data = torch.empty(0)

    def hand_out(self, tensor: torch.Tensor) -> None:
        if self.reads:
            self.handed.append(tensor.clone())
        else:
            tensor.copy_(self.left.pop())


@pytest.mark.parametrize(("kind", "head"), [("tied", "language"), ("untied", "reward"), ("glm4_moe", "language")])
def test_weights_are_shared_out_as_one_rank_reads_them(
    kind: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that transformers makes of several in the file; new and tied ones are left to the caller."""
    folder = make_model(tmp_path, kind) if kind == "glm4_moe" else make_tiny_model(tmp_path, tied=kind == "tied")
    config = ModelConfig(path=str(folder))
    torch.manual_seed(1)
    expected = load_model(config, torch.float32, head).state_dict()
    buffers = list(load_model(config, torch.float32, head).buffers())
    handed: list[torch.Tensor] = []
    for reads in (True, False):
        shares = Shares(reads, handed)
        torch.manual_seed(1)
        with monkeypatch.context() as patch:
            patch.setattr(core_model_loading, "_materialize_copy", shares.note(core_model_loading._materialize_copy))
            model = load_model(config, torch.float32, head, share_out=shares)
        assert bool(shares.read) == reads and not shares.left
        whole = [name for name, parameter in model.named_parameters() if parameter.numel()]
        tied = ["model.embed_tokens.weight"]
        assert whole == {"tied": tied, "untied": ["score.weight"], "glm4_moe": []}[kind]
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert torch.equal(shares.sharded.get(id(tensor), tensor), expected[name]), name
        assert all(torch.equal(buffer, found) for buffer, found in zip(model.buffers(), buffers, strict=True))


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
