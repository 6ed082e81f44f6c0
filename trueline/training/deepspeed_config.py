"""Our configuration in DeepSpeed's words."""

from typing import Any

import torch

from trueline.config.model import RanksConfig, TrainingConfig

NO_LIMIT = 1e30  # with no clipping at all DeepSpeed does not compute the gradient's norm
PARTITION_ABOVE = 10_000  # elements; smaller tensors stay whole on every rank under ZeRO 3


def deepspeed_config(config: RanksConfig, dtype: str, cuts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return DeepSpeed's settings, with one accumulation step: the worker itself marks the last micro-batch."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # over micro-batches; in bfloat16 the error grows with their number
        "zero_optimization": {
            "stage": effective_stage(config, dtype),
            "stage3_param_persistence_threshold": PARTITION_ABOVE,
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


def effective_stage(config: RanksConfig, dtype: str) -> int:
    """Return the ZeRO stage; bfloat16 training raises it to 2: the same numbers, optimizer and gradients shared out.

    Below stage 2 DeepSpeed 0.19 keeps float32 sums and master weights where a checkpoint cannot read them.
    """
    trained = isinstance(config, TrainingConfig)
    return max(config.zero_stage, 2) if trained and dtype == "bfloat16" else config.zero_stage
