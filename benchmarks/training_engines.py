"""Tokens per second and memory of the training engines, against a bare PyTorch loop over the same passes.

    python benchmarks/training_engines.py [--shape 1.5B] [--sides bare deepspeed fsdp2] [--modes checkpointed plain]
        [--offload none] [--samples 128] [--longest 2048] [--tokens 16384] [--steps 4] [--rounds 3] [--stay]
        [--out FILE]

On one GPU in bfloat16, elsewhere in float32, without Ray; every side computes the same log-probs of the same packed
passes by the same attention and head, and steps float32 weights with the same AdamW. `deepspeed` (ZeRO 2), `zero3`,
`fsdp2` and `fsdp2-kept` (training.fsdp2.reshard=false) are Trueline's worker, which also checks and reports. `bare` is
a loop over the module: float32 sums and weights, clipped by the same norm. --modes adds compiled layers: `compiled`,
`compiled-checkpointed`. With --offload all, DeepSpeed runs at ZeRO 3, and bare keeps its moments on the host alone.

Sides take turns, each in a process of its own: A B C, A B C, ... With --stay all of them start at once and keep their
processes for one mode after the other, which takes less time where the device holds all sides together.

A ratio is of two medians of one round, and the table has the median over the rounds, their range, and the most memory:
on a GPU of tensors (and with the allocator's cache), elsewhere of the process, libraries included. `processor` compares
processor time: use it if other programs run too. The losses of all sides have to agree; otherwise the exit status is 1.
A model of 7B needs --shape 7B --modes checkpointed --offload moments --samples 32.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from random_model import SHAPES, make_model, make_parser, write_result
from train_throughput import DEVICE, DTYPE, make_samples, make_scorer, synchronized_time

from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, collate, pack_samples, plan_micro_batches
from trueline.data.types import Sample
from trueline.models.compiling import CompiledLayers
from trueline.training.engines.optimizer import make_optimizer
from trueline.training.report import LossSettings, memory_metrics
from trueline.training.worker import Worker, WorkerSpec, rank_environment

GPU = DEVICE.type == "cuda"
WARM = 2  # steps that do not count
RATE = 1e-6
APART = 1e-2 if GPU else 1e-5  # how far losses of two sides may differ, relatively: what rounding does
SIDES: dict[str, dict[str, Any]] = {
    "bare": {},
    "deepspeed": {"engine": "deepspeed"},
    "zero3": {"engine": "deepspeed", "deepspeed": {"zero_stage": 3}},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-kept": {"engine": "fsdp2", "fsdp2": {"reshard": False}},
}
# Whether activations are recomputed, and layers compiled; nothing takes that back.
MODES = {
    "checkpointed": (True, False),
    "plain": (False, False),
    "compiled-checkpointed": (True, True),
    "compiled": (False, True),
}
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of PyTorch about its own calls, at every step
Figures = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What one process measures: one side, in some modes."""

    model: str
    side: str
    modes: tuple[str, ...]
    offload: str
    samples: tuple[int, int]  # how many, and the longest
    tokens: int
    steps: int

    def keys(self) -> TrainingConfig:
        """Return the keys of a side; all of a model is on the host at ZeRO 3 only, and never in the bare loop."""
        everything = self.offload == "all"
        offload = "moments" if self.side == "bare" and everything else self.offload
        side = "zero3" if self.side == "deepspeed" and everything else self.side
        return TrainingConfig.parse({"learning_rate": RATE, "offload": offload, **SIDES[side]})

    def material(self) -> tuple[list[Sample], Any]:
        samples = make_samples(*self.samples, 1000)
        (passes,) = plan_micro_batches([one.length() for one in samples], 1, Budget(self.tokens))
        return samples, passes


class Engine:
    """A side that is Trueline's worker."""

    compiled = False

    def __init__(self, turn: Turn, packed: Any, passes: Any) -> None:
        config = ModelConfig(path=turn.model, dtype=DTYPE)
        self.worker = Worker(WorkerSpec(config, turn.keys(), 0, 1, 1000, 0))
        self.worker.start(self.worker.listen())
        self.model, self.given = self.worker.model, (packed, passes)

    def compile(self) -> None:
        self.worker.compiled = CompiledLayers(self.worker.scorer)

    def step(self) -> float:
        report = self.worker.update(*self.given, "sft", LossSettings())
        if report.out_of_memory or report.remark:
            raise RuntimeError(report.out_of_memory or report.remark)
        return report.sums["loss"]


