from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trueline.algorithms.weighting import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.data.types import Sample
from trueline.runtime.actors import LocalActor
from trueline.training.group import LossSettings, ModelGroup
from trueline.training.worker import Worker, WorkerSpec

SETTINGS = LossSettings(0.8, AlgorithmConfig(preset="grpo", entropy_coefficient=0.01))
SCHEDULE = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}


def make_samples(count: int, seed: int) -> list[Sample]:
    """Answers of different lengths with all that the policy loss needs, off-policy and off-reference."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(3, 14, (1,), generator=generator))
        mask = torch.arange(length) >= 1 + length // 3
        sample = Sample(torch.randint(3, 250, (length,), generator=generator), mask)
        sample.old_logprobs = (-5 + torch.randn(length, generator=generator)) * mask
        sample.rollout_logprobs = sample.old_logprobs + 0.1 * torch.randn(length, generator=generator) * mask
        sample.ref_logprobs = sample.old_logprobs + 0.5 * torch.randn(length, generator=generator) * mask
        sample.advantages = torch.randn(1, generator=generator) * mask
        samples.append(sample)
    set_weights(samples, "sequence_mean", 0)
    return samples


def make_worker(folder: Path, **training: Any) -> Worker:
    model = ModelConfig(path=str(folder), dtype="float32")
    ranks = TrainingConfig(engine="torch", **(SCHEDULE | training))
    worker = Worker(WorkerSpec(model, ranks, rank=0, world=1, total_steps=4, seed=0))
    worker.start(("", 0))  # plain PyTorch meets nobody
    return worker


def make_group(worker: Worker, tokens: int = 1000, rows: int | None = None) -> ModelGroup:
    config = RanksConfig(engine="torch", micro_batch_tokens=tokens, micro_batch_samples=rows)
    return ModelGroup("policy", [LocalActor("policy-0", worker)], config, timeout_seconds=60)


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    return dict(worker.copy_weights())


def gradient(folder: Path, samples: list[Sample], loss: str, **budget: Any) -> tuple[dict[str, float], Any]:
    worker = make_worker(folder)
    metrics = make_group(worker, **budget).accumulate(samples, loss, SETTINGS)
    return metrics, worker.gradients()


@pytest.mark.parametrize("loss", ["policy", "sft"])
@pytest.mark.parametrize("budget", [{"rows": 1}, {"rows": 3}, {"tokens": 26}])
def test_gradient_and_metrics_do_not_depend_on_micro_batches(
    model_folder: Path, loss: str, budget: dict[str, int]
) -> None:
    samples = make_samples(7, seed=1)
    whole, expected = gradient(model_folder, samples, loss)
    split, found = gradient(model_folder, samples, loss, **budget)
    assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert max(np.abs(part).max() for part in expected.values()) > 1e-3
    for name, part in expected.items():
        np.testing.assert_allclose(found[name], part, rtol=1e-3, atol=1e-5, err_msg=name)


def test_gradient_does_not_depend_on_the_order_of_samples(model_folder: Path) -> None:
    samples = make_samples(5, seed=2)
    expected, found = (gradient(model_folder, order, "policy", rows=2)[1] for order in (samples, samples[::-1]))
    for name, part in expected.items():
        np.testing.assert_allclose(found[name], part, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_pass_of_fillers_adds_nothing(model_folder: Path) -> None:
    """Two ranks with one sample between them: one has a filler alone, and its gradient is zero."""
    samples = make_samples(1, seed=3)
    workers = [make_worker(model_folder), make_worker(model_folder)]
    actors = [LocalActor(f"policy-{rank}", worker) for rank, worker in enumerate(workers)]
    group = ModelGroup("policy", actors, RanksConfig(micro_batch_tokens=100), 60)
    metrics = group.accumulate(samples, "policy", SETTINGS)
    alone, expected = gradient(model_folder, samples, "policy")
    assert metrics == pytest.approx(alone, rel=1e-5, abs=1e-7)
    for name, part in expected.items():
        np.testing.assert_allclose(workers[0].gradients()[name], part, rtol=1e-4, atol=1e-6)
        assert not workers[1].gradients()[name].any()


def test_reported_means_are_weighted_like_the_loss(model_folder: Path) -> None:
    samples = make_samples(4, seed=4)
    worker = make_worker(model_folder)
    scores = make_group(worker).score(samples, SETTINGS.temperature)
    metrics = make_group(worker, rows=2).accumulate(samples, "sft", SETTINGS)
    expected = -sum(sample.weight * score.sum().item() for sample, score in zip(samples, scores, strict=True))
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_scores_come_back_in_the_order_of_the_samples(model_folder: Path) -> None:
    samples = make_samples(6, seed=5)
    group = make_group(make_worker(model_folder), tokens=30)
    together = group.score(samples, 0.8)
    for sample, scores in zip(samples, together, strict=True):
        torch.testing.assert_close(scores, group.score([sample], 0.8)[0], rtol=1e-5, atol=1e-5)
        assert scores.shape == sample.tokens.shape
        assert (scores[~sample.mask] == 0).all()


def test_a_step_follows_the_schedule_and_clips_the_gradient(model_folder: Path) -> None:
    worker = make_worker(model_folder, max_grad_norm=1e-4, epsilon=1.0, weight_decay=0.0, schedule="constant")
    before = weights(worker)
    metrics = make_group(worker).update(make_samples(3, seed=6), "sft", SETTINGS)
    change = sum((weights(worker)[name] - tensor).square().sum() for name, tensor in before.items()) ** 0.5
    assert metrics["learning_rate"] == pytest.approx(1e-2)
    assert metrics["grad_norm"] > 0.1  # as it was before clipping
    # With epsilon far above the gradient, Adam's first step is rate * gradient / epsilon.
    assert change.item() == pytest.approx(1e-2 * 1e-4, rel=0.05)


def test_an_update_leaves_no_gradient_behind(model_folder: Path) -> None:
    worker = make_worker(model_folder)
    make_group(worker).update(make_samples(3, seed=7), "policy", SETTINGS)
    assert not any(part.any() for part in worker.gradients().values())


def train(worker: Worker, steps: range) -> list[dict[str, float]]:
    group = make_group(worker, tokens=30)
    return [group.update(make_samples(4, seed=100 + step), "policy", SETTINGS) for step in steps]


def test_resuming_equals_going_on_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    straight = make_worker(model_folder)
    whole = train(straight, range(4))

    first = make_worker(model_folder)
    begun = train(first, range(2))
    first.save(str(tmp_path / "checkpoint"))
    second = make_worker(model_folder)
    second.load(str(tmp_path / "checkpoint"))
    resumed = train(second, range(2, 4))

    assert begun + resumed == whole
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(second)[name], tensor), name


def test_saving_does_not_disturb_training(model_folder: Path, tmp_path: Path) -> None:
    plain, saving = make_worker(model_folder), make_worker(model_folder)
    train(plain, range(2))
    train(saving, range(1))
    saving.save(str(tmp_path / "checkpoint"))
    train(saving, range(1, 2))
    assert all(torch.equal(weights(saving)[name], tensor) for name, tensor in weights(plain).items())


def test_a_checkpoint_before_the_first_step_can_be_loaded(model_folder: Path, tmp_path: Path) -> None:
    fresh = make_worker(model_folder)
    fresh.save(str(tmp_path / "checkpoint"))
    again = make_worker(model_folder)
    again.load(str(tmp_path / "checkpoint"))
    assert train(again, range(1)) == train(fresh, range(1))


def test_the_model_folder_is_one_that_transformers_opens(model_folder: Path, tmp_path: Path) -> None:
    worker = make_worker(model_folder)
    train(worker, range(1))
    worker.save(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = weights(worker)
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    start = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    assert any(not torch.equal(found[name], tensor) for name, tensor in start.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("1+1=")["input_ids"] == AutoTokenizer.from_pretrained(model_folder)("1+1=")["input_ids"]


def test_tied_weights_are_saved_once_and_loaded_into_both_places(model_folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "tied")
    worker = make_worker(tmp_path / "tied")
    train(worker, range(1))
    worker.save(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trained = weights(worker)["model.embed_tokens.weight"]
    assert "lm_head.weight" not in weights(worker)
    assert torch.equal(loaded.get_input_embeddings().weight, trained)
    assert torch.equal(loaded.get_output_embeddings().weight, trained)


def test_a_model_that_is_only_scored_has_no_optimizer(model_folder: Path) -> None:
    model = ModelConfig(path=str(model_folder), dtype="float32")
    spec = WorkerSpec(model, RanksConfig(engine="torch"), rank=0, world=1, total_steps=0, seed=0)
    reference = Worker(spec)
    reference.start(("", 0))
    samples = make_samples(2, seed=8)
    ours = make_group(reference).score(samples, 1.0)
    theirs = make_group(make_worker(model_folder)).score(samples, 1.0)
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
