"""Configurations of jobs that sample: `generate`, `eval`, recipes in rounds; and of a reward model server."""

from typing import ClassVar, Literal

from pydantic import Field

from trueline.config.base import Tree
from trueline.config.data import PromptDataConfig
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import FrozenConfig, ModelConfig, TrainingConfig, check_mesh, check_training
from trueline.config.reward import RewardConfig, RewardModelKeys
from trueline.config.rl import OWN_GPU, EvaluationConfig, RolloutConfig
from trueline.config.run import EnginesConfig, RunConfig
from trueline.config.supervised import PreferenceConfig, PreferenceRunConfig, SftConfig, SupervisedConfig


class SamplerConfig(RolloutConfig):
    """Engines that share their GPUs with no trainer."""

    gpu_memory_utilization: float = Field(OWN_GPU, gt=0, lt=1)
    """Share of each GPU's memory for the engine (weights and KV cache)."""


class SamplingConfig(RunConfig):
    model: ModelConfig = ModelConfig()
    rollout: SamplerConfig = SamplerConfig()
    data: PromptDataConfig = PromptDataConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: FrozenConfig = FrozenConfig()
    environment: EnvironmentConfig = EnvironmentConfig()

    def has_reward(self) -> bool:
        """Tell whether completions get rewards, from a function, a model or the environment."""
        return bool(self.reward.named_parts()) or self.environment.plays()


class SelectionConfig(SamplingConfig):
    """Several completions per prompt, some of which are kept."""

    samples: int = Field(4, ge=1)
    """Completions per prompt."""
    keep_truncated: bool = True
    """Whether truncated completions may be kept, or be the preferred one of a pair."""


class GenerateConfig(SelectionConfig):
    keep: Literal["all", "best", "threshold"] = "all"
    """Completions to keep. all; best: the best of each prompt (best-of-n); threshold: reward >= threshold
    (rejection sampling). Failed and empty completions are never kept."""
    threshold: float = Field(1.0, allow_inf_nan=False)
    """Lowest reward that keep=threshold keeps."""
    pairs: bool = False
    """Also write each prompt's best and worst completion as a preference dataset."""
    limit: int | None = Field(None, ge=1)
    """Sample for only this many prompts. null: all that `skip` leaves."""
    skip: int = Field(0, ge=0)
    """Skip this many prompts first, in the order of data.shuffle and seed."""
    shards: int = Field(1, ge=1)
    """Split the prompts into this many shards, e.g. for several machines; this run takes one."""
    shard: int = Field(0, ge=0)
    """Shard of this run, from 0 to shards - 1."""

    def check_keys(self) -> None:
        super().check_keys()
        if self.shard >= self.shards:
            raise ValueError(f"shard={self.shard} is not in 0 to {self.shards - 1} (shards={self.shards}): change it")
        if self.pairs and self.samples < 2:
            raise ValueError(f"pairs=true needs two completions: set samples to 2 or more (got {self.samples})")


class EvalConfig(SamplingConfig):
    evaluation: EvaluationConfig = EvaluationConfig()

    def check_keys(self) -> None:
        super().check_keys()
        if self.data.path or self.data.mixture:
            raise ValueError(
                f"data.path={self.data.path}: eval reads evaluation.data (--eval-data) or evaluation.sets instead; set "
                "one of those"
            )


class RoundTrainingConfig(TrainingConfig):
    """How each round trains; the keys of `sft` and `dpo`."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps per round. null: `epochs` passes over what the round kept."""
    epochs: int = Field(1, ge=1)
    """Passes over what the round kept."""
    samples_per_step: int = Field(64, ge=1)
    """Completions, or pairs, per optimizer step, over all ranks."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence; longer ones are dropped and counted. null: the model's context."""


OUTSIDE = ("steps", "epochs", "samples_per_step", "max_tokens")  # keys outside of `training` in sft and dpo


class RoundsConfig(SelectionConfig):
    trainer: ClassVar[str] = "sft"  # the verb that trains
    trained: ClassVar[type[SupervisedConfig]] = SftConfig
    learnt: ClassVar[str] = "kept.jsonl"  # the file that it trains on
    rounds: int = Field(3, ge=1)
    """Rounds; each samples from the current model and trains it on the result."""
    prompts_per_round: int | None = Field(None, ge=1)
    """Prompts per round, taken in the seeded order. null: all."""
    training: RoundTrainingConfig = RoundTrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def check_keys(self) -> None:
        super().check_keys()
        check_training(self.training, self.model)
        if not self.checkpoint.save:
            raise ValueError("checkpoint.save=false: each round starts from the last one's checkpoint; set it to true")

    def generate_keys(self) -> Tree:
        elsewhere = {"name", "folder", "checkpoint", "monitoring", "health"}
        return self.model_dump(include={*SelectionConfig.model_fields} - elsewhere)

    def training_keys(self) -> Tree:
        training = self.training.model_dump()
        unchanged = {"seed", "deterministic", "runtime", "timeout_seconds"}
        unchanged |= {"checkpoint", "monitoring", "health", "model"}
        return {
            **self.model_dump(include=unchanged),
            **{key: training.pop(key) for key in OUTSIDE},
            "training": training,
            # Render prompts as in sampling, and let no long row end a recipe.
            "data": {**self.data.model_dump(include={"chat_template", "chat_template_kwargs"}), "too_long": "drop"},
        }


class RaftConfig(RoundsConfig):
    keep: Literal["all", "best", "threshold"] = "best"
    """Completions to train on. all; best: the best of each prompt (best-of-n); threshold: reward >= threshold
    (rejection sampling). Failed and empty completions are never kept."""
    threshold: float = 1.0
    """Lowest reward that keep=threshold keeps."""

    def generate_keys(self) -> Tree:
        return super().generate_keys() | {"keep": self.keep, "threshold": self.threshold}


class IterativeDPOConfig(RoundsConfig):
    trainer: ClassVar[str] = "dpo"
    trained: ClassVar[type[SupervisedConfig]] = PreferenceRunConfig
    learnt: ClassVar[str] = "pairs.jsonl"
    preference: PreferenceConfig = PreferenceConfig()

    def generate_keys(self) -> Tree:
        return super().generate_keys() | {"pairs": True}

    def training_keys(self) -> Tree:
        return super().training_keys() | {"preference": self.preference.model_dump()}


class ServingConfig(RewardModelKeys, EnginesConfig):
    host: str = "127.0.0.1"
    """Address to listen on. Any address but the loopback is open to the network, unencrypted."""
    port: int = Field(8900, ge=0, le=65535)
    """Port to listen on. 0: any free port, which is printed."""
    token_variable: str = "TRUELINE_REWARD_TOKEN"
    """Environment variable with the token clients must send. If unset, a new token is printed once."""
    runtime: Literal["ray", "local"] = "local"
    """local: the model runs in this process. ray: one process per rank."""
    logs: str = "runs/serve-reward"
    """Folder for the output of runtime=ray processes."""
    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait for a batch, or for the model's start, before the server exits."""
    batch: int = Field(64, ge=1)
    """Most completions scored together."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest prompt plus reply; longer ones get an error. null: what model and ranks.micro_batch_tokens allow."""
    model: ModelConfig = ModelConfig()
    ranks: FrozenConfig = FrozenConfig()

    def check_keys(self) -> None:
        check_mesh(self.ranks, self.served_model(), "ranks", whose="its ")

    def served_model(self) -> ModelConfig:
        return self.ranks.model_like(self.model, self.model.path)
