"""Durations in words, the parts of a start, the seconds of each phase of a step, and speed."""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from trueline.monitoring.heartbeat import WORK


def duration(seconds: float) -> str:
    """Return a time as people say it, in its largest unit and the one below."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


Milestones = list[tuple[str, float]]  # parts of a start, one after the other, and when each ended


class StartClock:
    """The parts of this process's start."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.begun, self.ends = time.time(), Milestones()

    def end(self, part: str) -> None:
        """End a part, which has begun with the end of the one before."""
        self.ends.append((part, time.time()))


START = StartClock()


@contextmanager
def parts_in_log(parts: Mapping[str, str]) -> Iterator[None]:
    """End a part of the start whenever a library logs a message with its words, whatever becomes of its handlers."""
    make = logging.getLogRecordFactory()

    def make_and_end(*args: Any, **named: Any) -> logging.LogRecord:
        record = make(*args, **named)
        for words, part in parts.items():
            if words in str(record.msg):
                START.end(part)
        return record

    logging.setLogRecordFactory(make_and_end)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def part_seconds(begun: float, ends: Milestones) -> dict[str, float]:
    """Return the seconds of each part; parts of one name are added up."""
    found: dict[str, float] = {}
    for (_, since), (part, ended) in pairwise([("", begun), *ends]):
        found[part] = found.get(part, 0.0) + ended - since
    return found


def describe_parts(parts: Mapping[str, float]) -> str:
    """Return the parts that take at least half a second, in whole ones."""
    return ", ".join(f"{part} {seconds:.0f}" for part, seconds in parts.items() if seconds >= 0.5)


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.flushed = time.perf_counter()
        self.latest = ""  # phase that was begun last

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, self.latest = time.perf_counter(), name
        try:
            with WORK.doing("phase", name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """Return the seconds of the phases since the last flush, and all the time since then, phases or not."""
        taken, self.seconds = self.seconds, {}
        before, self.flushed = self.flushed, time.perf_counter()
        return {f"time/{name}": value for name, value in taken.items()} | {"time/step": self.flushed - before}


# Dense bfloat16 matrix TFLOP/s of one device, from the makers' data sheets; the first name that fits is taken. Those
# that compute no bfloat16 (V100, T4) have none.
PEAK_TFLOPS = (
    {"B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0}
    | {"H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0}
    | {"A40": 149.7, "A30": 165.0, "A10G": 70.0, "A10": 125.0, "RTX 6000 Ada": 364.0, "RTX A6000": 154.8}
    | {"RTX 5090": 209.5, "RTX 4090": 165.0, "RTX 3090": 71.0, "MI355X": 2516.6, "MI325X": 1307.4, "MI300X": 1307.4}
    | {"MI250X": 191.5, "MI210": 181.0}  # of an MI250X, one of its two dies, each of which is a device
)


def peak_tflops(device_name: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def flops_per_token(parameters: int, *, adapters: bool) -> int:
    """Count FLOPs: two per parameter in the forward and four in the backward pass, two of them for weight gradients."""
    return (4 if adapters else 6) * parameters


def speed_metrics(tokens: int, seconds: float, devices: int, flops: float, device_name: str) -> dict[str, float]:
    """Return tokens per second, and MFU where the device's peak is known (attention and recomputation not counted)."""
    rate = tokens / seconds
    metrics = {"speed/tokens_per_second": rate, "speed/tokens_per_second_per_device": rate / devices}
    if peak := peak_tflops(device_name):
        metrics["speed/mfu"] = flops * rate / (devices * peak * 1e12)
    return metrics
