"""Our configuration in DeepSpeed's words."""

from typing import Any

from trueline.config.model import RanksConfig, TrainingConfig

NO_LIMIT = 1e30  # with no clipping at all DeepSpeed does not compute the gradient's norm
PARTITION_ABOVE = 10_000  # elements; smaller tensors stay whole on every rank under ZeRO 3


def deepspeed_config(config: RanksConfig, dtype: str) -> dict[str, Any]:
    """One accumulation step: the worker marks the boundary itself, micro-batch by micro-batch."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {
            "stage": config.zero_stage,
            "stage3_param_persistence_threshold": PARTITION_ABOVE,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if isinstance(config, TrainingConfig):
        settings["gradient_clipping"] = config.max_grad_norm or NO_LIMIT
    return settings
