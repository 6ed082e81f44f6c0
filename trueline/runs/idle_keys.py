"""Keys that were set and change nothing in this run: each is named, with the reason."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trueline.algorithms.advantages import ADVANTAGES
from trueline.algorithms.entries import Entry
from trueline.algorithms.needs import needs
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.base import Config
from trueline.config.rl import RLConfig, SamplingControls
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.rewards.combined import kind_of
from trueline.training.engines import TRAIN_ENGINES

IMPORTANCE = "algorithm.importance_sampling.mode"
CAPPED = ("token_truncate", "sequence_truncate", "sequence_mask")
Rule = tuple[str, Callable[[Any], str]]  # keys or sections, and why they are idle; nothing where they are not


def idle_keys(config: RunConfig) -> list[str]:
    """Return a line for each key with another value than its default that nothing will read."""
    usual = {key.path: key.default for key in type(config).parse(defaults(config)).leaves()}
    changed = [key for key in config.leaves() if key.default != usual[key.path]]
    found: dict[str, str] = {}
    for names, reason in rules_of(config):
        why = reason(config)
        idle = [key for key in changed if why and key.path.startswith(tuple(names.split()))]
        found |= {key.path: f"{key.path}={key.default} has no effect: {why}" for key in idle}
    return list(found.values())


def defaults(config: RunConfig) -> dict[str, Any]:
    """Return the choices that set other keys' defaults by themselves: the runtime and the preset."""
    tree: dict[str, Any] = {"runtime": config.runtime}
    return tree | ({"algorithm": {"preset": config.algorithm.preset}} if isinstance(config, RLConfig) else {})


def rules_of(config: RunConfig) -> Iterator[Rule]:
    for kind, rules in RULES.items():
        if isinstance(config, kind):
            yield from rules


def unless(used: bool, why: str) -> str:
    return "" if used else why


def read_by_some(choice: str, table: Mapping[str, Entry]) -> Iterator[Rule]:
    """Yield a rule for each key of `algorithm` that some entries of a table read and others do not."""
    for key in dict.fromkeys(key for entry in table.values() for key in entry.reads):
        yield f"algorithm.{key}", read_by(choice, *(name for name, entry in table.items() if key in entry.reads))


def read_by(choice: str, *names: str) -> Callable[[RLConfig], str]:
    """Make a reason for a key that only these names read; a function of the user's may read whatever it likes."""

    def reason(run: RLConfig) -> str:
        chosen = next(key.default for key in run.leaves() if key.path == choice)
        return unless(chosen in names or ":" in chosen, f"{choice}={chosen} does not read it")

    return reason


def pair_loss_reads(loss: str) -> Callable[[Any], str]:
    def reason(run: Any) -> str:
        return unless(run.task != "preference" or run.preference.loss == loss, f"it is for preference.loss={loss}")

    return reason


def no_model(role: str) -> Callable[[RLConfig], str]:
    return lambda run: unless(
        role in needs(run.algorithm), f"algorithm.advantage={run.algorithm.advantage} has no {role}"
    )


def no_reference(run: RLConfig) -> str:
    if run.algorithm.kl.coefficient == 0:
        return "algorithm.kl.coefficient=0, so no reference is loaded"
    return unless(not run.model.lora.rank, "a policy with adapters is its own reference")


def no_reward_model(run: RLConfig | SamplingConfig) -> str:
    local = any(kind_of(part) == "model" for part in run.reward.named_parts().values())
    return unless(local, "no reward is a model on this machine")


def no_pull(run: RLConfig) -> str:
    return unless(run.algorithm.kl.coefficient > 0, "algorithm.kl.coefficient=0")


def no_shards(section: str) -> Callable[[Any], str]:
    key = f"{section}.engine"
    return lambda run: unless(
        TRAIN_ENGINES[name := run.engines()[section]].several_ranks, f"{key}={name} shards nothing"
    )


def never(why: str) -> Callable[[Config], str]:
    return lambda run: why


