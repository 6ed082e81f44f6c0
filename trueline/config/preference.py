"""What preference optimisation, reward models and distillation add to supervised training."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trueline.config.base import Config


class PreferenceConfig(Config):
    """How chosen answers are told from rejected ones."""

    loss: Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"] = "sigmoid"
    """sigmoid: DPO; hinge: SLiC's on DPO's margin; ipo, simpo, orpo: those papers' losses."""

    beta: float = Field(0.1, gt=0)
    """Scale of the margin: strength of the pull towards the reference, or SimPO's reward scale."""

    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of labels taken to be wrong (cDPO); for loss=sigmoid."""

    length_normalized: bool = True
    """IPO on mean log-probs per token, as its authors run it; false: on sums, as the paper writes it."""

    gamma: float = Field(1.0, ge=0)
    """SimPO's target margin, in units of beta times mean log-prob."""

    odds_coefficient: float = Field(0.1, gt=0)
    """Weight of ORPO's odds-ratio term."""

    nll_coefficient: float = Field(0.0, ge=0)
    """Weight of the chosen answer's mean negative log-likelihood per token; not for orpo, which has it."""

    @model_validator(mode="after")
    def check_use(self) -> Self:
        if self.nll_coefficient and self.loss == "orpo":
            raise ValueError(f"loss=orpo contains the NLL: set nll_coefficient=0 (got {self.nll_coefficient})")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing={self.label_smoothing} is for loss=sigmoid (got loss={self.loss})")
        return self


class KTOConfig(Config):
    beta: float = Field(0.1, gt=0)
    """Scale of the log-ratio to the reference."""

    desirable_weight: float = Field(1.0, gt=0)
    """Weight of answers with label true."""

    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of answers with label false."""


class RewardModelConfig(Config):
    centering: float = Field(0.0, ge=0)
    """Weight of (chosen + rejected)^2, which keeps rewards around zero; 0.01 is usual."""

    margin_column: str | None = None
    """Column with the margin by which chosen must win; null: no margin."""


class DistillConfig(Config):
    teacher: str = ""
    """Hugging Face model to learn from; it must have the student's vocabulary."""

    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """forward: KL(teacher || student); reverse: KL(student || teacher); jsd: the mean of both to their mixture."""

    temperature: float = Field(1.0, gt=0)
    """Divides both models' logits."""

    top_k: int | None = Field(None, ge=1)
    """Compare on the teacher's k likeliest tokens only, renormalised; null: the whole vocabulary."""


WITHOUT_REFERENCE = frozenset({"simpo", "orpo"})
