"""Each term of the expected seconds by itself, against numbers that can be counted by hand."""

import pytest

from tests.unit.plan.test_paper import expected_of, planned
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.models.loading import ModelFacts
from trueline.plan.hardware import (
    GLOO_RATE,
    HOST_RATE,
    IPC_RATE,
    LINKS,
    READING,
    SYNC_SECONDS,
    TOKEN_SECONDS,
    read_devices,
)
from trueline.plan.memory import ModelFootprint
from trueline.plan.time import (
    exchange_seconds,
    forward_flops,
    rollout_seconds,
    score_seconds,
    sync_bytes,
    sync_seconds,
    train_seconds,
)

FACTS = ModelFacts(
    parameters=10**9,
    context=4096,
    heads=8,
    key_heads=2,
    head_size=64,
    vocabulary=1000,
    hidden_size=512,
    layers=10,
    intermediate_size=2048,
)
DEVICES = read_devices("8xH100")
TOKENS, LENGTH = 10**6, 1000.0
FORWARD = TOKENS * (2 * 10**9 + 2 * 10 * 8 * 64 * LENGTH)  # operations
LINK = LINKS * 450e9


def tenant(
    world: int = 4, *, width: int = 1, lora: int = 0, checkpointing: bool = False, **ranks: object
) -> ModelFootprint:
    model = ModelConfig.parse(
        {"dtype": "bfloat16", "tensor_parallel": width, "lora": {"rank": lora}, "gradient_checkpointing": checkpointing}
    )
    training = TrainingConfig.parse(
        {"micro_batch_tokens": 100_000, "deepspeed": {"zero_stage": 2}, "offload": "none", **ranks}
    )
    return ModelFootprint("policy", "training", FACTS, model, training, world, 0.0)


def exchange(passes: int, width: int = 1) -> float:
    return passes * 2 * 10**9 / width / LINK


def test_a_forward_pass_is_two_for_each_parameter_and_attention_to_half_of_what_came_before() -> None:
    assert forward_flops(FACTS, TOKENS, LENGTH) == FORWARD


def test_ranks_exchange_all_weights_in_every_pass() -> None:
    """A million tokens over four ranks, 100,000 to a pass, are three passes; two ranks of one copy see the same."""
    assert exchange_seconds(tenant(1), TOKENS, DEVICES) == 0
    assert exchange_seconds(tenant(4), TOKENS, DEVICES) == pytest.approx(exchange(3))
    assert exchange_seconds(tenant(4, width=2), TOKENS, DEVICES) == pytest.approx(exchange(5, width=2))


@pytest.mark.parametrize(
    ("made", "forwards", "exchanges"),
    [
        (tenant(), 3, 1),  # forward, backward twice; gradients once
        (tenant(checkpointing=True), 4, 1),
        (tenant(deepspeed={"zero_stage": 3}), 3, 3),
        (tenant(lora=8), 2, 0),  # no gradients of weights, and none to exchange
        (tenant(lora=8, deepspeed={"zero_stage": 3}), 2, 2),
    ],
)
def test_what_training_computes_and_exchanges(made: ModelFootprint, forwards: int, exchanges: int) -> None:
    wanted = forwards * FORWARD / (4 * DEVICES.flops()) + exchanges * exchange(3)
    assert train_seconds(made, TOKENS, LENGTH, 5, DEVICES) == pytest.approx(wanted)


def test_moments_on_the_host_travel_both_ways_in_every_update() -> None:
    there = train_seconds(tenant(offload="moments"), TOKENS, LENGTH, 5, DEVICES)
    here = train_seconds(tenant(), TOKENS, LENGTH, 5, DEVICES)
    assert there - here == pytest.approx(5 * 16 * 10**9 / 4 / HOST_RATE)


def test_scoring_is_one_pass_and_gathers_sharded_weights() -> None:
    computed = FORWARD / (4 * DEVICES.flops())
    assert score_seconds(tenant(), TOKENS, LENGTH, DEVICES) == pytest.approx(computed)
    assert score_seconds(tenant(deepspeed={"zero_stage": 3}), TOKENS, LENGTH, DEVICES) == pytest.approx(
        computed + exchange(3)
    )


WORDS = ("rollout.max_new_tokens=512", "rollout.max_prompt_tokens=100")