TRAINING: list[Rule] = [
    ("model.lora.", lambda run: unless(run.model.lora.rank > 0, "model.lora.rank=0 trains all weights")),
    ("training.zero_stage", no_shards("training")),
    (
        "checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.metric",
        lambda run: unless(run.checkpoint.save, "checkpoint.save=false writes no checkpoint"),
    ),
    ("training.decay_share", lambda run: unless(run.training.schedule == "wsd", "it is for training.schedule=wsd")),
]

GREEDY: Rule = (
    "evaluation.top_p evaluation.top_k evaluation.min_p",
    lambda run: unless(run.evaluation.temperature > 0, "evaluation.temperature=0 takes the likeliest token"),
)

RULES: dict[type[RunConfig], list[Rule]] = {
    RLConfig: [
        *TRAINING,
        *((f"{name}.zero_stage", no_shards(name)) for name in ("critic", "reference", "teacher", "reward_model")),
        ("critic. algorithm.value_clip", no_model("critic")),
        *((f"algorithm.critic_warmup_{key}", no_model("critic")) for key in ("steps", "variance", "limit")),
        (
            "algorithm.critic_warmup_limit",
            lambda run: unless(run.algorithm.critic_warmup_variance is not None, "critic_warmup_variance=null"),
        ),
        *read_by_some("algorithm.advantage", ADVANTAGES),
        *read_by_some("algorithm.loss", POLICY_LOSSES),
        ("algorithm.gae_lambda", lambda run: unless(not run.algorithm.length_adaptive, "length_adaptive takes over")),
        ("reference.", no_reference),
        ("teacher.", no_model("teacher")),
        ("reward_model.", no_reward_model),
        ("algorithm.kl.place algorithm.kl.estimator algorithm.kl.unbiased", no_pull),
        ("algorithm.kl.estimator", lambda run: unless(run.algorithm.kl.place == "loss", "algorithm.kl.place=reward")),
        ("algorithm.kl.horizon", lambda run: unless(bool(run.algorithm.kl.target), "algorithm.kl.target=null")),
        ("algorithm.importance_sampling.cap", read_by(IMPORTANCE, *CAPPED)),
        ("algorithm.importance_sampling.low algorithm.importance_sampling.high", read_by(IMPORTANCE, "token_mask")),
        ("algorithm.importance_sampling.sequence_", read_by(IMPORTANCE, "sequence_mask")),
        (
            "algorithm.dynamic_sampling.",
            lambda run: unless(run.algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled=false"),
        ),
        (
            "algorithm.shaping.overlong_share",
            lambda run: unless(run.algorithm.shaping.overlong_factor > 0, "algorithm.shaping.overlong_factor=0"),
        ),
        (
            "algorithm.shaping.truncated_value",
            lambda run: unless(run.algorithm.shaping.truncated != "keep", "algorithm.shaping.truncated=keep"),
        ),
        GREEDY,
        ("evaluation.", lambda run: unless(bool(run.evaluation.named_sets()), "evaluation.data names no prompts")),
        ("sync.tolerance", lambda run: unless(run.sync.check, "sync.check=false")),
    ],
    SupervisedConfig: [
        *TRAINING,
        (
            "evaluation.",
            lambda run: unless(bool(run.evaluation.data or run.evaluation.share), "no rows are held out"),
        ),
        ("monitoring.transcripts_per_step model.lora.sync", never("nothing is sampled")),
        ("preference.gamma", pair_loss_reads("simpo")),
        ("preference.odds_coefficient", pair_loss_reads("orpo")),
        ("preference.length_normalized", pair_loss_reads("ipo")),
    ],
    SamplingConfig: [
        ("reward_model.", no_reward_model),
        ("checkpoint. monitoring. rollout.max_staleness evaluation.every", never("nothing is trained")),
    ],
    EvalConfig: [
        GREEDY,
        (" ".join(f"rollout.{key}" for key in SamplingControls.model_fields), never("eval reads that of `evaluation`")),
    ],
}
