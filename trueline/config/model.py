"""Which model is trained, and how."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from trueline.config.base import Config, ConfigError

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}  # short ones that are in use
HALF = ("fp16", "float16", "half")


def full_dtype(name: Any) -> Any:
    """Spell a short name out, and refuse half precision with its reason."""
    short = name.removeprefix("torch.") if isinstance(name, str) else name
    if short in HALF:
        raise ValueError(f"{name} overflows without loss scaling, which is not done here: set bfloat16 or float32")
    return DTYPE_NAMES.get(short, short) if isinstance(short, str) else short


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(full_dtype)]
LARGEST_PASS = 16384  # tokens; more in one pass gains no speed


class LoraConfig(Config):
    """Train small matrices beside frozen weights."""

    rank: int = Field(0, ge=0)
    """Rank of the added matrices; 0 trains all weights instead."""

    alpha: float = Field(32.0, gt=0)
    """The added product is scaled by alpha / rank."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in front of the added matrices. Above 0, training and scoring see different functions."""

    targets: str = "all-linear"
    """all-linear, names of linear layers such as q_proj,v_proj, or a pattern of whole names: .*self_attn.*_proj."""

    quantize: bool = False
    """QLoRA: hold the frozen weights in 4 bits (bitsandbytes)."""

    sync: Literal["auto", "merged", "adapter"] = "auto"
    """What RL sends to engines: adapters alone, or weights they are merged into; auto: alone if engines hold them."""

    @field_validator("targets", mode="before")
    @classmethod
    def list_targets(cls, targets: Any) -> Any:
        """Take a list, also one in brackets or with spaces, as names with commas between them."""
        bracketed = isinstance(targets, str) and re.fullmatch(r"\[[\w\s,.'\"-]*\]", targets)
        names = re.split(r"[\s,'\"]+", targets[1:-1]) if bracketed else targets
        return ",".join(str(name).strip() for name in names if name) if isinstance(names, list) else names

    def peft_targets(self) -> str | list[str]:
        """Return targets as peft reads them: all-linear or a pattern as it stands, else a list of names."""
        whole = self.targets == "all-linear" or re.search(r"[*+?^$()|\\\[\]{}]", self.targets)
        return self.targets if whole else [name.strip() for name in self.targets.split(",")]

    def apart(self) -> bool:
        return self.rank > 0 and self.sync == "adapter"

    def scale(self) -> float:
        return self.alpha / self.rank


class ModelConfig(Config):
    path: str = ""
    """Hugging Face model: a folder with config, safetensors weights and tokenizer, or a hub name."""

    dtype: Dtype = "auto"
    """Computation type; auto is bfloat16 on GPUs and float32 on CPUs. Master weights stay float32."""

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of Transformers; auto is sdpa. Packed sequences have their own: see training.packing."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: about a quarter slower, far less memory. null: if memory asks it."""

    head_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens per slice of the LM head; bounds the logits in memory to this many rows. null: 1024, on CPUs 128."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share out every layer's matrices (DeepSpeed AutoTP)."""

    context_parallel: int = Field(1, ge=1)
    """Ranks that share out every sequence (ring attention), for contexts too long for one device."""

    lora: LoraConfig = LoraConfig()

    def width(self) -> int:
        """Return the ranks that share one copy of the model."""
        return self.tensor_parallel * self.context_parallel


class RanksConfig(Config):
    """How one model is spread over processes."""

    engine: str = "deepspeed"
    """deepspeed, torch (plain PyTorch in one process), or another row of training.engines."""

    ranks: int | None = Field(None, ge=1)
    """Processes (devices) of this model; null takes one on a CPU, and all GPUs that rollout leaves."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage: what is sharded over ranks (1 optimizer, 2 and gradients, 3 and weights)."""

    micro_batch_tokens: int | None = Field(None, ge=1)
    """Hard limit of tokens, padding included, in a forward pass of a rank; null: up to 16384 (CPUs 4096) that fit."""

    micro_batch_samples: int | None = Field(None, ge=1)
    """Optional limit of sequences in one forward pass of one rank."""

    packing: bool = True
    """Lay sequences end to end; false pads them, for architectures that packed attention refuses."""

    offload: Literal["none", "moments", "optimizer", "all"] | None = None
    """Keep on the host: moments, the optimizer (ZeRO 1-3), or weights too (ZeRO 3). null: moments if memory asks it."""

    def tokens_per_pass(self) -> int:
        return self.micro_batch_tokens or LARGEST_PASS


