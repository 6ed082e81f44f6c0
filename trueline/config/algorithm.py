"""The parts of an RL algorithm, and the presets: one row of choices per named algorithm."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trueline.config.base import Config, Tree, merge


def resolve_function(value: str) -> str:
    """Make the file of a user's function absolute: ranks may run in another folder."""
    place, _, name = value.rpartition(":")
    if value.endswith(".py"):
        raise ValueError(f"{value} is a file: name a function in it, as {value}:NAME")
    if place.isidentifier() and Path(f"{place}.py").is_file():
        place = f"{place}.py"
    if not place.endswith(".py"):
        return value
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"no file {place} in {Path.cwd()}: check the path")
    return f"{file}:{name}"


OwnFunction = Annotated[str, AfterValidator(resolve_function)]


CONTEXT_FIELDS: dict[str, tuple[str, ...]] = {  # of the template, by context
    "none": (),
    "demonstration": ("demonstration",),
    "solution": ("solution",),
    "feedback": ("demonstration", "feedback"),
}
WHOLE_VOCABULARY = 8192  # the largest that is compared as a whole
TEACHER_TEMPLATE = (
    "{prompt}\n\nHere is a good reply:\n{demonstration}\n\nHere is the solution:\n{solution}\n\n"
    "An earlier reply was met with this:\n{feedback}\n\nNow reply in your own words."
)


class KLConfig(Config):
    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL term. 0: no reference model is loaded."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the policy loss. reward: subtracted from the reward of each sampled token (k1)."""
    estimator: Literal["k2", "k3", "k3+"] = "k3"
    """Loss term. k2: gradient of KL(policy || reference). k3: of the forward KL (GRPO). k3+: k3 with k2's gradient."""
    unbiased: bool = False
    """Multiply k3 by the ratio, with its gradient: an unbiased KL(policy || reference) off-policy too."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient until a completion's KL is this many nats (6 is usual). null: keep it fixed."""
    horizon: int = Field(10_000, ge=1)
    """Number of completions over which the coefficient approaches `target`."""

    def check_keys(self) -> None:
        if self.unbiased and (self.estimator != "k3" or self.place != "loss"):
            raise ValueError(
                f"unbiased=true needs estimator=k3 and place=loss (got {self.estimator} and {self.place}); k2 and k3+ "
                "are weighted off-policy anyway"
            )


class ImportanceSamplingConfig(Config):
    """Correction for tokens whose probability differs between engine and trainer."""

    mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Token weights from w = p_trainer / p_engine: none; capped; zero outside [low, high]; or per whole completion."""
    cap: float = Field(2.0, gt=0)
    """Largest weight for the truncating modes and sequence_mask."""
    low: float = Field(0.5, ge=0)
    """token_mask drops tokens whose weight is below this."""
    high: float = Field(5.0, gt=0)
    """token_mask drops tokens whose weight is above this."""
    sequence_low: float = Field(0.99, ge=0)
    """sequence_mask drops completions whose geometric mean weight is below this."""
    sequence_high: float = Field(1.01, gt=0)
    """sequence_mask drops completions whose geometric mean weight is above this."""
    off_policy_mask: float | None = Field(None, ge=0)
    """Drop negative advantages of completions whose mean log(p_engine / p) exceeds this (0.5 is usual). null: none."""


class DynamicSamplingConfig(Config):
    """Replace groups whose completions all have the same reward: they carry no signal."""

    enabled: bool = False
    """Drop such groups and sample other prompts instead."""
    max_batches: int = Field(10, ge=1)
    """Most groups sampled per step, as a multiple of prompts_per_step; then the step trains on what it has."""
    reward: str | None = None
    """Compare only this one of `reward.parts`. null: the whole task reward."""


class ShapingConfig(Config):
    """How length and truncation change the task reward."""

    overlong_factor: float = Field(0.0, ge=0)
    """Weight of DAPO's soft penalty for completions near the length limit. 0: off."""
    overlong_share: float = Field(0.2, gt=0, le=1)
    """The penalty grows from 0 to 1 over this last share of rollout.max_new_tokens."""
    overlong_filter: bool = False
    """Exclude truncated completions from the loss; they still count in the group's baseline."""
    truncated: Literal["keep", "multiply", "set"] = "keep"
    """Reward r of a truncated completion. keep: r. multiply: min(r, truncated_value * r). set: truncated_value."""
    truncated_value: float = 0.0
    """Factor or reward for `truncated`."""
    cosine_correct: list[float] | None = Field(None, min_length=2, max_length=2)
    """Replace task rewards above 0 by a cosine of the length, from its value at 0 to that at the limit. null: off."""
    cosine_wrong: list[float] = Field([-10.0, 0.0], min_length=2, max_length=2)
    """With cosine_correct, the same for all other task rewards."""

    def check_keys(self) -> None:
        if self.truncated == "multiply" and not 0 <= self.truncated_value <= 1:
            raise ValueError(
                f"truncated=multiply needs truncated_value from 0 to 1 (got {self.truncated_value}): change it, or set "
                "truncated=set"
            )


