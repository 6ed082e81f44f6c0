"""Ranks and an engine that hang when they are told to, until a file tells them to go on."""

import asyncio
import datetime
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trueline.monitoring.heartbeat import WORK
from trueline.runtime.actors import Target
from trueline.runtime.transport import Address, Rendezvous


def hang_until(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.05)


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank, self.rendezvous = rank, Rendezvous()

    def listen(self) -> Address:
        return self.rendezvous.open()

    def start(self, address: Address) -> None:
        store = self.rendezvous.store(address, 2, 60)
        timeout = datetime.timedelta(seconds=600)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2, timeout=timeout)

    def update(self, hang: str, skips: bool = False) -> float:
        """Make a step that ends in a collective; it waits for the file `hang` first, or leaves the collective out."""
        if hang:
            with WORK.doing("part", "optimizer step"):
                hang_until(hang)
        total = torch.ones(1)
        if not skips:
            dist.all_reduce(total)
        return float(total)


class Engine:
    def __init__(self) -> None:
        self.waiting, self.open = 0, asyncio.Event()

    async def generate(self) -> int:
        await asyncio.sleep(0)
        return 1

    async def wait(self) -> int:
        """Return once another call lets it."""
        self.waiting += 1
        await self.open.wait()
        return 2

    async def let_go(self, count: int) -> int:
        """Let all go on, once so many wait; return how many do."""
        while self.waiting < count:
            await asyncio.sleep(0.01)
        self.open.set()
        return self.waiting


RANK: Target[Rank] = Target("tests.support.stuck:Rank")
ENGINE: Target[Engine] = Target("tests.support.stuck:Engine", asynchronous=True, bulk_methods=("wait",))