class Bare:
    """A side that is a loop over the module."""

    compiled = False

    def __init__(self, turn: Turn, packed: Any, passes: Any) -> None:
        self.scorer = make_scorer(ModelConfig(path=turn.model, dtype=DTYPE))
        self.model, self.packed, self.passes = self.scorer.model, packed, passes
        self.weights = list(self.scorer.parameters())
        self.masters = self.weights if DTYPE == "float32" else [one.detach().float() for one in self.weights]
        named = [(name, one) for (name, _), one in zip(self.scorer.named_parameters(), self.masters, strict=True)]
        for _, one in named:
            one.requires_grad_()
        self.optimizer = make_optimizer(named, turn.keys())

    def compile(self) -> None:
        CompiledLayers(self.scorer)

    def step(self) -> float:
        losses = [self._add_gradients(one) for one in self.passes]
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return float(sum(losses))

    def _add_gradients(self, micro_batch: Any) -> torch.Tensor:
        batch = collate(self.packed, micro_batch, DEVICE)
        found = self.scorer(batch.tokens, batch.mask_bytes(), batch.lengths, 1.0, entropy=False)
        loss = -(batch.token_weights() * found["logprobs"]).sum()
        loss.backward()
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                fresh = weight.grad.float()
                master.grad = fresh if master.grad is None else master.grad.add_(fresh)
                weight.grad = None
        return loss.detach()


@lru_cache(maxsize=1)
def open_side(turn: Turn) -> Engine | Bare:
    """Return the side of this process, which later turns find as it is."""
    samples, passes = turn.material()
    return (Bare if turn.side == "bare" else Engine)(turn, pack_samples(samples), passes)


def measure(turn: Turn) -> dict[str, Figures]:
    """Return seconds, memory and loss of every mode, measured in this process."""
    side = open_side(replace(turn, modes=()))
    found: dict[str, Figures] = {}
    for mode in turn.modes:
        again, compiled = MODES[mode]
        if again:
            side.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            side.model.gradient_checkpointing_disable()
        if compiled and not side.compiled:
            side.compile()
            side.compiled = True
        found[mode] = measure_steps(side.step, turn.steps)
    return found


def measure_steps(step: Callable[[], float], steps: int) -> Figures:
    losses, times = [], []
    for number in range(WARM + steps):
        if number == WARM:
            forget_peak()
        start = synchronized_time(), time.process_time()
        losses.append(step())
        times.append((synchronized_time() - start[0], time.process_time() - start[1]))
    seconds, processor = zip(*times[WARM:], strict=True)
    reserved = {"reserved_gib": torch.cuda.max_memory_reserved() / 2**30} if GPU else {}
    found = {"seconds": seconds, "processor": processor, "gib": peak_gib(), "loss": losses[-1], **reserved}
    forget_peak()  # gives other sides the memory that is free
    return found


def forget_peak() -> None:
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew


def peak_gib() -> float:
    if GPU:
        return memory_metrics(DEVICE)["memory/peak_gib"]
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def start_process(turn: Turn) -> ProcessPoolExecutor:
    """Start a process with what a rank of this engine is started with."""
    process = ProcessPoolExecutor(1, get_context("spawn"))
    with patch.dict(os.environ, rank_environment(turn.keys(), torch.cuda.device_count()) | QUIET):
        process.submit(os.getpid)
    return process


def take_turn(turn: Turn, process: ProcessPoolExecutor) -> dict[str, Figures] | str:
    """Measure in this process; return why it failed."""
    try:
        return process.submit(measure, turn).result()
    except RuntimeError as error:  # out of memory, and a process that was killed, are among these
        return str(error).splitlines()[0]


def take_turns(turns: dict[str, Turn], rounds: int, stay: bool) -> Iterator[tuple[int, str, dict[str, Figures] | str]]:
    """Return the round, the side, and its figures or why it failed; a side that has failed has no further turn."""
    failed = set()
    with ExitStack() as stack:
        kept = {side: stack.enter_context(start_process(turn)) for side, turn in turns.items()} if stay else {}
        modes = next(iter(turns.values())).modes
        wait([process.submit(measure, replace(turns[side], modes=())) for side, process in kept.items()])
        for chosen, number, side in product([(one,) for one in modes] if stay else [modes], range(rounds), turns):
            if side not in failed:
                turn = replace(turns[side], modes=chosen)
                with nullcontext(kept[side]) if stay else start_process(turn) as process:
                    figures = take_turn(turn, process)
                failed |= {side} if isinstance(figures, str) else set()
                yield number, side, figures


