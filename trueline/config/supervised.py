"""The configurations of offline training."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from trueline.config.base import Config
from trueline.config.data import DataConfig
from trueline.config.model import ModelConfig, TrainingConfig, check_training
from trueline.config.preference import DistillConfig, KTOConfig, PreferenceConfig, RewardModelConfig
from trueline.config.run import RunConfig


class HeldOutConfig(Config):
    data: str = ""
    """Held-out rows, same columns as data.path; empty takes `share` of the training rows instead."""

    share: float = Field(0.0, ge=0, lt=1)
    """Share of data.path's rows that is held out and never trained on."""

    by: str | None = None
    """Column whose equal values stay on one side of that split, so that nothing leaks between the two."""

    every: int = Field(50, ge=0)
    """Evaluate every this many steps, besides before the first and after the last; 0 means only those two."""

    limit: int | None = Field(None, ge=1)
    """Use only the first this many held-out rows of each dataset."""


class SupervisedConfig(RunConfig):
    """Keys that all offline tasks share."""

    task: ClassVar[str] = "sft"

    steps: int | None = Field(None, ge=1)
    """Optimizer steps; null makes `epochs` passes over the data."""

    epochs: int = Field(1, ge=1)
    """Passes over the data when `steps` is null; the last step is filled up from the next pass."""

    samples_per_step: int = Field(64, ge=1)
    """Sequences, or pairs of them, per optimizer step, over all ranks."""

    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence; data.too_long says what happens to a longer one. null takes the model's context."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    evaluation: HeldOutConfig = HeldOutConfig()

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        check_training(self.training, self.model)
        if self.evaluation.data and self.evaluation.share:
            raise ValueError(
                f"evaluation.data={self.evaluation.data} and evaluation.share={self.evaluation.share} both name "
                "held-out rows: set one of them"
            )
        held_out = bool(self.evaluation.data or self.evaluation.share)
        self.checkpoint.check_best(held_out, self.evaluation.every)
        return self


class SftConfig(SupervisedConfig):
    learn: Literal["all", "last"] = "all"
    """Learn all of a conversation's assistant turns, or the last one only."""


class DistillRunConfig(SftConfig):
    task: ClassVar[str] = "distill"

    distill: DistillConfig = DistillConfig()


class PreferenceRunConfig(SupervisedConfig):
    task: ClassVar[str] = "preference"

    preference: PreferenceConfig = PreferenceConfig()


class KTORunConfig(SupervisedConfig):
    task: ClassVar[str] = "kto"

    kto: KTOConfig = KTOConfig()


class RewardModelRunConfig(SupervisedConfig):
    task: ClassVar[str] = "rm"

    reward_model: RewardModelConfig = RewardModelConfig()


class ProcessRewardRunConfig(SupervisedConfig):
    task: ClassVar[str] = "prm"
