"""How a policy's adapters reach the engines, by what those can hold."""

from dataclasses import replace

import pytest

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.models.loading import check_model
from trueline.models.lora import arriving_share, first_change
from trueline.plan.describe import describe
from trueline.plan.hardware import read_devices
from trueline.plan.paper import on_paper, plan_rl_on_paper
from trueline.plan.resolve import adapter_sync
from trueline.plan.rl import RLPlan
from trueline.rl.build import sync_plan
from trueline.runs.processes import engine_specs
from trueline.sync.weights import SyncPlan


def planned(*words: str, devices: str = "1xH200") -> RLPlan:
    config = RLConfig.load([], ["model.path=qwen2.5-7b", *words], {"algorithm": {"preset": "grpo"}})
    return plan_rl_on_paper(on_paper(config), read_devices(devices))


def rooms(plan: RLPlan) -> list[int]:
    """The rank of the adapters that each engine is started with room for."""
    return [one.adapter_rank for one in engine_specs(plan.config.model, plan.rollout, plan.layout, 0)]


def test_adapters_are_sent_alone_where_engines_can_hold_them() -> None:
    """No key says so: plan, engines and sync agree."""
    plan = planned("model.lora.rank=9")
    assert plan.config.model.lora.sync == "adapter" and rooms(plan) == [9]
    assert sync_plan(plan) == SyncPlan("bfloat16", "ipc", adapter_only=True, nodes=(0, 0))
    assert "adapters   sent alone; engines apply them to the weights" in describe(plan)
    whole = planned()
    assert rooms(whole) == [0] and not sync_plan(whole).adapter_only and "adapters   " not in describe(whole)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["rollout.engine=hf"], "rollout.engine=hf has no room for rank 16 (up to 0)"),
        (["model.lora.quantize=true"], "model.lora.quantize=true has the trainer compute with 4-bit weights"),
        (["model.lora.targets=q_proj,lm_head"], "rollout.engine=vllm is not known to hold adapters on lm_head"),
        (["model.lora.sync=merged"], "model.lora.sync=merged"),
        (["model.train_vision=all"], "model.train_vision=all adapts the tower, where engines hold none"),
    ],
)
def test_where_adapters_are_merged_the_plan_says_why_and_what_is_lost(words: list[str], why: str) -> None:
    plan = planned("model.lora.rank=16", "training.learning_rate=1e-4", *words)
    assert plan.config.model.lora.sync == "merged" and rooms(plan) == [0] and not sync_plan(plan).adapter_only
    change = first_change(plan.config.model.lora, 1e-4, 3584)
    arrives = arriving_share(change, "bfloat16")
    assert change == pytest.approx(7.7e-6, rel=0.01) and arrives == pytest.approx(0.077, abs=0.002)
    (said,) = (line for line in describe(plan).splitlines() if line.startswith("adapters"))
    assert why in said and "changes weights by 7.7e-06" in said
    assert "8% of it arrives, 92% is lost in the rounding to bfloat16" in said


def test_in_float32_nothing_is_lost() -> None:
    said = describe(planned("model.lora.rank=16", "training.learning_rate=1e-4", "rollout.dtype=float32"))
    assert "rounds the base weights" in said and "100% of it arrives, 0% is lost in the rounding to float32" in said


def test_layers_that_an_engine_is_not_known_to_hold_adapters_on_are_merged_unless_asked() -> None:
    config = RLConfig.load([], ["model.path=shape:qwen2.5-7b", "model.lora.rank=8", "model.dtype=float32"])
    config = config.with_keys({"rollout": {"dtype": "float32"}})
    facts = check_model(config.model)
    asked = config.with_keys({"model": {"lora": {"sync": "adapter"}}})
    assert adapter_sync(config, facts, 0) == "adapter"
    mixture = replace(facts, kind="mixtral")
    assert (adapter_sync(config, mixture, 0), adapter_sync(asked, mixture, 0)) == ("merged", "adapter")
    assert adapter_sync(config, facts, 1) == "merged"  # kernels of GPUs multiply adapters in 16 bits alone


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.lora.rank=8", "rollout.engine=hf"], r"rollout\.engine=hf has no room for rank 8 \(up to 0\)"),
        (["model.lora.rank=513"], r"rollout\.engine=vllm has no room for rank 513 \(up to 512\)"),
        (["model.lora.rank=8", "model.lora.quantize=true"], "model.lora.quantize=true has the trainer compute"),
        (["model.lora.rank=8", "model.train_vision=all"], "adapts the tower"),
        (["model.lora.rank=8", "rollout.dtype=float32"], "rollout.dtype=float32 does not"),
        (["model.lora.rank=8", "model.dtype=float32"], "multiplies adapters on GPUs in bfloat16"),
    ],
)
def test_adapters_that_engines_cannot_hold_are_refused_where_they_were_asked_for(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.lora\.sync=adapter: .*{said}.*; set model\.lora\.sync=merged"):
        planned(*words, "model.lora.sync=adapter")
