import importlib.util
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
)

from tests.support.stored import store_samples
from tests.support.tiny import make_tiny_model
from tests.support.whole import averages as averages_of
from tests.support.whole import whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.config.model import LoraConfig, ModelConfig, RanksConfig, TrainingConfig
from trueline.config.supervised import DistillConfig, KTOConfig, PreferenceConfig, RewardModelConfig
from trueline.data.types import Sample, is_filled
from trueline.models.head import load_teacher
from trueline.rl.step import open_samples
from trueline.runtime.actors import ActorFailure, LocalActor
from trueline.runtime.fingerprints import bit_sum, wrap_int64
from trueline.training.checkpoints import digest
from trueline.training.engines.deepspeed_config import GATHERING_ON_CPU
from trueline.training.group import ModelGroup, write_models
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec, rank_environment

SETTINGS = LossSettings(0.8, AlgorithmConfig(preset="grpo", entropy_coefficient=0.01))
FULL, LORA = LoraConfig(), LoraConfig(rank=2, alpha=8.0)
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


def make_worker(
    folder: Path, lora: LoraConfig = FULL, head: str = "language", teacher: Path | None = None, **training: Any
) -> Worker:
    model = ModelConfig(path=str(folder), dtype="float32", lora=lora)
    ranks = TrainingConfig(engine="torch", **(SCHEDULE | training))
    target = None if teacher is None else partial(load_teacher, DistillConfig(), ModelConfig(path=str(teacher)))
    worker = Worker(WorkerSpec(model, ranks, 0, 1, total_steps=4, seed=0, head=head, distillation_target=target))
    worker.start(("", 0))  # plain PyTorch meets nobody
    return worker


def make_group(worker: Worker, tokens: int = 1000, rows: int | None = None) -> ModelGroup:
    packing = worker.spec.ranks.packing
    config = RanksConfig(engine="torch", micro_batch_tokens=tokens, micro_batch_samples=rows, packing=packing)
    return ModelGroup("policy", [LocalActor("policy-0", worker)], config, timeout_seconds=60)


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    return dict(worker.copy_weights())


def gradient(folder: Path, samples: list[Sample], loss: str, **budget: Any) -> tuple[dict[str, float], Any]:
    worker = make_worker(folder)
    metrics = make_group(worker, **budget).accumulate(samples, loss, SETTINGS)
    return metrics, worker.gradients()


def accept_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, part in expected.items():
        np.testing.assert_allclose(found[name], part, rtol=1e-3, atol=1e-5, err_msg=name)


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
    accept_close(found, expected)


@pytest.mark.parametrize(("gpu", "share", "expected"), [(True, 0.6, [0.6]), (True, 1.0, []), (False, 0.6, [])])
def test_a_rank_bounds_its_memory_where_engines_need_the_rest(
    gpu: bool, share: float, expected: list[float], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[float] = []
    model, ranks = ModelConfig(path=str(model_folder), dtype="float32"), TrainingConfig(engine="torch")
    worker = Worker(WorkerSpec(model, ranks, 0, 1, total_steps=4, seed=0, memory_share=share))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: gpu)
        patched.setattr(torch.cuda, "set_per_process_memory_fraction", bounds.append)
        patched.setattr("trueline.training.worker.load_model", stop)
        with pytest.raises(InterruptedError):
            worker.start(("", 0))
    assert bounds == expected


def stop(*args: Any, **named: Any) -> None:
    raise InterruptedError


def test_gradient_does_not_depend_on_the_order_of_samples(model_folder: Path) -> None:
    samples = make_samples(5, seed=2)
    expected, found = (gradient(model_folder, order, "policy", rows=2)[1] for order in (samples, samples[::-1]))
    accept_close(found, expected)


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
    samples_per_row = group.score(samples, 0.8)
    for sample, scores in zip(samples, samples_per_row, strict=True):
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


