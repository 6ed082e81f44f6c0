"""Fill in keys left to the machine and the model, and refuse what its engines cannot do."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from trueline.algorithms.advantages import has_teacher, needs
from trueline.config.base import Config, ConfigError, Tree
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import FrozenConfig, ModelConfig, RanksConfig, Role, RoleConfig, TrainingConfig, resolve_path
from trueline.config.reward import RewardConfig
from trueline.config.rl import OWN_GPU, ResolvedRollout, RLConfig, RolloutConfig
from trueline.config.run import EnginesConfig
from trueline.config.sampling import SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.models.loading import PAPER, ModelFacts, check_model, load_tokenizer
from trueline.monitoring.findings import Finding
from trueline.plan.memory import longest_cached
from trueline.rewards.combined import kind_of
from trueline.rewards.model import reward_model_head
from trueline.rollout.engines import ROLLOUT_ENGINES, RolloutRow
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import RoleRanks
from trueline.training.engines.table import TRAIN_ENGINES, TrainRow

Kind = TypeVar("Kind", bound=Config)
PROMPT_STEP = 64  # tokens; the data's longest prompt is rounded up to a multiple

# Rules of thumb, near what published recipes use.
BASE_RATE, BASE_PARAMETERS = 2e-6, 1e9  # reinforcement and preferences, all weights of a 1B model
SMALLER, LARGER = 0.7, 0.3  # exponents of the size below and above that
FACTORS = {"policy": 1, "preference": 1, "kto": 1}  # others imitate data or score, and take ten times as much
ADAPTERS = 10  # times the rate of all weights
LARGEST = 2e-3
LONG_RUN = 100  # steps, in which compiling, 10 to 20 s at first, pays
FAR, DIVERGES = 30, 100  # times the default: worth a finding; a bad one, where it is larger
ROUND = (1, 2, 5, 10)
NAMES = {"policy": "reinforcement learning", "preference": "preferences", "critic": "a critic"}


def rows_of(section: str) -> Mapping[str, TrainRow | RolloutRow]:
    return ROLLOUT_ENGINES if section == "rollout" else TRAIN_ENGINES


def others(section: str, able: Callable[[Any], bool]) -> str:
    """Name the engines that could be set instead."""
    return " or ".join(f"{section}.engine={name}" for name, row in rows_of(section).items() if able(row))


def check_engines(config: EnginesConfig, *used: str) -> None:
    """Look up the engine of every section; those of the sections in use must be there and able."""
    parts = dict(config)
    for section, name in config.engines().items():
        if name not in rows_of(section):
            raise ConfigError(f"{section}.engine={name}: not known; choose from {', '.join(rows_of(section))}")
        row, part, model = rows_of(section)[name], parts[section], parts["model"]
        if parts["runtime"] == "local" and not row.local:
            able = others(section, lambda row: row.local)
            raise ConfigError(f"runtime=local keeps everything in one process: set {able} (got {name}) or runtime=ray")
        if section in used and row.package and importlib.util.find_spec(row.package) is None:
            raise ConfigError(
                f"{section}.engine={name}: {row.package} is not installed here; install it (it comes with "
                f"{row.brought_by}) or set {others(section, lambda row: not row.package)}"
            )
        if isinstance(row, RolloutRow) and not row.takes_weights and isinstance(config, RLConfig):
            able = others(section, lambda row: row.takes_weights)
            raise ConfigError(f"{section}.engine={name} only samples, and takes no new weights: set {able}")
        if section in used and isinstance(part, TrainingConfig):
            own = part.model_like(model, model.path) if isinstance(part, RoleConfig) else model
            check_trained(section, part, own)


def check_trained(section: str, ranks: TrainingConfig, model: ModelConfig) -> None:
    row, asked = TRAIN_ENGINES[ranks.engine], f"{section}.engine={ranks.engine}"
    check_ranks(section, ranks, model)
    if model.dtype == "bfloat16" and not row.masters:
        raise ConfigError(
            f"{asked} keeps no float32 master weights: set model.dtype=float32 (got bfloat16) or "
            + others(section, lambda row: row.masters)
        )
    if ranks.offload not in (None, "none", *row.offloads):
        able = " or ".join(("none", *row.offloads))
        raise ConfigError(f"{asked} cannot offload that: set {section}.offload={able} (got {ranks.offload})")
    row.check(ranks, model, section)


def check_ranks(section: str, ranks: RanksConfig, model: ModelConfig) -> None:
    width = model.width()
    if max(ranks.ranks or 1, width) > 1 and not TRAIN_ENGINES[ranks.engine].several_ranks:
        raise ConfigError(
            f"{section}.engine={ranks.engine} runs in one process: set {section}.ranks=1 (got {ranks.ranks}), "
            f"model.tensor_parallel=1 and model.context_parallel=1 (got {width} ranks wide), or runtime=ray and "
            + others(section, lambda row: row.several_ranks)
        )


def resolve_dtype(dtype: str, training: RanksConfig, machine: Machine) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if machine.gpus and TRAIN_ENGINES[training.engine].masters else "float32"


def rank_count(ranks: RanksConfig, model: ModelConfig, machine: Machine) -> int:
    """Return the configured number of ranks; else all GPUs, in multiples of what one copy of the model needs."""
    width = model.width()
    several = TRAIN_ENGINES[ranks.engine].several_ranks
    return ranks.ranks or (max(machine.gpus // width, 1) * width if several else 1)


def contexts(
    environment: EnvironmentConfig, rollout: RolloutConfig, facts: ModelFacts, machine: Machine, dtype: str
) -> list[int]:
    """Return what sequences of several turns may have, longest first: all that the model reads and a cache holds, and
    halves of that. 0 means what the data needs; episodes of one turn and a configured limit need no more.
    """
    if not environment.kind() or rollout.max_prompt_tokens is not None:
        return [0]
    held = rollout.with_keys({"dtype": dtype}) if rollout.dtype == "auto" else rollout
    longest = longest_cached(held, facts, machine)
    return [longest >> halvings for halvings in range(longest.bit_length())] + [0]


def resolve_rollout(
    rollout: RolloutConfig,
    facts: ModelFacts,
    lengths: Sequence[int] | np.ndarray,
    engines: int,
    dtype: str,
    gpus: int,
    context: int = 0,
) -> ResolvedRollout:
    """Fill in the keys that were left to machine, model and data, whose prompts have these `lengths`.

    Sequences may have `context` tokens, or as few as the data needs.
    """
    tokens = rollout.max_new_tokens or min(1024, facts.context // 2)
    room = max(facts.context - tokens, 1)
    within = np.asarray(lengths)[np.asarray(lengths) <= room]
    longest = int(within.max(initial=1)) if len(within) else room
    needed = max(math.ceil(longest / PROMPT_STEP) * PROMPT_STEP, context - tokens)
    row = ROLLOUT_ENGINES[rollout.engine]
    slow_seeds = gpus > 0 and row.slow_seeds
    simple = gpus > 0 and rollout.tensor_parallel == 1 and rollout.speculative == "none"
    values = {
        "engines": engines,
        "seeded": not slow_seeds if rollout.seeded is None else rollout.seeded,
        "gpu_memory_utilization": rollout.gpu_memory_utilization or OWN_GPU,
        "dtype": dtype if rollout.dtype == "auto" else rollout.dtype,
        "max_new_tokens": tokens,
        "max_prompt_tokens": rollout.max_prompt_tokens or min(needed, room),
        "workers": rollout.workers or 0,
        "lean_logprobs": row.lean_logprobs and (simple if rollout.lean_logprobs is None else rollout.lean_logprobs),
    }
    return ResolvedRollout.parse(rollout.model_dump() | values)


def check_model_keys(ranks: RanksConfig, model: ModelConfig, facts: ModelFacts, section: str = "training") -> None:
    """Refuse a width, packing, a router loss or divided experts that the model of a section does not allow."""
    width, place = model.tensor_parallel, "model" if section in ("training", "ranks") else section
    coefficient = ranks.router_aux_loss_coef if isinstance(ranks, TrainingConfig) else 0.0
    if facts.heads % width or facts.key_heads % width:
        raise ConfigError(
            f"{place}.tensor_parallel={width} does not divide the model's {facts.heads} heads and {facts.key_heads} "
            "key-value heads",
            key=f"{place}.tensor_parallel",
        )
    if ranks.packing and facts.unpackable:
        raise ConfigError(
            f"{section}.packing=true joins sequences, which would see each other in a model that has "
            f"{facts.unpackable}, such as {facts.kind} ({model.path}): set {section}.packing=false",
            key=f"{section}.packing",
        )
    if coefficient and not facts.balanced:
        kind = f"a mixture of {facts.experts} experts that are balanced otherwise" if facts.experts else "a dense model"
        raise ConfigError(
            f"{section}.router_aux_loss_coef={coefficient:g}: {model.path} is {kind}; set it to 0, or train a model "
            "whose configuration has that key, such as Mixtral, Qwen3-MoE or OLMoE",
            key=f"{section}.router_aux_loss_coef",
        )
    TRAIN_ENGINES[ranks.engine].suits(ranks, model, facts, section)


def check_rollout(rollout: ResolvedRollout, model: ModelConfig, facts: ModelFacts, machine: Machine) -> int:
    """Return the longest sequence that sampling can make, or refuse what the model or the engine cannot do."""
    engine, longest, width = rollout.engine, rollout.longest(), rollout.tensor_parallel
    row, on_cpu = ROLLOUT_ENGINES[engine], not machine.gpus
    place = "cpu" if on_cpu else "gpu"
    kind = facts.family or facts.kind
    package, sizes = row.kinds.get(kind, ""), row.cpu_head_sizes
    able, named = partial(others, "rollout"), f"model.path={model.path}: "
    lengths = f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens}"
    problems = {
        f"{lengths} exceed the model's context of {facts.context} tokens: lower one of them": longest > facts.context,
        f"{named}its attention heads have size {facts.head_size}; {engine} on a CPU runs {', '.join(map(str, sizes))}: "
        f"set {able(lambda row: not row.cpu_head_sizes)} or choose another model": (
            on_cpu and bool(sizes) and facts.head_size not in sizes
        ),
        f"{named}{engine} on a CPU gives {kind} other log-probs than Transformers: set "
        f"{able(lambda row: not row.cpu_differs)} or choose another model": on_cpu and kind in row.cpu_differs,
        f"{named}{engine} needs {package} to load {kind}, and it is not installed here; install it or set "
        f"{able(lambda row: not row.kinds)}": bool(package) and importlib.util.find_spec(package) is None,
        f"rollout.engine={engine} divides no model: set rollout.tensor_parallel=1 (got {width}) or "
        f"{able(lambda row: row.tensor_parallel)}": width > 1 and not row.tensor_parallel,
        f"rollout.speculative={rollout.speculative}: {engine} on a {place} cannot guess tokens and sample rightly: set "
        "rollout.speculative=none": rollout.speculative != "none" and place not in row.speculates_on,
        f"rollout.tensor_parallel={width} does not divide the model's {facts.heads} heads": facts.heads % width > 0,
    }
    for problem, holds in problems.items():
        if holds:
            raise ConfigError(problem)
    return longest


def adapter_sync(config: RLConfig, facts: ModelFacts, gpus: int) -> str:
    """Fill in model.lora.sync, or refuse separate adapters where engines cannot hold them."""
    lora = config.model.lora
    if not lora.rank:
        return lora.sync
    reason = adapter_obstacle(config, gpus)
    if lora.sync == "adapter" and reason:
        raise ConfigError(f"model.lora.sync=adapter: {reason}; set model.lora.sync=merged")
    if lora.sync == "auto":
        return "merged" if reason or adapter_doubt(config, facts) else "adapter"
    return lora.sync


def adapter_obstacle(config: RLConfig, gpus: int) -> str:
    """Say why engines cannot hold adapters with the trainer's base weights; empty: they can."""
    lora, engine, half = config.model.lora, config.rollout.engine, config.model.dtype == "bfloat16"
    largest, full = max(ROLLOUT_ENGINES[engine].adapter_ranks, default=0), config.rollout.dtype == "float32"
    reasons = {
        f"rollout.engine={engine} has no room for rank {lora.rank} (up to {largest})": lora.rank > largest,
        "model.lora.quantize=true has the trainer compute with 4-bit weights, which engines do not hold": lora.quantize,
        "model.train_vision=all adapts the tower, where engines hold none": config.model.train_vision == "all",
        "model.dtype=bfloat16 rounds the base weights, and rollout.dtype=float32 does not": half and full,
        f"rollout.engine={engine} multiplies adapters on GPUs in bfloat16, and rollout.dtype=float32": full and gpus,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def adapter_doubt(config: RLConfig, facts: ModelFacts) -> str:
    """Say which layers an engine may hold no adapters on; who knows that it does sets model.lora.sync=adapter."""
    targets, engine = config.model.lora.targets, config.rollout.engine
    row = ROLLOUT_ENGINES[engine]
    if facts.kind not in row.adapter_models:
        return f"rollout.engine={engine} is not known to hold adapters on all layers of a model_type={facts.kind}"
    others = [name for name in targets.split(",") if targets != "all-linear" and name not in row.adapter_layers]
    return f"rollout.engine={engine} is not known to hold adapters on {', '.join(others)}" if others else ""


def first_fitting_keys(config: Kind, candidates: Iterable[Tree], fits: Callable[[Kind], bool]) -> str:
    """Return the first of these changes with which a run fits, as a configuration writes it; or nothing."""
    before = {key.path: key.default for key in config.leaves()}
    for keys in candidates:
        with suppress(ConfigError):
            changed = config.with_keys(keys)
            if fits(changed):
                different = (key for key in changed.leaves() if key.default != before[key.path])
                return " and ".join(f"{key.path}={key.default}" for key in different)
    return ""


# Learning rates by task, size and adapters


def suited_rate(parameters: int, kind: str, *, adapters: bool) -> float:
    """Return the default of a policy, a critic, or the model of an offline task: a round number by its size."""
    size = BASE_PARAMETERS / max(parameters, 1)
    by_size = BASE_RATE * size ** (SMALLER if size > 1 else LARGER)
    factor = FACTORS.get(kind, 10) * (ADAPTERS if adapters else 1)
    unit = 10.0 ** math.floor(math.log10(by_size))
    round_rate = unit * min(ROUND, key=lambda digit: abs(math.log(by_size / unit / digit)))
    return min(float(f"{round_rate * factor:.0e}"), LARGEST)


def rate_keys(parameters: int, kind: str, model: ModelConfig, training: TrainingConfig) -> Tree:
    """Return the learning rate of a section: the one that was set, or the default for this model."""
    suited = suited_rate(parameters, kind, adapters=model.lora.rank > 0)
    return {"learning_rate": suited if training.learning_rate is None else training.learning_rate}


def compile_keys(config: RLConfig | SupervisedConfig, facts: ModelFacts, machine: Machine) -> Tree:
    """Tell whether layers are compiled: where it was not set, if that works in one piece and pays."""
    model, training = config.model, config.training
    whole = TRAIN_ENGINES[training.engine].compiles(training) and model.width() == 1 and not model.lora.rank
    suits = machine.gpus > 0 and whole and not facts.experts and not facts.family
    pays = config.steps is None or config.steps >= LONG_RUN
    return {"compile": suits and pays if training.compile is None else training.compile}


def rate_line(
    parameters: int, kind: str, model: ModelConfig, training: TrainingConfig, section: str = "training"
) -> str:
    """Describe the rate of a plan, and the default for such a model."""
    suited, rate = suited_rate(parameters, kind, adapters=model.lora.rank > 0), training.peak_rate()
    reason = f"default for {NAMES.get(kind, kind)}{' with adapters' * (model.lora.rank > 0)} on {size_of(parameters)}"
    origin = f": {reason}" if rate == suited else f", as set; {suited:g} is the {reason}"
    return f"rate       {section}.learning_rate={rate:g}{origin}"


def size_of(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}B parameters" if parameters >= 1e8 else f"{parameters / 1e6:.2g}M parameters"


def rate_findings(
    parameters: int, kind: str, model: ModelConfig, training: TrainingConfig, section: str = "training"
) -> list[Finding]:
    """Find a rate far from what suits the model."""
    suited, rate = suited_rate(parameters, kind, adapters=model.lora.rank > 0), training.learning_rate
    if rate is None or suited / FAR <= rate <= suited * FAR:
        return []
    trained = "adapters of a model" if model.lora.rank else "a model"
    danger = "learn next to nothing" if rate < suited else "diverge"
    size = size_of(parameters)
    what = f"{section}.learning_rate={rate:g} is far from {suited:g}, the default for {trained} of {size}"
    level = "bad" if rate > DIVERGES * suited else "watch"
    why = f"training may {danger}: leave the key out to take the default"
    return [Finding(level, "learning_rate", what, why, f"{section}.learning_rate")]


# The models that a run loads besides its policy


@dataclass(frozen=True, slots=True)
class RoleModel:
    """A model besides the policy."""

    name: str
    section: str  # of the configuration
    model: ModelConfig
    ranks: Role
    head: str
    facts: ModelFacts
    world: int  # ranks

    def layout(self) -> RoleRanks:
        return RoleRanks(self.name, self.world, self.ranks.placement == "shared", self.model.width())

    def spread(self, policy_ranks: int) -> "RoleModel":
        """Take as many of the policy's ranks as whole copies fill, unless ranks are configured."""
        if self.ranks.ranks is not None or self.ranks.placement == "separate":
            return self
        return replace(self, world=max(policy_ranks // self.world, 1) * self.world)


def worker_count(config: RLConfig | SamplingConfig, judges: list[RoleModel], machine: Machine) -> int:
    """Return the number of rollout workers; the ranks of a reward model must get their calls in one order."""
    asked, wide = config.rollout.workers, [role for role in judges if role.world > 1]
    if config.runtime == "local":
        if asked:
            raise ConfigError(f"rollout.workers={asked}: runtime=local keeps all in one process; remove one of them")
        return 0
    if wide and (asked or 0) > 1:
        raise ConfigError(
            f"rollout.workers={asked}: {wide[0].section}.ranks={wide[0].world} take the calls of one process: set "
            f"rollout.workers=1 or {wide[0].section}.ranks=1"
        )
    usable = sum((node.gpus if machine.gpus else node.cpus) > 0 for node in machine.nodes)
    return asked if asked is not None else min(usable, 1) if wide else usable


def own_gpus(roles: list[RoleModel]) -> int:
    """Count the GPUs of models that share with no one."""
    return sum(role.world for role in roles if role.ranks.placement == "separate")


def roles_of(config: RLConfig) -> list[RoleModel]:
    """Return the models that algorithm and rewards need, one copy of each; one that they do not need is not loaded."""
    algorithm, policy = config.algorithm, config.model
    reward_roles = reward_models(config.reward, config.reward_model, policy)
    roles = list(reward_roles)
    if algorithm.needs_reference() and not policy.lora.rank:  # a policy with adapters is its own reference
        roles.append(role_model("reference", policy.path, config.reference, policy))
    teachers = teachers_of(config).items()
    roles += [role_model(f"teacher-{name}".rstrip("-"), path, config.teacher, policy) for name, path in teachers]
    if "critic" in needs(algorithm):
        start = critic_start(config, reward_roles)
        roles.append(role_model("critic", start, config.critic, policy, head="value"))
    return roles


def reward_models(rewards: RewardConfig, ranks: FrozenConfig, policy: ModelConfig) -> list[RoleModel]:
    """Return one role for each reward that is a model on this machine."""
    parts = {name: part for name, part in rewards.named_parts().items() if kind_of(part) == "model"}
    return [
        role_model(
            reward_model_name(name, rewards), part.function, ranks, policy, head=reward_model_head(part.function)
        )
        for name, part in parts.items()
    ]


def reward_model_name(part: str, rewards: RewardConfig) -> str:
    return f"reward_model-{part}" if rewards.parts else "reward_model"


def role_model(name: str, path: str, ranks: Role, policy: ModelConfig, *, head: str = "language") -> RoleModel:
    section = name.partition("-")[0]
    model = ranks.model_like(policy, resolve_path(path))
    try:
        facts = check_model(model, head)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return RoleModel(name, section, model, ranks, head, facts, ranks.ranks or model.width())


def critic_start(config: RLConfig, reward_roles: list[RoleModel]) -> str:
    """Return the critic's start: the named model, a reward model that reads the policy's tokens, or the policy."""
    named, policy = config.critic.path, config.model
    if named is not None:
        role_model("critic", named, config.critic, policy, head="value")  # it is there at all
        if not reads_alike(named, policy):
            raise ConfigError(f"critic.path={named}: its tokenizer is not that of model.path={policy.path}")
        return named
    able = [one.model.path for one in reward_roles if one.head == "reward" and reads_alike(one.model.path, policy)]
    return able[0] if able else policy.path


def teachers_of(config: RLConfig) -> dict[str, str]:
    """Return the models that teach, by the names that rows have for them; none where it is the policy."""
    asked, policy = config.algorithm.distillation, config.model
    if not has_teacher(config.algorithm) or asked.teacher != "frozen":
        return {}
    if asked.reads_more() and not (config.teacher.path or config.teacher.paths):
        return {} if policy.lora.rank else {"": policy.path}  # a policy with adapters teaches without them
    paths = config.teacher.paths or {"": config.teacher.path}
    if not all(paths.values()):
        raise ConfigError("teacher.path is empty: name the model to learn from, e.g. teacher.path=path/to/folder")
    if path := next((one for one in paths.values() if not reads_alike(one, policy)), ""):
        raise ConfigError(f"teacher.path={path}: its tokenizer is not that of model.path={policy.path}")
    return paths


def reads_alike(path: str, policy: ModelConfig) -> bool:
    """Tell whether a model has the policy's tokens; on paper that is taken for granted."""
    if policy.path.startswith(PAPER):
        return True
    return bool(load_tokenizer(policy.with_keys({"path": path})).get_vocab() == load_tokenizer(policy).get_vocab())
