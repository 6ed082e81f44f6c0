"""The configuration of `trueline verify`."""

from typing import Literal

from pydantic import Field

from trueline.config.data import TemplateConfig
from trueline.config.model import ModelConfig, TrainingConfig, check_training
from trueline.config.rl import RolloutConfig
from trueline.config.run import EnginesConfig


class VerifyConfig(EnginesConfig):
    runtime: Literal["ray", "local"] = "ray"
    """local: only what runs in one process: no other ranks, and rollout.engine=hf."""
    seed: int = Field(0, ge=0)
    """Seed of the engine's sampling."""
    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait for one call of a process."""
    tokens: int | None = Field(None, ge=16)
    """Longest sequence that is compared. null: 1024, on CPUs 128; at most the model's context."""
    model: ModelConfig = ModelConfig()
    data: TemplateConfig = TemplateConfig()
    training: TrainingConfig = TrainingConfig()
    rollout: RolloutConfig = RolloutConfig()

    def check_keys(self) -> None:
        check_training(self.training, self.model)
