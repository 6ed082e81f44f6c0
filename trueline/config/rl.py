"""The configuration of a reinforcement-learning run."""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import Config, ConfigError
from trueline.config.data import PromptDataConfig
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import (
    CriticConfig,
    Dtype,
    FrozenConfig,
    ModelConfig,
    PolicyTrainingConfig,
    Role,
    TeacherConfig,
    check_mesh,
    check_training,
)
from trueline.config.reward import RewardConfig
from trueline.config.run import CheckpointConfig, RunConfig

LESSON = 512  # tokens, in which a template and what a teacher is shown have room
OWN_GPU = 0.9  # share of a GPU for an engine that shares it with nothing


class SamplingControls(Config):
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this. 1: all tokens."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most likely tokens. 0: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the top token's probability. 0: all tokens."""
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Above 1: make tokens of the prompt and the completion so far less likely. 1: off."""
    stop: list[str] = []
    """Strings that end a completion; they are not part of it."""

    @field_validator("stop", mode="before")
    @classmethod
    def list_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def check_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError(f"an empty string would end every completion at once: remove it (got {stop})")
        return stop

    def reshaping_keys(self) -> dict[str, float]:
        """Return the keys that change the sampling distribution, besides the temperature."""
        values = self.model_dump(include={"top_p", "top_k", "min_p", "repetition_penalty"})
        return {name: value for name, value in values.items() if value != SamplingControls.model_fields[name].default}


class RolloutConfig(SamplingControls):
    engine: str = "vllm"
    """vllm, hf (Transformers' generation: slow, runs anywhere), or another row of rollout.engines."""
    engines: int | None = Field(None, ge=1)
    """Number of engines. null: 1 on a CPU; on GPUs, engines and training get equal shares."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices per engine."""
    dtype: Dtype = "auto"
    """Compute type of the engine. auto: as model.dtype."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same value."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest completion; multi-turn: all replies of a sequence. null: 1024, or half of the model's context."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; longer ones are refused. null: the data's longest; multi-turn: all that memory leaves."""
    max_staleness: int = Field(0, ge=0)
    """How many policy versions old a completion may be when it is trained. 0: synchronous training."""
    on_update: Literal["wait", "interrupt", "keep"] = "wait"
    """In-flight completions finish first, or continue with the new weights: in any engine (interrupt) or their own."""
    too_old: Literal["wait", "drop"] = "wait"
    """A group that would exceed max_staleness after this step: wait for it now, or drop it."""
    oversample: float | None = Field(None, ge=0)
    """Sample so many more groups than a step needs (0.25: a quarter); the rest goes on. null: max_staleness."""
    window: int | None = Field(None, ge=1)
    """At most window - 1 groups drawn later are taken before a group (1: the order of the data). null: no bound."""
    seeded: bool | None = None
    """Give every completion its own seed, so that it can be reproduced. null: on unless it slows sampling (GPUs)."""
    max_sequences: int = Field(256, ge=1)
    """Concurrent completions per engine."""
    workers: int | None = Field(None, ge=0)
    """Processes for episodes, environments and rewards. 0: the run's own. null: one per node of a cluster, else 0."""
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    """Share of each GPU's memory for the engine (weights and KV cache). null: what other models leave, or 0.9."""
    cpu_cache_gib: float = Field(1.0, gt=0)
    """KV cache of an engine that runs on a CPU, in GiB."""
    cuda_graphs: bool = True
    """Capture CUDA graphs on GPUs: slower start, faster sampling."""
    speculative: Literal["none", "ngram"] = "none"
    """ngram: vLLM guesses tokens from repeated text. GPUs only, and not tried there yet: watch mismatch/sampler_z."""
    lean_logprobs: bool | None = None
    """Keep the log-probs of vLLM's tokens on the device until a request ends. null: on GPUs."""

    def check_keys(self) -> None:
        if self.extra_share() > self.max_staleness:
            raise ValueError(
                f"oversample={self.oversample:g}: the rest of a step would be older than max_staleness="
                f"{self.max_staleness} when it is trained: set rollout.max_staleness={math.ceil(self.extra_share())}"
            )

    def extra_share(self) -> float:
        """Return how many more groups are in flight than a step needs, in steps."""
        return self.max_staleness if self.oversample is None else self.oversample


class ResolvedRollout(RolloutConfig):
    """The rollout of a plan: every value is set."""

    engines: int
    gpu_memory_utilization: float = OWN_GPU
    max_new_tokens: int
    max_prompt_tokens: int
    seeded: bool = True
    workers: int = 0
    lean_logprobs: bool = False

    def longest(self) -> int:
        """Return the tokens of the longest possible sequence."""
        return self.max_prompt_tokens + self.max_new_tokens


class EvaluationConfig(SamplingControls):
    data: str = ""
    """Held-out prompts with the columns of data.path. Empty: no evaluation, unless `sets` is set."""
    sets: dict[str, str] = {}
    """Several held-out datasets instead of `data`: name in the metrics, and path."""
    every: int = Field(0, ge=0)
    """Evaluate every this many steps, and always before the first and after the last. 0: only those two."""
    limit: int | None = Field(None, ge=1)
    """Use only the first this many prompts of each dataset. null: all."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0: greedy."""
    samples: int = Field(1, ge=1)
    """Completions per prompt, for mean@k, pass@k and maj@k; above 1, the temperature must be above 0."""
    pass_reward: float = 1.0
    """Completions with at least this reward count as correct in pass@k."""

    def check_keys(self) -> None:
        if self.data and self.sets:
            raise ValueError(f"data={self.data} and sets={', '.join(self.sets)} exclude each other: keep one of them")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} greedy completions would be identical: set evaluation.temperature above 0"
            )

    def named_sets(self) -> dict[str, str]:
        """Return the path of each held-out dataset by name; a single one has an empty name."""
        return self.sets or ({"": self.data} if self.data else {})


