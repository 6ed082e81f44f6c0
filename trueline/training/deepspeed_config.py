"""Our configuration in DeepSpeed's words."""

from typing import Any

import torch

from trueline.config.model import RanksConfig, TrainingConfig

NO_LIMIT = 1e30  # with no clipping at all DeepSpeed does not compute the gradient's norm
BUCKET = 500_000_000  # elements of gradients that ranks exchange at a time at ZeRO 1 and 2: DeepSpeed's own default
PARTITION_ABOVE = 10_000  # elements; smaller tensors stay whole on every rank under ZeRO 3
# Under ZeRO 3, how many elements are whole or under way at a time: this part of the model, within these limits. By
# DeepSpeed's own defaults a model of less than 1e9 parameters is whole on every rank after its first pass.
GATHERED, LEAST, MOST = 1 / 64, 2**20, 2**26
ON_CPU = {"DS_ACCELERATOR": "cpu"}
# Under ZeRO 3, where weights are gathered and let go all the time: from the heap, what is free between them would grow.
GATHERING_ON_CPU = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "THP_MEM_ALLOC_ENABLE": "1"}


def deepspeed_config(
    config: RanksConfig, dtype: str, cuts: dict[str, Any] | None = None, elements: int = 0
) -> dict[str, Any]:
    """Return DeepSpeed's settings, with one accumulation step: the worker itself marks the last micro-batch."""
    stage = effective_stage(config, dtype)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # over micro-batches; in bfloat16 the error grows with their number
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": PARTITION_ABOVE,
            **(buckets(elements) if stage == 3 else {"reduce_bucket_size": BUCKET}),
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if config.offload in ("optimizer", "all"):
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's AdamW, which needs no compiler
    if config.offload == "all":
        settings["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if isinstance(config, TrainingConfig):
        settings["gradient_clipping"] = config.max_grad_norm or NO_LIMIT
    if cuts is not None:
        settings["tensor_parallel"] = cuts
    return settings


def at_once(elements: int) -> int:
    """Return how many elements of a model of so many are gathered at a time under ZeRO 3."""
    return int(min(max(elements * GATHERED, LEAST), MOST))


def buckets(elements: int) -> dict[str, int]:
    few = at_once(elements)
    return {
        "reduce_bucket_size": few,
        "stage3_prefetch_bucket_size": few,
        "stage3_max_live_parameters": 2 * few,
        "stage3_max_reuse_distance": few,
        "sub_group_size": few,  # stepped at a time, of this rank's part
    }


def effective_stage(config: RanksConfig, dtype: str) -> int:
    """Return the ZeRO stage; bfloat16 training raises it to 2: the same numbers, optimizer and gradients shared out.

    Below stage 2 DeepSpeed 0.19 keeps float32 sums and master weights where a checkpoint cannot read them.
    """
    trained = isinstance(config, TrainingConfig)
    return max(config.zero_stage, 2) if trained and dtype == "bfloat16" else config.zero_stage
