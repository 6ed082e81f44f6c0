"""The loss that balances experts is transformers' own, however a minibatch is cut."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tests.support.letters import rows_of, run_letters
from tests.support.tiny import make_samples, make_tiny_mixture
from trueline.algorithms.loss_aggregation import set_weights
from trueline.cli import main
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.rl import RLConfig
from trueline.config.supervised import SftConfig
from trueline.data.types import Sample
from trueline.models.loading import check_model
from trueline.plan.offline import plan_supervised
from trueline.plan.rl import plan_rl
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

KEY = "training.router_aux_loss_coef"
COEFFICIENT = 3.0  # as large as the loss itself
Found = tuple[dict[str, float], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mixture(tmp_path_factory.mktemp("mixture"))


def minibatch(count: int = 7) -> list[Sample]:
    samples = make_samples(count, seed=3)
    set_weights(samples, "token_mean", 0)
    return samples


def accumulated(
    folder: Path, samples: list[Sample], coefficient: float, *, ranks: int = 1, again: bool = False, **training: Any
) -> Found:
    """Metrics, and the gradients of all ranks together, each a worker of this process."""
    config = TrainingConfig(engine="torch", learning_rate=1e-6, router_aux_loss_coef=coefficient, **training)
    model = ModelConfig(path=str(folder), dtype="float32", gradient_checkpointing=again)
    workers = [Worker(WorkerSpec(model, config, 0, 1, 4, 0)) for _ in range(ranks)]
    for worker in workers:
        worker.start(("", 0))
    group = ModelGroup("model", [LocalActor("model", worker) for worker in workers], config, 60)
    metrics = group.accumulate(samples, "sft", LossSettings())
    parts = [worker.gradients() for worker in workers]
    return metrics, {name: sum(part[name] for part in parts) for name in parts[0]}


def of_transformers(folder: Path, samples: list[Sample]) -> tuple[float, dict[str, np.ndarray]]:
    """The auxiliary loss of a padded batch, and its gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = pad_sequence([sample.tokens for sample in samples], batch_first=True)
    real = pad_sequence([torch.ones_like(sample.tokens) for sample in samples], batch_first=True)
    loss = model(input_ids=tokens, attention_mask=real, output_router_logits=True).aux_loss
    loss.backward()
    grads = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in model.named_parameters()}
    return loss.item(), {name: gradient.numpy() for name, gradient in grads.items()}


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_value_and_gradient_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder, samples = make_tiny_mixture(tmp_path, kind), minibatch()
    expected, gradients = of_transformers(folder, samples)
    plain, without = accumulated(folder, samples, 0.0)
    metrics, found = accumulated(folder, samples, COEFFICIENT)
    assert metrics["router_loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["loss"] == pytest.approx(plain["loss"]) and "router_loss" not in plain
    router = next(name for name in found if name.endswith("gate.weight"))
    assert np.abs(gradients[router]).max() > 1e-4
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name] - without[name], COEFFICIENT * gradient, atol=1e-5, err_msg=name)


CUTS: list[dict[str, Any]] = [
    {"micro_batch_samples": 4},
    {"micro_batch_samples": 2},
    {"micro_batch_samples": 1, "again": True},
    {"packing": False, "micro_batch_samples": 3},
    {"packing": False, "again": True},
    {"ranks": 2, "micro_batch_samples": 3},
]


def test_it_does_not_depend_on_how_a_minibatch_is_cut(mixture: Path) -> None:
    samples = minibatch()
    whole, expected = accumulated(mixture, samples, COEFFICIENT)
    for cut in CUTS:
        metrics, found = accumulated(mixture, samples, COEFFICIENT, **cut)
        assert metrics == pytest.approx(whole, rel=1e-5), cut
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, atol=2e-6, err_msg=f"{cut} {name}")


def test_fillers_and_filtered_completions_do_not_count(mixture: Path) -> None:
    one, two = (accumulated(mixture, minibatch(1), COEFFICIENT, ranks=ranks)[0] for ranks in (1, 2))
    assert two == pytest.approx(one)  # the second rank has a filler alone
    samples = make_samples(7, seed=3)
    for sample in samples[5:]:
        sample.filtered = True
    set_weights(samples, "token_mean", 0)
    kept = accumulated(mixture, samples[:5], COEFFICIENT)[0]
    assert accumulated(mixture, samples, COEFFICIENT, micro_batch_samples=3)[0] == pytest.approx(kept, rel=1e-5)


def test_facts_tell_experts(mixture: Path, model_folder: Path) -> None:
    found = [check_model(ModelConfig(path=str(folder))) for folder in (mixture, model_folder)]
    assert [(facts.experts, facts.balanced) for facts in found] == [(4, True), (0, False)]


def test_models_without_such_routers_are_refused_by_key(model_folder: Path, mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2", "answer": "2"}) + "\n")
    words = [f"data.path={tmp_path}/rows.jsonl", "runtime=local"]
    dense = [*words, f"model.path={model_folder}"]
    said = rf"{KEY}=0.01: {model_folder} is a dense model; set it to 0, or train .* such as Mixtral"
    with pytest.raises(ConfigError, match=said):
        plan_supervised(SftConfig.load([], [*dense, f"{KEY}=0.01"]))
    rewarded = [*words, "reward.function=exact", "algorithm.preset=ppo", "rollout.max_new_tokens=8"]
    with pytest.raises(ConfigError, match=said):
        plan_rl(RLConfig.load([], [*rewarded, f"model.path={model_folder}", f"{KEY}=0.01"]))
    critic = [f"model.path={mixture}", f"critic.path={model_folder}", f"{KEY}=0.01", "critic.router_aux_loss_coef=0.02"]
    with pytest.raises(ConfigError, match=r"critic.router_aux_loss_coef=0.02: .* is a dense model"):
        plan_rl(RLConfig.load([], [*rewarded, *critic]))
    plan_rl(RLConfig.load([], [*rewarded, f"model.path={mixture}", f"{KEY}=0.01"]))


def test_the_key_reaches_supervised_training_and_rl(tmp_path: Path) -> None:
    make_tiny_mixture(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1:", "completion": "a quick brown fox" * 5}) + "\n")
    named = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/rows.jsonl"]
    small = ["steps=8", "samples_per_step=1", "training.learning_rate=3e-3", "runtime=local", f"folder={tmp_path}"]
    balances = {}
    for name, coefficient in (("weak", 1e-6), ("strong", 100.0)):
        assert main(["sft", *named, *small, f"{KEY}={coefficient}", "--name", name]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        balances[name] = [json.loads(line)["router_loss"] for line in lines]
    assert balances["strong"][0] == balances["weak"][0]
    assert balances["strong"][-1] < min(balances["strong"][0], balances["weak"][-1] - 0.05)  # 2 is about the least
    saved = json.loads((tmp_path / "strong/checkpoints/step_000008/model/config.json").read_text())
    assert not saved["output_router_logits"]  # what training asks of its model is not asked of every later reader
    assert run_letters(tmp_path, "grpo", "steps=1", f"{KEY}=0.1") == 0
    assert rows_of(tmp_path)[-1]["router_loss"] > 0