def summarize(mode: str, rounds: list[dict[str, Any]], tokens: int) -> dict[str, Figures]:
    """Return of each side tokens per second, its ratio to the bare loop with its range, memory and loss."""
    found = {}
    for side in rounds[0]:
        turns = [one[side][mode] for one in rounds if mode in one.get(side, {})]
        if turns:
            speeds = {
                name: tokens / median(seconds for turn in turns for seconds in turn[times])
                for name, times in {"tokens_per_second": "seconds", "tokens_per_processor_second": "processor"}.items()
            }
            most = {key: max(turn[key] for turn in turns) for key in ("gib", "reserved_gib") if key in turns[0]}
            found[side] = {**speeds, **most, "loss": turns[-1]["loss"], **ratios(mode, side, rounds)}
    return found


def ratios(mode: str, side: str, rounds: list[dict[str, Any]]) -> Figures:
    both = [
        (one["bare"][mode], one[side][mode])
        for one in rounds
        if all(mode in one.get(which, {}) for which in ("bare", side))
    ]
    found: Figures = {}
    for name, times in {"ratio": "seconds", "processor": "processor"}.items():
        ordered = sorted(median(bare[times]) / median(own[times]) for bare, own in both)
        found |= {name: median(ordered), f"{name}_range": [ordered[0], ordered[-1]]} if ordered else {}
    return found


def machine() -> str:
    device = torch.cuda.get_device_name() if GPU else f"{os.cpu_count()} CPU cores"
    return f"{device}, {DTYPE}, torch {torch.__version__}"


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def show(mode: str, sides: dict[str, Figures]) -> None:
    for side, of in sides.items():
        spread = "{:.3f} to {:.3f}".format(*of["ratio_range"]) if "ratio" in of else ""
        ratio = f"{of['ratio']:.3f} of bare ({spread}), processor {of['processor']:.3f}" if spread else ""
        print(f"{mode:<22}{side:<12}{of['tokens_per_second']:9.0f} tokens/s {of['gib']:7.2f} GiB  {ratio}", flush=True)


def agree(sides: dict[str, Figures]) -> bool:
    losses = [of["loss"] for of in sides.values()]
    return max(losses) - min(losses) <= APART * abs(losses[0]) if losses else False


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="1.5B" if GPU else "small", choices=SHAPES)
    parser.add_argument("--sides", nargs="+", default=["bare", "deepspeed", "fsdp2"], choices=SIDES)
    parser.add_argument("--modes", nargs="+", default=["checkpointed", "plain"], choices=MODES)
    parser.add_argument("--offload", default="none", choices=["none", "moments", "all"])
    parser.add_argument("--samples", type=int, default=128 if GPU else 32)
    parser.add_argument("--longest", type=int, default=2048 if GPU else 256)
    parser.add_argument("--tokens", type=int, default=16384 if GPU else 1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    modes, rounds = (
        tuple(mode for mode in MODES if mode in given.modes),
        [dict[str, Any]() for _ in range(given.rounds)],
    )
    facts: Figures = {"commit": commit(), "machine": machine(), "shape": given.shape}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given.shape)
        sizes = (modes, given.offload, (given.samples, given.longest), given.tokens, given.steps)
        turns = {side: Turn(folder, side, *sizes) for side in given.sides}
        facts["tokens"] = sum(one.length() for one in turns[given.sides[0]].material()[0])
        start = time.monotonic()
        for number, side, figures in take_turns(turns, given.rounds, given.stay):
            failed |= {side: figures} if isinstance(figures, str) else {}
            rounds[number].setdefault(side, {}).update({} if isinstance(figures, str) else figures)
            print(f"{time.monotonic() - start:.0f} s, round {number + 1} {side}: {failed.get(side, '')}", flush=True)
            found = {mode: summarize(mode, rounds, facts["tokens"]) for mode in modes}
            write_result(given.out, {**facts, "failed": failed, "modes": found})
    for mode, sides in found.items():
        show(mode, sides)
    return int(bool(failed) or not all(map(agree, found.values())))


if __name__ == "__main__":
    sys.exit(main())
