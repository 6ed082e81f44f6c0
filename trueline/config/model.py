"""Models: the policy and the models around it, their ranks and their optimizers."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from trueline.config.base import Config, ConfigError

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
HALF = ("fp16", "float16", "half")


def full_dtype(name: Any) -> Any:
    """Expand a short name, and refuse half precision."""
    short = name.removeprefix("torch.") if isinstance(name, str) else name
    if short in HALF:
        raise ValueError(f"{name} overflows without loss scaling, which is not supported: set bfloat16 or float32")
    return DTYPE_NAMES.get(short, short) if isinstance(short, str) else short


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(full_dtype)]
Vision = Literal["none", "projector", "all"]  # what is trained besides the language model
LARGEST_PASS = 16384  # tokens; larger passes are no faster
WORTHWHILE = 0.1  # of a step's tokens: what sharing prefixes has to save


def resolve_path(path: str) -> str:
    """Resolve a folder, for other processes may work in another one and know no `~`; a hub name stays as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path and folder.is_dir() else path


class LoraConfig(Config):
    """Train small low-rank matrices and freeze the other weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters. 0: train all weights."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters. Above 0, training and scoring compute different functions."""
    targets: str = "all-linear"
    """all-linear, layer names such as q_proj,v_proj, or a regular expression for whole names: .*self_attn.*_proj."""
    quantize: bool = False
    """QLoRA: keep the frozen weights in 4 bits (bitsandbytes)."""
    sync: Literal["auto", "merged", "adapter"] = "auto"
    """What engines receive in RL. merged: merged weights. adapter: adapters only. auto: adapter if they support it."""

    @field_validator("targets", mode="before")
    @classmethod
    def list_targets(cls, targets: Any) -> Any:
        """Accept a list, also written in brackets or with spaces, and join its names by commas."""
        bracketed = isinstance(targets, str) and re.fullmatch(r"\[[\w\s,.'\"-]*\]", targets)
        names = re.split(r"[\s,'\"]+", targets[1:-1]) if bracketed else targets
        return ",".join(str(name).strip() for name in names if name) if isinstance(names, list) else names

    def peft_targets(self) -> str | list[str]:
        """Return targets as peft expects them: all-linear or a pattern unchanged, else a list of names."""
        whole = self.targets == "all-linear" or re.search(r"[*+?^$()|\\\[\]{}]", self.targets)
        return self.targets if whole else [name.strip() for name in self.targets.split(",")]

    def adapter_only(self) -> bool:
        return self.rank > 0 and self.sync == "adapter"

    def scale(self) -> float:
        return self.alpha / self.rank


class ModelConfig(Config):
    path: str = ""
    """Hugging Face model: a folder with config, safetensors weights and tokenizer, or a hub name."""
    dtype: Dtype = "auto"
    """Compute type. auto: bfloat16 on GPUs, float32 on CPUs. Master weights are always float32."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of Transformers; auto is sdpa. Packed sequences use their own (training.packing)."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: about 25 % slower, far less memory. null: on when memory is short."""
    head_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens per slice of the LM head, which bounds the logits in memory. null: 1024, on CPUs 128."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share each layer's matrices."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence (ring attention), for contexts too long for one device."""
    train_vision: Vision = "none"
    """Of a vision-language model, train besides the language model: none, the projector, or all, the tower too."""
    lora: LoraConfig = LoraConfig()

    def width(self) -> int:
        """Return how many ranks share one copy of the model."""
        return self.tensor_parallel * self.context_parallel

    def place_tokens(self, sequences: float, longest: float, world: int) -> float:
        """Return the tokens of a rank's share of a step: its data place has whole sequences, which a ring divides."""
        return math.ceil(sequences * self.width() / world) * longest / self.context_parallel


class DeepSpeedConfig(Config):
    """Keys of engine=deepspeed."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: shard the optimizer (1), also gradients (2), also weights (3)."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that divide the experts of each layer of a mixture; tokens travel to the ranks that have theirs."""