class TrainingConfig(RanksConfig):
    """The ranks of the trained model and its optimizer."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of hidden layers and AdamW for all else (float32; torch, or ZeRO 0)."""

    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate, of AdamW and of Muon; null: what suits the task, the model's size and adapters."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up: constant, or falling to zero at the last step; wsd: constant, then falling."""

    decay_share: float = Field(0.2, gt=0, le=1)
    """Last share of the steps in which schedule=wsd falls."""

    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""

    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""

    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """AdamW decay rates of the two moments."""

    epsilon: float = Field(1e-8, gt=0)
    """AdamW epsilon."""

    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the loss that spreads tokens over a mixture's experts, e.g. 0.001; it costs a forward pass. 0: off."""

    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Keep an exponential moving average of the weights with this decay, e.g. 0.999; 0 keeps none."""

    max_bad_steps: int = Field(3, ge=0)
    """Steps in a row with a loss or gradient that is not finite (skipped, counted) before the run stops."""

    def peak_rate(self) -> float:
        if self.learning_rate is None:
            raise ConfigError("learning_rate is null: set it, for only the plan of a run fills it in")
        return self.learning_rate


class PolicyTrainingConfig(TrainingConfig):
    """The ranks of a policy, whose answers engines sample."""

    replay_routing: bool | Literal["measure"] = False
    """Send each token of a mixture to the experts that the engine chose; measure: report how often they differ."""


def told_experts(ranks: RanksConfig) -> bool:
    """Tell whether a model is trained on samples that say which experts the engine chose."""
    return isinstance(ranks, PolicyTrainingConfig) and bool(ranks.replay_routing)


def check_training(training: TrainingConfig, model: ModelConfig, section: str = "training") -> None:
    """Refuse combinations of model and training keys that cannot work; `section` holds the latter."""
    check_mesh(training, model, section)
    if training.offload == "all" and training.zero_stage != 3:
        raise ConfigError(f"{section}.offload=all needs {section}.zero_stage=3 (got {training.zero_stage})")
    if training.offload == "optimizer" and training.zero_stage == 0:
        raise ConfigError(f"{section}.offload=optimizer needs {section}.zero_stage=1 or more (got 0)")
    check_lora(training, model)


def check_mesh(ranks: RanksConfig, model: ModelConfig, section: str, whose: str = "model.") -> None:
    """Refuse ranks that do not fit how layers and sequences are divided among them, which `whose` keys say."""
    width = model.width()
    if ranks.ranks is not None and ranks.ranks % width:
        raise ConfigError(
            f"{section}.ranks={ranks.ranks} is no multiple of {whose}tensor_parallel={model.tensor_parallel} x "
            f"{whose}context_parallel={model.context_parallel}: set it to {width} or a multiple"
        )
    if model.context_parallel > 1 and not ranks.packing:
        raise ConfigError(
            f"{whose}context_parallel={model.context_parallel} works on packed sequences: set {section}.packing=true"
        )


def check_lora(training: TrainingConfig, model: ModelConfig) -> None:
    if model.lora.quantize and model.lora.rank == 0:
        raise ConfigError("model.lora.quantize=true freezes the weights: set model.lora.rank to 1 or more (got 0)")
    if model.lora.rank and model.tensor_parallel > 1:
        raise ConfigError(
            f"model.lora.rank={model.lora.rank} cannot be divided by tensor parallelism: set model.tensor_parallel=1 "
            f"(got {model.tensor_parallel}); ZeRO shares memory out as well"
        )
    if model.lora.quantize and training.zero_stage == 3:
        raise ConfigError(
            "model.lora.quantize=true: 4-bit weights cannot be sharded: set training.zero_stage=2 (got 3)"
        )
