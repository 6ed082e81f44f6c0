"""Findings of a plan: keys without effect, crowded cores, what the template does to messages; and what repeats bits."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from trueline.algorithms.advantages import ADVANTAGES, has_teacher, needs
from trueline.algorithms.entries import Entry
from trueline.algorithms.policy_losses import POLICY_LOSSES
from trueline.config.base import ConfigError, Tree
from trueline.config.model import TrainingConfig
from trueline.config.rl import RLConfig, SamplingControls
from trueline.config.run import MonitoringConfig, RunConfig
from trueline.config.sampling import EvalConfig, RoundsConfig, SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.prompts import known_rates, sample_of
from trueline.data.types import Prompt
from trueline.environments.opening import turn_findings
from trueline.monitoring.findings import Finding
from trueline.plan.memory import Forecast
from trueline.plan.resolve import first_fitting_keys, others
from trueline.rewards.combined import kind_of
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.runtime.placement import Layout, crowding
from trueline.training.engines.table import TRAIN_ENGINES

IMPORTANCE = "algorithm.importance_sampling.mode"
NO_REWARD_MODEL = "no reward is a model on this machine"
CAPPED = ("token_truncate", "sequence_truncate", "sequence_mask")
Kind = TypeVar("Kind", bound=RunConfig)
Rule = tuple[str, Callable[[Any], bool], str]  # keys or sections, whether a run reads them, and why it does not

Obstacle = tuple[str, object, str, str]  # a key, its value, why bits would differ, and what to do
ASKED = "deterministic=true"
SERVED = ("scorer", "judge", "rubric")  # kinds of rewards that a server computes


def find(
    config: RunConfig, layout: Layout, machine: Machine, chat: ChatFormat, found: Iterable[Finding] = ()
) -> list[Finding]:
    """Return all findings of a plan: what every plan looks at, and what was `found` by its own kind."""
    turns = turn_findings(config.environment, chat) if isinstance(config, RLConfig | SamplingConfig) else []
    return [*chat.findings(), *turns, *crowding(layout, machine), *found, *doubts(config), *idle_keys(config)]


def idle_keys(config: RunConfig) -> list[Finding]:
    """Find keys with another value than their default that nothing will read."""
    usual = {key.path: key.default for key in type(config).parse(defaults(config)).leaves()}
    changed = {key.path: key.default for key in config.leaves() if key.default != usual[key.path]}
    reasons: dict[str, str] = {}
    for names, read, why in (rule for kind, rules in RULES.items() if isinstance(config, kind) for rule in rules):
        idle = [key for key in changed if key.startswith(tuple(names.split())) and not read(config)]
        reasons |= dict.fromkeys(idle, why.format(run=config))
    return [
        Finding("watch", "idle_key", f"{key}={changed[key]} has no effect", why, key) for key, why in reasons.items()
    ]


def difficulty_findings(config: RLConfig, sources: Sequence[Sequence[Prompt]]) -> Iterator[Finding]:
    """Check the column of known pass rates; without one, no prompt rests before it was sampled once."""
    difficulty, key = config.data.difficulty, f"{DIFFICULTY}enabled"
    if difficulty.enabled and difficulty.column is not None:
        for prompts in sources:
            known_rates(sample_of(prompts), difficulty.column)
    elif difficulty.enabled and (drawn := config.steps * config.prompts_per_step) <= (rows := sum(map(len, sources))):
        what = f"{key}=True has no effect: the run draws {drawn} of {rows} prompts, and none twice"
        yield Finding("watch", "idle_key", what, "train longer, or set data.difficulty.column", key)


def defaults(config: RunConfig) -> dict[str, Any]:
    """Return the choices that set other keys' defaults by themselves: runtime, training engine and preset."""
    tree: dict[str, Any] = {"runtime": config.runtime}
    if engine := config.engines().get("training"):
        tree["training"] = {"engine": engine}
    return tree | ({"algorithm": {"preset": config.algorithm.preset}} if isinstance(config, RLConfig) else {})


def read_by_some(choice: str, table: Mapping[str, Entry]) -> Iterator[Rule]:
    """Yield a rule for each key of `algorithm` that some entries of a table read and others do not."""
    for key in dict.fromkeys(key for entry in table.values() for key in entry.reads):
        yield read_by(f"algorithm.{key}", choice, *(name for name, entry in table.items() if key in entry.reads))


