"""Routing replay: tokens go to the engine's experts with the trainer's weights, however a minibatch is cut."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.mixtures import EXPERTS, LAYERS, TOP_K, by_hand, chosen_by, told_samples
from tests.support.tiny import make_tiny_mixture
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, PolicyTrainingConfig
from trueline.config.rl import RLConfig
from trueline.data.types import UNKNOWN_EXPERT, Sample
from trueline.models.routing import ROUTERS, Replay, routers_of
from trueline.plan.describe import describe
from trueline.plan.rl import check_replay, plan_rl
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

KEY = "training.replay_routing"
KINDS = ["mixtral", "qwen3_moe"]
AGREEMENT = "mismatch/routing_agreement"
Found = tuple[list[torch.Tensor], dict[str, float], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mixture(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def group_of(
    folder: Path, *, ranks: int = 1, lora: int = 0, again: bool = False, **training: Any
) -> tuple[ModelGroup, list[Worker]]:
    config = PolicyTrainingConfig.parse({"engine": "torch", "learning_rate": 1e-6, "replay_routing": True} | training)
    model = ModelConfig.parse(
        {"path": str(folder), "dtype": "float32", "gradient_checkpointing": again, "lora": {"rank": lora}}
    )
    workers = [Worker(WorkerSpec(model, config, 0, 1, 4, 0)) for _ in range(ranks)]
    for worker in workers:
        worker.start(("", 0))
    return ModelGroup("policy", [LocalActor("policy", worker) for worker in workers], config, 60), workers


def computed(folder: Path, samples: list[Sample], **settings: Any) -> Found:
    """Log-probs, metrics of an update, and its gradients over all ranks, each a worker of this process."""
    group, workers = group_of(folder, **settings)
    scores = group.score(samples)
    metrics = group.accumulate(samples, "sft", LossSettings())
    parts = [worker.gradients() for worker in workers]
    return scores, metrics, {name: sum(part[name] for part in parts) for name in parts[0]}


def alike(found: Found, logprobs: list[torch.Tensor], gradients: dict[str, Any], case: object = "") -> None:
    for mine, expected in zip(found[0], logprobs, strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-6, rtol=0, msg=lambda said: f"{case} {said}")
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[2][name], np.asarray(gradient), atol=2e-6, err_msg=f"{case} {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_choice_replayed_changes_nothing(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_mixture(tmp_path, kind)
    samples = told_samples(folder)
    plain = computed(folder, samples, replay_routing=False)
    replayed = computed(folder, samples)
    for mine, expected in zip(replayed[0], plain[0], strict=True):
        assert torch.equal(mine, expected)
    for name, gradient in plain[2].items():
        np.testing.assert_array_equal(replayed[2][name], gradient, err_msg=name)
    assert replayed[1][AGREEMENT] == 1.0 and AGREEMENT not in plain[1]


@pytest.mark.parametrize("kind", [*KINDS, "normed"])
def test_other_experts_are_the_mixture_worked_out_by_hand(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_mixture(tmp_path, "qwen3_moe" if kind == "normed" else kind)
    if kind == "normed":
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"norm_topk_prob": True}))
    samples = told_samples(folder, changed=0.5, untold=0.2)
    logprobs, gradients, _ = by_hand(folder, samples)
    routers = [name for name in gradients if name.endswith("gate.weight")]
    assert len(routers) == LAYERS and all(gradients[name].abs().max() > 1e-5 for name in routers)
    found = computed(folder, samples)
    alike(found, logprobs, gradients)
    own = computed(folder, samples, replay_routing=False)[0]
    assert max((mine - theirs).abs().max() for mine, theirs in zip(own, logprobs, strict=True)) > 0.05


CUTS: list[dict[str, Any]] = [
    {"micro_batch_samples": 2},
    {"again": True},
    {"micro_batch_samples": 1, "again": True},
    {"packing": False},
    {"packing": False, "micro_batch_samples": 3, "again": True},
    {"ranks": 2, "micro_batch_samples": 2},
    {"ranks": 2, "packing": False, "micro_batch_samples": 1},
]


def test_it_does_not_depend_on_how_a_minibatch_is_cut(mixture: Path) -> None:
    samples = told_samples(mixture, changed=0.5, untold=0.2)
    whole = computed(mixture, samples)
    for cut in CUTS:
        found = computed(mixture, samples, **cut)
        alike(found, whole[0], whole[2], cut)
        assert found[1] == pytest.approx(whole[1], rel=1e-5), cut


def test_agreement_is_the_share_of_equal_choices(mixture: Path) -> None:
    """Where routers choose by themselves, their choices do not depend on those that are told."""
    samples = told_samples(mixture, changed=0.5, untold=0.2)
    scores, metrics, gradients = computed(mixture, samples, replay_routing="measure")
    plain = computed(mixture, samples, replay_routing=False)
    alike((scores, metrics, gradients), plain[0], plain[2])
    agreed = told = 0
    for sample in samples:
        for mine, theirs in zip(chosen_by(mixture, sample.tokens).tolist(), sample.experts.tolist(), strict=True):
            both = zip(mine, theirs, strict=True)
            pairs = [(set(one), set(other)) for one, other in both if UNKNOWN_EXPERT not in other]
            agreed += sum(len(one & other) for one, other in pairs)
            told += TOP_K * len(pairs)
    assert metrics[AGREEMENT] == pytest.approx(agreed / told) and 0.5 < agreed / told < 0.9


def test_the_balancing_loss_speaks_of_the_routers_own_choices(mixture: Path) -> None:
    """Of their logits where replay has led the tokens; E x sum over experts of shares sent x mean probability."""
    samples = told_samples(mixture, changed=0.5)
    logits = torch.cat(by_hand(mixture, samples)[2]).flatten(0, 1)
    shares = torch.zeros_like(logits).scatter_(-1, logits.topk(TOP_K).indices, 1.0).mean(0)
    expected = EXPERTS * (shares * logits.softmax(-1).mean(0)).sum()
    for cut in ({}, {"again": True, "micro_batch_samples": 2}):
        found = computed(mixture, samples, router_aux_loss_coef=0.1, **cut)[1]
        assert found["router_loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_a_policy_as_its_own_reference_chooses_by_itself(mixture: Path) -> None:
    samples = told_samples(mixture, changed=0.5)
    group, _ = group_of(mixture, lora=2)
    plain = computed(mixture, samples, replay_routing=False)[0]
    reference, policy = group.score(samples, reference=True), group.score(samples)
    for theirs, expected in zip(reference, plain, strict=True):
        torch.testing.assert_close(theirs, expected, atol=2e-6, rtol=0)
    assert max((mine - theirs).abs().max() for mine, theirs in zip(policy, reference, strict=True)) > 0.05


def test_samples_without_experts_are_scored_and_not_trained_on(mixture: Path) -> None:
    told = told_samples(mixture, changed=0.5)
    samples = [Sample(sample.tokens, sample.mask, weight=sample.weight) for sample in told]
    group, _ = group_of(mixture)
    group.score(told)  # whose experts a later pass must not see
    for mine, expected in zip(group.score(samples), computed(mixture, told, replay_routing=False)[0], strict=True):
        torch.testing.assert_close(mine, expected)
    with pytest.raises(ValueError, match=f"{KEY}: these samples have no experts of the engine"):
        group.accumulate(samples, "sft", LossSettings())


def test_experts_of_another_model_are_refused(mixture: Path) -> None:
    samples = told_samples(mixture)
    for sample in samples:
        sample.experts = sample.experts[:, :1]
    with pytest.raises(ValueError, match=r"2 experts of \d+ tokens in 1 layers, .* router of layer 1 chooses 2 of"):
        computed(mixture, samples)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
MIXED = {"num_experts_per_tok": 3, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
OTHERS = {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "q_lora_rank": 8}


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_known_router_gives_experts_the_weights_of_transformers(kind: str) -> None:
    """Its own experts get its own weights; in another order, or told for some tokens alone, each keeps its own."""
    torch.manual_seed(1)
    extra = OTHERS if kind in ("deepseek_v3", "glm4_moe") else {"pad_token_id": 0}
    config = AutoConfig.for_model(kind, **SIZES, **HEADS, **MIXED, **extra)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    replay = Replay(model, follows=True)
    assert [router.layer for router in replay.routers] == ([1] if "first_k_dense_replace" in extra else [0, 1])
    for router in replay.routers:
        weight: Any = router.module.weight
        torch.nn.init.normal_(weight)
        hidden = torch.randn(20, 32)
        replay.begin(None)
        logits, weights, own = router.module(hidden)
        told = torch.full((20, 2, 3), UNKNOWN_EXPERT)
        told[:10, router.layer] = own[:10].flip(-1)
        replay.begin(told)
        again, replayed, experts = router.module(hidden)
        assert torch.equal(again, logits) and torch.equal(experts[:10], own[:10].flip(-1))
        torch.testing.assert_close(replayed, torch.cat([weights[:10].flip(-1), weights[10:]]))


def test_a_router_that_weighs_otherwise_is_refused(mixture: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture)
    replay, router = Replay(model, follows=True), routers_of(model)[0]
    logits, weights, own = router.module(torch.randn(5, 32))
    with pytest.raises(ConfigError, match=rf"{KEY}: .* computes other expert weights in Qwen3MoeTopKRouter"):
        replay._prove(router, (logits, weights / 2, own))


def planned(tmp_path: Path, folder: Path, *words: str) -> Any:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "answer": "2"}) + "\n")
    named = [f"data.path={tmp_path}/rows.jsonl", f"model.path={folder}", "reward.function=exact", "runtime=local"]
    return plan_rl(RLConfig.load([], [*named, "algorithm.preset=grpo", "rollout.max_new_tokens=8", *words]))


def test_the_plan_says_who_chooses(mixture: Path, tmp_path: Path, model_folder: Path) -> None:
    said = {
        "false": "engine and trainer choose experts independently",
        "true": "the trainer sends tokens to the experts that the engine chose",
        "measure": "independently, and their choices are compared",
    }
    for value, words in said.items():
        text = describe(planned(tmp_path, mixture, f"{KEY}={value}"))
        assert words in text and f"({KEY}={value})" in text
    assert "routing " not in describe(planned(tmp_path, model_folder))


def test_what_cannot_be_replayed_is_refused_by_name(mixture: Path, tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}=true: {model_folder} is a dense model, which has no experts"):
        planned(tmp_path, model_folder, f"{KEY}=true")
    plan = planned(tmp_path, mixture, f"{KEY}=measure")
    config = plan.config.with_keys({"rollout": {"engine": "vllm"}, "runtime": "ray"})
    with pytest.raises(ConfigError, match=f"{KEY}=measure: vllm on a CPU does not report .* or rollout.engine=hf"):
        check_replay(config, plan.facts, plan.machine)
    settings = json.loads((mixture / "config.json").read_text())
    strange = tmp_path / "strange"
    make_tiny_mixture(strange)
    sizes = {name: settings[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    named = {"model_type": "phimoe", "architectures": ["PhimoeForCausalLM"], "num_local_experts": 4}
    described = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(described | sizes | named))
    with pytest.raises(ConfigError, match=f"{KEY} does not support phimoe: .* train one of mixtral, qwen2_moe"):
        planned(tmp_path, strange, f"{KEY}=true")


def test_only_a_policy_has_the_key() -> None:
    with pytest.raises(ConfigError, match=r"critic\.replay_routing"):
        RLConfig.load([], ["critic.replay_routing=true"])
    with pytest.raises(ConfigError, match=KEY):
        RLConfig.load([], [f"{KEY}=sometimes"])