def test_each_model_that_scores_and_each_that_trains_is_counted() -> None:
    """KL adds a reference, old log-probs that are computed again the policy; a critic scores and trains."""

    def of(*words: str) -> dict[str, float]:
        return expected_of(planned("qwen2.5-1.5b", "8xH100", "algorithm.group_size=8", *WORDS, *words), "8xH100")

    recomputed = ("algorithm.old_logprobs=recompute", "minibatches=2")
    plain, kl = of("algorithm.kl.coefficient=0"), of("algorithm.kl.coefficient=0.1")
    assert plain["score"] == 0 < kl["score"]
    both = of("algorithm.kl.coefficient=0.1", *recomputed)
    assert both["score"] == pytest.approx(2 * kl["score"])
    again = of("algorithm.kl.coefficient=0", *recomputed)
    assert again["score"] == pytest.approx(kl["score"])
    adapted = of("algorithm.kl.coefficient=0.1", "model.lora.rank=8")
    assert adapted["score"] == pytest.approx(
        of("algorithm.kl.coefficient=0", "model.lora.rank=8", *recomputed)["score"]
    )
    critic = of("algorithm.preset=ppo", "algorithm.kl.coefficient=0")
    assert critic["score"] == pytest.approx(kl["score"])
    assert critic["train"] == pytest.approx(2 * plain["train"], rel=0.1)  # its moments may lie elsewhere
    twice = of("algorithm.kl.coefficient=0", "epochs=2")
    assert 1.5 * plain["train"] < twice["train"] <= 2 * plain["train"] * 1.01


@pytest.mark.parametrize(
    ("at_once", "width", "bound"), [(1, 1, "read"), (8, 1, "read"), (8, 2, "read"), (512, 1, "computed")]
)
def test_sampling_reads_weights_and_caches_for_each_token_and_takes_turns(at_once: int, width: int, bound: str) -> None:
    """Few sequences wait for memory, many for computation; devices of one engine divide both."""
    prompts_per_step = max(at_once // 16, 1)
    words = (f"rollout.max_sequences={at_once}", f"prompts_per_step={prompts_per_step}", "algorithm.group_size=16")
    plan = planned("qwen2.5-1.5b", f"{width}xH200", *WORDS, *words, f"rollout.tensor_parallel={width}")
    facts, engine, devices = plan.facts, plan.forecast.room.engine, read_devices(f"{width}xH200")
    completions, speed = 16 * prompts_per_step, width * devices.flops()
    at_once = min(at_once, int(plan.cache_bytes() / engine.sequence))  # as many as the cache holds
    seen = (plan.longest_prompt + 512 / 2) / plan.rollout.longest()
    read = (2 * facts.parameters / width + at_once * engine.sequence * seen) / (READING * devices.device.memory_rate)
    computed = forward_flops(facts, at_once, plan.rollout.longest() / 2) / speed
    assert (computed > read) is (bound == "computed")
    prompts = forward_flops(facts, completions * plan.longest_prompt, plan.longest_prompt) / speed
    tokens = completions / at_once * 512
    assert rollout_seconds(plan, devices) == pytest.approx(prompts + tokens * (TOKEN_SECONDS + max(read, computed)))


def test_a_sync_is_what_is_sent_and_what_is_gathered_first() -> None:
    plan = planned("qwen2.5-7b", "8xH100", *WORDS)
    full = 2 * plan.facts.parameters
    assert plan.transport() == "ipc" and sync_bytes(plan) == full
    assert sync_seconds(plan, DEVICES) == pytest.approx(SYNC_SECONDS + full / IPC_RATE)
    adapter_only = planned("qwen2.5-7b", "8xH100", *WORDS, "placement=separate", "training.deepspeed.zero_stage=3")
    (gathered,) = (2 * adapter_only.facts.parameters / LINK,)
    assert adapter_only.transport() == "nccl"
    assert sync_seconds(adapter_only, DEVICES) == pytest.approx(SYNC_SECONDS + full / DEVICES.send_rate() + gathered)
    slow = planned("qwen2.5-7b", "8xH100", *WORDS, "placement=separate", "sync.transport=gloo")
    assert sync_seconds(slow, DEVICES) == pytest.approx(SYNC_SECONDS + full / GLOO_RATE)
    lora = planned("qwen2.5-7b", "8xH100", *WORDS, "model.lora.rank=4", "model.lora.sync=adapter")
    shape = lora.facts
    ends = 3 * (shape.hidden_size + shape.intermediate_size)  # gate, up and down
    ends += 2 * (shape.hidden_size + shape.heads * shape.head_size)  # queries and what comes out
    ends += 2 * (shape.hidden_size + shape.key_heads * shape.head_size)  # keys and values
    assert sync_bytes(lora) == 2 * 4 * shape.layers * ends
