"""The configurations of jobs that train nothing: those that sample and score, and a reward model served over HTTP."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trueline.config.data import ChatTemplate, PromptDataConfig
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import ModelConfig, check_mesh
from trueline.config.reward import RewardConfig
from trueline.config.rl import OWN_GPU, EvaluationConfig, RolloutConfig
from trueline.config.roles import FrozenConfig
from trueline.config.run import EnginesConfig, RunConfig


class SamplerConfig(RolloutConfig):
    """Engines that share their GPUs with no trainer."""

    gpu_memory_utilization: float = Field(OWN_GPU, gt=0, lt=1)
    """Share of each GPU's memory for the engine (weights and KV cache)."""


class SamplingConfig(RunConfig):
    """Keys that all sampling jobs share."""

    model: ModelConfig = ModelConfig()
    rollout: SamplerConfig = SamplerConfig()
    data: PromptDataConfig = PromptDataConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: FrozenConfig = FrozenConfig()
    environment: EnvironmentConfig = EnvironmentConfig()

    def scored(self) -> bool:
        """Tell whether completions get a reward at all, from a function or model or from the environment itself."""
        return bool(self.reward.named_parts()) or self.environment.plays()


class SelectionConfig(SamplingConfig):
    """Several completions of a prompt, of which some are worth learning."""

    samples: int = Field(4, ge=1)
    """Completions per prompt."""

    keep_truncated: bool = True
    """Whether a completion that the length limit cut off may be kept, or preferred in a pair."""


class GenerateConfig(SelectionConfig):
    keep: Literal["all", "best", "threshold"] = "all"
    """Completions to keep: all; the best one of each prompt (best-of-n); all with a reward of `threshold` or more
    (rejection sampling). Failed and empty completions are never kept."""

    threshold: float = Field(1.0, allow_inf_nan=False)
    """Lowest reward that keep=threshold keeps."""

    pairs: bool = False
    """Also write each prompt's best against its worst completion, as a preference dataset."""

    limit: int | None = Field(None, ge=1)
    """Answer only this many prompts; null answers all that `skip` leaves."""

    skip: int = Field(0, ge=0)
    """Pass over this many prompts first, in the order that data.shuffle and seed make."""

    shards: int = Field(1, ge=1)
    """Share the prompts out among this many runs, say on several machines; this run answers one share of them."""

    shard: int = Field(0, ge=0)
    """Which share, from 0 to shards - 1."""

    @model_validator(mode="after")
    def check_selection(self) -> Self:
        if self.shard >= self.shards:
            raise ValueError(f"shard={self.shard} of shards={self.shards} is not there: count from 0")
        if self.pairs and self.samples < 2:
            raise ValueError(f"pairs=true needs two answers to a prompt: set samples to 2 or more (got {self.samples})")
        return self


class EvalConfig(SamplingConfig):
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def check_data(self) -> Self:
        if self.data.path or self.data.mixture:
            raise ValueError(
                f"data.path={self.data.path}: eval reads evaluation.data (--eval-data) or evaluation.sets; the other "
                "keys of `data` say how"
            )
        return self


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
