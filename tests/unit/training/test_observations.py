"""What an environment answers, as a part of the policy's loss, against plain autograd on a plain model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.architectures import make_model
from tests.support.stored import store_samples
from tests.unit.training.test_worker import SETTINGS, make_group, make_worker
from trueline.algorithms.entries import Entry
from trueline.algorithms.loss_aggregation import set_weights
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, LossOutput, Sample, answered_places
from trueline.rl.step import open_samples
from trueline.training.report import LossSettings

WEIGHT = 0.3
NAME = "policy/observation_loss"
TURNS = ["..ss..ss", ".s...", "..sss.s", ".ssss", "...s..s..s."]  # s: sampled


def episodes() -> list[Sample]:
    """Of no, one or several answers; the second one is filtered."""
    generator, samples = torch.Generator().manual_seed(5), []
    for number, turns in enumerate(TURNS):
        mask = torch.tensor([letter == "s" for letter in turns])
        sample = Sample(torch.randint(3, 250, (len(turns),), generator=generator), mask, group=number)
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
            setattr(sample, name, (-5 + 0.1 * torch.randn(len(turns), generator=generator)) * mask)
        sample.advantages = torch.randn(1, generator=generator) * mask
        sample.filtered = number == 1
        samples.append(sample)
    set_weights(samples, "sequence_mean", 0)
    return samples


def settings(weight: float, **more: Any) -> LossSettings:
    return replace(SETTINGS, section=AlgorithmConfig(preset="grpo", observation_loss=weight), **more)


def test_what_lies_behind_the_first_sampled_token_is_observed() -> None:
    expected = ["....oo..", "..ooo", ".....o.", ".....", "....oo.oo.o"]
    for sample, letters in zip(episodes(), expected, strict=True):
        assert answered_places(sample.mask).tolist() == [letter == "o" for letter in letters]
        assert sample.observed_tokens() == letters.count("o")
    assert not answered_places(torch.zeros(3, dtype=torch.bool)).any()


def measured(folder: Path, weight: float, **how: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    budget = {name: how.pop(name) for name in ("tokens", "rows") if name in how}
    worker = make_worker(folder, **how)
    group, samples = make_group(worker, **budget), episodes()
    metrics = group.accumulate(samples, "policy", group.prepare_settings(samples, "policy", settings(weight)))
    return metrics, worker.gradients()


def expected_loss(folder: Path) -> tuple[float, Any]:
    """The mean over all observed tokens of the minibatch, one sequence at a time, at the sampling temperature."""
    model, terms = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for sample in (one for one in episodes() if not one.filtered):
        logprobs = (model(input_ids=sample.tokens[None]).logits[0, :-1] / SETTINGS.temperature).log_softmax(-1)
        own = logprobs.gather(-1, sample.tokens[1:, None])[:, 0]
        terms.append(-own[answered_places(sample.mask)[1:]])
    loss = torch.cat(terms).mean()
    loss.backward()
    return loss.item(), {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}


def compare(folder: Path, **how: Any) -> None:
    plain, without = measured(folder, 0.0, **how)
    metrics, found = measured(folder, WEIGHT, **how)
    loss, expected = expected_loss(folder)
    assert metrics.pop(NAME) == pytest.approx(loss, rel=1e-4) and NAME not in plain
    assert metrics.pop("loss") - plain.pop("loss") == pytest.approx(WEIGHT * loss, rel=1e-3)
    assert metrics == pytest.approx(plain, rel=1e-4, abs=1e-6)  # nothing else that is reported changes
    assert max(np.abs(part).max() for part in expected.values()) > 1e-2
    for name, part in found.items():
        np.testing.assert_allclose(part - without[name], WEIGHT * expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("how", [{}, {"rows": 1}, {"tokens": 14}, {"rows": 2, "packing": False}], ids=str)
def test_the_gradient_is_that_of_the_mean_over_all_answers(how: dict[str, Any], model_folder: Path) -> None:
    compare(model_folder, **how)


def test_its_metric_is_the_mean_whatever_the_weights_of_completions_add_up_to(model_folder: Path) -> None:
    samples, group = episodes(), make_group(make_worker(model_folder), rows=2)
    set_weights(samples, "sequence_sum", 0)
    metrics = group.accumulate(samples, "policy", group.prepare_settings(samples, "policy", settings(WEIGHT)))
    assert metrics[NAME] == pytest.approx(expected_loss(model_folder)[0], rel=1e-4)


def test_another_family_learns_the_same(tmp_path: Path) -> None:
    compare(make_model(tmp_path, "qwen3"), rows=2)


def test_an_update_keeps_log_probs_and_entropies_of_sampled_tokens_alone(model_folder: Path) -> None:
    """As without the loss, of samples by reference, whose counts the controller knows without their tokens."""
    found = []
    for weight in (0.0, WEIGHT):
        group, stored = make_group(make_worker(model_folder), rows=2), store_samples(episodes())
        for row, sample in zip(stored.rows, episodes(), strict=True):
            row.observed = sample.observed_tokens()
        wanted = settings(weight, logprobs_from_update=True, entropies=True)
        metrics = group.update(stored, "policy", group.prepare_settings(stored, "policy", wanted))
        found.append(open_samples(stored))
    assert metrics[NAME] == pytest.approx(expected_loss(model_folder)[0], rel=1e-4)
    for plain, sample in zip(*found, strict=True):
        for name in ("old_logprobs", "entropy"):
            torch.testing.assert_close(getattr(sample, name), getattr(plain, name))


def test_losses_see_log_probs_of_sampled_tokens_alone(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, clean = POLICY_LOSSES["ppo_clip"], list[bool]()

    def spy(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
        clean.append(bool((logprobs[~batch.mask] == 0).all()))
        return plain(logprobs, batch, config)

    monkeypatch.setitem(POLICY_LOSSES, "ppo_clip", Entry(spy))
    measured(model_folder, WEIGHT)
    assert clean == [True]


def test_a_minibatch_without_answers_adds_nothing(model_folder: Path) -> None:
    samples, worker = episodes()[3:4], make_worker(model_folder)
    group = make_group(worker)
    metrics = group.accumulate(samples, "policy", group.prepare_settings(samples, "policy", settings(WEIGHT)))
    assert metrics[NAME] == 0 and all(np.isfinite(part).all() for part in worker.gradients().values())
