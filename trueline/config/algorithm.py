"""What an algorithm is made of, and one row of choices per named algorithm."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trueline.config.base import Config, Tree, merge


def resolve_function(value: str) -> str:
    """Resolve the file of a user's own function, for ranks that compute a loss may work in another folder."""
    place, _, name = value.rpartition(":")
    if value.endswith(".py"):
        raise ValueError(f"{value} is a file: name the function in it, too, as {value}:NAME")
    if place.isidentifier() and Path(f"{place}.py").is_file():
        place = f"{place}.py"
    if not place.endswith(".py"):
        return value
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {place} (looked in {Path.cwd()})")
    return f"{file}:{name}"


OwnFunction = Annotated[str, AfterValidator(resolve_function)]


class KLConfig(Config):
    """The pull towards the reference model."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL term; 0 means that no reference model is loaded."""

    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the policy loss; reward: taken off the reward of every sampled token (k1)."""

    estimator: Literal["k2", "k3", "k3+"] = "k3"
    """Loss term. k2: gradient of KL(policy || reference); k3: of the forward KL (GRPO); k3+: k3, gradient of k2."""

    unbiased: bool = False
    """Multiply k3 by the ratio, with its gradient: exact for KL(policy || reference) off-policy too."""

    target: float | None = Field(None, gt=0)
    """Adapt the coefficient so that a completion's KL comes to this many nats (6 is usual); null keeps it fixed."""

    horizon: int = Field(10_000, ge=1)
    """Completions over which an adaptive coefficient follows its target."""

    @model_validator(mode="after")
    def check_unbiased(self) -> Self:
        if self.unbiased and (self.estimator != "k3" or self.place != "loss"):
            raise ValueError(
                f"unbiased=true is for estimator=k3 in the loss (got {self.estimator} in the {self.place}): k2 and k3+ "
                "are weighted off-policy anyway"
            )
        return self


class ImportanceSamplingConfig(Config):
    """What is done about tokens that engine and trainer see with different probabilities."""

    mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Weight of a token, w = p_trainer / p_engine: 1; min(w, cap); w, or 0 outside [low, high]; or by whole answers."""

    cap: float = Field(2.0, gt=0)
    """Largest weight under the truncating modes and sequence_mask."""

    low: float = Field(0.5, ge=0)
    """Lowest weight that `token_mask` keeps."""

    high: float = Field(5.0, gt=0)
    """Highest weight that `token_mask` keeps."""

    sequence_low: float = Field(0.99, ge=0)
    """Lowest geometric mean of a completion's weights that `sequence_mask` keeps."""

    sequence_high: float = Field(1.01, gt=0)
    """Highest geometric mean of a completion's weights that `sequence_mask` keeps."""


class DynamicSamplingConfig(Config):
    """Groups whose completions all have the same reward teach nothing; others are sampled in their place."""

    enabled: bool = False
    """Drop such groups and sample others."""

    max_batches: int = Field(10, ge=1)
    """Groups sampled for one step, in multiples of prompts_per_step, before the step trains on what there is."""

    reward: str | None = None
    """Judge by this one of `reward.parts`; null takes the whole task reward."""


class ShapingConfig(Config):
    """What length and truncation do to the task reward."""

    overlong_factor: float = Field(0.0, ge=0)
    """Weight of DAPO's soft punishment of completions near the length limit; 0 turns it off."""

    overlong_share: float = Field(0.2, gt=0, le=1)
    """Last share of rollout.max_new_tokens in which that punishment grows from 0 to 1."""

    overlong_filter: bool = False
    """Leave truncated completions out of the loss; they keep their place in the group's baseline."""

    truncated: Literal["keep", "multiply", "set"] = "keep"
    """Reward of a truncated completion: kept; min(r, value * r); or set to `truncated_value`."""

    truncated_value: float = 0.0
    """See `truncated`."""

    @model_validator(mode="after")
    def check_factor(self) -> Self:
        if self.truncated == "multiply" and not 0 <= self.truncated_value <= 1:
            raise ValueError(
                f"truncated=multiply takes a factor from 0 to 1 (got truncated_value={self.truncated_value}): change "
                "it, or set truncated=set"
            )
        return self


