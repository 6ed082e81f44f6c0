"""The Transformers engine on prompts with pictures, for each family: the trainer's log-probs, with and without them."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pictures import make_picture, make_tiny_gemma, make_tiny_llava, make_tiny_qwen, png
from tests.support.ranks import started
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.data.pictures import Picture
from trueline.data.types import Sample
from trueline.models.loading import load_chat
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.hf_engine import HFEngine
from trueline.training.worker import Worker, WorkerSpec

QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
MAKERS = {"llava": make_tiny_llava, "gemma3": make_tiny_gemma}
MAKERS |= {kind: partial(make_tiny_qwen, kind=kind) for kind in QWENS}
TOLERANCE = 1e-4
PARAMS = SamplingParams(1.0, 6, (), seed=3)


def picture(seed: int, size: tuple[int, int] = (40, 24)) -> Picture:
    return Picture(png(make_picture(seed, *size)), *size)


def by_trainer(trainer: Worker, tokens: list[int], pictures: tuple[Picture, ...]) -> torch.Tensor:
    """[T - 1] log-probs of tokens[1:]."""
    sample = Sample(torch.tensor(tokens), torch.arange(len(tokens)) > 0, pictures=pictures)
    plan = plan_micro_batches([len(tokens)], 1, Budget(10_000, None, False), 1)
    return torch.from_numpy(trainer.score(pack_samples([sample]), plan[0], 1.0))[1:]


@pytest.mark.parametrize("family", MAKERS)
def test_prompts_and_completions_have_the_logprobs_of_the_trainer(family: str, tmp_path: Path) -> None:
    """Texts are sampled after pictures, whose positions they must not inherit, and in the same batch."""
    model, keys = MAKERS[family](tmp_path), {"engine": "torch", "learning_rate": 1e-12, "packing": False}
    config = ModelConfig(path=str(model), dtype="float32")
    trainer = started(Worker(WorkerSpec(config, TrainingConfig.parse(keys), 0, 1, 100, 0)))
    engine = HFEngine(EngineSpec(str(model), "float32", 256, 1, 16, 0, 0.3, False, False, False, pictures=2))
    chat, seen = load_chat(config, "auto"), [(picture(1), picture(2, (60, 64))), (picture(3, (24, 40)),), ()]
    parts = [[*[{"type": "image"}] * len(one), {"type": "text", "text": "so?"}] for one in seen]
    asked = [[{"role": "user", "content": one}] for one in parts]
    prompts = [chat.begin(messages, (), one) for messages, one in zip(asked, seen, strict=True)]
    plain = [9] * len(prompts[1].tokens)  # as long as one with a picture: both are of one batch

    async def generate(tokens: list[int], shown: Any, name: str) -> Any:
        return await engine.generate(tokens, PARAMS, name, shown)

    async def all_of_them() -> list[Any]:
        asked = [*((one.tokens, one.shown) for one in prompts), (plain, None)]
        first = await asyncio.gather(*(generate(*one, str(at)) for at, one in enumerate(asked)))
        return [*first, await generate(plain, None, "later")]

    for prompt, pictures in zip(prompts, seen, strict=True):
        scores = torch.tensor(asyncio.run(engine.score(prompt.tokens, prompt.shown)))
        assert (scores - by_trainer(trainer, prompt.tokens, pictures)).abs().max() < TOLERANCE
    befores = [*(one.tokens for one in prompts), plain, plain]
    for before, one, pictures in zip(befores, asyncio.run(all_of_them()), [*seen, (), ()], strict=True):
        expected = by_trainer(trainer, [*before, *one.tokens.tolist()], pictures)[len(before) - 1 :]
        assert (torch.from_numpy(one.logprobs) - expected).abs().max() < TOLERANCE
