"""Configurations of recipes that repeat rounds of sampling, selecting and training."""

from typing import ClassVar, Literal

from pydantic import Field

from trueline.config.base import Tree
from trueline.config.model import TrainingConfig, check_training
from trueline.config.rl import EvaluationConfig
from trueline.config.sampling import SelectionConfig
from trueline.config.supervised import PreferenceConfig, PreferenceRunConfig, SftConfig, SupervisedConfig


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
        unchanged = {"seed", "runtime", "timeout_seconds", "checkpoint", "monitoring", "health", "model"}
        return {
            **self.model_dump(include=unchanged),
            **{key: training.pop(key) for key in OUTSIDE},
            "training": training,
            # Render prompts as in sampling, and let no long row end a recipe.
            "data": {
                "chat_template": self.data.chat_template,
                "chat_template_kwargs": self.data.chat_template_kwargs,
                "too_long": "drop",
            },
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
