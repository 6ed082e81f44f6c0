"""GRPO of a mixture of experts: the trainer routes tokens itself, and again replays the engine's routing.

    python benchmarks/routing_replay.py FOLDER [--model PATH] [--steps 6] [--tokens 256] [--completions 16x8] [--tiny]
        [--out FILE] [key=value ...]

The model has the shape of a Qwen3-MoE of 0.7B parameters (32 experts in each of 12 layers, 4 of which see a token) and
random weights, those of routers and head scaled up, so that they are decisive; --tiny shrinks it for a try on a CPU,
and --model takes a folder. Completions are one policy version old, a step makes two updates at a high rate, and rewards
are random: weights should move, not learn. First, one request shows whether the engine returns experts. Prints log-prob
gaps between engine and trainer in the first step, whose weights are those that sampled, and over all others, and the
share of choices that agree. Further arguments are keys of both runs.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from random_model import make_parser, make_prompts, read_size, read_steps, write_result
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trueline.cli import main as trueline
from trueline.config.rl import RolloutConfig
from trueline.demo.material import make_tokenizer
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout, Processes

SHAPES = {
    "0.7B": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 1024,
    },
}
SHARPER = 4.0  # factor on the weights of routers and head
RANDOM_REWARD = """
import random


def reward(reply: str) -> float:
    return random.random()
"""
MODES = {"own": "measure", "replayed": "true"}  # of training.replay_routing
SECONDS = 300.0
GAPS = ("mismatch/logprob_gap_mean", "mismatch/logprob_gap_max", "mismatch/kl", "mismatch/effective_share")
AGREEMENT = "mismatch/routing_agreement"


def make_mixture(folder: Path, shape: str) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    more = {"max_position_embeddings": 4096, "tie_word_embeddings": False, "norm_topk_prob": True}
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        config = Qwen3MoeConfig(**SHAPES[shape], **more, **ids)
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16 if gpu else torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "lm_head.weight")):
                tensor *= SHARPER
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    if gpu:
        torch.cuda.empty_cache()


def probe_engine(folder: Path, model: str, engine: str, *, local: bool) -> dict[str, Any]:
    """Sample one completion, and return what the engine reports of experts."""
    machine, loop = machine_at_hand(), EventLoop(SECONDS)
    dtype = "bfloat16" if machine.gpus else "float32"
    spec = EngineSpec(model, dtype, 256, 1, 8, 0, 0.3, False, False, False, experts=True)
    with nullcontext() if local else ray_cluster(machine):
        processes = Processes(machine, Layout(0, 1), folder / "logs", local=local)
        pool = EnginePool(processes.engines(ROLLOUT_ENGINES[engine].target(RolloutConfig()), [spec]))
        loop.run(pool.call(RolloutEngine.processes), "start of the engine")
        request = pool.generate(list(range(3, 43)), SamplingParams(1.0, 16, ()), RolloutKey(0, 0))
        completion = loop.run(request, "one completion")
        pool.stop()
    loop.stop()
    experts = completion.experts
    known = int((experts >= 0).all(axis=(1, 2)).sum()) if len(experts) else 0
    return {
        "tokens": 40 + len(completion.tokens),
        "shape": list(experts.shape),
        "dtype": str(experts.dtype),
        "routed_tokens": known,
        "different_experts": len(set(experts[experts >= 0].tolist())),
    }


def run(folder: Path, mode: str, given: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    prompts, group = given.completions
    command = ["grpo", "--model", given.model, "--data", f"{folder}/prompts.jsonl", "--name", mode, f"folder={folder}"]
    command += ["--reward", f"{folder}/random_reward.py:reward", f"steps={given.steps}", f"prompts_per_step={prompts}"]
    command += [f"algorithm.group_size={group}", "algorithm.kl.coefficient=0", "minibatches=2"]
    command += [f"rollout.max_new_tokens={given.tokens}", "rollout.max_prompt_tokens=128", "rollout.max_staleness=1"]
    command += [f"rollout.engine={given.engine}", "rollout.cuda_graphs=false", "training.learning_rate=3e-5"]
    command += ["sync.tolerance=5", "checkpoint.save=false", "monitoring.tensorboard=false", "monitoring.doctor=false"]
    if trueline([*command, f"training.replay_routing={MODES[mode]}", *overrides]):
        raise SystemExit(f"the run {folder / mode} failed")
    steps = read_steps(folder / mode)
    stale = steps[1:] or steps  # the first step has the weights that sampled it
    return {
        "gap_mean": fmean(row["mismatch/logprob_gap_mean"] for row in stale),
        "gap_max": max(row["mismatch/logprob_gap_max"] for row in stale),
        "kl": fmean(row["mismatch/kl"] for row in stale),
        "effective_share": fmean(row["mismatch/effective_share"] for row in stale),
        "agreement": fmean(row[AGREEMENT] for row in stale),
        "first_gap_mean": steps[0]["mismatch/logprob_gap_mean"],
        "first_gap_max": steps[0]["mismatch/logprob_gap_max"],
        "first_agreement": steps[0][AGREEMENT],
        "seconds": fmean(row["time/step"] for row in stale),
        "steps": [{name: row[name] for name in (*GAPS, AGREEMENT, "rollout/staleness_mean")} for row in steps],
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    names = ["first_gap_mean", "first_gap_max", "first_agreement", "gap_mean", "gap_max", "kl", "effective_share"]
    names += ["agreement", "seconds"]
    rows = [["experts", *names], ["---"] * (len(names) + 1)]
    rows += [[mode, *(f"{of[name]:.4g}" for name in names)] for mode, of in found.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--completions", type=read_size, default=(16, 8))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", default="vllm" if torch.cuda.is_available() else "hf")
    parser.add_argument("--out", type=Path)
    given, overrides = parser.parse_known_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True)
    if given.model is None:
        given.model = str(folder / "model")
        make_mixture(Path(given.model), "tiny" if given.tiny else "0.7B")
    make_prompts(folder)
    (folder / "random_reward.py").write_text(RANDOM_REWARD)
    one = probe_engine(folder, given.model, given.engine, local="runtime=local" in overrides)
    print(f"{given.engine} returns for one request: {one}", flush=True)
    found = {mode: run(folder, mode, given, overrides) for mode in MODES}
    print(table(found))
    write_result(given.out, {"one_request": one, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
