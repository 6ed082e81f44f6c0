"""Packed attention in the architectures of plain transformers, and the ones that it must refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.tiny import as_bytes
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.data.batching import find_repeats
from trueline.data.types import Repeat
from trueline.models.attention import NAME, Current, PackedLayout, packed_attention
from trueline.models.loading import load_model
from trueline.models.scorer import Probe, Scorer

CPU = torch.device("cpu")
LENGTHS = [11, 3, 1, 20, 6]
TOKENS = torch.randint(3, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
EVERY = torch.ones(sum(LENGTHS), dtype=torch.bool)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
KINDS: dict[str, dict[str, Any]] = {  # model type -> what it needs besides SHAPE
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "gemma": {"head_dim": 8},
    "phi3": {},
    "phi": {},
    "gpt2": {"n_inner": 48, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 1.0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "smollm3": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
}


def make_model(kind: str, attention: str, **settings: Any) -> Any:
    torch.manual_seed(5)
    values = SHAPE | KINDS.get(kind, {}) | settings | {"attn_implementation": attention}
    config = transformers.AutoConfig.for_model(kind, **values)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def packed(model: Any) -> Tensor:
    return Scorer(model, 7)(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["logprobs"]


def padded(model: Any) -> Tensor:
    return Scorer(model, 7, packed=False)(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["logprobs"]


def by_transformers(model: Any) -> Tensor:
    """Each sequence alone, from the whole model's own logits."""
    found = []
    for part in TOKENS.split(LENGTHS):
        scores = model(input_ids=part[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found += [torch.zeros(1), scores.gather(-1, part[1:, None])[:, 0]]
    return torch.cat(found)


@pytest.mark.parametrize("kind", sorted(KINDS))
@torch.no_grad()
def test_packed_is_padded_is_plain_transformers(kind: str) -> None:
    expected = by_transformers(make_model(kind, "eager"))
    torch.testing.assert_close(packed(make_model(kind, NAME)), expected, **CLOSE)
    torch.testing.assert_close(padded(make_model(kind, "sdpa")), expected, **CLOSE)


@pytest.mark.parametrize("kind", sorted(KINDS))
@torch.no_grad()
def test_no_architecture_lets_neighbours_see_each_other(kind: str) -> None:
    scorer = Scorer(make_model(kind, NAME), 7)
    before = scorer(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["logprobs"]
    changed = torch.cat([(TOKENS[:11] + 5) % 90, TOKENS[11:]])
    after = scorer(changed, as_bytes(EVERY), LENGTHS, 1.0)["logprobs"]
    assert torch.equal(after[11:], before[11:])
    assert not torch.equal(after[:11], before[:11])


@pytest.mark.parametrize("window", [1, 2, 5, 19, 20, 21])
@torch.no_grad()
def test_a_window_is_that_of_transformers(window: int) -> None:
    expected = by_transformers(make_model("mistral", "eager", sliding_window=window))
    torch.testing.assert_close(packed(make_model("mistral", NAME, sliding_window=window)), expected, **CLOSE)
    torch.testing.assert_close(padded(make_model("mistral", "sdpa", sliding_window=window)), expected, **CLOSE)


@torch.no_grad()
def test_the_window_of_five_is_seen_in_the_numbers() -> None:
    """Otherwise the test above would show nothing."""
    whole = packed(make_model("mistral", NAME, sliding_window=None))
    assert not torch.allclose(packed(make_model("mistral", NAME, sliding_window=5)), whole, atol=1e-3)


@torch.no_grad()
def test_layers_with_and_without_windows_mix() -> None:
    settings = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    expected = by_transformers(make_model("gemma3_text", "eager", **settings))
    torch.testing.assert_close(packed(make_model("gemma3_text", NAME, **settings)), expected, **CLOSE)


def family() -> tuple[list[Tensor], Tensor]:
    """Sequences that begin alike: prompts of 36 and 33 tokens, an answer within another, twins, a loner; and a mask."""
    pieces = iter(torch.randint(3, 90, (300,), generator=torch.Generator().manual_seed(4)).split(1))

    def some(count: int) -> Tensor:
        return torch.cat([next(pieces) for _ in range(count)])

    one, other = some(36), some(33)
    rows = [
        torch.cat([prompt, some(count)]) for prompt, count in ((one, 9), (other, 2), (one, 1), (one, 14), (other, 7))
    ]
    rows += [some(40), torch.cat([rows[0], some(5)]), rows[3].clone()]
    learnt = [torch.arange(len(row)) >= start for row, start in zip(rows, (36, 33, 36, 36, 33, 0, 36, 40), strict=True)]
    return rows, torch.cat(learnt)


FAMILY, LEARNT = family()
FAMILY_LENGTHS = [len(row) for row in FAMILY]
REPEATS = find_repeats([row.numpy() for row in FAMILY])


def outputs_and_gradients(model: Any, repeats: list[Repeat]) -> list[Tensor]:
    scorer = Scorer(model, 7)
    found = scorer(torch.cat(FAMILY), as_bytes(LEARNT), FAMILY_LENGTHS, 0.8, repeats=repeats)
    flow = torch.linspace(-1, 2, sum(FAMILY_LENGTHS))
    (flow * (found["logprobs"] + 0.3 * found["entropy"])).sum().backward()
    return [*found.values(), *(one.grad for one in model.parameters() if one.grad is not None)]


def check_sharing(kind: str, **settings: Any) -> None:
    found, expected = (outputs_and_gradients(make_model(kind, NAME, **settings), some) for some in (REPEATS, []))
    assert Current.layout.keys is None and len(found) == len(expected) > 5
    zero = 1e-6 * max(one.norm() for one in expected)  # the gradient of a bias of keys is zero, but for rounding
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= max(1e-5 * other.norm(), zero)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_common_prefixes_are_computed_once_and_change_nothing(kind: str) -> None:
    """Neither log-probs and entropies nor gradients, with positions of every kind, grouped heads and experts."""
    check_sharing(kind)


@pytest.mark.parametrize("window", [1, 5, 40, 50])
def test_a_window_over_a_common_prefix_is_that_of_one_sequence(window: int) -> None:
    check_sharing("mistral", sliding_window=window)


def test_windows_in_some_layers_and_common_prefixes_mix() -> None:
    settings = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    check_sharing("gemma3_text", **settings)


def test_no_token_is_computed_twice() -> None:
    """36 + 9 + 1 + 14 tokens of one prompt, 33 + 2 + 7 of the other, a loner, five more and the twin's last one."""
    model, seen = make_model("llama", NAME), []
    model.get_input_embeddings().register_forward_hook(lambda module, given, output: seen.append(given[0].numel()))
    outputs_and_gradients(model, REPEATS)
    assert seen == [36 + 9 + 1 + 14 + 33 + 2 + 7 + 40 + 5 + 1]


def refused(model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        packed(model)
    return str(caught.value)


def test_soft_capped_scores_are_refused_by_name() -> None:
    settings = {"head_dim": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": None}
    message = refused(make_model("gemma2", NAME, **settings))
    assert "soft-capped attention scores" in message
    assert "training.packing=false" in message


@torch.no_grad()
def test_padded_soft_capped_scores_are_those_of_transformers() -> None:
    settings = {"head_dim": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": None}
    model = make_model("gemma2", "eager", **settings)
    torch.testing.assert_close(padded(model), by_transformers(make_model("gemma2", "eager", **settings)), **CLOSE)


def test_attention_sinks_are_refused_by_name() -> None:
    settings = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    message = refused(make_model("gpt_oss", NAME, **settings))
    assert "attention sinks" in message
    assert "training.packing=false" in message


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_an_architecture_with_attention_of_its_own_is_refused(kind: str) -> None:
    """It would look at neighbours: it never asks for the attention that knows where sequences end."""
    model = make_model(kind, "eager")
    message = refused(model)
    assert type(model).__name__ in message
    assert "0 of 2 layers" in message
    assert "training.packing=false" in message


def test_a_model_loaded_for_padding_is_refused_packed() -> None:
    assert "0 of 2 layers" in refused(make_model("llama", "sdpa"))


@torch.no_grad()
def test_bloom_works_padded() -> None:
    model = make_model("bloom", "eager")
    torch.testing.assert_close(padded(model), by_transformers(make_model("bloom", "eager")), **CLOSE)


@torch.no_grad()
def test_a_mask_of_the_models_own_is_heeded_or_refused() -> None:
    """Doge adds learnt numbers to its attention scores, by way of the mask."""
    model = make_model("doge", NAME)
    plain = make_model("doge", "eager")
    for one in (model, plain):
        torch.manual_seed(1)
        for parameter in one.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    try:
        found = packed(model)
    except ConfigError:
        return
    torch.testing.assert_close(found, by_transformers(plain), **CLOSE)


def test_a_head_of_several_layers_is_refused() -> None:
    """ModernBERT's decoder has a dense layer and a norm in front of its output embeddings."""
    model = make_model("modernbert-decoder", "eager")
    probe = Probe(model, CPU, packed=False, has_language_head=True)
    with pytest.raises(ConfigError, match="differ from plain transformers"):
        probe.compare(scorer_of(model, packed=False), model.get_input_embeddings())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_a_model_that_trains_as_it_speaks_passes(kind: str) -> None:
    model = make_model(kind, NAME)
    probe = Probe(model, CPU, packed=True, has_language_head=True)
    probe.compare(scorer_of(model, packed=True), model.get_input_embeddings())


def make_sharp_model() -> tuple[Any, Probe]:
    """Logits so large that rounding alone moves log-probs by hundredths, as bfloat16 does in real models."""
    model = make_model("llama", NAME)
    with torch.no_grad():
        model.lm_head.weight *= 1e5
    return model, Probe(model, CPU, packed=True, has_language_head=True)


def test_the_rounding_of_a_sharp_model_is_no_fault() -> None:
    model, probe = make_sharp_model()
    forward = scorer_of(model, packed=True)
    assert probe.expected is not None
    with torch.no_grad():
        gap = (forward(probe.tokens, [7, 5]) - probe.expected).abs().mean()
    assert gap > 3e-3  # so that a fixed limit, which serves other models, would refuse it
    probe.compare(forward, model.get_input_embeddings())
    assert not model.get_input_embeddings()._forward_hooks


def test_neighbours_that_see_each_other_and_numbers_that_are_not_finite_are_noticed() -> None:
    model, probe = make_sharp_model()
    forward, embeddings = scorer_of(model, packed=True), model.get_input_embeddings()
    with pytest.raises(ConfigError, match="influence each other"):
        probe.compare(lambda tokens, lengths: forward(tokens, [len(tokens)]), embeddings)
    with pytest.raises(ConfigError, match="influence each other"):
        probe.compare(lambda tokens, lengths: forward(tokens, lengths) * torch.nan, embeddings)


def scorer_of(model: Any, *, packed: bool) -> Callable[[Tensor, list[int]], Tensor]:
    scorer = Scorer(model, 7, packed=packed)
    return lambda tokens, lengths: scorer(tokens, as_bytes(torch.ones_like(tokens)), lengths, 1.0)["logprobs"]


@pytest.mark.parametrize("kind", ["falcon", "gptj", "mpt"])
def test_what_cannot_be_packed_is_refused_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    make_model(kind, "eager", **({"rotary_dim": 4} if kind == "gptj" else {})).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"training\.packing=false"):
        Probe(load_model(ModelConfig(path=str(tmp_path)), torch.float32, packed=True), CPU, True, True)


HEADS = {
    "reward": transformers.AutoModelForSequenceClassification,
    "steps": transformers.AutoModelForTokenClassification,
}


@pytest.mark.parametrize("kind", ["gemma", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("head", sorted(HEADS))
@torch.no_grad()
def test_scores_of_packed_sequences_are_those_of_transformers(kind: str, head: str) -> None:
    found = []
    for attention in (NAME, "eager"):
        torch.manual_seed(6)
        values = SHAPE | KINDS[kind] | {"num_labels": 2}
        config = transformers.AutoConfig.for_model(kind, **values)
        found.append(HEADS[head].from_config(config, attn_implementation=attention).eval())
    scores = Scorer(found[0], 7)(TOKENS, as_bytes(EVERY), LENGTHS, 1.0)["scores"]
    parts = [found[1](input_ids=part[None]).logits[0] for part in TOKENS.split(LENGTHS)]
    if head == "reward":
        torch.testing.assert_close(scores[torch.tensor(LENGTHS).cumsum(0) - 1], torch.stack(parts), **CLOSE)
    else:
        torch.testing.assert_close(scores, torch.cat(parts), **CLOSE)


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """[T, heads, D] of one sequence, in float64; each key head serves two query heads."""
    query, key, value = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[0] // key.shape[0], 0) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    places = torch.arange(query.shape[1])
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or 10**9))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1).float()


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_values_are_those_of_the_plain_softmax(window: int | None, scaling: float | None) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = [5, 1, 8]
    query, key, value = (torch.randn(1, heads, 14, 6, generator=random) for heads in (4, 2, 2))
    Current.layout = PackedLayout(lengths)
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=scaling, sliding_window=window)
    parts = zip(*(tensor[0].transpose(0, 1).split(lengths) for tensor in (query, key, value)), strict=True)
    scale = scaling if scaling is not None else 6**-0.5
    expected = torch.cat([by_hand(*part, scale, window) for part in parts])
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)
    assert Current.layout.calls == 1
