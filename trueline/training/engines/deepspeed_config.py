"""The configuration of DeepSpeed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.models.loading import ModelFacts
from trueline.training.engines.division import Division, Sizes

NO_LIMIT = 1e30  # without clipping DeepSpeed does not compute the gradient's norm
BUCKET = 500_000_000  # elements of gradients that ranks exchange at a time at ZeRO 1 and 2 (DeepSpeed's default)
PARTITION_ABOVE = 10_000  # elements; smaller tensors stay whole on every rank under ZeRO 3
# How many elements ZeRO 3 gathers at a time: this part of the model, within these limits. With DeepSpeed's defaults
# every rank would hold a whole model of less than 1e9 parameters after its first pass.
GATHERED, LEAST, MOST = 1 / 64, 2**20, 2**26
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe")  # whose experts were divided
ON_CPU = {"DS_ACCELERATOR": "cpu"}
# ZeRO 3 gathers and frees weights all the time, which would fragment the heap.
GATHERING_ON_CPU = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "THP_MEM_ALLOC_ENABLE": "1"}


@contextmanager
def without_mlflow() -> Iterator[None]:
    """Hide MLflow while DeepSpeed is imported: its tuner would import it, for seconds and to no use."""
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if sys.modules["mlflow"] is None:
            del sys.modules["mlflow"]


def deepspeed_config(
    config: RanksConfig, dtype: str, cuts: dict[str, Any] | None = None, elements: int = 0
) -> dict[str, Any]:
    """Return DeepSpeed's settings, with one accumulation step: the worker marks the last micro-batch."""
    stage, few = effective_stage(config, dtype), at_once(elements)
    stage_3 = {
        "stage3_prefetch_bucket_size": few,
        "stage3_max_live_parameters": 2 * few,
        "stage3_max_reuse_distance": few,
        "sub_group_size": few,  # elements of this rank's part that are stepped at a time
    }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # over micro-batches; in bfloat16 the error grows with their number
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": PARTITION_ABOVE,
            "reduce_bucket_size": few if stage == 3 else BUCKET,
            **(stage_3 if stage == 3 else {}),
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if config.offload in ("optimizer", "all"):
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's AdamW, which needs no compiler
    if config.offload == "all":
        settings["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if isinstance(config, TrainingConfig) and stage:  # without ZeRO it clips by a mean of the ranks' norms
        settings["gradient_clipping"] = config.max_grad_norm or NO_LIMIT
    if cuts is not None:
        settings["tensor_parallel"] = cuts
    return settings


def at_once(elements: int) -> int:
    """Return how many elements of a model ZeRO 3 gathers at a time."""
    return int(min(max(elements * GATHERED, LEAST), MOST))


def effective_stage(config: RanksConfig, dtype: str) -> int:
    """Return the ZeRO stage, at least 2 for bfloat16 training, with the same results."""
    # Below stage 2, DeepSpeed 0.19 keeps float32 sums and master weights where a checkpoint cannot read them.
    stage = config.deepspeed.zero_stage
    return max(stage, 2) if isinstance(config, TrainingConfig) and dtype == "bfloat16" else stage


def division(ranks: RanksConfig, dtype: str, alike: int) -> Division:
    stage = effective_stage(ranks, dtype)
    weights, gradients, optimizer = (alike if stage >= least else 1 for least in (3, 2, 1))
    return Division(weights, gradients, optimizer, experts=ranks.deepspeed.expert_parallel)


def working(ranks: TrainingConfig, dtype: str, sizes: Sizes) -> float:
    """Return the elements of the buckets of gradients."""
    stage = effective_stage(ranks, dtype)
    return BUCKET if stage in (1, 2) else 2 * at_once(int(sizes.model)) if stage == 3 else 0


def environment(ranks: RanksConfig, gpus: int) -> dict[str, str]:
    gathers = ranks.deepspeed.zero_stage == 3
    return {} if gpus else ON_CPU | (GATHERING_ON_CPU if gathers else {})


def keeps_gradients(ranks: RanksConfig) -> str:
    """Return why gradients cannot be discarded, or nothing."""
    if ranks.deepspeed.zero_stage == 3:
        return "deepspeed.zero_stage=3"
    return f"offload={ranks.offload}" if ranks.offload in ("optimizer", "all") else ""


def check(ranks: TrainingConfig, model: ModelConfig, section: str) -> None:
    """Refuse keys that cannot work together."""
    stage, key = ranks.deepspeed.zero_stage, f"{section}.deepspeed.zero_stage"
    if ranks.offload == "all" and stage != 3:
        raise ConfigError(f"{section}.offload=all needs {key}=3 (got {stage})")
    if ranks.offload == "optimizer" and stage == 0:
        raise ConfigError(f"{section}.offload=optimizer needs {key}=1 or more (got 0)")
    if ranks.compile and (stage == 3 or model.tensor_parallel > 1):
        raise ConfigError(
            f"{section}.compile=true needs whole layers on every rank: set {key}=2 (got {stage}) and "
            f"model.tensor_parallel=1 (got {model.tensor_parallel})"
        )
    if model.lora.quantize and stage == 3:
        raise ConfigError(f"model.lora.quantize=true cannot be sharded: set {key}=2 (got 3)")
    if ranks.optimizer == "muon" and (effective_stage(ranks, model.dtype) or model.tensor_parallel > 1):
        raise ConfigError(
            f"{section}.optimizer=muon steps whole matrices in float32, which ZeRO, bfloat16 and tensor parallelism "
            f"take apart: set {key}=0 (got {stage}), model.dtype=float32 (got {model.dtype}) and "
            f"model.tensor_parallel=1 (got {model.tensor_parallel}), {section}.engine=fsdp2, or "
            f"{section}.optimizer=adamw"
        )


def check_experts(ranks: RanksConfig, model: ModelConfig, facts: ModelFacts, section: str) -> None:
    """Refuse to divide what a model does not have, or where something else takes layers apart."""
    size, compiles = ranks.deepspeed.expert_parallel, isinstance(ranks, TrainingConfig) and bool(ranks.compile)
    key, world = f"{section}.deepspeed.expert_parallel", ranks.ranks or 1
    obstacles = {
        f"{model.path} is a dense model: set it to 1": not facts.experts,
        f"{facts.kind} ({model.path}) is not supported: set it to 1, or use one of {', '.join(MIXTURES)}": facts.kind
        not in MIXTURES,
        f"it does not divide the {facts.experts} experts of a layer: set it to a divisor": facts.experts % size > 0,
        f"it does not divide {section}.ranks={world}: set that to {size} or a multiple": world % size > 0,
        f"tensor parallelism refuses experts: set model.tensor_parallel=1 (got {model.tensor_parallel}) or it to 1": (
            model.tensor_parallel > 1
        ),
        f"adapters leave experts frozen, and were not tried with it: set model.lora.rank=0 (got {model.lora.rank}) or "
        "it to 1": model.lora.rank > 0,
        f"compiled layers cannot send tokens to other ranks: set {section}.compile=false or it to 1": compiles,
    }
    for obstacle, holds in obstacles.items():
        if size > 1 and holds:
            raise ConfigError(f"{key}={size}: {obstacle}", key=key)


def words(ranks: RanksConfig) -> str:
    size = ranks.deepspeed.expert_parallel
    return f"ZeRO {ranks.deepspeed.zero_stage}" + (f", experts over {size} ranks" if size > 1 else "")
