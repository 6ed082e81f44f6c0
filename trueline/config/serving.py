"""The configuration of a reward model that is served over HTTP."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trueline.config.data import ChatTemplate
from trueline.config.model import ModelConfig, check_mesh
from trueline.config.roles import FrozenConfig
from trueline.config.run import EnginesConfig


class ServingConfig(EnginesConfig):
    host: str = "127.0.0.1"
    """Address to listen on; any other than the loopback is open to the network, without encryption."""

    port: int = Field(8900, ge=0, le=65535)
    """Port to listen on; 0 takes any free one, which is printed."""

    token_variable: str = "TRUELINE_REWARD_TOKEN"
    """Environment variable with the token that clients must send; where it is not set, a new one is shown once."""

    runtime: Literal["ray", "local"] = "local"
    """local: the model lives in this process; ray: one process per rank."""

    logs: str = "runs/serve-reward"
    """Folder for what the processes of runtime=ray print."""

    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait for one batch of the model, or for its start, before the server ends."""

    batch: int = Field(64, ge=1)
    """Most replies that are scored together."""

    max_tokens: int | None = Field(None, ge=2)
    """Longest prompt and reply; a longer one gets an error. null: what model and ranks.micro_batch_tokens allow."""

    chat_template: ChatTemplate = "auto"
    """auto (the template saved with the model), never or a Jinja file, as the model was trained."""

    normalize: bool = False
    """Subtract the mean and divide by the deviation that were stored with the model."""

    steps: Literal["min", "mean", "product", "last"] = "min"
    """Process reward models: how the probabilities that steps are good become one number."""

    step_separator: str = "\n"
    """Process reward models: text that ends each step; on the command line, \\n is a newline."""

    model: ModelConfig = ModelConfig()
    ranks: FrozenConfig = FrozenConfig()

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        check_mesh(self.ranks, self.served_model(), "ranks", whose="its ")
        return self

    def served_model(self) -> ModelConfig:
        return self.ranks.model_like(self.model, self.model.path)
