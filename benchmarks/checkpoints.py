"""Seconds that four ranks take to save a checkpoint, over those of one writer with the same bytes.

    python benchmarks/checkpoints.py [--mebibytes 1024] [--folder FOLDER] [--rounds 3]

Ranks are processes that write, hash and flush their shares as those of a run do. The ratio is that of the medians; a
high load average means that other programs slowed both.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from statistics import median
from typing import Any

import torch

from trueline.training.engines.shards import whole_shard
from trueline.training.saving import MODEL, TRAINING, Content, Saver

RANKS, LAYERS = 4, 24


def contents(elements: int, rank: int, world: int) -> Iterator[Content]:
    """Weights in bfloat16, and master weights and two moments in float32: 14 bytes of each parameter."""
    weight = torch.ones(elements, dtype=torch.bfloat16)
    state = torch.ones(elements)
    for layer in range(LAYERS):
        yield MODEL, whole_shard(f"layer.{layer}", weight)
    for layer in range(LAYERS):
        for part in ("weight", "exp_avg", "exp_avg_sq"):
            yield TRAINING, whole_shard(f"layer.{layer}/{part}", state, rank, world)


def save(rank: int, world: int, settings: argparse.Namespace, starts: Any, times: Any) -> None:
    """Save once per round; the first save allocates buffers and does not count."""
    torch.set_num_threads(1)
    elements = settings.mebibytes * 2**20 // 14 // LAYERS
    saver = Saver(rank, world, lambda model, planned=False: contents(elements, rank, world))
    for number in range(settings.rounds + 1):
        starts.wait()
        begin = time.monotonic()
        saver.save(settings.folder / f"{world}-{number}", 1, lambda: None)
        held = time.monotonic() - begin
        saved = saver.result(wait=True)
        assert saved is not None and saved.problem is None, saved
        times.put((number, held, time.monotonic()))


def next_time(times: Any, ranks: list[Any]) -> Any:
    """Wait for a rank's time, as long as all ranks live."""
    while True:
        try:
            return times.get(timeout=1.0)
        except Empty:
            if dead := [one.exitcode for one in ranks if one.exitcode]:
                raise SystemExit(f"a rank ended with {dead[0]}") from None


def seconds(world: int, settings: argparse.Namespace) -> tuple[float, float]:
    """The median time until the last rank is done, and until the last one could train on."""
    context = get_context("spawn")
    starts, times = context.Barrier(world + 1), context.Queue()
    ranks = [context.Process(target=save, args=(rank, world, settings, starts, times)) for rank in range(world)]
    for process in ranks:
        process.start()
    taken, waited = [], []
    for number in range(settings.rounds + 1):
        folder = settings.folder / f"{world}-{number}"
        folder.mkdir()
        starts.wait()
        begin = time.monotonic()
        ends = [next_time(times, ranks) for _ in ranks]
        shutil.rmtree(folder)
        if number:
            taken.append(max(end for _, _, end in ends) - begin)
            waited.append(max(held for _, held, _ in ends))
    for process in ranks:
        process.join()
    return median(taken), median(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    settings.folder = Path(tempfile.mkdtemp(dir=settings.folder))
    try:
        found = {world: seconds(world, settings) for world in (1, RANKS)}
    finally:
        shutil.rmtree(settings.folder)
    for world, (taken, waited) in found.items():
        print(f"{world} ranks: {taken:.2f} s to the disk, training waits {waited:.2f} s")
    ratio, load = found[RANKS][0] / found[1][0], os.getloadavg()[0]
    print(f"{settings.mebibytes} MiB: {ratio:.2f} of one writer's time; load average {load:.1f}")


if __name__ == "__main__":
    main()