def save(worker: Worker, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    worker.save(str(folder))
    saved = worker.save_result(True)
    assert saved is not None and saved.problem is None
    return str(folder)


def resumed(checkpoint: str, *args: Any, **settings: Any) -> Worker:
    worker = make_worker(*args, **settings)
    worker.load(checkpoint)
    return worker


def averages(worker: Worker) -> dict[str, torch.Tensor]:
    return averages_of(worker.engine)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize("lora", [FULL, LORA, LoraConfig(rank=2, dropout=0.3)], ids=["full", "lora", "dropout"])
@pytest.mark.parametrize(("decay", "optimizer"), [(0.0, "adamw"), (0.9, "adamw"), (0.0, "muon")])
def test_resuming_equals_going_on_bit_for_bit(
    model_folder: Path, tmp_path: Path, lora: LoraConfig, decay: float, optimizer: str
) -> None:
    """Weights, moments, schedule, moving average, and the random numbers that dropout draws."""
    straight = make_worker(model_folder, lora, ema_decay=decay, optimizer=optimizer)
    whole = train(straight, range(4))

    first = make_worker(model_folder, lora, ema_decay=decay, optimizer=optimizer)
    begun = train(first, range(2))
    checkpoint = save(first, tmp_path / "checkpoint")
    torch.manual_seed(12345)
    second = resumed(checkpoint, model_folder, lora, ema_decay=decay, optimizer=optimizer)
    rest = train(second, range(2, 4))

    assert without_memory(begun + rest) == without_memory(whole)
    assert same(weights(straight), weights(second))
    assert same(averages(straight), averages(second))
    assert bool(averages(second)) == (decay > 0)


def test_a_checkpoint_holds_the_moments_of_each_tensors_optimizer(model_folder: Path, tmp_path: Path) -> None:
    """And is refused to another one, by the name of a tensor and what it has."""
    worker = make_worker(model_folder, optimizer="muon")
    train(worker, range(1))
    parts: dict[str, set[str]] = {}
    for name, _, part in (shard.name.rpartition("/") for shard in worker.engine.moment_shards()):
        parts.setdefault(name, set()).add(part)
    muon = {name for name, moments in parts.items() if moments == {"momentum_buffer"}}
    assert muon == {name for name, tensor in weights(worker).items() if ".layers." in name and tensor.ndim == 2}
    assert all(parts[name] == {"exp_avg", "exp_avg_sq"} for name in parts.keys() - muon)
    checkpoint = save(worker, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"another optimizer than optimizer=adamw .*_proj.weight has momentum_buffer"):
        make_worker(model_folder).load(checkpoint)


def without_memory(reports: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in report.items() if name != "memory/peak_gib"} for report in reports]


def test_saving_does_not_disturb_training(model_folder: Path, tmp_path: Path) -> None:
    plain, saving = make_worker(model_folder, ema_decay=0.5), make_worker(model_folder, ema_decay=0.5)
    train(plain, range(2))
    train(saving, range(1))
    save(saving, tmp_path / "checkpoint")
    train(saving, range(1, 2))
    assert same(weights(plain), weights(saving))
    assert same(averages(plain), averages(saving))


def test_the_moving_average_follows_its_formula(model_folder: Path) -> None:
    worker = make_worker(model_folder, ema_decay=0.75)
    expected = weights(worker)
    for step in range(3):
        train(worker, range(step, step + 1))
        expected = {name: 0.75 * expected[name] + 0.25 * tensor for name, tensor in weights(worker).items()}
    for name, tensor in averages(worker).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_a_moving_average_begun_on_resuming_starts_at_the_resumed_weights(model_folder: Path, tmp_path: Path) -> None:
    first = make_worker(model_folder)
    train(first, range(1))
    second = resumed(save(first, tmp_path / "checkpoint"), model_folder, ema_decay=0.9)
    assert same(averages(second), weights(first))


def test_a_checkpoint_with_an_average_is_taken_up_without_one(model_folder: Path, tmp_path: Path) -> None:
    first = make_worker(model_folder, ema_decay=0.9)
    train(first, range(1))
    second = resumed(save(first, tmp_path / "checkpoint"), model_folder)
    assert same(weights(first), weights(second))
    assert not averages(second)


def test_a_checkpoint_before_the_first_step_can_be_loaded(model_folder: Path, tmp_path: Path) -> None:
    logprobs_from_update = make_worker(model_folder)
    again = resumed(save(logprobs_from_update, tmp_path / "checkpoint"), model_folder)
    assert without_memory(train(again, range(1))) == without_memory(train(logprobs_from_update, range(1)))


