"""The models beside the policy: each with ranks, parallelism and a place of its own."""

from typing import Literal

from pydantic import Field

from trueline.config.base import Config
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig


class RoleConfig(Config):
    """Where a model beside the policy lives and how it is cut."""

    placement: Literal["shared", "separate"] = "shared"
    """shared: on the policy's GPUs; separate: on GPUs of its own. On a CPU every rank is a process anyway."""

    tensor_parallel: int | None = Field(None, ge=1)
    """Ranks that share out every layer's matrices; null: as model.tensor_parallel."""

    context_parallel: int | None = Field(None, ge=1)
    """Ranks that share out every sequence; null: as model.context_parallel."""

    def model_like(self, policy: ModelConfig, path: str) -> ModelConfig:
        """Return the policy's settings for another model: cut as this role says, without adapters."""
        return policy.replaced(
            {
                "path": path,
                "tensor_parallel": self.tensor_parallel or policy.tensor_parallel,
                "context_parallel": self.context_parallel or policy.context_parallel,
                "lora": {"rank": 0, "quantize": False},
            }
        )


class FrozenConfig(RoleConfig, RanksConfig):
    """A model that only scores."""

    zero_stage: Literal[0, 3] = 0
    """0: every rank holds the whole model; 3: sharded. (A frozen model has no optimizer to shard.)"""


class TeacherConfig(FrozenConfig):
    path: str = ""
    """Model whose log-probs are the reward of on-policy distillation; it must have the policy's tokenizer."""


class CriticConfig(RoleConfig, TrainingConfig):
    """The value model; loaded only where the advantage needs one."""

    path: str | None = None
    """Model that the critic starts from; null takes a local reward model where there is one, else the policy's."""


Role = FrozenConfig | CriticConfig
