"""The configuration of supervised training."""

from typing import Any, Self

from pydantic import Field, model_validator

from trueline.config.base import merge
from trueline.config.data import DataConfig
from trueline.config.model import ModelConfig, TrainingConfig, check_torch_engine
from trueline.config.run import RunConfig


class SupervisedTrainingConfig(TrainingConfig):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""


class SupervisedConfig(RunConfig):
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; null makes `epochs` passes over the data."""

    epochs: int = Field(1, ge=1)
    """Passes over the data when `steps` is null."""

    samples_per_step: int = Field(64, ge=1)
    """Sequences per optimizer step, over all ranks."""

    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence; a longer one is refused by row. null takes the model's context."""

    completion_column: str | None = None
    """Column with the text to learn; null takes the first of completion, answer, response that exists."""

    model: ModelConfig = ModelConfig()
    training: SupervisedTrainingConfig = SupervisedTrainingConfig()
    data: DataConfig = DataConfig()

    @model_validator(mode="before")
    @classmethod
    def fill_local(cls, values: Any) -> Any:
        local = isinstance(values, dict) and values.get("runtime") == "local"
        return merge({"training": {"engine": "torch"}}, values) if local else values

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        if self.runtime == "local" and self.training.engine != "torch":
            raise ValueError(
                f"runtime=local keeps everything in one process: set training.engine=torch (got {self.training.engine})"
            )
        check_torch_engine(self.training, self.model)
        if (self.max_tokens or 0) > self.training.micro_batch_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} does not fit into training.micro_batch_tokens="
                f"{self.training.micro_batch_tokens}: raise the latter or lower the former"
            )
        return self