def test_a_checkpoint_of_another_kind_is_refused_by_name(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = save(make_worker(model_folder), tmp_path / "checkpoint")
    for settings in ({"lora": LORA}, {"head": "reward"}):
        with pytest.raises(ConfigError, match=f"{checkpoint}: a checkpoint of another model or task"):
            resumed(checkpoint, model_folder, **settings)


def test_a_checkpoint_with_one_tensor_too_many_is_refused_by_its_name(model_folder: Path, tmp_path: Path) -> None:
    worker = make_worker(model_folder)
    checkpoint = save(worker, tmp_path / "checkpoint")
    worker.load(checkpoint)
    name, frozen = list(worker.model.named_parameters())[-1]
    frozen.requires_grad_(False)
    shape = re.escape(str(list(frozen.shape)))
    with pytest.raises(ConfigError, match=rf"checkpoint: .*\({name} of shape {shape} is only in one of the two\)"):
        worker.load(checkpoint)


@pytest.mark.parametrize(("stage", "gpus", "gathers"), [(3, 0, True), (2, 0, False), (3, 1, False)])
def test_ranks_that_gather_weights_on_cpus_give_large_allocations_back(stage: int, gpus: int, gathers: bool) -> None:
    ranks = TrainingConfig.parse({"engine": "deepspeed", "deepspeed": {"zero_stage": stage}})
    assert (GATHERING_ON_CPU.items() <= rank_environment(ranks, gpus).items()) is gathers


def test_a_checkpoint_of_another_size_is_refused_by_name(model_folder: Path, tmp_path: Path) -> None:
    checkpoint = save(make_worker(model_folder), tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=str(checkpoint)):
        resumed(checkpoint, make_tiny_model(tmp_path / "wide", tied=False))


def test_a_folder_that_cannot_be_written_is_told_and_not_raised(model_folder: Path, tmp_path: Path) -> None:
    worker = make_worker(model_folder)
    for _ in range(2):  # what was not written is in nobody's way later
        worker.save(str(tmp_path / "missing"))
        saved = worker.save_result(True)
        assert saved is not None and (saved.problem or "").startswith("rank 0: ")
    look = write_models({"critic": make_group(worker)}, tmp_path)
    found = look(True)
    assert found is not None and found.problem is None
    assert set(found.digests) == {"critic/model/model.safetensors", "critic/training.safetensors"}
    assert found.digests == {name: digest(tmp_path / name) for name in found.digests}


def test_a_model_whose_folder_is_gone_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    """A cache may be emptied and a network disk unmounted while a run trains."""
    folder = make_tiny_model(tmp_path / "model", tied=True)
    worker = make_worker(folder)
    worker.prepare_saving(1)
    shutil.rmtree(folder)
    checkpoint = Path(save(worker, tmp_path / "checkpoint"))
    assert AutoTokenizer.from_pretrained(checkpoint / "model").eos_token_id == worker.tokenizer.eos_token_id


def test_a_sample_of_the_weights_is_spread_over_every_tensor(model_folder: Path) -> None:
    worker = make_worker(model_folder, learning_rate=1e-2)
    before = worker.weight_sample(16)
    flats = [tensor.flatten() for tensor in weights(worker).values()]
    assert before.tolist() == torch.cat([flat[:: -(-len(flat) // 16)] for flat in flats]).tolist()
    make_group(worker).update(make_samples(3, seed=8), "policy", SETTINGS)
    after = worker.weight_sample(16)
    assert 0 < abs(after - before).max() < 0.02  # `before` is a copy


def test_sampled_weights_outlive_the_tensor_that_an_engine_lends(model_folder: Path) -> None:
    class Lending:
        def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
            lent = torch.zeros(3)
            for number in (1, 2):
                yield f"tensor{number}", lent.fill_(number)

    worker = make_worker(model_folder)
    worker.engine = Lending()  # type: ignore[assignment]
    assert worker.weight_sample(3).tolist() == [1, 1, 1, 2, 2, 2]


def test_fingerprints_change_where_weights_change(model_folder: Path) -> None:
    worker = make_worker(model_folder)
    before = worker.fingerprints()
    assert before.keys() == weights(worker).keys()
    assert worker.fingerprints() == before
    worker.model.lm_head.weight.data[3, 5] += 1e-6
    changed = [name for name, value in worker.fingerprints().items() if value != before[name]]
    assert changed == ["lm_head.weight"]


@pytest.mark.parametrize("loss", ["ppo_clip", "tests.support.tiny:offset_loss"])  # the second's gradient stays finite
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(model_folder: Path, bad: float, loss: str) -> None:
    worker = make_worker(model_folder, ema_decay=0.9)
    train(worker, range(1))
    before, moments, average = weights(worker), state(worker), averages(worker)
    samples = make_samples(4, seed=20)
    samples[2].advantages = samples[2].advantages + bad
    settings = LossSettings(0.8, AlgorithmConfig(preset="grpo", loss=loss))
    metrics = make_group(worker, rows=1).update(samples, "policy", settings)
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["loss"])
    assert same(before, weights(worker))
    assert same(moments, state(worker))
    assert same(average, averages(worker))
    assert worker.engine.steps == 1
    assert not any(part.any() for part in worker.gradients().values())


def state(worker: Worker) -> dict[str, torch.Tensor]:
    return whole_state(worker.engine)


def test_training_goes_on_after_a_skipped_step(model_folder: Path) -> None:
    """As if the step had not been there, its place in the schedule included."""
    plain, stumbling = make_worker(model_folder), make_worker(model_folder)
    train(plain, range(2))
    train(stumbling, range(1))
    samples = make_samples(4, seed=20)
    samples[0].advantages = samples[0].advantages * math.nan
    make_group(stumbling).update(samples, "policy", SETTINGS)
    assert train(stumbling, range(1, 2))[0]["skipped"] == 0.0
    assert same(weights(plain), weights(stumbling))


def test_evaluating_is_the_loss_of_an_update_and_changes_nothing(model_folder: Path) -> None:
    worker, samples = make_worker(model_folder), make_samples(5, seed=21)
    before = weights(worker)
    found = make_group(worker, rows=2).evaluate(samples, "sft", SETTINGS)
    assert same(before, weights(worker))
    assert not any(part.any() for part in worker.gradients().values())
    assert found == pytest.approx(make_group(worker).accumulate(samples, "sft", SETTINGS), rel=1e-5)


def test_evaluating_and_scoring_know_no_dropout(model_folder: Path) -> None:
    worker, samples = make_worker(model_folder, LoraConfig(rank=2, dropout=0.5)), make_samples(5, seed=21)
    train(worker, range(2))
    group = make_group(worker)
    assert group.evaluate(samples, "sft", SETTINGS) == group.evaluate(samples, "sft", SETTINGS)
    assert torch.equal(group.score(samples)[0], group.score(samples)[0])


@pytest.mark.parametrize("rows", [2, 4, None])
def test_padded_training_is_packed_training(model_folder: Path, rows: int | None) -> None:
    samples, found = make_samples(6, seed=22), []
    for packing in (True, False):
        worker = make_worker(model_folder, packing=packing)
        make_group(worker, rows=rows).accumulate(samples, "policy", SETTINGS)
        found.append(worker.gradients())
    accept_close(found[1], found[0])


def test_as_reference_a_model_with_adapters_answers_without_them(model_folder: Path) -> None:
    samples = make_samples(3, seed=23)
    start = make_group(make_worker(model_folder)).score(samples, 0.8)
    worker = make_worker(model_folder, LORA)
    train(worker, range(2))
    group = make_group(worker)
    reference, policy = group.score(samples, 0.8, reference=True), group.score(samples, 0.8)
    assert all(torch.equal(one, other) for one, other in zip(reference, start, strict=True))
    assert not all(torch.allclose(one, other, atol=1e-3) for one, other in zip(policy, start, strict=True))
    assert train(worker, range(2, 3))[0]["skipped"] == 0.0


def test_only_adapters_are_trained_and_all_of_them(model_folder: Path) -> None:
    worker = make_worker(model_folder, LORA)
    before, frozen = worker.fingerprints(), dict(worker.engine.weights())
    kept = {name: tensor.clone() for name, tensor in frozen.items() if "lora" not in name}
    train(worker, range(2))
    assert all(value != before[name] for name, value in worker.fingerprints().items())
    assert all("lora" in name for name in before)
    assert all(torch.equal(frozen[name], tensor) for name, tensor in kept.items())


def test_an_engine_is_sent_plain_weights(model_folder: Path) -> None:
    """Merged, under the names and in the order of the model without adapters."""
    plain, worker = make_worker(model_folder), make_worker(model_folder, LORA)
    train(worker, range(2))
    specs = [(spec.name, spec.shape) for spec in worker.weight_specs("float32")]
    assert specs == [(spec.name, spec.shape) for spec in plain.weight_specs("float32")]
    samples = make_samples(3, seed=24)
    plain.model.load_state_dict(weights(worker))
    pairs = zip(make_group(plain).score(samples), make_group(worker).score(samples), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_sums_of_gathered_weights_are_those_of_held_ones(model_folder: Path, sync: str) -> None:
    """Where a conversion adds numbers, ranks cannot add up what they hold."""
    for lora in (FULL, LORA.with_keys({"sync": sync})):
        worker = make_worker(model_folder, lora)
        train(worker, range(1))
        held = worker.weight_bits("bfloat16")
        worker.names.resized.update(worker.names.shapes)
        assert worker.weight_bits("bfloat16") == held and held.plain


def test_an_engine_is_sent_adapters_alone(model_folder: Path) -> None:
    """Frozen weights and the product of what is sent, which needs no scaling, make the model that was trained."""
    plain, worker = make_worker(model_folder), make_worker(model_folder, LORA)
    adapter_only = make_worker(model_folder, LORA.with_keys({"sync": "adapter"}))
    for one in (worker, adapter_only):
        train(one, range(2))
    sent = dict(adapter_only.outgoing.sent_weights())
    assert [spec.name for spec in adapter_only.weight_specs("float32")] == list(sent)
    assert all(name.startswith("base_model.model.model.layers.") for name in sent)
    whole = {name: tensor.clone() for name, tensor in adapter_only.outgoing.plain_weights()}
    assert all(torch.equal(whole[name], tensor) for name, tensor in plain.outgoing.plain_weights())
    assert adapter_only.weight_bits("float32")[0] == plain.weight_bits("float32")[0]
    assert adapter_only.weight_bits("float32")[1] == wrap_int64(sum(int(bit_sum(tensor)) for tensor in sent.values()))
    for name in [name for name in sent if "lora_A" in name]:
        target = name.removeprefix("base_model.model.").replace("lora_A.", "")
        whole[target] += sent[name.replace("lora_A", "lora_B")] @ sent[name]
    assert all(torch.allclose(whole[name], tensor, atol=1e-6) for name, tensor in worker.outgoing.plain_weights())


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_four_bit_weights_stay_and_adapters_learn(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "wide", tied=False)  # bitsandbytes rounds in blocks of 64
    worker = make_worker(folder, LoraConfig(rank=2, quantize=True))
    assert worker.model.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    before = worker.fingerprints()
    assert all("lora" in name for name in before)
    kept = {name: tensor.clone() for name, tensor in worker.engine.weights() if "lora" not in name}
    reports = train(worker, range(2))
    assert all(math.isfinite(report["loss"]) and not report["skipped"] for report in reports)
    assert all(value != before[name] for name, value in worker.fingerprints().items())
    now = dict(worker.engine.weights())
    assert all(torch.equal(now[name], tensor) for name, tensor in kept.items())
    second = resumed(save(worker, tmp_path / "checkpoint"), folder, LoraConfig(rank=2, quantize=True))
    assert second.fingerprints() == worker.fingerprints()


def test_gradients_pass_through_four_bit_weights(tmp_path: Path) -> None:
    """As through the same weights at full precision: what bitsandbytes does for inference must stay off."""
    folder = make_tiny_model(tmp_path / "wide", tied=False)
    quantized = make_worker(folder, LoraConfig(rank=2, quantize=True))
    plain_folder = Path(shutil.copytree(folder, tmp_path / "plain"))
    sent = quantized.outgoing.plain_weights()  # the adapters are still zero
    plain_weights = {name: tensor.clone() for name, tensor in sent}
    save_file(plain_weights, plain_folder / "model.safetensors", metadata={"format": "pt"})
    plain = make_worker(plain_folder, LoraConfig(rank=2))
    for name, parameter in plain.model.named_parameters():
        if "lora" in name:
            parameter.data.copy_(quantized.model.get_parameter(name))
    samples = make_samples(4, seed=9)
    for worker in (quantized, plain):
        make_group(worker).score(samples)  # in evaluation mode
        make_group(worker).accumulate(samples, "policy", SETTINGS)
    found, expected = quantized.gradients(), plain.gradients()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        distance = np.linalg.norm(found[name] - tensor) / max(np.linalg.norm(tensor), 1e-9)
        assert distance < 1e-3, f"{name}: {distance:.2e}"


def test_scoring_tells_log_probs_and_entropies_as_the_update_after_it_does(model_folder: Path) -> None:
    samples, settings = make_samples(7, seed=31), replace(SETTINGS, entropies=True, logprobs_from_update=True)
    group = make_group(make_worker(model_folder), rows=2)
    scored, updated = store_samples(samples), store_samples(samples)
    for block in group.score_stored(scored, "old_logprobs", "entropy", temperature=SETTINGS.temperature):
        scored.add(block)
    group.update(updated, "policy", settings)
    for one, other in zip(open_samples(scored), open_samples(updated), strict=True):
        for name in ("old_logprobs", "entropy"):
            found, expected = (getattr(sample, name)[one.mask] for sample in (one, other))
            torch.testing.assert_close(found, expected)
        assert (one.entropy[one.mask] > 1).all() and (one.old_logprobs[one.mask] < -1).all()


def test_scoring_tells_squares_alone_or_beside_entropies(model_folder: Path) -> None:
    samples, group = make_samples(5, seed=33), make_group(make_worker(model_folder), rows=2)
    for sample in samples:
        del sample.old_logprobs
    found = []
    for names in (("old_logprobs", "squares"), ("old_logprobs", "entropy", "squares"), ("old_logprobs",)):
        stored = store_samples(samples)
        for block in group.score_stored(stored, *names, temperature=SETTINGS.temperature):
            stored.add(block)
        found.append(open_samples(stored))
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for alone, beside, plain in zip(*found, strict=True):
        logits = model(input_ids=alone.tokens[None]).logits[0, :-1].detach() / SETTINGS.temperature
        expected = logits.softmax(-1).square().sum(-1)[alone.mask[1:]]
        torch.testing.assert_close(alone.squares[alone.mask], expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(alone.squares, beside.squares) and not is_filled(plain, "squares")
        assert torch.equal(alone.old_logprobs, plain.old_logprobs)
        assert (beside.entropy[alone.mask] > 1).all()


def test_an_update_tells_the_entropy_of_each_token(model_folder: Path) -> None:
    """In the samples' own order, whatever the passes: that of the distribution at the run's temperature."""
    samples = make_samples(7, seed=31)
    group = make_group(make_worker(model_folder), rows=2)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    stored = store_samples(samples)
    group.update(stored, "policy", replace(SETTINGS, entropies=True))
    for sample in open_samples(stored):
        sample.tokens = sample.tokens.long()
        logits = model(input_ids=sample.tokens[None]).logits[0, :-1].detach() / SETTINGS.temperature
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(sample.entropy[1:][sample.mask[1:]], expected[sample.mask[1:]], rtol=1e-4, atol=1e-5)
    others = store_samples(make_samples(7, seed=31))
    group.update(others, "policy", SETTINGS)
    assert not any(is_filled(sample, "entropy") for sample in open_samples(others))


def test_preferences_are_learnt(model_folder: Path) -> None:
    """SimPO needs no reference: the margin between the two answers of each pair grows."""
    worker, samples = make_worker(model_folder, schedule="constant", learning_rate=1e-3), make_samples(6, seed=25)
    set_weights(samples, "sequence_sum", 0)
    settings = LossSettings(1.0, PreferenceConfig(loss="simpo", beta=2.0))
    group = make_group(worker, rows=2)
    reports = [group.update(samples, "preference", settings, samples_per_row=2) for _ in range(5)]
    margins = [report["preference/margin"] for report in reports]
    assert margins == sorted(margins)
    assert margins[-1] > margins[0]


def test_rewards_are_learnt_and_opened_by_transformers(model_folder: Path, tmp_path: Path) -> None:
    worker, samples = make_worker(model_folder, head="reward", learning_rate=1e-3), make_samples(6, seed=26)
    set_weights(samples, "sequence_sum", 0)
    group, settings = make_group(worker), LossSettings(1.0, RewardModelConfig())
    losses = [group.update(samples, "reward_model", settings, samples_per_row=2)["loss"] for _ in "1234"]
    assert losses == sorted(losses, reverse=True)
    group.keep_facts(samples, "reward_model", settings)
    save(worker, tmp_path / "checkpoint")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint" / "model", dtype=torch.float32)
    found = group.score(samples)
    rewards = [float(scores[-1, 0]) for scores in found]
    assert (model.config.reward_mean, model.config.reward_std) == (fmean(rewards), pstdev(rewards))
    for sample, scores in zip(samples, found, strict=True):
        assert scores.shape == (sample.length(), 1)
        expected = model(input_ids=sample.tokens[None]).logits[0, 0]
        torch.testing.assert_close(scores[-1, 0], expected, rtol=1e-4, atol=1e-5)


def test_what_a_loss_wants_to_know_of_the_minibatch_joins_the_settings(model_folder: Path) -> None:
    """KTO's companions are scored by the model that is trained, at the temperature of the run."""
    group, samples = make_group(make_worker(model_folder)), make_samples(2, seed=26)
    others = make_samples(2, seed=27)
    for sample, other in zip(samples, others, strict=True):
        sample.companion, other.ref_logprobs = other, torch.full((other.length(),), -20.0)
    given = LossSettings(0.8, KTOConfig(), {"known": 1.0})
    settings = group.prepare_settings(samples, "kto", given)
    scored = zip(others, group.score(others, 0.8), strict=True)
    kl = fmean(float(((logprobs + 20.0) * other.mask).sum()) for other, logprobs in scored)
    assert (settings.temperature, settings.section) == (0.8, given.section)
    assert settings.statistics == {"known": 1.0, "kto/kl": kl}
    assert group.prepare_settings(samples, "sft", given) == given


@pytest.mark.parametrize("head", ["reward", "steps"])
def test_a_scoring_head_beside_adapters_changes_as_a_whole(model_folder: Path, head: str) -> None:
    """A tensor that is called trained and never moves stops a run."""
    worker, samples = make_worker(model_folder, LORA, head=head), make_samples(4, seed=27)
    for sample in samples:
        sample.step_labels = torch.ones(sample.length())
    set_weights(samples, "sequence_sum", 0)
    before = worker.fingerprints()
    loss, config = ("reward_model", RewardModelConfig()) if head == "reward" else ("process_reward", None)
    for _ in range(2):
        make_group(worker).update(samples, loss, LossSettings(1.0, config), samples_per_row=2)
    assert [name for name, value in worker.fingerprints().items() if value == before[name]] == []


def test_what_belongs_to_a_reward_model_with_adapters_is_saved(model_folder: Path, tmp_path: Path) -> None:
    worker = make_worker(model_folder, LORA, head="reward")
    worker.annotate({"reward_mean": 0.25})
    folder = Path(save(worker, tmp_path / "checkpoint")) / "model"
    assert any("reward_mean" in file.read_text() for file in folder.rglob("*.json"))


def test_a_student_comes_nearer_to_its_teacher(model_folder: Path, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", tied=False)
    worker = make_worker(model_folder, teacher=teacher, learning_rate=1e-3)
    samples = make_samples(4, seed=28)
    losses = [make_group(worker).update(samples, "distill", SETTINGS)["loss"] for _ in "1234"]
    assert losses == sorted(losses, reverse=True)


def test_a_teacher_of_another_vocabulary_is_refused(model_folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder)
    config.vocab_size += 8
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=r"distill\.teacher=.*choose models with the same vocabulary"):
        make_worker(model_folder, teacher=tmp_path / "teacher")


def make_bloom(model_folder: Path, target: Path) -> Path:
    """An architecture that never asks for packed attention."""
    known = AutoConfig.from_pretrained(model_folder)
    config = BloomConfig(
        vocab_size=known.vocab_size,
        hidden_size=32,
        n_layer=2,
        n_head=2,
        pad_token_id=0,
        eos_token_id=known.eos_token_id,
    )
    BloomForCausalLM(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(target)
    return target


def test_an_architecture_that_cannot_be_packed_is_refused_at_the_start(model_folder: Path, tmp_path: Path) -> None:
    folder = make_bloom(model_folder, tmp_path / "bloom")
    with pytest.raises(ConfigError, match=r"set training\.packing=false"):
        make_worker(folder)


def test_advantages_of_zero_leave_every_tensor_alone(model_folder: Path) -> None:
    """Such a step is made, not skipped: whoever watches for weights that move must know of it."""
    worker, samples = make_worker(model_folder, weight_decay=0.0), make_samples(4, seed=29)
    for sample in samples:
        sample.advantages = torch.zeros(sample.length())
    before = worker.fingerprints()
    settings = LossSettings(0.8, AlgorithmConfig.parse({"preset": "grpo", "kl": {"coefficient": 0}}))
    metrics = make_group(worker).update(samples, "policy", settings)
    assert (metrics["grad_norm"], metrics["skipped"]) == (0.0, 0.0)
    assert worker.fingerprints() == before


def test_the_model_folder_is_one_that_transformers_opens(model_folder: Path, tmp_path: Path) -> None:
    worker = make_worker(model_folder)
    train(worker, range(1))
    save(worker, tmp_path)
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
    save(worker, tmp_path)
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


def short_of_memory(worker: Worker, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of more tokens than this do not fit; the second of an update fails, when the first left gradients."""
    whole, calls = worker.engine.forward, []

    def forward(batch: Any, *args: Any, **named: Any) -> Any:
        calls.append(len(batch.tokens))
        if len(calls) > 1 and calls[-1] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(batch, *args, **named)

    monkeypatch.setattr(worker.engine, "forward", forward)


def test_an_update_that_runs_out_of_memory_is_made_in_smaller_passes(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(8, seed=0)
    longest = max(sample.length() for sample in samples)
    plain, tight = make_worker(model_folder), make_worker(model_folder)
    expected = make_group(plain, 2 * longest).update(samples, "policy", SETTINGS)
    short_of_memory(tight, longest, monkeypatch)
    group = make_group(tight, 2 * longest)
    found = group.update(samples, "policy", SETTINGS)
    assert found.pop("memory/halved") == 1.0 and group.budget.tokens == longest
    assert without_memory([found])[0] == pytest.approx(without_memory([expected])[0], rel=1e-5)
    for name, tensor in weights(tight).items():
        torch.testing.assert_close(tensor, weights(plain)[name], rtol=1e-5, atol=1e-6)
    assert group.update(samples, "policy", SETTINGS)["memory/halved"] == 1.0  # it stays counted


@pytest.mark.parametrize(("tokens", "largest"), [(2, 0.5), (1, 0.5)])  # of the longest sample
def test_memory_that_half_the_pass_does_not_save_ends_the_run(
    tokens: float, largest: float, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(8, seed=0)
    longest = max(sample.length() for sample in samples)
    worker = make_worker(model_folder)
    short_of_memory(worker, int(largest * longest), monkeypatch)
    before = weights(worker)
    with pytest.raises(ActorFailure, match=rf"out of memory in passes of up to {longest} tokens: CUDA out of memory"):
        make_group(worker, tokens * longest).update(samples, "policy", SETTINGS)
    assert same(weights(worker), before) and worker.engine.steps == 0


def test_one_of_several_ranks_raises_at_once(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(model_folder)
    worker.spec = replace(worker.spec, world=2)
    short_of_memory(worker, 1, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        make_group(worker, 30).update(make_samples(8, seed=0), "policy", SETTINGS)
