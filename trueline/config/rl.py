"""The configuration of a reinforcement-learning run."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import Config
from trueline.config.data import PromptDataConfig
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import Dtype, ModelConfig, PolicyTrainingConfig, check_mesh, check_training
from trueline.config.reward import RewardConfig
from trueline.config.roles import CriticConfig, FrozenConfig, Role, TeacherConfig
from trueline.config.run import CheckpointConfig, RunConfig

OWN_GPU = 0.9  # share of a GPU that an engine without a neighbour takes


class SamplingControls(Config):
    """What a token is drawn from, and where a completion ends before its end token."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability; 1 draws from all."""

    top_k: int = Field(0, ge=0)
    """Draw from this many of the likeliest tokens; 0 draws from all."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from tokens with at least this share of the likeliest one's probability; 0 draws from all."""

    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Above 1, makes tokens of the prompt and of the completion so far less likely; 1 leaves them as they are."""

    stop: list[str] = []
    """Texts that end a completion; the reply ends before them."""

    @field_validator("stop", mode="before")
    @classmethod
    def list_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def check_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError(f"an empty text would end every completion at once: take it out (got {stop})")
        return stop

    def reshaped(self) -> dict[str, float]:
        """Return the keys that make the distribution drawn from another than the model's at this temperature."""
        values = self.model_dump(include={"top_p", "top_k", "min_p", "repetition_penalty"})
        return {name: value for name, value in values.items() if value != SamplingControls.model_fields[name].default}


class RolloutConfig(SamplingControls):
    engine: str = "vllm"
    """vllm, hf (Transformers' own generation: slow; runs wherever PyTorch runs) or another row of rollout.engines."""

    engines: int | None = Field(None, ge=1)
    """Number of engines; null takes one on a CPU, and shares GPUs evenly with training."""

    tensor_parallel: int = Field(1, ge=1)
    """Devices that one engine spreads its weights over."""

    dtype: Dtype = "auto"
    """Computation type of the engine; auto follows model.dtype."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same number."""

    max_new_tokens: int | None = Field(None, ge=1)
    """Longest completion; of several turns, all replies in one sequence. null: 1024, or half of the model's context."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; longer ones are refused. null: the data's longest; several turns: all that memory leaves."""

    max_staleness: int = Field(0, ge=0)
    """How many policy versions a trained completion may lag behind; 0 is synchronous training."""

    on_update: Literal["wait", "interrupt", "keep"] = "wait"
    """Completions under way wait for new weights to the end, or go on under them: in any engine, or in their own."""

    too_old: Literal["wait", "drop"] = "wait"
    """A group that would lag more than max_staleness versions after this step: wait for it now, or drop it."""

    seeded: bool | None = None
    """Give every completion its own seed, so that it can be drawn again; null: unless that slows sampling (GPUs)."""

    max_sequences: int = Field(256, ge=1)
    """Completions that one engine works on at a time."""

    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """Share of each GPU's memory for the engine (weights and KV cache); null: what models beside it leave, or 0.9."""

    cpu_cache_gib: float = Field(1.0, gt=0)
    """Memory for the KV cache of an engine that runs on a CPU."""

    cuda_graphs: bool = True
    """Capture CUDA graphs on GPUs: a slower start, faster sampling."""


class ResolvedRollout(RolloutConfig):
    """The rollout as a plan holds it: nothing is left to machine, model or data any more."""

    engines: int
    gpu_memory_utilization: float = OWN_GPU
    max_new_tokens: int
    max_prompt_tokens: int
    seeded: bool = True

    def longest(self) -> int:
        """Return the number of tokens of the longest sequence that sampling can make."""
        return self.max_prompt_tokens + self.max_new_tokens


class EvaluationConfig(SamplingControls):
    data: str = ""
    """Held-out prompts, same columns as data.path; empty turns evaluation off, unless `sets` names some."""

    sets: dict[str, str] = {}
    """Several held-out datasets in place of `data`: each one's name in the metrics and its path."""

    every: int = Field(0, ge=0)
    """Evaluate every this many steps, besides before and after; 0 means only those two."""

    limit: int | None = Field(None, ge=1)
    """Use only the first this many prompts of each dataset."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    samples: int = Field(1, ge=1)
    """Completions per prompt, for mean@k, pass@k and maj@k; more than one needs a temperature above 0."""

    pass_reward: float = 1.0
    """Reward from which on a completion counts as right in pass@k."""

    @model_validator(mode="after")
    def check_sets(self) -> Self:
        if self.data and self.sets:
            raise ValueError(f"data={self.data} and sets={', '.join(self.sets)} exclude each other: keep one of them")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} greedy answers would all be the same: set evaluation.temperature above 0"
            )
        return self

    def named_sets(self) -> dict[str, str]:
        """Return every held-out dataset's path by its name; the only one of a run has an empty name."""
        return self.sets or ({"": self.data} if self.data else {})


