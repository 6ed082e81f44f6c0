"""On a GPU: packed attention, head and log-probs against float64, and adapters that learn beside 4-bit weights."""

import os
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig
from trueline.data.types import Sample
from trueline.models.attention import sequence_by_sequence, varlen_attention
from trueline.models.head import ChunkedHead, HeadWork
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

pytestmark = pytest.mark.gpu
LENGTHS = [3, 130, 64, 257]


def with_gradients(attend: object, parts: list[Tensor], flow: Tensor) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    out = attend(*leaves, LENGTHS, leaves[0].shape[-1] ** -0.5, None)  # type: ignore[operator]
    out.backward(flow)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_packed_attention_and_its_gradients() -> None:
    torch.manual_seed(0)
    heads = (8, 2, 2)
    parts = [torch.randn(sum(LENGTHS), count, 64, device="cuda").bfloat16() for count in heads]
    flow = torch.randn(sum(LENGTHS), heads[0], 64, device="cuda").bfloat16()
    found = with_gradients(varlen_attention, parts, flow)
    truth = with_gradients(sequence_by_sequence, [part.double() for part in parts], flow.double())
    for one, other in zip(found, truth, strict=True):
        assert (one.double() - other).norm() / other.norm() < 1e-2  # bfloat16 has 8 bits


def test_the_head_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 128, device="cuda"), torch.randn(5000, 128, device="cuda") / 11
    targets = torch.randint(0, 5000, (700,), device="cuda")
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        found = ChunkedHead.apply(*leaves, None, targets, HeadWork(0.7, 256, True))  # type: ignore[misc]
        logprobs, entropy, variance = found
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        scores = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
        truth = scores.gather(-1, targets[:, None])[:, 0]
        uncertainty = -(scores.exp() * scores).sum(-1)
        (truth.sum() + 0.1 * uncertainty.sum()).backward()
        pairs = [
            (logprobs, truth),
            (entropy, uncertainty),
            (variance, (scores.exp() * (scores + uncertainty[:, None]).square()).sum(-1)),
            *((one.grad, other.grad) for one, other in zip(leaves, exact, strict=True)),
        ]
        for one, other in pairs:
            assert (one.double() - other).norm() / other.norm() < limit, dtype


def make_group(config: ModelConfig, **training: object) -> ModelGroup:
    ranks = TrainingConfig.parse({"engine": "torch", "learning_rate": 1e-3, **training})
    group = ModelGroup("policy", [LocalActor("policy", Worker(WorkerSpec(config, ranks, 0, 1, 100, 0)))], ranks, 300.0)
    group.start()
    return group


def make_texts() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(500, 5000, (length,), generator=generator) for length in LENGTHS]
    return [Sample(tokens, torch.arange(len(tokens)) > 0) for tokens in texts]


def test_log_probs_of_a_real_model() -> None:
    model, samples = os.environ["SMOLLM2"], make_texts()
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()

    def scored(network: torch.nn.Module, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            scores = network(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        return scores.gather(-1, tokens[1:, None])[:, 0].cpu()

    truths = [scored(exact, one.tokens) for one in samples]
    rounded = [scored(plain, one.tokens.cuda()) for one in samples]

    def gap(found: list[Tensor]) -> float:
        return float(torch.cat([(one - other).abs() for one, other in zip(found, truths, strict=True)]).mean())

    for dtype, limit in (("float32", 1e-4), ("bfloat16", 1.3 * gap(rounded))):
        group = make_group(ModelConfig.parse({"path": model, "dtype": dtype}))
        assert gap([scores[1:].double() for scores in group.score(samples, 1.0)]) < limit, dtype


def test_passes_do_not_wait_for_the_device() -> None:
    """An update waits for it a few times, however many passes it makes."""
    group = make_group(ModelConfig(path=os.environ["SMOLLM2"], dtype="bfloat16"))
    samples = make_texts() * 4
    for sample in samples:
        sample.weight = 1 / len(samples)
    waits = []
    for passes in (2, 2, 8):  # the first one warms up
        group.budget = replace(group.budget, samples=len(samples) // passes)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            group.update(samples, "sft", LossSettings())
            torch.cuda.set_sync_debug_mode("default")
        waits.append([f"{one.filename}:{one.lineno}" for one in found if "synchronizing" in str(one.message)])
    assert len(waits[2]) <= len(waits[1]) + 1, waits[2]


@pytest.mark.parametrize("quantize", [False, True])
def test_adapters_learn(quantize: bool) -> None:
    lora = LoraConfig(rank=8, quantize=quantize)
    group = make_group(ModelConfig(path=os.environ["SMOLLM2"], dtype="bfloat16", lora=lora))
    samples = make_texts()
    for sample in samples:
        sample.weight = 1 / sum(LENGTHS)
    settings = LossSettings()
    losses = [group.update(samples, "sft", settings)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 1, losses
