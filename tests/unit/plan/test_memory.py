"""How much memory a run is thought to take, and the passes that follow from it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from trueline.config.base import ConfigError, parse_override
from trueline.config.model import CriticConfig, FrozenConfig, ModelConfig, RanksConfig, TrainingConfig
from trueline.config.rl import ResolvedRollout
from trueline.models.loading import ModelFacts
from trueline.models.vision import Tower
from trueline.plan.describe import memory_lines
from trueline.plan.memory import (
    CONTEXT,
    ENGINE_ASLEEP,
    ENGINE_LOGITS,
    ENGINE_OUTSIDE,
    ENGINE_WORK,
    GIB,
    Choice,
    EngineRoom,
    MemoryPool,
    ModelFootprint,
    activation_bytes,
    engine_room,
    first_choice,
    idle_bytes,
    kept_bytes,
    model_bytes,
    settle,
    stepping_bytes,
    tenant_bytes,
)
from trueline.runtime.cluster import Machine
from trueline.training.engines.deepspeed_config import deepspeed_config

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


def tenant(
    ranks: RanksConfig | None = None, facts: ModelFacts = SMOLLM2, world: int = 1, **model: Any
) -> ModelFootprint:
    settings = ModelConfig.parse({"dtype": "float32"} | model)
    return ModelFootprint("policy", "training", facts, settings, ranks or TrainingConfig(), world, MANY)


def test_the_estimate_is_not_below_what_a_gpu_showed() -> None:
    """Passes of 16384 tokens of this shape in bfloat16 took 70 GiB, and 31.7 GiB with activations computed again."""
    one = tenant(facts=QWEN, dtype="bfloat16")
    for checkpointing, measured in ((False, 70.0), (True, 31.7)):
        # Measured with gradients in bfloat16, not summed in float32: 2 bytes of each parameter instead of 4.
        found = tenant_bytes(one, 16384, checkpointing, "cuda") - 2 * QWEN.parameters
        assert measured * GIB < found < 1.2 * measured * GIB


FSDP2 = {"engine": "fsdp2"}


@pytest.mark.parametrize(
    ("ranks", "model", "world", "each"),  # bytes of each parameter
    [
        (TrainingConfig(), {}, 1, 4 + 4 + 8),
        (TrainingConfig(), {"dtype": "bfloat16"}, 1, 2 + 4 + 12),
        (TrainingConfig(ema_decay=0.9), {"dtype": "bfloat16"}, 1, 2 + 4 + 12 + 4),
        (TrainingConfig(offload="moments"), {"dtype": "bfloat16"}, 1, 2 + 4 + 4),
        (TrainingConfig.parse({"deepspeed": {"zero_stage": 3}}), {"dtype": "bfloat16"}, 4, (2 + 4 + 12) / 4),
        (TrainingConfig.parse({"deepspeed": {"zero_stage": 2}}), {}, 4, 4 + (4 + 8) / 4),
        (TrainingConfig.parse({"deepspeed": {"zero_stage": 1}}), {}, 4, 4 + 4 + 8 / 4),
        (TrainingConfig(offload="optimizer"), {}, 1, 4 + 4),
        (
            TrainingConfig.parse({"deepspeed": {"zero_stage": 0}, "optimizer": "muon"}),
            {},
            4,
            4 + 4 + 4 + 4 * 2 * 49_152 * 576 / 134_515_008,
        ),
        (TrainingConfig(), {"tensor_parallel": 2}, 2, (4 + 4 + 8) * (1 + 2 * 49_152 * 576 / 134_515_008) / 2),
        (TrainingConfig(), {"lora": {"rank": 8}}, 1, 4),
        (TrainingConfig(), {"lora": {"rank": 8, "quantize": True}}, 1, 0.5),
        (FrozenConfig(), {}, 4, 4),
        (FrozenConfig.parse({"deepspeed": {"zero_stage": 3}}), {}, 4, 1),
        # FSDP2 computes with copies of its float32 weights, block by block, which `stepping_bytes` counts.
        (TrainingConfig.parse(FSDP2), {}, 4, (4 + 4 + 8) / 4),
        (TrainingConfig.parse(FSDP2), {"dtype": "bfloat16"}, 4, (4 + 4 + 8) / 4),
        (TrainingConfig.parse(FSDP2 | {"replicas": 2}), {"dtype": "bfloat16"}, 4, (4 + 4 + 8) / 2),
        (TrainingConfig.parse(FSDP2 | {"offload": "all"}), {"dtype": "bfloat16"}, 4, 4 / 4),
        (TrainingConfig.parse(FSDP2), {"dtype": "bfloat16", "lora": {"rank": 8}}, 4, 2 / 4),
        (FrozenConfig.parse(FSDP2), {"dtype": "bfloat16"}, 4, 2),
        (FrozenConfig.parse(FSDP2 | {"replicas": 1}), {"dtype": "bfloat16"}, 4, 2 / 4),
    ],
)
def test_bytes_of_weights_gradients_and_optimizer(ranks: Any, model: dict[str, Any], world: int, each: float) -> None:
    found = model_bytes(tenant(ranks, world=world, **model))
    assert found == pytest.approx(each * SMOLLM2.parameters)


@pytest.mark.parametrize(
    ("stage", "dense", "experts"),  # bytes of each parameter: weights, gradients and optimizer
    [
        (0, 4 + 4 + 8, (4 + 4 + 8) / 2),
        (1, 4 + 4 + 8 / 4, (4 + 4) / 2 + 8 / 4),
        (2, 4 + (4 + 8) / 4, 4 / 2 + (4 + 8) / 4),
        (3, (4 + 4 + 8) / 4, (4 + 4 + 8) / 4),  # four ranks in any case
    ],
)
def test_two_of_four_ranks_divide_experts_at_any_stage(stage: int, dense: float, experts: float) -> None:
    mixture = replace(SMOLLM2, experts=8, expert_parameters=10**8)
    ranks = TrainingConfig.parse({"deepspeed": {"zero_stage": stage, "expert_parallel": 2}})
    found = model_bytes(tenant(ranks, mixture, world=4))
    assert found == pytest.approx(dense * (mixture.parameters - 10**8) + experts * 10**8)


def test_muon_leaves_experts_and_models_that_are_all_embedding_to_adamw() -> None:
    muon = TrainingConfig.parse({"deepspeed": {"zero_stage": 0}, "optimizer": "muon"})
    for facts in (replace(SMOLLM2, experts=8), replace(SMOLLM2, parameters=1000)):
        assert model_bytes(tenant(muon, facts)) == (4 + 4 + 8) * facts.parameters


def test_activations_grow_with_tokens_and_with_the_mlp() -> None:
    def per_token(one: ModelFootprint, checkpointing: bool = False) -> float:
        return (
            activation_bytes(one, 4096, checkpointing, "cpu") - activation_bytes(one, 2048, checkpointing, "cpu")
        ) / 2048

    layer = 4 * (8 * 576 + 2 * (9 + 3) * 64 + 4 * 1536)
    assert per_token(tenant()) == pytest.approx((30 + 2) * layer)
    assert per_token(tenant(), checkpointing=True) == pytest.approx(30 * 2 * 576 * 4 + 2 * layer)
    assert per_token(tenant(FrozenConfig())) == pytest.approx(layer)


def test_a_frozen_tower_has_weights_and_no_gradient() -> None:
    """Its activations are gone before the language model's begin; those of a trained one stay."""
    tower = Tower(hidden_size=1280, intermediate_size=3420, layers=32, patches=4, parameters=10**7, projector=10**6)
    facts, layer = replace(SMOLLM2, tower=tower), 4 * 4 * (12 * 1280 + 4 * 3420)
    for trained, frozen in (("none", 11 * 10**6), ("projector", 10**7), ("all", 0)):
        found = model_bytes(tenant(facts=facts, train_vision=trained))
        assert found == 4 * SMOLLM2.parameters + (4 + 8) * (SMOLLM2.parameters - frozen)
        bare, seen = (
            activation_bytes(tenant(facts=one, train_vision=trained), 4096, False, "cpu") for one in (SMOLLM2, facts)
        )
        assert seen == bare + (trained == "all") * 4096 * 34 * layer
    checkpointed = [
        activation_bytes(tenant(facts=one, train_vision="all"), 4096, True, "cpu") for one in (SMOLLM2, facts)
    ]
    assert checkpointed[1] - checkpointed[0] == 4096 * (32 * 4 * 4 * 2 * 1280 + 2 * layer)
    for ranks in (FrozenConfig(), TrainingConfig()):  # a small language model behind a large tower
        small = replace(facts, layers=1, hidden_size=8, intermediate_size=8, vocabulary=8)
        assert activation_bytes(tenant(ranks, small), 4096, False, "cpu") == 4096 * 2 * layer


