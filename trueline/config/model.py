"""Which model is trained, and how."""

from typing import Literal

from pydantic import Field

from trueline.config.base import Config


class ModelConfig(Config):
    path: str = ""
    """Hugging Face model: a folder with config, safetensors weights and tokenizer, or a hub name."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computation type; auto is bfloat16 on GPUs and float32 on CPUs. Master weights stay float32."""

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of Transformers; auto is sdpa."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a quarter slower, far less memory."""

    head_chunk_tokens: int = Field(1024, ge=1)
    """Tokens per slice of the LM head; bounds the logits in memory to this many rows."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


class RanksConfig(Config):
    """How one model is spread over processes."""

    engine: Literal["deepspeed", "torch"] = "deepspeed"
    """deepspeed, or torch: plain PyTorch in one process."""

    ranks: int | None = Field(None, ge=1)
    """Processes (devices) of this model; null takes one on a CPU, and all GPUs that rollout leaves."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage: what is sharded over ranks (1 optimizer, 2 and gradients, 3 and weights)."""

    micro_batch_tokens: int = Field(16384, ge=1)
    """Hard limit of tokens, padding included, in one forward pass of one rank."""

    micro_batch_samples: int | None = Field(None, ge=1)
    """Optional limit of sequences in one forward pass of one rank."""


class TrainingConfig(RanksConfig):
    """The ranks of the trained model and its optimizer."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to zero at the last step."""

    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""

    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay, on matrices only."""

    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """AdamW decay rates of the two moments."""

    epsilon: float = Field(1e-8, gt=0)
    """AdamW epsilon."""

    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""


def check_torch_engine(training: TrainingConfig, model: ModelConfig) -> None:
    """Plain PyTorch has one process and no float32 master weights beside lower precision."""
    if training.engine != "torch":
        return
    if (training.ranks or 1) > 1:
        raise ValueError(
            f"training.engine=torch runs in one process: set training.ranks=1 (got {training.ranks}) "
            "or training.engine=deepspeed"
        )
    if model.dtype == "bfloat16":
        raise ValueError(
            "training.engine=torch keeps no float32 master weights: set model.dtype=float32 (got bfloat16) "
            "or training.engine=deepspeed"
        )