class DistillationConfig(Config):
    """A teacher scores the policy's own completions; it may read more than the policy did."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence between the next-token distributions of policy and teacher in the loss."""
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"
    """forward: KL(teacher || policy). reverse: KL(policy || teacher). jsd: mean KL of both to their mixture."""
    top_k: int | None = Field(100, ge=1)
    """Compare the teacher's k likeliest tokens, and all others as one. null: the whole vocabulary (up to 8192)."""
    teacher: Literal["frozen", "policy", "average"] = "frozen"
    """frozen: teacher.path, or the starting policy. policy: the step's weights. average: training.ema_decay's."""
    context: Literal["none", "demonstration", "solution", "feedback"] = "none"
    """What only the teacher reads: a column's text, or the environment's word and a rewarded reply of the group."""
    column: str | None = None
    """Column with the demonstration or solution. null: the one called `demonstration` or `solution`."""
    rewarded: float = 1.0
    """Least task reward of a reply that context=feedback shows."""
    template: str = TEACHER_TEMPLATE
    """The teacher's last user message. Fields: prompt, demonstration, solution, feedback; no paragraph without its."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt of the teacher; rows with a longer one have none. null: its longest sequence, 512 at least."""

    def check_keys(self) -> None:
        wanted = CONTEXT_FIELDS[self.context]
        if wanted and not ("{prompt}" in self.template and any(f"{{{name}}}" in self.template for name in wanted)):
            named = " and ".join(f"{{{name}}}" for name in ("prompt", wanted[0]))
            raise ValueError(f"context={self.context}: template={self.template!r} lacks {named}: add them")

    def reads_more(self) -> bool:
        return self.context != "none"


class AlgorithmConfig(Config):
    """The RL algorithm. A preset sets these keys; each key can still be set by itself."""

    preset: str = "grpo"
    """Named algorithm; it fills every key of this section that you do not set."""
    advantage: OwnFunction = Field(
        "group_norm",
        description="gae, reinforce, group_norm, gdpo, group_mean, maxrl, otb, leave_one_out, greedy_baseline, "
        "batch_mean, moving_average, teacher, none, own.",
    )
    loss: OwnFunction = "ppo_clip"
    """Policy loss: ppo_clip, gspo, cispo, reinforce, sapo, gmpo, dppo, file.py:name or package.module:name."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant", "sequence_sum"] = "sequence_mean"
    """How token losses are averaged over a minibatch."""
    group_size: int = Field(8, ge=1)
    """Completions sampled per prompt."""
    top_entropy_share: float = Field(1.0, gt=0, le=1)
    """Share of a step's tokens, those of the highest entropy, that the policy learns from (0.2 is usual)."""
    whiten: bool = False
    """Normalize a step's advantages to mean 0 and variance 1 over all tokens in the loss."""
    credit: Literal["token", "turn"] = "token"
    """What gets an advantage. token: each sampled token; groups compare episodes. turn: each turn as a whole."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token, or per turn with credit=turn, for `gae` and `reinforce`."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE; 0.95 suits short completions."""
    baseline_decay: float = Field(0.95, ge=0, lt=1)
    """What a completion leaves of the moving average of rewards that `moving_average` subtracts."""
    length_adaptive: float | None = Field(None, gt=0)
    """VAPO's alpha: lambda = 1 - 1 / (alpha * length) for the policy, 1 for the critic. null: gae_lambda for both."""
    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped below 1 - clip_low. dppo: largest divergence of a token that becomes less likely."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above 1 + clip_high. dppo: largest divergence of a token that becomes likelier."""
    divergence: Literal["tv", "kl"] = "tv"
    """What dppo bounds, of a token against all others. tv: the change of its probability. kl: KL(old || new)."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ppo_clip loss for negative advantages, in units of the advantage (3 is usual). null: no bound."""
    ratio_cap: float = Field(5.0, gt=0)
    """Largest ratio that weights a token in the losses cispo, reinforce and dppo."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio. recompute: the trainer's log-probs before the update. rollout: the engine's."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    positive_nll: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of completions with a reward above 0 (VAPO)."""
    observation_loss: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of what environments, tools and users answer in later turns (ECHO)."""
    value_clip: float = Field(0.5, ge=0)
    """Clip the critic's value to this distance from its old value in the value loss. 0: off."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Train only the critic for this many first steps."""
    critic_warmup_variance: float | None = Field(None, gt=0, lt=1)
    """Extend the warm-up until critic/explained_variance reaches this. null: only critic_warmup_steps counts."""
    critic_warmup_limit: int = Field(100, ge=1)
    """The warm-up ends at this step even if critic_warmup_variance was not reached."""
    kl: KLConfig = KLConfig()
    importance_sampling: ImportanceSamplingConfig = ImportanceSamplingConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    shaping: ShapingConfig = ShapingConfig()
    distillation: DistillationConfig = DistillationConfig()

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = values.get("preset", "grpo")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; choose from {', '.join(sorted(PRESETS))}")
        return merge(PRESETS[preset], values)

    def check_keys(self) -> None:
        if self.group_size < 2 and self.dynamic_sampling.enabled:
            raise ValueError(
                "algorithm.dynamic_sampling drops groups of equal rewards: set algorithm.group_size to 2 or more "
                f"(got {self.group_size}), or dynamic_sampling.enabled=false"
            )
        if self.kl.target is not None and self.kl.coefficient == 0:
            raise ValueError(f"algorithm.kl.target={self.kl.target}: set kl.coefficient above 0, which it adapts")
        if self.needs_entropy() and self.old_logprobs == "rollout":
            raise ValueError(
                f"algorithm.top_entropy_share={self.top_entropy_share:g} needs entropies, which engines do not report: "
                "set algorithm.old_logprobs=recompute"
            )
        low, high, mode = self.importance_sampling.low, self.importance_sampling.high, self.importance_sampling.mode
        if low > high:
            raise ValueError(f"algorithm.importance_sampling.low={low} is above high={high}: swap them")
        if self.old_logprobs == "rollout" and mode in ("token_truncate", "sequence_truncate"):
            raise ValueError(
                f"importance_sampling.mode={mode}: algorithm.old_logprobs=rollout corrects the mismatch in its ratio "
                "already; set it to none, token_mask or sequence_mask"
            )

    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    def needs_entropy(self) -> bool:
        """Tell whether advantages follow from entropies, which come with the old log-probs."""
        return self.top_entropy_share < 1