def read_by(keys: str, choice: str, *names: str) -> Rule:
    """Make a rule for keys that only these names read; a function of the user's may read whatever it likes."""
    chosen = attrgetter(choice)
    return keys, lambda run: chosen(run) in names or ":" in chosen(run), f"{choice}={{run.{choice}}} does not read it"


def needs_key(keys: str, path: str, why: str) -> Rule:
    """Make a rule for keys that nothing reads while the key at `path` is off or 0."""
    value = attrgetter(path)
    return keys, lambda run: bool(value(run)), why


def read_by_loss(key: str, loss: str) -> Rule:
    """Make a rule for a key of one loss over pairs; other tasks do not have it."""
    why = f"it is for preference.loss={loss}"
    return f"preference.{key}", lambda run: run.task != "preference" or run.preference.loss == loss, why


def read_by_model(keys: str, role: str) -> Rule:
    why = f"algorithm.advantage={{run.algorithm.advantage}} has no {role}"
    return keys, lambda run: role in needs(run.algorithm), why


def teaches(run: RLConfig) -> bool:
    return has_teacher(run.algorithm)


def has_reward_model(run: RLConfig | SamplingConfig) -> bool:
    return any(kind_of(part) == "model" for part in run.reward.named_parts().values())


def engine_rules(section: str) -> list[Rule]:
    """Make a rule for the keys of each engine that a section may name."""
    engine, why = attrgetter(f"{section}.engine"), f"{section}.engine={{run.{section}.engine}} does not read it"

    def rule(name: str, keys: tuple[str, ...]) -> Rule:
        return " ".join(f"{section}.{key}" for key in keys), lambda run: engine(run) == name, why

    return [rule(name, row.keys) for name, row in TRAIN_ENGINES.items() if row.keys]


def plays(run: RLConfig | SamplingConfig) -> bool:
    return bool(run.environment.kind())


def never(run: RunConfig) -> bool:
    return False