def test_the_heads_slice_is_that_of_the_device() -> None:
    frozen = tenant(FrozenConfig())
    gap = activation_bytes(frozen, 4096, False, "cuda") - activation_bytes(frozen, 4096, False, "cpu")
    assert gap == 12 * 49_152 * (1024 - 128)
    own = tenant(FrozenConfig(), head_chunk_tokens=512)
    assert activation_bytes(own, 4096, False, "cuda") == activation_bytes(own, 4096, False, "cpu")


def test_a_pass_has_no_more_tokens_than_a_step() -> None:
    small = replace(tenant(), step_tokens=100)
    assert tenant_bytes(small, 16384, False, "cpu") == tenant_bytes(small, 100, False, "cpu")


def room(gib: float, *tenants: ModelFootprint, device: str = "cpu", engines: int = 0) -> MemoryPool:
    taken = EngineRoom(2.5 * GIB, 2.5 * GIB, 2.5 * GIB)
    return MemoryPool(gib * GIB, device, [(one, 1) for one in tenants or (tenant(),)], engines, taken)


@pytest.mark.parametrize(
    ("gib", "device", "expected"),
    [
        (64, "cpu", (4096, False)),
        (9, "cpu", (2048, False)),
        (6, "cpu", (1277, False)),
        (5, "cpu", (4096, True)),  # a CPU likes 1024 and more
        (24, "cuda", (8192, False)),
        (11, "cuda", (16384, True)),  # a GPU likes 4096 and more
        (7, "cuda", (1277, True)),
    ],
)
def test_passes_follow_memory(gib: float, device: str, expected: tuple[int, bool]) -> None:
    choice = settle([room(gib, device=device)], 1277, "max_tokens").choice
    assert (choice.tokens["training"], choice.checkpointing) == expected
    assert room(gib, device=device).bytes_needed(choice) <= 0.9 * gib * GIB