KL_IN_REWARD: Tree = {"coefficient": 0.01, "place": "reward"}
OVERLONG: Tree = {"overlong_factor": 1.0}
DPPO: Tree = {  # the trust region is around the policy that sampled
    "old_logprobs": "rollout",
    "importance_sampling": {"mode": "none"},
    "clip_low": 0.15,
    "clip_high": 0.15,
    "ratio_cap": 20.0,
}
VAPO: Tree = {"length_adaptive": 0.05, "clip_high": 0.28, "positive_nll": 0.1, "critic_warmup_steps": 10}


def row(advantage: str, loss: str, loss_aggregation: str, group_size: int, **besides: Any) -> Tree:
    named = {"advantage": advantage, "loss": loss, "loss_aggregation": loss_aggregation, "group_size": group_size}
    return named | besides


def by_itself(teacher: str, context: str, divergence: str) -> Tree:
    return {"coefficient": 1.0, "teacher": teacher, "context": context, "divergence": divergence}


PRESETS: dict[str, Tree] = {
    "ppo": row("gae", "ppo_clip", "token_mean", 1, whiten=True, kl=KL_IN_REWARD),
    "reinforce++": row("reinforce", "ppo_clip", "token_mean", 1, whiten=True, kl=KL_IN_REWARD),
    "reinforce++_baseline": row(
        "group_mean", "ppo_clip", "token_mean", 8, whiten=True, kl={"coefficient": 1e-3, "estimator": "k2"}
    ),
    "grpo": row("group_norm", "ppo_clip", "sequence_mean", 8, kl={"coefficient": 1e-3, "estimator": "k3"}),
    "dr_grpo": row("group_mean", "ppo_clip", "constant", 8),
    "maxrl": row("maxrl", "ppo_clip", "constant", 16),
    "otb": row("otb", "ppo_clip", "constant", 8),
    "rloo": row("leave_one_out", "reinforce", "sequence_sum", 8, kl=KL_IN_REWARD),
    "remax": row("greedy_baseline", "reinforce", "sequence_sum", 1, kl=KL_IN_REWARD),
    "dapo": row(
        "group_norm", "ppo_clip", "token_mean", 16, clip_high=0.28, dynamic_sampling={"enabled": True}, shaping=OVERLONG
    ),
    "gdpo": row("gdpo", "ppo_clip", "sequence_mean", 8, whiten=True),
    "gspo": row("group_norm", "gspo", "sequence_mean", 8, clip_low=3e-4, clip_high=4e-4),
    "cispo": row("group_norm", "cispo", "token_mean", 8, ratio_cap=5.0),
    "dppo": row("group_norm", "dppo", "token_mean", 8, **DPPO),
    "vapo": row("gae", "ppo_clip", "token_mean", 16, **VAPO),
    "on_policy_distill": row("teacher", "ppo_clip", "token_mean", 1),
    "sdft": row("none", "reinforce", "token_mean", 1, distillation=by_itself("average", "demonstration", "reverse")),
    "sdpo": row("none", "reinforce", "token_mean", 8, distillation=by_itself("average", "feedback", "jsd")),
    "opsd": row("none", "reinforce", "token_mean", 1, distillation=by_itself("frozen", "solution", "forward")),
}
