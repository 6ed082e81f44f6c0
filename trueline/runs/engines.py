"""Check the engines of a run before anything starts: names, packages, and what each of them can do."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.config.roles import RoleConfig
from trueline.config.run import EnginesConfig
from trueline.rollout.engines import ROLLOUT_ENGINES, RolloutRow
from trueline.training.engines import TRAIN_ENGINES, TrainRow


def rows_of(section: str) -> Mapping[str, TrainRow | RolloutRow]:
    return ROLLOUT_ENGINES if section == "rollout" else TRAIN_ENGINES


def others(section: str, able: Callable[[Any], bool]) -> str:
    """Name the engines that could be set instead."""
    return " or ".join(f"{section}.engine={name}" for name, row in rows_of(section).items() if able(row))


def check_engines(config: EnginesConfig, *used: str) -> None:
    """Look up the engine of every section; those of the sections in use must be there and able."""
    parts = dict(config)
    for section, name in config.engines().items():
        if name not in rows_of(section):
            raise ConfigError(f"{section}.engine={name}: not known; choose from {', '.join(rows_of(section))}")
        row, part, model = rows_of(section)[name], parts[section], parts["model"]
        if parts["runtime"] == "local" and not row.local:
            able = others(section, lambda row: row.local)
            raise ConfigError(f"runtime=local keeps everything in one process: set {able} (got {name}) or runtime=ray")
        if section in used and row.package and importlib.util.find_spec(row.package) is None:
            raise ConfigError(
                f"{section}.engine={name}: {row.package} is not installed here; install it (it comes with "
                f"{row.brought_by}) or set {others(section, lambda row: not row.package)}"
            )
        if section in used and isinstance(part, TrainingConfig):
            own = part.model_like(model, model.path) if isinstance(part, RoleConfig) else model
            check_trained(section, part, own)


def check_trained(section: str, ranks: TrainingConfig, model: ModelConfig) -> None:
    row, asked = TRAIN_ENGINES[ranks.engine], f"{section}.engine={ranks.engine}"
    check_ranks(section, ranks, model)
    if model.dtype == "bfloat16" and not row.masters:
        raise ConfigError(
            f"{asked} keeps no float32 master weights: set model.dtype=float32 (got bfloat16) or "
            + others(section, lambda row: row.masters)
        )
    if ranks.offload not in (None, "none", *row.offloads):
        able = " or ".join(("none", *row.offloads))
        raise ConfigError(f"{asked} cannot offload that: set {section}.offload={able} (got {ranks.offload})")
    if ranks.optimizer == "muon" and (row.stage(ranks, model.dtype) or model.tensor_parallel > 1):
        raise ConfigError(
            f"{section}.optimizer=muon steps whole matrices in float32, which ZeRO, bfloat16 and tensor parallelism "
            f"take apart: set {section}.zero_stage=0 (got {ranks.zero_stage}), model.dtype=float32 (got {model.dtype}) "
            f"and model.tensor_parallel=1 (got {model.tensor_parallel}), or {section}.optimizer=adamw"
        )


def check_ranks(section: str, ranks: RanksConfig, model: ModelConfig) -> None:
    width = model.width()
    if max(ranks.ranks or 1, width) > 1 and not TRAIN_ENGINES[ranks.engine].several_ranks:
        raise ConfigError(
            f"{section}.engine={ranks.engine} runs in one process: set {section}.ranks=1 (got {ranks.ranks}), "
            f"model.tensor_parallel=1 and model.context_parallel=1 (got {width} ranks wide), or runtime=ray and "
            + others(section, lambda row: row.several_ranks)
        )
