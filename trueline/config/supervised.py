"""The configurations of offline training."""

from typing import ClassVar, Literal

from pydantic import Field

from trueline.config.base import Config
from trueline.config.data import DataConfig
from trueline.config.model import ModelConfig, TrainingConfig, check_training
from trueline.config.run import RunConfig

WITHOUT_REFERENCE = frozenset({"simpo", "orpo"})  # losses


class PreferenceConfig(Config):
    loss: Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"] = "sigmoid"
    """sigmoid: DPO. hinge: SLiC's loss on DPO's margin. ipo, simpo, orpo: the losses of those papers."""
    beta: float = Field(0.1, gt=0)
    """Scale of the margin: strength of the pull to the reference, or SimPO's reward scale."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of labels assumed to be wrong (cDPO), for loss=sigmoid."""
    length_normalized: bool = True
    """IPO on mean log-probs per token, as its authors run it. false: on sums, as in the paper."""
    gamma: float = Field(1.0, ge=0)
    """SimPO's target margin, in units of beta times the mean log-prob."""
    odds_coefficient: float = Field(0.1, gt=0)
    """Weight of ORPO's odds-ratio term."""
    nll_coefficient: float = Field(0.0, ge=0)
    """Weight of the chosen completion's mean NLL per token; not for orpo, which includes it."""

    def check_keys(self) -> None:
        if self.nll_coefficient and self.loss == "orpo":
            raise ValueError(f"loss=orpo includes the NLL: set nll_coefficient=0 (got {self.nll_coefficient})")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing={self.label_smoothing} needs loss=sigmoid (got loss={self.loss})")


class KTOConfig(Config):
    beta: float = Field(0.1, gt=0)
    """Scale of the log-ratio to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of completions with label true."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of completions with label false."""


class RewardModelConfig(Config):
    centering: float = Field(0.0, ge=0)
    """Weight of (chosen + rejected)^2, which keeps rewards near zero; 0.01 is usual."""
    margin_column: str | None = None
    """Column with the margin by which chosen must win. null: no margin."""


class DistillConfig(Config):
    teacher: str = ""
    """Hugging Face model to learn from; it must have the student's vocabulary."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """forward: KL(teacher || student). reverse: KL(student || teacher). jsd: mean KL of both to their mixture."""
    temperature: float = Field(1.0, gt=0)
    """Divide both models' logits by this."""
    top_k: int | None = Field(None, ge=1)
    """Compare only the teacher's k most likely tokens, renormalized. null: the whole vocabulary."""


class HeldOutConfig(Config):
    data: str = ""
    """Held-out rows with the columns of data.path. Empty: use `share`."""
    share: float = Field(0.0, ge=0, lt=1)
    """Share of data.path's rows to hold out of training."""
    by: str | None = None
    """Rows with equal values in this column stay on one side of the split, so that nothing leaks."""
    every: int = Field(50, ge=0)
    """Evaluate every this many steps, and always before the first and after the last. 0: only those two."""
    limit: int | None = Field(None, ge=1)
    """Use only the first this many held-out rows of each dataset. null: all."""


class SupervisedConfig(RunConfig):
    task: ClassVar[str] = "sft"
    steps: int | None = Field(None, ge=1)
    """Optimizer steps. null: `epochs` passes over the data."""
    epochs: int = Field(1, ge=1)
    """Passes over the data if `steps` is null; the next pass fills up the last step."""
    samples_per_step: int = Field(64, ge=1)
    """Sequences, or pairs, per optimizer step, over all ranks."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest sequence; see data.too_long for longer ones. null: the model's context."""
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    evaluation: HeldOutConfig = HeldOutConfig()

    def check_keys(self) -> None:
        super().check_keys()
        check_training(self.training, self.model)
        if self.evaluation.data and self.evaluation.share:
            raise ValueError(
                f"evaluation.data={self.evaluation.data} and evaluation.share={self.evaluation.share} both set "
                "held-out rows: set one of them"
            )
        self.checkpoint.check_best(bool(self.evaluation.data or self.evaluation.share), self.evaluation.every)


class SftConfig(SupervisedConfig):
    learn: Literal["all", "last"] = "all"
    """Train on all assistant turns of a conversation, or only on the last."""


class DistillRunConfig(SftConfig):
    task: ClassVar[str] = "distill"
    distill: DistillConfig = DistillConfig()


class PreferenceRunConfig(SupervisedConfig):
    task: ClassVar[str] = "preference"
    preference: PreferenceConfig = PreferenceConfig()


class KTORunConfig(SupervisedConfig):
    task: ClassVar[str] = "kto"
    kto: KTOConfig = KTOConfig()


class RewardModelRunConfig(SupervisedConfig):
    task: ClassVar[str] = "rm"
    reward_model: RewardModelConfig = RewardModelConfig()


class ProcessRewardRunConfig(SupervisedConfig):
    task: ClassVar[str] = "prm"