def test_the_spare_tenth_is_used_where_nothing_else_helps() -> None:
    tightest = room(1, device="cuda").bytes_needed(Choice({"training": 1277}, True)) / GIB
    assert settle([room(tightest * 1.01, device="cuda")], 1277, "").choice.checkpointing


def test_what_is_set_is_kept() -> None:
    given = TrainingConfig(micro_batch_tokens=5000)
    assert settle([room(64, tenant(given))], 1277, "").choice.tokens == {"training": 5000}
    off, on = tenant(gradient_checkpointing=False), tenant(gradient_checkpointing=True)
    assert settle([room(9, off)], 1277, "").choice == Choice({"training": 2048}, False)
    assert settle([room(64, on)], 1277, "").choice == Choice({"training": 4096}, True)


def test_a_pass_holds_the_longest_sequence_of_which_a_ring_divides_each() -> None:
    assert settle([room(900)], 30_000, "").choice.tokens["training"] == 30_000
    assert settle([room(900, tenant(context_parallel=4))], 100_000, "").choice.tokens["training"] == 25_000


LLAMA = ModelFacts(
    6_738_415_616,
    context=4096,
    heads=32,
    key_heads=32,
    head_size=128,
    vocabulary=32_000,
    hidden_size=4096,
    layers=32,
    intermediate_size=11_008,
)
H200 = Machine(cpus=16, memory_bytes=int(120 * GIB), gpus=1, gpu_bytes=int(139.8 * GIB))


def shared_gpu(
    facts: ModelFacts, share: float | None = None, host: float = 72, ranks: Any = None, **keys: Any
) -> MemoryPool:
    """One GPU for a model and its engine: 16 prompts x 8 completions of up to 512 tokens."""
    settings = {"engines": 1, "dtype": "bfloat16", "max_new_tokens": 512, "max_prompt_tokens": 128}
    rollout = ResolvedRollout.parse(settings | {"gpu_memory_utilization": share or 0.9} | keys)
    one = replace(tenant(ranks, facts, dtype="bfloat16"), step_tokens=128 * 640)
    engine = engine_room(rollout, facts, H200, 128, share)
    return MemoryPool(H200.gpu_bytes, "cuda", [(one, 1)], 1, engine, host * GIB)