class SyncConfig(Config):
    bucket_mib: int = Field(256, ge=1)
    """Weights travel to the engines in pieces of this size."""

    transport: Literal["auto", "ipc", "nccl", "gloo"] = "auto"
    """ipc: a GPU's memory that both share; nccl: GPU to GPU; gloo: the machine's memory. auto: the first there is."""

    check: bool = True
    """Prove at the start and after every update that engines hold the trainer's weights and compute alike."""

    tolerance: float | None = Field(None, gt=0)
    """Largest mean log-prob gap of that check; null follows the gap at the start, when both hold the same weights."""


class RLCheckpointConfig(CheckpointConfig):
    metric: str = "-evaluation/reward"
    """What keep_best looks at; a `-` in front means that more is better, e.g. -reward/mean."""


def dividing(prompts: int, group: int, minibatches: int) -> str:
    """Return the nearest keys with which minibatches divide a step's answers, in a configuration's words."""
    fewer = max(count for count in range(1, minibatches) if prompts * group % count == 0)
    more = next(count for count in range(prompts, prompts + minibatches) if count * group % minibatches == 0)
    return f"set minibatches={fewer} or prompts_per_step={more}"


class RLConfig(RunConfig):
    steps: int = Field(100, ge=1)
    """Training steps: each samples, scores, updates and publishes once."""

    prompts_per_step: int = Field(16, ge=1)
    """Prompts per step; each gets algorithm.group_size completions."""

    minibatches: int = Field(1, ge=1)
    """Optimizer steps that share one step's completions."""

    epochs: int = Field(1, ge=1)
    """Passes over one step's completions."""

    placement: Literal["auto", "separate", "colocated"] = "auto"
    """Whether training and engines have GPUs of their own or share them: in turns, or at once if max_staleness > 0."""

    checkpoint: RLCheckpointConfig = RLCheckpointConfig()
    model: ModelConfig = ModelConfig()
    training: PolicyTrainingConfig = PolicyTrainingConfig()
    reference: FrozenConfig = FrozenConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: FrozenConfig = FrozenConfig()
    teacher: TeacherConfig = TeacherConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: PromptDataConfig = PromptDataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sync: SyncConfig = SyncConfig()

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        completions = self.prompts_per_step * self.algorithm.group_size
        if completions % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} does not divide the {completions} answers of a step "
                f"(prompts_per_step={self.prompts_per_step} x algorithm.group_size={self.algorithm.group_size}): "
                f"{dividing(self.prompts_per_step, self.algorithm.group_size, self.minibatches)}"
            )
        check_training(self.training, self.model)
        for name, role in self.roles().items():
            check_mesh(role, role.model_like(self.model, self.model.path), name, whose="its ")
        if not self.judged() and self.evaluation.named_sets():
            raise ValueError("evaluation needs a reward: set reward.function, or leave evaluation.data out")
        self.checkpoint.check_best(bool(self.evaluation.named_sets()), self.evaluation.every)
        return self

    @model_validator(mode="after")
    def check_distribution(self) -> Self:
        for name, value in self.rollout.reshaped().items():
            raise ValueError(
                f"rollout.{name}={value} samples from another distribution than the one that is trained: log-probs of "
                "policy and reference are those of all tokens at rollout.temperature, and their ratios would be wrong; "
                f"leave it out, or set evaluation.{name} for evaluation alone"
            )
        return self

    def judged(self) -> bool:
        """Tell whether episodes have rewards: of a function or model, or of the environment's own."""
        return bool(self.reward.named_parts()) or self.environment.plays()

    def roles(self) -> dict[str, Role]:
        """Return the models beside the policy, whether or not this run needs them."""
        return {name: part for name, part in self if isinstance(part, Role)}