class AlgorithmConfig(Config):
    """A preset names a row of choices; every key below can still be set alone."""

    preset: str = "grpo"
    """Named algorithm whose row fills every key of this section that is not set."""

    advantage: OwnFunction = "group_norm"
    """gae, reinforce, group_norm, group_mean, leave_one_out, greedy_baseline, batch_mean, teacher, or file.py:name."""

    loss: OwnFunction = "ppo_clip"
    """Policy loss: ppo_clip, gspo, cispo, reinforce, sapo, gmpo, file.py:function or package.module:function."""

    loss_aggregation: Literal["token_mean", "sequence_mean", "constant", "sequence_sum"] = "sequence_mean"
    """How token losses are averaged over one minibatch."""

    group_size: int = Field(8, ge=1)
    """Completions sampled per prompt."""

    whiten: bool = False
    """Bring the step's advantages to mean 0 and variance 1, over all tokens in the loss."""

    credit: Literal["token", "turn"] = "token"
    """What an advantage belongs to: token: each sampled token, a group compares episodes; turn: a turn as a whole."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token, or per turn under `credit=turn`, of `gae` and `reinforce`."""

    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Decay of the trace of `gae`; 0.95 suits short completions."""

    length_adaptive: float | None = Field(None, gt=0)
    """VAPO's alpha: lambda = 1 - 1 / (alpha * length) for the policy, 1 for the critic; null: gae_lambda for both."""

    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped below 1 - clip_low."""

    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above 1 + clip_high."""

    dual_clip: float | None = Field(None, gt=1)
    """Bound of ppo_clip's loss where the advantage is negative, in units of the advantage (3 is usual); null: none."""

    ratio_cap: float = Field(5.0, gt=0)
    """Largest ratio that weights a token under the losses cispo and reinforce."""

    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Log-probs that the ratio compares with: the trainer's before the update, or the engine's as sampled."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""

    positive_nll: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of completions with a reward above 0 (VAPO)."""

    value_clip: float = Field(0.5, ge=0)
    """How far the critic's value may move from its old one before its loss stops falling; 0 turns this off."""

    critic_warmup_steps: int = Field(0, ge=0)
    """First steps, in which the critic learns and the policy waits."""

    critic_warmup_variance: float | None = Field(None, gt=0, lt=1)
    """Let the policy wait longer, until critic/explained_variance was once this high; null counts steps alone."""

    critic_warmup_limit: int = Field(100, ge=1)
    """Step by which the policy learns, whether or not the critic has reached critic_warmup_variance."""

    kl: KLConfig = KLConfig()
    importance_sampling: ImportanceSamplingConfig = ImportanceSamplingConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    shaping: ShapingConfig = ShapingConfig()

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = values.get("preset", "grpo")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; choose from {', '.join(sorted(PRESETS))}")
        return merge(PRESETS[preset], values)

    @model_validator(mode="after")
    def check_group_size(self) -> Self:
        if self.group_size < 2 and self.dynamic_sampling.enabled:
            raise ValueError(
                "algorithm.dynamic_sampling drops groups of equal rewards: set algorithm.group_size to 2 or more "
                f"(got {self.group_size}), or dynamic_sampling.enabled=false"
            )
        return self

    @model_validator(mode="after")
    def check_use(self) -> Self:
        """Refuse keys that would be read by nothing, or not as they sound."""
        if self.kl.target is not None and self.kl.coefficient == 0:
            raise ValueError(f"algorithm.kl.target={self.kl.target} has nothing to adapt: set kl.coefficient above 0")
        low, high = self.importance_sampling.low, self.importance_sampling.high
        if low > high:
            raise ValueError(f"algorithm.importance_sampling.low={low} is above high={high}: swap them")
        return self

    @model_validator(mode="after")
    def check_old_logprobs(self) -> Self:
        if self.old_logprobs == "rollout" and self.importance_sampling.mode in ("token_truncate", "sequence_truncate"):
            raise ValueError(
                "algorithm.old_logprobs=rollout puts mismatch and staleness into one ratio: importance_sampling.mode="
                f"{self.importance_sampling.mode} has nothing to weight; set it to none, token_mask or sequence_mask"
            )
        return self

    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0


KL_IN_REWARD: Tree = {"coefficient": 0.01, "place": "reward"}
OVERLONG: Tree = {"overlong_factor": 1.0}


def row(advantage: str, loss: str, loss_aggregation: str, group_size: int, **besides: Any) -> Tree:
    return {
        "advantage": advantage,
        "loss": loss,
        "loss_aggregation": loss_aggregation,
        "group_size": group_size,
        **besides,
    }


PRESETS: dict[str, Tree] = {
    "ppo": row("gae", "ppo_clip", "token_mean", 1, whiten=True, kl=KL_IN_REWARD),
    "reinforce++": row("reinforce", "ppo_clip", "token_mean", 1, whiten=True, kl=KL_IN_REWARD),
    "reinforce++_baseline": row(
        "group_mean", "ppo_clip", "token_mean", 8, whiten=True, kl={"coefficient": 1e-3, "estimator": "k2"}
    ),
    "grpo": row("group_norm", "ppo_clip", "sequence_mean", 8, kl={"coefficient": 1e-3, "estimator": "k3"}),
    "dr_grpo": row("group_mean", "ppo_clip", "constant", 8),
    "rloo": row("leave_one_out", "reinforce", "sequence_sum", 8, kl=KL_IN_REWARD),
    "remax": row("greedy_baseline", "reinforce", "sequence_sum", 1, kl=KL_IN_REWARD),
    "dapo": row(
        "group_norm", "ppo_clip", "token_mean", 16, clip_high=0.28, dynamic_sampling={"enabled": True}, shaping=OVERLONG
    ),
    "gspo": row("group_norm", "gspo", "sequence_mean", 8, clip_low=3e-4, clip_high=4e-4),
    "cispo": row("group_norm", "cispo", "token_mean", 8, ratio_cap=5.0),
    "vapo": row(
        "gae",
        "ppo_clip",
        "token_mean",
        16,
        length_adaptive=0.05,
        clip_high=0.28,
        positive_nll=0.1,
        critic_warmup_steps=10,
    ),
    "on_policy_distill": row("teacher", "ppo_clip", "token_mean", 1),
}