def chosen(room: MemoryPool) -> Choice:
    return settle([room], 640, "").choice


def test_a_gpu_shared_with_an_engine_is_planned_from_quick_to_frugal() -> None:
    for facts, expected in ((SMOLLM2, (16384, False)), (QWEN, (16384, False)), (LLAMA, (8192, True))):
        room = shared_gpu(facts)
        choice = chosen(room)
        assert (choice.tokens["training"], choice.on_host) == expected
        assert not choice.checkpointing
        phases = room.phases(choice)
        assert set(phases) == {"rollout", "training"} and max(phases.values()) <= 0.9 * room.size
    poor = chosen(shared_gpu(LLAMA, host=8))  # no room for moments on the host
    assert (poor.checkpointing, poor.on_host) == (True, False)
    assert poor.share < choice.share  # so they stay beside the engine


def test_phases_take_turns() -> None:
    """A forecast is the largest phase, not the sum: an engine that sleeps keeps little, a model that waits the rest."""
    room, choice = shared_gpu(QWEN, share=0.5), Choice({"training": 16384}, False, share=0.5)
    phases = room.phases(choice)
    one = room.tenants[0][0]
    piece = 2 * QWEN.vocabulary * QWEN.hidden_size  # the largest tensor, which travels whole
    assert phases["training"] == tenant_bytes(one, 16384, False, "cuda") + ENGINE_ASLEEP + 2 * piece
    assert phases["rollout"] == 0.5 * room.size + ENGINE_OUTSIDE + 4 * piece + CONTEXT + (2 + 12) * QWEN.parameters
    assert room.bytes_needed(choice) == max(phases.values())
    assert settle([room], 640, "").largest() == f"{phases['rollout'] / GIB:.1f} GiB (rollout)"
    moved = room.phases(replace(choice, on_host=True))
    assert phases["training"] - moved["training"] == 8 * QWEN.parameters - GIB  # pieces of them are on their way
    judge = replace(one, name="reward_model", section="reward_model", ranks=FrozenConfig())
    judged = replace(room, tenants=[(one, 1), (judge, 1)])
    working = judged.each(Choice({"training": 16384, "reward_model": 4096}, False), "rollout")["reward_model"][1]
    assert working == tenant_bytes(judge, 4096, False, "cuda") > idle_bytes(judge)  # it scores while engines sample


def test_the_cache_of_a_device_has_a_key_head_at_least() -> None:
    """Four key heads on eight devices: each holds one whole head, as two of them hold the same."""
    facts, keys = replace(QWEN, key_heads=4), {"max_sequences": 1}
    of = {width: shared_gpu(facts, tensor_parallel=width, **keys).engine for width in (1, 2, 4, 8)}
    assert of[1].sequence == 2 * of[2].sequence == 4 * of[4].sequence == 4 * of[8].sequence


def test_tensor_parallel_ranks_share_out_layers_and_no_optimizer() -> None:
    """ZeRO divides among ranks that hold the same parameters; embeddings and head stay whole on each."""
    for stage in (1, 2, 3):
        ranks = TrainingConfig.parse({"deepspeed": {"zero_stage": stage}})
        whole = 2 * LLAMA.vocabulary * LLAMA.hidden_size
        cut = whole + (LLAMA.parameters - whole) / 4
        alone, two = (tenant(ranks, LLAMA, world, tensor_parallel=4, dtype="bfloat16") for world in (4, 8))
        assert kept_bytes(alone) == pytest.approx((2 + 4 + 8) * cut)
        assert kept_bytes(two) == pytest.approx((2 / (2 if stage == 3 else 1) + (4 + 8) / 2) * cut)


def test_a_rank_has_the_sequences_of_its_data_place() -> None:
    """Eight ranks in two places of a ring of two and tensor width two."""
    mesh = ModelConfig(tensor_parallel=2, context_parallel=2)
    assert mesh.place_tokens(10, 100, 8) == 5 * 100 / 2
    assert ModelConfig().place_tokens(10, 100, 8) == 2 * 100  # one place has a second sequence
    assert ModelConfig(tensor_parallel=8).place_tokens(10, 100, 8) == 10 * 100


