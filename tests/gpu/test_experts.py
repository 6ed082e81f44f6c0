"""On one GPU: vLLM tells the experts that it chose, over prefix-cache hits, cut-off requests and new weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.support.mixtures import chosen_by
from trueline.config.rl import RolloutConfig
from trueline.data.types import UNKNOWN_EXPERT, Completion
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout, Processes

pytestmark = pytest.mark.gpu
SECONDS = 300.0
PROMPT = list(range(3, 103))
LAYERS, TOP_K = 3, 2
Stage = tuple[EnginePool, EventLoop, Path]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": LAYERS}
    experts = {"num_experts": 16, "num_experts_per_tok": TOP_K, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    machine, loop = machine_at_hand(), EventLoop(SECONDS)
    spec = EngineSpec(str(folder), "bfloat16", 512, 1, 16, 0, 0.2, True, False, False, experts=True)
    with ray_cluster(machine):
        processes = Processes(machine, Layout(0, 1), folder / "logs", local=False)
        pool = EnginePool(processes.engines(ROLLOUT_ENGINES["vllm"].target(RolloutConfig()), [spec]))
        loop.run(pool.call(RolloutEngine.processes), "start of the engine")
        yield pool, loop, folder
        pool.stop()
    loop.stop()


def check(completion: Completion, folder: Path) -> None:
    tokens = [*PROMPT, *completion.tokens.tolist()]
    assert completion.experts.shape == (len(tokens), LAYERS, TOP_K)
    assert (completion.experts[-1] == UNKNOWN_EXPERT).all() and (completion.experts[:-1] != UNKNOWN_EXPERT).all()
    own = chosen_by(folder, torch.tensor(tokens)).numpy()[:-1, [0, 2]]  # in float32, and the second layer is dense
    told = completion.experts[:-1, [0, 2]]
    agreed = (own[..., :, None] == told[..., None, :]).any(-1).mean()
    assert agreed > 0.9  # of 16 experts, chance alone gives 0.13


def test_prompts_cached_prompts_and_answers(stage: Stage) -> None:
    pool, loop, folder = stage

    async def ask() -> list[Completion]:
        calls = [pool.generate(PROMPT, SamplingParams(1.0, 5 + at, (), at), RolloutKey(0, at)) for at in range(8)]
        first = list(await asyncio.gather(*calls))
        return [*first, await pool.generate(PROMPT, SamplingParams(1.0, 4, (), 9), RolloutKey(0, 0), 1)]

    found = loop.run(ask(), "completions")
    assert found[-1].cached > 0
    for completion in found:
        check(completion, folder)
    np.testing.assert_array_equal(found[0].experts[: len(PROMPT) - 16], found[-1].experts[: len(PROMPT) - 16])


def test_a_request_that_is_cut_off_and_goes_on(stage: Stage) -> None:
    pool, loop, folder = stage

    async def ask() -> Completion:
        asked = asyncio.ensure_future(pool.generate(PROMPT, SamplingParams(1.0, 400, (), 3), RolloutKey(0, 0)))
        await asyncio.sleep(0.4)
        await pool.actors[0].call(RolloutEngine.pause, "keep")
        await pool.actors[0].call(RolloutEngine.resume)
        return await asked

    check(loop.run(ask(), "a completion in parts"), folder)