PACKED = "sequences that are packed have an attention of their own ({}.packing=true)"
TRAINING: list[Rule] = [
    needs_key("model.lora.", "model.lora.rank", "model.lora.rank=0 trains all weights"),
    *engine_rules("training"),
    (
        "checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.metric",
        lambda run: run.checkpoint.save,
        "checkpoint.save=false writes no checkpoint",
    ),
    ("training.decay_share", lambda run: run.training.schedule == "wsd", "it is for training.schedule=wsd"),
    (
        "health.rate_factor",
        lambda run: run.health.action == "roll_back",
        "health.action=log, pause and stop change no rate",
    ),
]
ONE_TURN: Rule = ("environment.", plays, "episodes have one turn")
GREEDY: Rule = (
    "evaluation.top_p evaluation.top_k evaluation.min_p",
    lambda run: run.evaluation.temperature > 0,
    "evaluation.temperature=0 takes the likeliest token",
)
TRACKED = " ".join(f"monitoring.{key}" for key in MonitoringConfig.model_fields if key != "doctor")
ASYNCHRONOUS = "rollout.on_update rollout.too_old rollout.window"
DIFFICULTY = "data.difficulty."
DYNAMIC, TRANSCRIPTS = "algorithm.dynamic_sampling.", "monitoring.transcripts_per_step"
KEPT = "monitoring.keep_samples_mib"
SYNCHRONOUS = "rollout.max_staleness=0 samples nothing while it trains"
KL, SHAPING, IMPORTANT = "algorithm.kl.", "algorithm.shaping.", "algorithm.importance_sampling."
LESSON = "algorithm.distillation."
NO_KL = "algorithm.kl.coefficient=0"
RULES: dict[type[RunConfig], list[Rule]] = {
    RLConfig: [
        *TRAINING,
        (
            "model.attention",
            lambda run: not all(ranks.packing for ranks in (run.training, *run.roles().values())),
            PACKED.format("training"),
        ),
        *(rule for name in ("critic", "reference", "teacher", "reward_model") for rule in engine_rules(name)),
        read_by_model("critic. algorithm.value_clip algorithm.critic_warmup_", "critic"),
        (
            "algorithm.critic_warmup_limit",
            lambda run: run.algorithm.critic_warmup_variance is not None,
            "critic_warmup_variance=null",
        ),
        *read_by_some("algorithm.advantage", ADVANTAGES),
        *read_by_some("algorithm.loss", POLICY_LOSSES),
        ("algorithm.gae_lambda", lambda run: not run.algorithm.length_adaptive, "length_adaptive takes over"),
        ("reference.", lambda run: not run.model.lora.rank, "a policy with adapters is its own reference"),
        ("reference.", lambda run: run.algorithm.kl.coefficient > 0, f"{NO_KL}, so no reference is loaded"),
        ("teacher. algorithm.distillation.", teaches, "algorithm.advantage={run.algorithm.advantage} has no teacher"),
        ("teacher.", lambda run: run.algorithm.distillation.teacher == "frozen", "the policy is its own teacher"),
        needs_key("teacher.column", "teacher.paths", "teacher.paths is empty"),
        needs_key(f"{LESSON}divergence {LESSON}top_k", f"{LESSON}coefficient", f"{LESSON}coefficient=0"),
        (
            f"{LESSON}template {LESSON}column {LESSON}max_prompt_tokens",
            lambda run: run.algorithm.distillation.reads_more(),
            f"{LESSON}context=none",
        ),
        read_by(f"{LESSON}rewarded", f"{LESSON}context", "feedback"),
        read_by(f"{LESSON}column", f"{LESSON}context", "demonstration", "solution"),
        ("reward_model.", has_reward_model, NO_REWARD_MODEL),
        (f"{KL}place {KL}estimator {KL}unbiased", lambda run: run.algorithm.kl.coefficient > 0, NO_KL),
        (f"{KL}estimator", lambda run: run.algorithm.kl.place == "loss", "algorithm.kl.place=reward"),
        needs_key(f"{KL}horizon", f"{KL}target", f"{KL}target=null"),
        read_by(f"{IMPORTANT}cap", IMPORTANCE, *CAPPED),
        read_by(f"{IMPORTANT}low {IMPORTANT}high", IMPORTANCE, "token_mask"),
        read_by(f"{IMPORTANT}sequence_", IMPORTANCE, "sequence_mask"),
        needs_key(DYNAMIC, f"{DYNAMIC}enabled", f"{DYNAMIC}enabled=false"),
        needs_key(f"{SHAPING}overlong_share", f"{SHAPING}overlong_factor", f"{SHAPING}overlong_factor=0"),
        needs_key(f"{SHAPING}cosine_wrong", f"{SHAPING}cosine_correct", f"{SHAPING}cosine_correct=null"),
        (
            f"{SHAPING}truncated_value",
            lambda run: run.algorithm.shaping.truncated != "keep",
            f"{SHAPING}truncated=keep",
        ),
        GREEDY,
        ("evaluation.", lambda run: bool(run.evaluation.named_sets()), "evaluation.data names no prompts"),
        needs_key("sync.tolerance", "sync.check", "sync.check=false"),
        needs_key("monitoring.tokens", TRANSCRIPTS, f"{TRANSCRIPTS}=0"),
        ("algorithm.credit", plays, "episodes have one turn"),
        ONE_TURN,
        needs_key(ASYNCHRONOUS, "rollout.max_staleness", SYNCHRONOUS),
        needs_key(DIFFICULTY, f"{DIFFICULTY}enabled", f"{DIFFICULTY}enabled=false"),
    ],
    SupervisedConfig: [
        *TRAINING,
        ("model.attention", lambda run: not run.training.packing, PACKED.format("training")),
        ("evaluation.", lambda run: bool(run.evaluation.data or run.evaluation.share), "no rows are held out"),
        (f"{TRANSCRIPTS} monitoring.tokens {KEPT} model.lora.sync", never, "nothing is sampled"),
        read_by_loss("gamma", "simpo"),
        read_by_loss("odds_coefficient", "orpo"),
        read_by_loss("length_normalized", "ipo"),
    ],
    SamplingConfig: [
        ("model.attention", lambda run: not run.reward_model.packing, PACKED.format("reward_model")),
        ("model.attention", has_reward_model, "engines have an attention of their own"),
        ("reward_model.", has_reward_model, NO_REWARD_MODEL),
        ONE_TURN,
        (
            f"checkpoint. health. {TRACKED} rollout.max_staleness rollout.oversample {ASYNCHRONOUS} {DIFFICULTY} "
            "evaluation.every",
            never,
            "nothing is trained",
        ),
    ],
    EvalConfig: [
        GREEDY,
        (" ".join(f"rollout.{key}" for key in SamplingControls.model_fields), never, "eval reads that of `evaluation`"),
    ],
}


# Runs that are to compute the same bits again