def test_what_an_update_takes_besides_the_model_is_counted() -> None:
    """DeepSpeed's bucket of gradients, and pieces of moments that are on the host."""

    def stepping(offload: str, **ranks: Any) -> float:
        return stepping_bytes(tenant(TrainingConfig.parse({"offload": offload, **ranks}), LLAMA, dtype="bfloat16"))

    assert stepping("none") == 2 * 5e8
    assert stepping("moments") == 2 * 5e8 + GIB
    assert stepping("none", deepspeed={"zero_stage": 3}) == 2 * 2 * 2**26
    assert stepping_bytes(tenant(FrozenConfig(), LLAMA)) == 0
    assert deepspeed_config(TrainingConfig(), "bfloat16")["zero_optimization"]["reduce_bucket_size"] == 5e8


def test_the_forecast_of_a_7b_shape_is_what_an_h200_showed() -> None:
    """137.5 GiB were in use by a policy, its reference and an engine of 0.405 of the GPU, with moments on the host."""
    room = shared_gpu(LLAMA, share=0.405)
    reference = replace(room.tenants[0][0], name="reference", section="reference", ranks=FrozenConfig())
    both = replace(room, tenants=[*room.tenants, (reference, 1)])
    choice = Choice({"training": 4096, "reference": 4096}, False, on_host=True, share=0.405)
    assert both.bytes_needed(choice) / GIB == pytest.approx(137.5, rel=0.015)


def test_adapters_have_their_room_in_an_engine() -> None:
    """vLLM keeps room for the next rank that it knows, and no whole tensor travels."""
    rollout = ResolvedRollout.parse(
        {"engines": 1, "dtype": "bfloat16", "max_new_tokens": 512, "max_prompt_tokens": 128}
    )
    plain, adapter_only = (
        engine_room(rollout, LLAMA, H200, 8, 0.5, bucket=2**20, adapter_rank=rank) for rank in (0, 9)
    )
    assert adapter_only.fixed - plain.fixed == 2 * 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11_008))
    assert (plain.piece, adapter_only.piece) == (2 * 32_000 * 4096, 2**20)


def test_an_engine_takes_what_it_can_use_of_what_models_leave() -> None:
    cache = 2 * 28 * 2 * 128 * 2 * 640  # bytes of the longest sequence
    fixed = 2 * QWEN.parameters + ENGINE_WORK + ENGINE_LOGITS * 4 * 256 * QWEN.vocabulary
    room = shared_gpu(QWEN)
    assert (room.engine.most, room.engine.least) == (fixed + 128 * cache, fixed + 32 * cache)
    assert chosen(room).share == int(1000 * room.engine.most / room.size) / 1000
    assert shared_gpu(QWEN, max_sequences=64).engine.least - 8 * cache == pytest.approx(
        shared_gpu(QWEN, max_sequences=64).engine.most - 64 * cache
    )
    long = shared_gpu(LLAMA, max_new_tokens=1920)  # more than there is
    assert chosen(long).share * long.size < long.engine.most
    assert long.phases(chosen(long))["rollout"] == pytest.approx(0.9 * long.size, rel=0.002)
    assert chosen(shared_gpu(QWEN, share=0.3)).share == 0.3
    assert room.engine.cache_bytes(room.engine.most) == 128 * cache
    assert room.engine.cache_bytes(fixed) == 32 * cache  # a share of weights and work alone would hold no answer


def test_where_moments_live_is_kept_if_it_was_set() -> None:
    for offload in ("none", "moments", "optimizer"):
        room = shared_gpu(LLAMA, ranks=TrainingConfig.parse({"offload": offload}))
        found = settle([room], 640, "")
        assert not found.choice.on_host and "offload" not in found.keys()["training"]
    found = settle([shared_gpu(LLAMA)], 640, "")
    assert found.keys()["training"] == {"micro_batch_tokens": 8192, "offload": "moments"}
    assert settle([shared_gpu(QWEN)], 640, "").keys()["training"]["offload"] == "none"


