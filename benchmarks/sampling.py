"""Tokens per second sampled through Trueline's pool of engines, and by vLLM's own `generate`, on the same requests.

    python benchmarks/sampling.py FOLDER [--shape 1.5B] [--vocabulary N] [--tokens 512] [--completions 16x8]
        [--rounds 4] [--out FILE]

One engine with the same options on either side, in a process of its own, one side after the other. The pool is used
as in a run: one call through Ray for each completion, without seeds, log-probs included. Medians of the rounds
after the first. With --vocabulary 1024 completions end at random, each side's where they happen to.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from random_model import SHAPES, make_model, make_parser, read_size, write_result

from trueline.config.rl import RolloutConfig
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout, Processes, process_environment

SECONDS = 600.0


def spec_of(folder: Path, given: argparse.Namespace) -> EngineSpec:
    dtype = "bfloat16" if machine_at_hand().gpus else "float32"
    context, sequences = 128 + given.tokens, given.completions[0] * given.completions[1]
    return EngineSpec(f"{folder}/model", dtype, context, 1, sequences, 0, 0.5, True, False, False)


def prompts_of(given: argparse.Namespace) -> list[list[int]]:
    words = 1000 if given.vocabulary is None else given.vocabulary - 24
    return [[10 + (number * 37 + place * 11) % words for place in range(100)] for number in range(given.completions[0])]


def through_pool(folder: Path, given: argparse.Namespace) -> list[float]:
    machine, loop = machine_at_hand(), EventLoop(SECONDS)
    params = SamplingParams(1.0, given.tokens, (given.end,))
    speeds = []
    with ray_cluster(machine):
        processes = Processes(machine, Layout(0, 1), folder / "logs", local=False)
        target = ROLLOUT_ENGINES["vllm"].target(RolloutConfig())
        pool = EnginePool(processes.engines(target, [spec_of(folder, given)]))
        loop.run(pool.call(RolloutEngine.processes), "start of the engine")

        async def sample(turn: int) -> int:
            calls = [
                pool.generate(tokens, params, RolloutKey(number, index), turn)
                for number, tokens in enumerate(prompts_of(given))
                for index in range(given.completions[1])
            ]
            return sum(len(one.tokens) for one in await asyncio.gather(*calls))

        for turn in range(given.rounds):
            start = time.perf_counter()
            count = loop.run(sample(turn), "sampling")
            speeds.append(count / (time.perf_counter() - start))
        pool.stop()
    loop.stop()
    return speeds[1:]


def by_vllm(folder: Path, given: argparse.Namespace) -> list[float]:
    """Sample in this very process; called by itself, with the environment that a run gives its engines."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams
    from vllm.inputs import TokensPrompt

    from trueline.rollout.vllm_engine import engine_options

    options = engine_options(spec_of(folder, given), on_gpu=machine_at_hand().gpus > 0)
    llm = LLM(**options)
    params = VllmParams(
        temperature=1.0, max_tokens=given.tokens, stop_token_ids=[given.end], detokenize=False, logprobs=0
    )
    prompts = [
        TokensPrompt(prompt_token_ids=tokens) for tokens in prompts_of(given) for _ in range(given.completions[1])
    ]
    speeds = []
    for _ in range(given.rounds):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        speeds.append(count / (time.perf_counter() - start))
    return speeds[1:]


def vllm_side(folder: Path) -> list[float]:
    """Run this program again for vLLM's side."""
    machine = machine_at_hand()
    target = ROLLOUT_ENGINES["vllm"].target(RolloutConfig())
    variables = [f"{name}={value}" for name, value in process_environment(target, machine).items()]
    result = folder / "vllm.json"
    subprocess.run(["env", *variables, sys.executable, *sys.argv, f"--vllm-side={result}"], check=True)
    found: list[float] = json.loads(result.read_text())
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--completions", type=read_size, default=(16, 8))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--end", type=int, default=2, help="token that ends a completion")
    parser.add_argument("--vllm-side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.vllm_side is not None:
        given.vllm_side.write_text(json.dumps(by_vllm(folder, given)))
        return 0
    make_model(folder / "model", given.shape, vocabulary=given.vocabulary)
    speeds = {"vllm": median(vllm_side(folder)), "pool": median(through_pool(folder, given))}
    found = speeds | {"ratio": speeds["pool"] / speeds["vllm"]}
    print(json.dumps(found))
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
