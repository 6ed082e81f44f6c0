"""The configuration of a reinforcement-learning run."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import Config, merge
from trueline.config.data import PromptDataConfig, RewardConfig
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig, check_training
from trueline.config.run import RunConfig


class RolloutConfig(Config):
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf: Transformers' own generation (slow; runs wherever PyTorch runs)."""

    engines: int | None = Field(None, ge=1)
    """Number of engines; null takes one on a CPU, and shares GPUs evenly with training."""

    tensor_parallel: int = Field(1, ge=1)
    """Devices that one engine spreads its weights over."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computation type of the engine; auto follows model.dtype."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same number."""

    max_new_tokens: int | None = Field(None, ge=1)
    """Longest answer; null takes 1024 or half of the model's context, whichever is less."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; longer ones are refused before the start. null takes what the context leaves, up to 4096."""

    max_staleness: int = Field(0, ge=0)
    """How many policy versions a trained answer may lag behind; 0 is synchronous training."""

    seeded: bool = True
    """Give every answer its own seed, so that a run can be repeated; costs speed in very large GPU batches."""

    max_sequences: int = Field(256, ge=1)
    """Answers that one engine works on at a time."""

    gpu_memory_share: float = Field(0.4, gt=0, lt=1)
    """Share of each GPU's memory for the engine (weights and KV cache)."""

    cpu_cache_gib: float = Field(1.0, gt=0)
    """Memory for the KV cache of an engine that runs on a CPU."""

    cuda_graphs: bool = True
    """Capture CUDA graphs on GPUs: a slower start, faster sampling."""


class EvaluationConfig(Config):
    data: str = ""
    """Held-out prompts, same columns as data.path; empty turns evaluation off."""

    every: int = Field(0, ge=0)
    """Evaluate every this many steps, besides before and after; 0 means only those two."""

    limit: int | None = Field(None, ge=1)
    """Use only the first this many prompts."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class SyncConfig(Config):
    bucket_mib: int = Field(256, ge=1)
    """Weights travel to the engines in pieces of this size."""

    check: bool = True
    """After every update, engine and trainer score the same tokens; a gap above `tolerance` stops the run."""

    tolerance: float | None = Field(None, gt=0)
    """Largest mean log-prob gap of that check; null is 1e-3 where both compute in float32 and 0.1 otherwise."""


class ReferenceConfig(RanksConfig):
    """The frozen reference model; loaded only where algorithm.kl.coefficient is above 0."""

    zero_stage: Literal[0, 3] = 0
    """0: every rank holds the whole model; 3: sharded. (A frozen model has no optimizer to shard.)"""


LOCAL_DEFAULTS = {
    "rollout": {"engine": "hf"},
    "training": {"engine": "torch"},
    "reference": {"engine": "torch"},
}


class RLConfig(RunConfig):
    steps: int = Field(100, ge=1)
    """Training steps: each samples, scores, updates and publishes once."""

    groups_per_step: int = Field(16, ge=1)
    """Prompts per step; each gets algorithm.group_size answers."""

    minibatches: int = Field(1, ge=1)
    """Optimizer steps that share one step's answers."""

    epochs: int = Field(1, ge=1)
    """Passes over one step's answers."""

    placement: Literal["auto", "separate", "colocated"] = "auto"
    """Whether training and engines have GPUs of their own; auto shares them when there are too few."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    reference: ReferenceConfig = ReferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: PromptDataConfig = PromptDataConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sync: SyncConfig = SyncConfig()

    @model_validator(mode="before")
    @classmethod
    def fill_local(cls, values: Any) -> Any:
        local = isinstance(values, dict) and values.get("runtime") == "local"
        return merge(LOCAL_DEFAULTS, values) if local else values

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        answers = self.groups_per_step * self.algorithm.group_size
        if answers % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} does not divide the {answers} answers of a step "
                f"(groups_per_step={self.groups_per_step} x algorithm.group_size={self.algorithm.group_size}): "
                "change one of the three"
            )
        if self.placement == "colocated" and self.rollout.max_staleness > 0:
            raise ValueError(
                "placement=colocated cannot sample while it trains: set rollout.max_staleness=0 "
                f"(got {self.rollout.max_staleness}) or placement=separate"
            )
        if self.runtime == "local":
            self._check_local()
        check_training(self.training, self.model)
        self._check_reference()
        return self

    def _check_reference(self) -> None:
        width = self.model.tensor_parallel * self.model.ring
        if self.reference.ranks is not None and self.reference.ranks % width:
            raise ValueError(
                f"reference.ranks={self.reference.ranks} is no multiple of model.tensor_parallel="
                f"{self.model.tensor_parallel} x model.ring={self.model.ring}: set it to {width} or a multiple"
            )
        if self.model.ring > 1 and not self.reference.packing:
            raise ValueError(f"model.ring={self.model.ring} works on packed sequences: set reference.packing=true")

    def _check_local(self) -> None:
        for section, engines in LOCAL_DEFAULTS.items():
            value = self.model_dump(include={section})[section]["engine"]
            if value != engines["engine"]:
                raise ValueError(
                    f"runtime=local keeps everything in one process: set {section}.engine={engines['engine']} "
                    f"(got {value}) or runtime=ray"
                )
