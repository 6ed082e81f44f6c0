"""What one policy and one engine take of a GPU, each alone on it and state by state, beside the terms of the forecast.

    python benchmarks/gpu_memory_terms.py FOLDER [--shape 7B] [--tokens 4096] [--share 0.328] [--side policy | engine]

The policy has its moments on the host and trains on passes of --tokens; the engine takes --share of the GPU. They run
in processes of their own, one after the other. A second call in FOLDER takes up the model that the first has made.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import torch
from random_model import SHAPES, make_model

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.rl import ResolvedRollout, RolloutConfig
from trueline.data.batching import Budget, plan_micro_batches
from trueline.data.types import Sample, pack_samples
from trueline.models.loading import check_model
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runs import memory
from trueline.runtime.cluster import machine_at_hand
from trueline.training.report import LossSettings, in_use_gib
from trueline.training.worker import Worker, WorkerSpec

GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if GPU else "float32"
SEQUENCES, LONGEST, PROMPT = 128 if GPU else 2, 640, 128


def say(state: str, **terms: float) -> None:
    """Print what is in use of the GPU, and of it what this process's tensors and its allocator had at most."""
    found = (0.0, 0.0, 0.0)
    if GPU:
        torch.cuda.synchronize()
        found = (in_use_gib(), torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30)
        torch.cuda.reset_peak_memory_stats()
    forecast = sum(terms.values()) / memory.GIB
    parts = ", ".join(f"{name} {value / memory.GIB:.2f}" for name, value in terms.items())
    print(
        f"{state:<22} in use {found[0]:6.2f}  forecast {forecast:6.2f} ({parts});  most of tensors {found[1]:6.2f}, of "
        f"the allocator {found[2]:6.2f} GiB",
        flush=True,
    )


def policy(path: str, tokens: int) -> None:
    config, ranks = ModelConfig(path=path, dtype=DTYPE), TrainingConfig(offload="moments", micro_batch_tokens=tokens)
    facts = check_model(config)
    one = memory.Tenant("policy", "training", facts, config, ranks, 1, SEQUENCES * LONGEST)
    samples = [Sample(torch.randint(3, 1000, (LONGEST,)), torch.arange(LONGEST) >= PROMPT) for _ in range(SEQUENCES)]
    set_weights(samples, "token_mean", LONGEST)
    passes = plan_micro_batches([LONGEST] * SEQUENCES, 1, Budget(tokens))[0]
    worker = Worker(WorkerSpec(config, ranks, 0, 1, 10, 0))
    worker.start(worker.listen())
    say("started", context=memory.CONTEXT, kept=memory.kept_bytes(one))
    print(
        f"  while it starts, the plan has {memory.idle_bytes(one) / memory.GIB:.2f} GiB beside an engine that is awake"
    )
    for step in range(2):
        worker.update(pack_samples(samples), passes, "sft", LossSettings())
        say(
            f"after update {step}",
            context=memory.CONTEXT,
            model=memory.model_bytes(one),
            passes=(1 + memory.SLACK) * memory.activation_bytes(one, tokens, False, "cuda"),
            stepping=memory.stepping_bytes(one),
        )
    worker.release()
    say("released", context=memory.CONTEXT, kept=memory.kept_bytes(one))


async def engine(path: str, share: float) -> None:
    from trueline.rollout.vllm_engine import VllmEngine  # the other side does without vLLM

    machine, facts = machine_at_hand(), check_model(ModelConfig(path=path))
    lengths = {"max_prompt_tokens": PROMPT, "max_new_tokens": LONGEST - PROMPT}
    rollout = ResolvedRollout.parse({"engines": 1, "dtype": DTYPE} | lengths)
    room = memory.engine_room(rollout, facts, machine, SEQUENCES, share)
    cache = room.cache_bytes(share * machine.gpu_bytes) if GPU else 0
    spec = EngineSpec(path, DTYPE, LONGEST, 1, 256, 0, share, True, GPU, False, cache_bytes=cache)
    made = VllmEngine(spec)
    terms = {"share": share * machine.gpu_bytes, "outside": memory.ENGINE_OUTSIDE}
    say("engine ready", **terms)
    params = SamplingParams(1.0, LONGEST - PROMPT, ())
    prompts = [[10 + (number + place) % 500 for place in range(PROMPT)] for number in range(SEQUENCES)]
    await asyncio.gather(*(made.generate(prompt, params, str(number)) for number, prompt in enumerate(prompts)))
    say("engine has sampled", **terms)
    await made.sleep()
    say("engine asleep", asleep=memory.ENGINE_ASLEEP)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="7B", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.328)
    parser.add_argument("--side", choices=["policy", "engine"])
    given = parser.parse_args()
    path = given.folder.resolve() / f"model-{given.shape}"
    if not path.exists():
        make_model(path, given.shape)
    if given.side == "policy":
        policy(str(path), given.tokens)
    elif given.side == "engine":
        asyncio.run(engine(str(path), given.share))
    else:
        own = ROLLOUT_ENGINES["vllm"].environment(RolloutConfig(), int(GPU))
        sides = [[sys.executable, *sys.argv, "--side", side] for side in ("policy", "engine")]
        return max(subprocess.run(side, env=os.environ | own, check=False).returncode for side in sides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
