"""Prompts that a pass computes once: the same numbers and gradients as with every sequence computed whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.letters import letters_command, rows_of
from tests.support.stored import store_samples
from tests.support.tiny import add_targets, make_samples, make_tiny_mixture
from trueline.algorithms.loss_aggregation import set_weights
from trueline.cli import main
from trueline.config.algorithm import PRESETS, AlgorithmConfig
from trueline.config.model import LoraConfig, ModelConfig, PolicyTrainingConfig, RanksConfig, TrainingConfig
from trueline.config.supervised import PreferenceConfig, RewardModelConfig
from trueline.data.types import Sample
from trueline.models.attention import Shared
from trueline.models.ring_attention import Mesh
from trueline.monitoring.findings import Finding
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

PROMPT, ANSWER = 34, 24
Gradients = dict[str, np.ndarray]


def minibatch(shared: int = PROMPT, seed: int = 6) -> list[Sample]:
    samples = make_samples(10, seed=seed, longest=ANSWER, shared=shared)
    for number, sample in enumerate(samples):
        sample.returns = sample.values = 0.1 * number * sample.mask
    set_weights(samples, "token_mean", 0)
    add_targets(samples)
    return samples


def make_group(
    folder: Path, sharing: bool | str, head: str = "language", lora: int = 0, **keys: Any
) -> tuple[ModelGroup, Worker]:
    model = ModelConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=lora))
    ranks = TrainingConfig.parse({"engine": "torch", "learning_rate": 1e-3, "share_prefixes": sharing, **keys})
    worker = Worker(WorkerSpec(model, ranks, 0, 1, total_steps=4, seed=0, head=head))
    worker.start(("", 0))
    if lora or head != "language":  # of which parts begin at zero
        torch.manual_seed(1)
        for tensor in worker.model.parameters():
            tensor.data += 0.1 * torch.randn(tensor.shape) * tensor.requires_grad
    return ModelGroup("policy", [LocalActor("policy-0", worker)], ranks, timeout_seconds=60), worker


def check_gradients(found: Gradients, expected: Gradients) -> None:
    largest = max(np.linalg.norm(one) for one in expected.values())
    assert largest > 1e-3
    for name, one in expected.items():
        assert np.linalg.norm(found[name] - one) <= 1e-5 * max(np.linalg.norm(one), 1e-2 * largest), name


def compare(folder: Path, loss: str, settings: LossSettings, **given: Any) -> None:
    results = []
    for sharing in (True, False):
        group, worker = make_group(folder, sharing, **given)
        samples = minibatch()
        metrics = group.accumulate(samples, loss, group.prepare_settings(samples, loss, settings))
        assert (group.plan(minibatch()).saved > 0.3) is sharing
        results.append((metrics, worker.gradients()))
    (metrics, found), (whole, expected) = results
    assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-5)
    check_gradients(found, expected)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_has_the_same_loss_and_gradient(model_folder: Path, preset: str) -> None:
    config = AlgorithmConfig.parse({"preset": preset, "entropy_coefficient": 0.01})
    compare(model_folder, "policy", LossSettings(0.8, config, {"kl_coefficient": 0.1}), micro_batch_samples=4)


def test_adapters_have_the_same_gradient(model_folder: Path) -> None:
    compare(model_folder, "policy", LossSettings(1.0, AlgorithmConfig(preset="grpo")), lora=4)


def test_a_critic_has_the_same_gradient(model_folder: Path) -> None:
    compare(model_folder, "value", LossSettings(1.0, AlgorithmConfig(preset="ppo")), head="value")


@pytest.mark.parametrize(
    ("head", "loss", "section"),
    [("reward", "reward_model", RewardModelConfig()), ("language", "preference", PreferenceConfig())],
)
def test_pairs_share_their_prompt_and_are_trained_alike(model_folder: Path, head: str, loss: str, section: Any) -> None:
    found = []
    for sharing in ("auto", False):
        group, _ = make_group(model_folder, sharing, head, micro_batch_samples=4)
        metrics = group.update(minibatch(), loss, LossSettings(1.0, section), samples_per_row=2)
        assert metrics.pop("speed/shared_prefixes", 0.0) == pytest.approx(0.38 if sharing else 0, abs=0.05)
        found.append({name: value for name, value in metrics.items() if not name.startswith("memory/")})
    assert found[0]["grad_norm"] > 1e-3 and found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_balanced_experts_count_the_tokens_of_every_sequence(kind: str, tmp_path: Path) -> None:
    settings = LossSettings(1.0, AlgorithmConfig(preset="grpo"))
    compare(make_tiny_mixture(tmp_path, kind), "policy", settings, router_aux_loss_coef=0.1)


@pytest.mark.parametrize("head", ["language", "value", "steps"])
def test_scores_are_the_same_at_every_token(model_folder: Path, head: str) -> None:
    """Also those of prompts, which a critic and a reward model have."""
    found, expected = (make_group(model_folder, sharing, head)[0].score(minibatch()) for sharing in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_an_update_finds_belongs_to_the_right_tokens(model_folder: Path) -> None:
    config = AlgorithmConfig(preset="grpo")
    fields = []
    for sharing in (True, False):
        stored = store_samples(minibatch())
        group, _ = make_group(model_folder, sharing, micro_batch_tokens=150)
        metrics = group.update(stored, "policy", LossSettings(1.0, config, logprobs_from_update=True, entropies=True))
        assert ("speed/shared_prefixes" in metrics) is sharing
        fields.append([stored.part(name, at) for name in ("old_logprobs", "entropy") for at in range(len(stored))])
    for one, other in zip(*fields, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_step_of_several_parts_tells_what_all_of_them_save(model_folder: Path) -> None:
    samples, parts = minibatch(), (slice(0, 4), slice(4, 9), slice(9, 10))
    group, _ = make_group(model_folder, True)
    saved = sum(group.plan(samples[part]).saved * sum(one.length() for one in samples[part]) for part in parts)
    for part in parts[:2]:
        assert group.update(samples[part], "sft", LossSettings(then="more")) == {}
    metrics = group.update(samples[parts[2]], "sft", LossSettings())
    assert metrics["speed/shared_prefixes"] == pytest.approx(saved / sum(one.length() for one in samples))
    assert "speed/shared_prefixes" not in group.update(samples[parts[2]], "sft", LossSettings())


@pytest.mark.parametrize(("sharing", "shared", "saves"), [("auto", 34, True), ("auto", 0, False), (False, 34, False)])
def test_auto_shares_what_is_worthwhile(model_folder: Path, sharing: Any, shared: int, saves: bool) -> None:
    group, _ = make_group(model_folder, sharing)
    metrics = group.update(minibatch(shared), "sft", LossSettings())
    assert (metrics.get("speed/shared_prefixes", 0.0) > 0.3) is saves


def test_little_in_common_is_shared_only_on_request(model_folder: Path) -> None:
    samples = [*minibatch(0), *minibatch(0, seed=7), *minibatch()[:2]]
    saved = [make_group(model_folder, sharing)[0].plan(samples).saved for sharing in ("auto", True)]
    assert saved[0] == 0 < saved[1] < 0.1


def test_a_model_that_shares_wrongly_computes_sequences_whole(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each answer's first token is predicted from another token of the prompt than its last one."""
    expected = make_group(model_folder, False)[0].accumulate(minibatch(), "sft", LossSettings())
    monkeypatch.setattr(Shared, "rows", lambda self, places: (self.row_of[places] - 1).clamp(0))
    group, _ = make_group(model_folder, "auto")
    found: list[Finding] = []
    group.report = found.append
    assert group.accumulate(minibatch(), "sft", LossSettings()) == pytest.approx(expected)
    group.accumulate(minibatch(), "sft", LossSettings())
    assert [one.code for one in found] == ["prefixes_differ"] and group.sharing is False
    assert "policy: sequences whose common prefix" in found[0].what


