"""What an algorithm is made of, and one row of choices per named algorithm."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from trueline.config.base import Config, Tree, merge


class KLConfig(Config):
    """The pull towards the reference model, added to the policy loss."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL term; 0 means that no reference model is loaded."""

    estimator: Literal["k2", "k3", "k3+"] = "k3"
    """k2: gradient of KL(policy || reference); k3: GRPO's, of the forward KL; k3+: value of k3, gradient of k2."""


class CorrectionConfig(Config):
    """What is done about tokens that engine and trainer see with different probabilities."""

    kind: Literal["none", "truncate", "mask"] = "truncate"
    """none; truncate: weight min(w, cap); mask: weight w inside [low, high], 0 outside; w = p_trainer / p_engine."""

    cap: float = Field(2.0, gt=0)
    """Largest weight under `truncate`."""

    low: float = Field(0.5, ge=0)
    """Lowest weight that `mask` keeps."""

    high: float = Field(5.0, gt=0)
    """Highest weight that `mask` keeps."""


class AlgorithmConfig(Config):
    """A preset names a row of choices; every key below can still be set alone."""

    preset: str = "grpo"
    """Named algorithm whose row fills every key of this section that is not set."""

    advantage: str = "group_norm"
    """Advantage estimator: group_norm, group_mean, leave_one_out, or `package.module:function`."""

    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, or `package.module:function`."""

    weighting: Literal["token_mean", "sequence_mean", "constant", "sequence_sum"] = "sequence_mean"
    """How token losses are averaged over one minibatch."""

    group_size: int = Field(8, ge=1)
    """Answers sampled per prompt."""

    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped below 1 - clip_low."""

    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above 1 + clip_high."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""

    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

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
        if self.group_size < 2 and self.advantage in NEED_GROUPS:
            raise ValueError(
                f"algorithm.advantage={self.advantage} compares answers to one prompt: "
                f"set algorithm.group_size to 2 or more (got {self.group_size})"
            )
        return self


NEED_GROUPS = frozenset({"group_norm", "group_mean", "leave_one_out"})

PRESETS: dict[str, Tree] = {
    "grpo": {
        "advantage": "group_norm",
        "loss": "ppo_clip",
        "weighting": "sequence_mean",
        "group_size": 8,
        "kl": {"coefficient": 1e-3, "estimator": "k3"},
    },
    "dr_grpo": {
        "advantage": "group_mean",
        "loss": "ppo_clip",
        "weighting": "constant",
        "group_size": 8,
    },
}