def reproducible(config: Kind) -> Kind:
    """Refuse what two runs cannot compute alike, and set the keys on which their bits depend."""
    if not config.deterministic:
        return config
    machine = machine_at_hand()
    for key, value, why, remedy in obstacles(config, machine):
        raise ConfigError(f"{ASKED}: {key}={value} {why}: {remedy}", key=key)
    keys: Tree = {}
    if not isinstance(config, SamplingConfig):
        keys["training"] = {"compile": False} | ({"stream": False} if isinstance(config, RLConfig) else {})
    if isinstance(config, RLConfig | SamplingConfig):
        alone = {"max_sequences": 1} if ROLLOUT_ENGINES[config.rollout.engine].alone else {}
        keys |= {"rollout": {"seeded": True} | alone, "reward": {"batch": 1}}
    return config.with_keys(keys)


def obstacles(config: RunConfig, machine: Machine) -> Iterator[Obstacle]:
    if machine.nodes:
        yield "cluster.address", config.cluster.address, "places processes where there is room", "run on one machine"
    for name, part in config:
        if isinstance(part, TrainingConfig) and part.compile:
            yield f"{name}.compile", "true", "chooses kernels by their speed", "set it to false"
    if isinstance(config, RLConfig) and config.training.stream is True:
        yield "training.stream", "true", "adds gradients in the order in which groups end", "set it to false"
    if isinstance(config, RLConfig | SamplingConfig):
        yield from sampling_obstacles(config, "gpu" if machine.gpus else "cpu")


def sampling_obstacles(config: RLConfig | SamplingConfig, place: str) -> Iterator[Obstacle]:
    rollout, played = config.rollout, config.environment
    row = ROLLOUT_ENGINES[rollout.engine]
    if not (row.alone or place in row.invariant_on):
        able = others("rollout", lambda row: row.alone or place in row.invariant_on)
        yield "rollout.engine", rollout.engine, f"on a {place.upper()} rounds by what it batches", f"set {able}"
    if rollout.max_staleness:
        yield "rollout.max_staleness", rollout.max_staleness, "trains groups in the order in which they end", "set 0"
    if rollout.speculative != "none":
        yield "rollout.speculative", rollout.speculative, "computes tokens in batches that vary", "set none"
    if rollout.seeded is False:
        yield "rollout.seeded", "false", "draws tokens without seeds of their own", "leave it out"
    if played.agent:
        yield "environment.agent", played.agent, "is a program that talks to the world", "use environment.function"
    for tool in (tool for tool in played.tools if tool.startswith("mcp:")):
        yield "environment.tools", tool, "is a server that the run does not control", "use file.py:function"


def check_settled(asked: RunConfig, forecast: Forecast, *, sampled: bool = False) -> None:
    """Refuse values that follow from memory that happens to be free, or from lengths that happen to be known."""
    if not asked.deterministic:
        return
    chosen = forecast.keys()
    if chosen != forecast.quickest.keys(forecast.moved):
        keys = first_fitting_keys(asked, [chosen], lambda changed: True)
        raise ConfigError(f"{ASKED}: memory is short, and what is free would decide how bits are rounded: set {keys}")
    if isinstance(asked, RLConfig) and asked.rollout.max_prompt_tokens is None:
        reasons = {"a large dataset, of which this run has measured a sample": sampled}
        reasons |= {"sequences of several turns, as long as memory allows": bool(asked.environment.kind())}
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ConfigError(f"{ASKED}: rollout.max_prompt_tokens=null with {reason}: set it")


def doubts(config: RunConfig) -> list[Finding]:
    """Find code and servers that may answer differently in another run."""
    if not (config.deterministic and isinstance(config, RLConfig | SamplingConfig)):
        return []
    served = {
        part.function: "reward.function" for part in config.reward.named_parts().values() if kind_of(part) in SERVED
    }
    kind = config.environment.kind()
    played = {f"environment.{kind}": f"environment.{kind}"} if kind else {}
    return [
        Finding("watch", "may_differ", f"{name}: {ASKED} cannot hold for it", "make sure that it repeats itself", key)
        for name, key in (served | played).items()
    ]


def bits_lines(config: RunConfig, machine: Machine) -> list[str]:
    """Say what holds of another run of the same command, if it was asked for."""
    if not config.deterministic:
        return []
    what, how, where = "weights", "", "; not measured on GPUs" if machine.gpus else ""
    if isinstance(config, RLConfig | SamplingConfig):
        what = "weights and sampled tokens" if isinstance(config, RLConfig | RoundsConfig) else "sampled tokens"
        how = ", one completion at a time" if config.rollout.max_sequences == 1 else ""
    return [f"bits       the same {what} in every run of this command on this machine{how} ({ASKED}){where}"]