@pytest.mark.parametrize("verb", ["grpo", "dpo"])
def test_a_run_tells_that_its_model_shares_wrongly(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "rows", lambda self, places: (self.row_of[places] - 1).clamp(0))
    replies = {} if verb == "grpo" else {"chosen": "abc", "rejected": "12"}
    rows = [{"prompt": f"{number}: " + "which letters? " * 4, **replies} for number in range(8)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = letters_command(tmp_path, verb, f"data.path={tmp_path}/long.jsonl", "training.learning_rate=1e-3")
    if verb == "dpo":
        at = words.index("--reward")
        words = [word for word in words[:at] + words[at + 2 :] if not word.startswith(("prompts_", "rollout."))]
    assert main([*words, *(["steps=2"] if verb == "grpo" else ["samples_per_step=4"])]) == 0
    found = [json.loads(line) for line in (tmp_path / "run" / "findings.jsonl").read_text().splitlines()]
    assert sum(one["code"] == "prefixes_differ" for one in found) >= 1
    assert not any("speed/shared_prefixes" in row for row in rows_of(tmp_path))


def test_what_cannot_share_does_not(model_folder: Path) -> None:
    def shares(mesh: Mesh | None = None, **keys: Any) -> bool:
        actors = [LocalActor(f"rank-{rank}", object()) for rank in range(mesh.world if mesh else 1)]
        kind = PolicyTrainingConfig if "replay_routing" in keys else RanksConfig
        group: ModelGroup = ModelGroup("policy", actors, kind.parse(keys), 60.0, mesh)  # type: ignore[arg-type]
        return bool(group.sharing)

    assert shares() and shares(Mesh(2)) and shares(Mesh(2, tensor=2))
    assert not any((shares(Mesh(2, ring=2)), shares(packing=False), shares(replay_routing="measure")))