class FrozenDeepSpeedConfig(DeepSpeedConfig):
    zero_stage: Literal[0, 3] = 0
    """0: every rank holds the whole model. 3: weights are sharded."""


class FSDP2Config(Config):
    """Keys of engine=fsdp2."""

    reshard: bool | None = None
    """Free a block's weights after it computed, and gather them for its next pass. null: if ranks divide the model."""
    reduce_each_pass: bool | None = None
    """Reduce gradients in every pass; false: in a step's last one, in full on every rank. null: as reshard's null."""


class RanksConfig(Config):
    """How one model is distributed over processes."""

    engine: str = "deepspeed"
    """deepspeed, fsdp2 (PyTorch's own), or torch (plain PyTorch, one process). Other models: as training.engine."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    fsdp2: FSDP2Config = FSDP2Config()
    ranks: int | None = Field(None, ge=1)
    """Processes (devices) of this model. null: 1 on a CPU; on GPUs, all that rollout leaves."""
    replicas: int | None = Field(None, ge=1)
    """Copies of the model, each sharded over ranks / replicas (fsdp2). null: 1; of models that only score, ranks."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Most tokens, padding included, per forward pass of a rank. null: what fits, up to 16384 (CPUs 4096)."""
    micro_batch_samples: int | None = Field(None, ge=1)
    """Most sequences per forward pass of a rank. null: no limit."""
    packing: bool = True
    """Concatenate sequences without padding. false: pad them, for models that packed attention does not support."""
    share_prefixes: bool | Literal["auto"] = "auto"
    """Compute tokens that sequences of a pass begin with once, e.g. a group's prompt. auto: if that saves 10 %."""
    offload: Literal["none", "moments", "optimizer", "all"] | None = None
    """Move to the host: moments, optimizer (ZeRO 1-3), all: weights too (ZeRO 3, fsdp2). null: moments when needed."""

    def tokens_per_pass(self) -> int:
        return self.micro_batch_tokens or LARGEST_PASS


class TrainingConfig(RanksConfig):
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for hidden matrices, AdamW for the rest (torch, fsdp2, or ZeRO 0 in float32)."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of AdamW and Muon. null: chosen from task, model size and adapters."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up. constant; linear or cosine to zero; wsd: constant, then linear to zero."""
    decay_share: float = Field(0.2, gt=0, le=1)
    """Last share of the steps over which schedule=wsd decays."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to matrices only."""
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """AdamW decay rates of the two moments."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip gradients to this global norm. 0: off."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the loss that balances experts, e.g. 0.001; it costs an extra forward pass. 0: off."""
    compile: bool | None = None
    """Compile layers and head (torch.compile); not with ZeRO 3. null: in long runs on GPUs, if dense, with ZeRO 0-2."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, e.g. 0.999. 0: none is kept."""
    max_bad_steps: int = Field(3, ge=0)
    """Stop after more than this many steps in a row with a non-finite loss or gradient; such steps are skipped."""

    def peak_rate(self) -> float:
        if self.learning_rate is None:
            raise ConfigError("learning_rate is null: set it (only the plan of a run fills it in)")
        return self.learning_rate


class PolicyTrainingConfig(TrainingConfig):
    replay_routing: bool | Literal["measure"] = False
    """true: route each token to the experts that the engine chose. measure: only report how often they differ."""
    stream: bool | Literal["auto"] = "auto"
    """Train complete groups while others are still sampled; exact. auto: on GPUs, if the algorithm and memory allow."""


def reads_experts(ranks: RanksConfig) -> bool:
    """Tell whether training reads which experts the engine chose."""
    return isinstance(ranks, PolicyTrainingConfig) and bool(ranks.replay_routing)