class SyncConfig(Config):
    bucket_mib: int = Field(256, ge=1)
    """Weights are sent to the engines in buckets of this size."""
    transport: Literal["auto", "ipc", "nccl", "gloo"] = "auto"
    """ipc: shared GPU memory. nccl: GPU to GPU. gloo: host memory. auto: the first that works."""
    check: bool = True
    """Verify at the start and after each update that engines hold the trainer's weights and compute alike."""
    tolerance: float | None = Field(None, gt=0)
    """Largest mean log-prob gap of that check. null: derived from the gap at the start, when weights are equal."""


class RLCheckpointConfig(CheckpointConfig):
    metric: str = "-evaluation/reward"
    """Metric for keep_best; a leading `-` means higher is better, e.g. -reward/mean."""


class RLConfig(RunConfig):
    steps: int = Field(100, ge=1)
    """Training steps; each samples, scores, updates and syncs weights once."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts per step; each gets algorithm.group_size completions."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per training step; they split its completions."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's completions."""
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """separate: engines have their own GPUs. colocated: they share the trainer's, in turns if max_staleness=0."""
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

    def check_keys(self) -> None:
        super().check_keys()
        prompts, group, parts = self.prompts_per_step, self.algorithm.group_size, self.minibatches
        if prompts * group % parts:
            fewer = max(count for count in range(1, parts) if prompts * group % count == 0)
            more = next(count for count in range(prompts, prompts + parts) if count * group % parts == 0)
            raise ConfigError(
                f"minibatches={parts} does not divide the {prompts * group} completions of a step "
                f"(prompts_per_step={prompts} x algorithm.group_size={group}): "
                f"set minibatches={fewer} or prompts_per_step={more}",
                key="minibatches",
            )
        check_training(self.training, self.model)
        for name, role in self.roles().items():
            check_mesh(role, role.model_like(self.model, self.model.path), name, whose="its ")
        if not self.has_reward() and self.evaluation.named_sets():
            raise ValueError("evaluation needs a reward: set reward.function, or remove evaluation.data")
        if self.data.difficulty.enabled and (group < 2 or not self.has_reward()):
            least = "set algorithm.group_size to 2 or more" if group < 2 else "set reward.function"
            raise ValueError(f"data.difficulty.enabled=true compares the rewards of a prompt's completions: {least}")
        self.checkpoint.check_best(bool(self.evaluation.named_sets()), self.evaluation.every)
        if (weight := self.algorithm.observation_loss) and not self.environment.kind():
            raise ConfigError(
                f"algorithm.observation_loss={weight:g} learns what environments answer, and episodes have one turn: "
                "set it to 0, or set environment.function, environment.tools or environment.agent",
                key="algorithm.observation_loss",
            )
        if (penalty := self.rollout.repetition_penalty) != 1:
            raise ValueError(
                f"rollout.repetition_penalty={penalty:g} would make training ratios wrong, because log-probs are of "
                "the distribution without it: remove it, or set evaluation.repetition_penalty for evaluation only"
            )

    def has_reward(self) -> bool:
        """Tell whether episodes get rewards, from a function, a model or the environment."""
        return bool(self.reward.named_parts()) or self.environment.plays()

    def lesson_tokens(self, rollout: ResolvedRollout, context: int) -> int:
        """Return the longest prompt of a teacher: its key, or what it usually needs, if all models read that."""
        asked, passes = self.algorithm.distillation.max_prompt_tokens, (self.training, self.teacher)
        rooms = [context, *(one.micro_batch_tokens for one in passes if one.micro_batch_tokens)]
        return asked or max(min(max(rollout.longest(), LESSON), min(rooms) - rollout.max_new_tokens), 1)

    def longest_read(self, rollout: ResolvedRollout, context: int) -> int:
        """Return the tokens of the longest sequence that the policy or a teacher may read."""
        lesson = self.lesson_tokens(rollout, context) if self.algorithm.distillation.reads_more() else 0
        return max(rollout.longest(), lesson + rollout.max_new_tokens)

    def roles(self) -> dict[str, Role]:
        """Return all models other than the policy, needed or not."""
        return {name: part for name, part in self if isinstance(part, Role)}
