"""The configurations of recipes that run rounds: sample, select, train, and again."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from trueline.config.base import Tree
from trueline.config.model import TrainingConfig, check_training
from trueline.config.preference import PreferenceConfig
from trueline.config.rl import EvaluationConfig
from trueline.config.sampling import SelectionConfig
from trueline.config.supervised import PreferenceRunConfig, SftConfig, SupervisedConfig


class RoundTrainingConfig(TrainingConfig):
    """How each round trains; the keys are those of `sft` and `dpo`."""

    steps: int | None = Field(None, ge=1)
    """Optimizer steps of a round; null makes `epochs` passes over what the round kept."""

    epochs: int = Field(1, ge=1)
    """Passes over what the round kept."""

    samples_per_step: int = Field(64, ge=1)
    """Completions, or pairs of them, per optimizer step, over all ranks."""

    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence; longer ones are left out and counted. null takes the model's context."""


OUTSIDE = ("steps", "epochs", "samples_per_step", "max_tokens")  # keys that stand beside `training` in sft and dpo


class RoundsConfig(SelectionConfig):
    """Keys that all recipes share."""

    trainer: ClassVar[str] = "sft"  # the verb that trains
    trained: ClassVar[type[SupervisedConfig]] = SftConfig
    learnt: ClassVar[str] = "kept.jsonl"  # what of a round's samples it trains on

    rounds: int = Field(3, ge=1)
    """Times to sample from the present model and train it on what it made."""

    prompts_per_round: int | None = Field(None, ge=1)
    """Prompts that each round answers, the next ones in the seeded order; null takes as many as there are."""

    training: RoundTrainingConfig = RoundTrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def check_rounds(self) -> Self:
        check_training(self.training, self.model)
        if not self.checkpoint.save:
            raise ValueError("checkpoint.save=false: a round goes on from the checkpoint of the one before; set true")
        return self

    def run_keys(self) -> Tree:
        """Return the keys that every stage takes over as they are."""
        return self.model_dump(
            include={"seed", "runtime", "timeout_seconds", "checkpoint", "monitoring", "health", "model"}
        )

    def generate_keys(self) -> Tree:
        elsewhere = {"name", "folder", "checkpoint", "monitoring", "health"}
        return self.model_dump(include={*SelectionConfig.model_fields} - elsewhere)

    def training_keys(self) -> Tree:
        training = self.training.model_dump()
        return {
            **self.run_keys(),
            **{key: training.pop(key) for key in OUTSIDE},
            "training": training,
            # Prompts are read as they were sampled; one long row does not end a recipe.
            "data": {
                "chat_template": self.data.chat_template,
                "chat_template_kwargs": self.data.chat_template_kwargs,
                "too_long": "drop",
            },
        }


class RaftConfig(RoundsConfig):
    keep: Literal["all", "best", "threshold"] = "best"
    """Completions to learn: all; the best one of each prompt (best-of-n); all with a reward of `threshold` or more
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