def test_a_forecast_says_each_phase_and_why() -> None:
    (line,) = memory_lines(settle([shared_gpu(LLAMA)], 640, ""))
    assert re.fullmatch(
        r"memory     rollout [\d.]+ GiB, training [\d.]+ GiB of 139.8 GiB on each GPU; engine share 0\.\d+; "
        r"optimizer moments on the host; the fastest keys would need [\d.]+ GiB \(training\)",
        line,
    )
    (calm,) = memory_lines(settle([shared_gpu(QWEN)], 640, ""))
    assert "fastest" not in calm and "host" not in calm
    assert memory_lines(settle([room(64)], 640, "")) == []


def test_a_share_that_leaves_too_little_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"\(rollout\): set rollout\.gpu_memory_utilization=0\.\d+$") as caught:
        chosen(shared_gpu(LLAMA, share=0.85))
    value = float(str(caught.value).rpartition("=")[2])
    assert chosen(shared_gpu(LLAMA, share=value)).share == value


def test_every_room_counts() -> None:
    critic = replace(tenant(CriticConfig()), name="critic", section="critic")
    wide = settle([room(40, device="cuda")], 1277, "").choice
    narrow = settle([room(40, device="cuda"), room(8, critic, device="cuda")], 1277, "").choice
    assert not wide.checkpointing and narrow.checkpointing
    assert set(narrow.tokens) == {"training", "critic"}


def models(**given: int) -> list[ModelFootprint]:
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
        settle([room(12, *models(**given))], 1277, "max_tokens")
    assert re.search(r"needs about [\d.]+ GiB .*1 x training [\d.]+, 1 x critic [\d.]+\), 12.0 GiB", str(caught.value))
    (named,) = re.findall(r"set (\S+)=(\d+)$", str(caught.value))
    assert named[0] == f"{key}.micro_batch_tokens"
    mended = given | {key: int(named[1])}
    settle([room(12, *models(**mended))], 1277, "max_tokens")


def test_a_refusal_names_all_values_where_one_is_not_enough() -> None:
    asked = {"training": 60_000, "critic": 60_000}
    off = [replace(one, model=one.model.with_keys({"gradient_checkpointing": False})) for one in models(**asked)]
    with pytest.raises(ConfigError) as caught:
        settle([room(9, *off)], 1277, "max_tokens")
    said = str(caught.value).partition("set ")[2].split(" and ")
    tree: dict[str, Any] = {}
    for word in said:
        tree |= parse_override(word)
    assert set(tree) == {"training", "critic", "model"}
    choice = Choice({name: tree[name]["micro_batch_tokens"] for name in asked}, tree["model"]["gradient_checkpointing"])
    assert room(9, *off).bytes_needed(choice) <= 9 * GIB


def test_a_refusal_names_engines_or_lengths_or_another_model() -> None:
    for gib, longest, said in (
        (12, 1277, r"set rollout\.engines=3$"),
        (7, 100_000, r"sequences of up to \d+ tokens would fit: lower max_tokens$"),
        (2, 1277, "set model.lora.rank, or use a smaller model$"),
    ):
        with pytest.raises(ConfigError, match=said):
            settle([room(gib, engines=8 if gib == 12 else 0)], longest, "max_tokens")
    assert first_choice([room(12, engines=3)], 1277, 1.0) and not first_choice([room(12, engines=4)], 1277, 1.0)


@pytest.mark.parametrize(
    ("dtype", "stage", "expected"),
    [
        # bytes per parameter on each of 4 ranks: weights, gradients and their sums, moments and master weights
        ("float32", 0, 4 + 4 + 8),
        ("float32", 1, 4 + 4 + 8 / 4),
        ("float32", 2, 4 + 4 / 4 + 8 / 4),
        ("float32", 3, 4 / 4 + 4 / 4 + 8 / 4),
        *(("bfloat16", stage, 2 + 4 / 4 + 12 / 4) for stage in (0, 1, 2)),  # all of them run at stage 2
        ("bfloat16", 3, 2 / 4 + 4 / 4 + 12 / 4),
    ],
)
def test_a_stage_shares_out_what_it_says(dtype: str, stage: int, expected: float) -> None:
    ranks = TrainingConfig.parse({"deepspeed": {"zero_stage": stage}})
    assert model_bytes(tenant(ranks, world=4, dtype=dtype)) / SMOLLM2.parameters == expected