def sharing_obstacle(ranks: RanksConfig, context_parallel: int, section: str = "training") -> str:
    """Say which keys prevent that common prefixes are computed once; empty: none."""
    replays = isinstance(ranks, PolicyTrainingConfig) and ranks.replay_routing
    reasons = {
        f"{section}.packing=false pads sequences": not ranks.packing,
        f"context_parallel={context_parallel} divides sequences": context_parallel > 1,
        f"{section}.replay_routing={str(replays).lower()} has experts of its own for every completion": bool(replays),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_training(training: TrainingConfig, model: ModelConfig, section: str = "training") -> None:
    """Refuse combinations of model and training keys that cannot work; `section` names the training keys."""
    check_mesh(training, model, section)
    if model.lora.quantize and model.lora.rank == 0:
        raise ConfigError("model.lora.quantize=true freezes the weights: set model.lora.rank to 1 or more (got 0)")
    if model.lora.rank and model.tensor_parallel > 1:
        raise ConfigError(
            f"model.lora.rank={model.lora.rank} does not work with tensor parallelism: set model.tensor_parallel=1 "
            f"(got {model.tensor_parallel}); sharding saves memory too"
        )


def check_mesh(ranks: RanksConfig, model: ModelConfig, section: str, whose: str = "model.") -> None:
    """Refuse a number of ranks that does not match the model's parallelism; `whose` prefixes its keys."""
    width = model.width()
    if ranks.ranks is not None and ranks.ranks % width:
        raise ConfigError(
            f"{section}.ranks={ranks.ranks} is not a multiple of {whose}tensor_parallel={model.tensor_parallel} x "
            f"{whose}context_parallel={model.context_parallel}: set it to {width} or a multiple"
        )
    if model.context_parallel > 1 and not ranks.packing:
        raise ConfigError(f"{whose}context_parallel={model.context_parallel} needs {section}.packing=true")
    if ranks.share_prefixes is True and (obstacle := sharing_obstacle(ranks, model.context_parallel, section)):
        raise ConfigError(
            f"{section}.share_prefixes=true: {obstacle}; set {section}.share_prefixes=auto or change that"
        )


class RoleConfig(Config):
    """Placement and parallelism of a model other than the policy."""

    placement: Literal["shared", "separate"] = "shared"
    """shared: on the policy's GPUs. separate: on its own GPUs. On CPUs every rank is a process anyway."""
    tensor_parallel: int | None = Field(None, ge=1)
    """Ranks that share each layer's matrices. null: as model.tensor_parallel."""
    context_parallel: int | None = Field(None, ge=1)
    """Ranks that share each sequence. null: as model.context_parallel."""

    def model_like(self, policy: ModelConfig, path: str) -> ModelConfig:
        """Return the policy's settings for another model: with this role's own keys, without adapters."""
        own = self.model_dump(include={"tensor_parallel", "context_parallel", "train_vision"}, exclude_none=True)
        none = {"lora": {"rank": 0, "quantize": False}, "train_vision": "none"}
        return policy.with_keys({"path": path, **none, **own})


class FrozenConfig(RoleConfig, RanksConfig):
    """A model that only scores."""

    deepspeed: FrozenDeepSpeedConfig = FrozenDeepSpeedConfig()


class TeacherConfig(FrozenConfig):
    path: str = ""
    """Teacher of on-policy distillation, a model with the policy's tokenizer. Empty: algorithm.distillation.teacher."""
    paths: dict[str, str] = {}
    """Several teachers instead of `path`, by names; each row names its own in the column `column`."""
    column: str = "teacher"
    """Column with the name of a row's teacher, if `paths` is set."""

    @field_validator("paths")
    @classmethod
    def resolve_paths(cls, paths: dict[str, str]) -> dict[str, str]:
        return {name: resolve_path(path) for name, path in paths.items()}

    def check_keys(self) -> None:
        if self.path and self.paths:
            raise ValueError(f"path={self.path} and paths={', '.join(self.paths)} exclude each other: keep one of them")


class CriticConfig(RoleConfig, TrainingConfig):
    """The value model; loaded only if the advantage needs one."""

    path: str | None = None
    """Model the critic starts from. null: a local reward model if there is one, else the policy's model."""
    train_vision: Vision = "none"
    """Of a vision-language critic, train besides the language model: as model.train_vision."""


Role = FrozenConfig | CriticConfig
