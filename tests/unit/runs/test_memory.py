"""How much memory a run is thought to take, and the passes that follow from it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from trueline.config.base import ConfigError, parse_override
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.config.roles import CriticConfig, FrozenConfig
from trueline.models.loading import ModelFacts
from trueline.runs.memory import (
    GIB,
    Passes,
    Room,
    Tenant,
    activation_bytes,
    fitting,
    model_bytes,
    settled,
    tenant_bytes,
)

SMOLLM2 = ModelFacts(
    134_515_008,
    context=8192,
    heads=9,
    key_heads=3,
    head_size=64,
    vocabulary=49_152,
    hidden_size=576,
    layers=30,
    intermediate_size=1536,
)
QWEN = ModelFacts(
    1_543_714_304,
    context=32_768,
    heads=12,
    key_heads=2,
    head_size=128,
    vocabulary=151_936,
    hidden_size=1536,
    layers=28,
    intermediate_size=8960,
)
MANY = 1e9  # tokens of a step: passes are full


def tenant(ranks: RanksConfig | None = None, facts: ModelFacts = SMOLLM2, world: int = 1, **model: Any) -> Tenant:
    settings = ModelConfig.parse({"dtype": "float32"} | model)
    return Tenant("policy", "training", facts, settings, ranks or TrainingConfig(), world, MANY)


def test_the_estimate_is_not_below_what_a_gpu_showed() -> None:
    """Passes of 16384 tokens of this shape in bfloat16 took 70 GiB, and 31.7 GiB with activations computed again."""
    one = tenant(facts=QWEN, dtype="bfloat16")
    for checkpointing, measured in ((False, 70.0), (True, 31.7)):
        # Measured without float32 sums of gradients, which are 4 bytes of each parameter.
        found = tenant_bytes(one, 16384, checkpointing, "cuda") - 4 * QWEN.parameters
        assert measured * GIB < found < 1.2 * measured * GIB


@pytest.mark.parametrize(
    ("ranks", "model", "world", "each"),  # bytes of each parameter
    [
        (TrainingConfig(), {}, 1, 4 + 4 + 8),
        (TrainingConfig(), {"dtype": "bfloat16"}, 1, 2 + 2 + 4 + 12),
        (TrainingConfig(zero_stage=3), {"dtype": "bfloat16"}, 4, (2 + 2 + 4 + 12) / 4),
        (TrainingConfig(zero_stage=2), {}, 4, 4 + (4 + 8) / 4),
        (TrainingConfig(zero_stage=1), {}, 4, 4 + 4 + 8 / 4),
        (TrainingConfig(offload="optimizer"), {}, 1, 4 + 4),
        (TrainingConfig(zero_stage=0, optimizer="muon"), {}, 4, 4 + 4 + 4 + 4 * 2 * 49_152 * 576 / 134_515_008),
        (TrainingConfig(), {"tensor_parallel": 2}, 2, (4 + (4 + 8) / 2) / 2),
        (TrainingConfig(), {"lora": {"rank": 8}}, 1, 4),
        (TrainingConfig(), {"lora": {"rank": 8, "quantize": True}}, 1, 0.5),
        (FrozenConfig(), {}, 4, 4),
        (FrozenConfig(zero_stage=3), {}, 4, 1),
    ],
)
def test_bytes_of_weights_gradients_and_optimizer(ranks: Any, model: dict[str, Any], world: int, each: float) -> None:
    found = model_bytes(tenant(ranks, world=world, **model))
    assert found == pytest.approx(each * SMOLLM2.parameters)


def test_muon_leaves_experts_and_models_that_are_all_embedding_to_adamw() -> None:
    muon = TrainingConfig(zero_stage=0, optimizer="muon")
    for facts in (replace(SMOLLM2, experts=8), replace(SMOLLM2, parameters=1000)):
        assert model_bytes(tenant(muon, facts)) == (4 + 4 + 8) * facts.parameters


def test_activations_grow_with_tokens_and_with_the_mlp() -> None:
    def per_token(one: Tenant, checkpointing: bool = False) -> float:
        return (
            activation_bytes(one, 4096, checkpointing, "cpu") - activation_bytes(one, 2048, checkpointing, "cpu")
        ) / 2048

    layer = 4 * (13 * 576 + 4 * 1536)
    assert per_token(tenant()) == pytest.approx((30 + 2) * layer)
    assert per_token(tenant(), checkpointing=True) == pytest.approx(30 * 2 * 576 * 4 + 2 * layer)
    assert per_token(tenant(FrozenConfig())) == pytest.approx(layer)


def test_the_heads_slice_is_that_of_the_device() -> None:
    frozen = tenant(FrozenConfig())
    gap = activation_bytes(frozen, 4096, False, "cuda") - activation_bytes(frozen, 4096, False, "cpu")
    assert gap == 12 * 49_152 * (1024 - 128)
    own = tenant(FrozenConfig(), head_chunk_tokens=512)
    assert activation_bytes(own, 4096, False, "cuda") == activation_bytes(own, 4096, False, "cpu")


def test_a_pass_has_no_more_tokens_than_a_step() -> None:
    small = replace(tenant(), step_tokens=100)
    assert tenant_bytes(small, 16384, False, "cpu") == tenant_bytes(small, 100, False, "cpu")


def room(gib: float, *tenants: Tenant, device: str = "cpu", engines: int = 0) -> Room:
    return Room(gib * GIB, device, [(one, 1) for one in tenants or (tenant(),)], engines, 2.5 * GIB)


@pytest.mark.parametrize(
    ("gib", "device", "expected"),
    [
        (64, "cpu", (16384, False)),
        (20, "cpu", (8192, False)),
        (10, "cpu", (2048, False)),
        (6, "cpu", (1277, False)),
        (5, "cpu", (4096, True)),  # a CPU likes 1024 and more
        (20, "cuda", (8192, False)),
        (10, "cuda", (16384, True)),  # a GPU likes 4096 and more
        (3.5, "cuda", (1277, True)),
    ],
)
def test_passes_follow_memory(gib: float, device: str, expected: tuple[int, bool]) -> None:
    passes = settled([room(gib, device=device)], 1277, "max_tokens")
    assert (passes.tokens["training"], passes.checkpointing) == expected
    assert room(gib, device=device).needed(passes) <= 0.9 * gib * GIB


def test_the_spare_tenth_is_used_where_nothing_else_helps() -> None:
    tightest = room(1, device="cuda").needed(Passes({"training": 1277}, True)) / GIB
    assert settled([room(tightest * 1.01, device="cuda")], 1277, "").checkpointing


def test_what_is_set_is_kept() -> None:
    given = TrainingConfig(micro_batch_tokens=5000)
    assert settled([room(64, tenant(given))], 1277, "").tokens == {"training": 5000}
    assert settled([room(9, tenant(gradient_checkpointing=False))], 1277, "") == Passes({"training": 2048}, False)
    assert settled([room(64, tenant(gradient_checkpointing=True))], 1277, "") == Passes({"training": 16384}, True)


def test_a_pass_holds_the_longest_sequence_of_which_a_ring_divides_each() -> None:
    assert settled([room(900)], 30_000, "").tokens["training"] == 30_000
    assert settled([room(900, tenant(context_parallel=4))], 100_000, "").tokens["training"] == 25_000


def test_every_room_counts() -> None:
    critic = replace(tenant(CriticConfig()), name="critic", section="critic")
    wide = settled([room(40, device="cuda")], 1277, "")
    narrow = settled([room(40, device="cuda"), room(5, critic, device="cuda")], 1277, "")
    assert not wide.checkpointing and narrow.checkpointing
    assert set(narrow.tokens) == {"training", "critic"}


def models(**given: int) -> list[Tenant]:
    """A policy and a critic, with passes as they were asked for."""
    sections: dict[str, type[TrainingConfig]] = {"training": TrainingConfig, "critic": CriticConfig}
    return [
        replace(tenant(kind(micro_batch_tokens=given.get(name))), name=name, section=name)
        for name, kind in sections.items()
    ]


@pytest.mark.parametrize(
    ("given", "key"), [({"critic": 60_000}, "critic"), ({"training": 60_000, "critic": 2000}, "training")]
)
def test_a_refusal_names_a_value_that_fits_for_the_model_at_fault(given: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled([room(12, *models(**given))], 1277, "max_tokens")
    assert re.search(r"needs about [\d.]+ GiB .*1 x training [\d.]+, 1 x critic [\d.]+\), 12.0 GiB", str(caught.value))
    (named,) = re.findall(r"set (\S+)=(\d+)$", str(caught.value))
    assert named[0] == f"{key}.micro_batch_tokens"
    mended = given | {key: int(named[1])}
    settled([room(12, *models(**mended))], 1277, "max_tokens")


def test_a_refusal_names_all_values_where_one_is_not_enough() -> None:
    asked = {"training": 60_000, "critic": 60_000}
    off = [replace(one, model=one.model.replaced({"gradient_checkpointing": False})) for one in models(**asked)]
    with pytest.raises(ConfigError) as caught:
        settled([room(9, *off)], 1277, "max_tokens")
    said = str(caught.value).partition("set ")[2].split(" and ")
    tree: dict[str, Any] = {}
    for word in said:
        tree |= parse_override(word)
    assert set(tree) == {"training", "critic", "model"}
    passes = Passes({name: tree[name]["micro_batch_tokens"] for name in asked}, tree["model"]["gradient_checkpointing"])
    assert room(9, *off).needed(passes) <= 9 * GIB


def test_a_refusal_names_engines_or_lengths_or_another_model() -> None:
    for gib, longest, said in (
        (12, 1277, r"set rollout\.engines=3$"),
        (7, 100_000, r"sequences of up to \d+ tokens would fit: lower max_tokens$"),
        (2, 1277, "set model.lora.rank, or take a smaller model$"),
    ):
        with pytest.raises(ConfigError, match=said):
            settled([room(gib, engines=8 if gib == 12 else 0)], longest, "max_tokens")
    assert fitting([room(12, engines=3)], 1277, 1.0) and not fitting([room(12, engines=4)], 1277, 1.0)


@pytest.mark.parametrize(
    ("dtype", "stage", "expected"),
    [
        # bytes per parameter on each of 4 ranks: weights, gradients and their sums, moments and master weights
        ("float32", 0, 4 + 4 + 8),
        ("float32", 1, 4 + 4 + 8 / 4),
        ("float32", 2, 4 + 4 / 4 + 8 / 4),
        ("float32", 3, 4 / 4 + 4 / 4 + 8 / 4),
        *(("bfloat16", stage, 2 + 2 / 4 + 4 / 4 + 12 / 4) for stage in (0, 1, 2)),  # all of them run at stage 2
        ("bfloat16", 3, 2 / 4 + 2 / 4 + 4 / 4 + 12 / 4),
    ],
)
def test_a_stage_shares_out_what_it_says(dtype: str, stage: int, expected: float) -> None:
    ranks = TrainingConfig.parse({"zero_stage": stage})
    assert model_bytes(tenant(ranks, world=4, dtype=dtype)) / SMOLLM2.parameters == expected
