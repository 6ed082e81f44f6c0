"""Fill in keys left to machine and model, and refuse what cannot work, before any kind of run starts."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trueline.config.base import Config, ConfigError, nested, parse_override, read_tree
from trueline.config.data import PromptDataConfig
from trueline.config.environment import EnvironmentConfig
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.config.reward import RewardConfig
from trueline.config.rl import OWN_GPU, ResolvedRollout, RolloutConfig
from trueline.config.run import CheckpointConfig, RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.encoding import naming
from trueline.data.readers import read_prompts
from trueline.data.sources import open_source
from trueline.data.stored import stored_data
from trueline.data.types import Prompt
from trueline.models.loading import ModelFacts
from trueline.monitoring.run_folder import RunFolder
from trueline.rewards.combined import kind_of
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runs.engines import others
from trueline.runs.memory import NO_ENGINE, EngineRoom, Room, Tenant, longest_cached
from trueline.runtime.cluster import Machine
from trueline.training.checkpoints import MANIFEST, Checkpoints
from trueline.training.engines import TRAIN_ENGINES

if TYPE_CHECKING:  # which needs this module
    from trueline.runs.rewards import Trial

Kind = TypeVar("Kind", bound=Config)
MODEL_KEYS = ("model.path", "critic.path", "teacher.path", "distill.teacher")  # and rewards that are models
UNTRAINED = ("generate", "eval")  # verbs whose runs hold no model
PROMPT_STEP = 64  # tokens; the data's longest prompt is rounded up to a multiple


def resolve_dtype(dtype: str, training: RanksConfig, machine: Machine) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if machine.gpus and TRAIN_ENGINES[training.engine].masters else "float32"


def rank_count(ranks: RanksConfig, model: ModelConfig, machine: Machine) -> int:
    """Return as many ranks as were asked for; else all GPUs, in multiples of what one copy of the model needs."""
    width = model.width()
    several = TRAIN_ENGINES[ranks.engine].several_ranks
    return ranks.ranks or (max(machine.gpus // width, 1) * width if several else 1)


def resolve_path(path: str) -> str:
    """Resolve a folder, for other processes may work in another one and know no `~`; a hub name stays as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if path and folder.is_dir() else path


def chained(config: Kind) -> tuple[Kind, list[str]]:
    """Put in place of each run or saved dataset that a key names what it stands for; return lines about them too."""
    config, models = chained_models(config)
    config, data = chained_data(config)
    return config, models + data


def chained_data(config: Kind) -> tuple[Kind, list[str]]:
    """Put a file in place of each run of `generate`, and a split in place of each dataset of several."""
    task = config.task if isinstance(config, SupervisedConfig) else "prompts"
    runs = config.folder if isinstance(config, RunConfig) else ""
    leaves = {key.path: key.default for key in config.leaves()}
    named = {key: leaves.get(key) for key in ("data.path", "evaluation.data")}
    sets: dict[str, str] = leaves.get("evaluation.sets") or {}
    lines = []
    for key, path in (*named.items(), *((f"evaluation.sets.{name}", path) for name, path in sets.items())):
        if path and (found := stored_data(path, key, task, runs)):
            name = key.removeprefix("evaluation.sets.")
            config = config.replaced(
                nested("evaluation.sets", {name: found[0]}) if name != key else nested(key, found[0])
            )
            lines.append(found[1])
    return config, lines


def chained_models(config: Kind) -> tuple[Kind, list[str]]:
    """Put the model of a checkpoint in place of each run that is named as a model."""
    named = {key.path: str(key.default or "") for key in config.leaves() if key.path in MODEL_KEYS}
    rewards = dict(config).get("reward")
    if isinstance(rewards, RewardConfig):
        key = "reward.parts.{}.function" if rewards.parts else "reward.function"
        parts = rewards.named_parts().items()
        named |= {key.format(name): part.function for name, part in parts if kind_of(part) == "model"}
    lines = []
    for key, path in named.items():
        if path and (found := run_model(Path(path).expanduser().resolve(), f"{key}={path}")):
            model, which = found
            config = config.replaced(parse_override(f"{key}={model}", [key]))
            lines.append(f"taken      {key}={path}: {which} ({model})")
    return config, lines


def run_model(folder: Path, named: str) -> tuple[Path, str] | None:
    """Return the model of a checkpoint or run, and which one it is; None where the folder is neither."""
    run = RunFolder(folder)
    if (folder / MANIFEST).is_file():
        return folder / "model", "this checkpoint's model"
    if not run.config.is_file() or not run.verb():
        return None
    if run.verb() in UNTRAINED:
        raise ConfigError(
            f"{named} is a run of {run.verb()}, which trains no model: name a run that trains, or a model"
        )
    asked = CheckpointConfig.parse(read_tree(run.config).get("checkpoint", {}))
    trained = run.trained()
    checkpoints = Checkpoints(trained, asked)
    if best := checkpoints.best():
        return best[0] / "model", f"{best[0].name}, the best checkpoint by {asked.metric}"
    newest = checkpoints.newest()
    if newest is None and not asked.save:
        raise ConfigError(
            f"{named} is a run of {run.verb()} that saved nothing (checkpoint.save=false): name another one"
        )
    if newest is None:
        raise ConfigError(
            f"{named} is a run of {run.verb()} without a checkpoint yet: let it go on until it has one (trueline "
            f"{run.verb()} --resume --name {folder.name}), or name another run or model folder"
        )
    which = f"{newest.name}, the newest checkpoint"
    return newest / "model", which if trained == folder else f"{which} of {trained.parent.name}"


def contexts(
    environment: EnvironmentConfig, rollout: RolloutConfig, facts: ModelFacts, machine: Machine, dtype: str
) -> list[int]:
    """Return what sequences of several turns may have, longest first: all that the model reads and a cache holds, and
    halves of that. 0 stands for what the data alone needs; other episodes, and whoever sets a limit, need no more.
    """
    if not environment.kind() or rollout.max_prompt_tokens is not None:
        return [0]
    held = rollout.replaced({"dtype": dtype}) if rollout.dtype == "auto" else rollout
    longest = longest_cached(held, facts, machine)
    return [longest >> halvings for halvings in range(longest.bit_length())] + [0]


def resolved_rollout(
    rollout: RolloutConfig,
    facts: ModelFacts,
    prompts: list["Measured"],
    engines: int,
    dtype: str,
    gpus: int,
    context: int = 0,
) -> ResolvedRollout:
    """Fill in the keys that were left to machine, model and data; sequences may have `context` tokens, or as few as the
    data needs.
    """
    tokens = rollout.max_new_tokens or min(1024, facts.context // 2)
    room = max(facts.context - tokens, 1)
    longest = max((length for one in prompts for length in one.lengths if length <= room), default=room)
    needed = max(math.ceil(longest / PROMPT_STEP) * PROMPT_STEP, context - tokens)
    slow_seeds = gpus > 0 and ROLLOUT_ENGINES[rollout.engine].slow_seeds
    values = {
        "engines": engines,
        "seeded": not slow_seeds if rollout.seeded is None else rollout.seeded,
        "gpu_memory_utilization": rollout.gpu_memory_utilization or OWN_GPU,
        "dtype": dtype if rollout.dtype == "auto" else rollout.dtype,
        "max_new_tokens": tokens,
        "max_prompt_tokens": rollout.max_prompt_tokens or min(needed, room),
    }
    return ResolvedRollout.parse(rollout.model_dump() | values)


def check_parallel(model: ModelConfig, facts: ModelFacts, section: str = "model") -> None:
    width = model.tensor_parallel
    if facts.heads % width or facts.key_heads % width:
        raise ConfigError(
            f"{section}.tensor_parallel={width} does not divide the model's {facts.heads} heads and {facts.key_heads} "
            "key-value heads"
        )


def check_routers(section: str, ranks: RanksConfig, model: ModelConfig, facts: ModelFacts) -> None:
    coefficient = ranks.router_aux_loss_coef if isinstance(ranks, TrainingConfig) else 0.0
    if coefficient and not facts.balanced:
        kind = f"a mixture of {facts.experts} experts that are balanced otherwise" if facts.experts else "a dense model"
        raise ConfigError(
            f"{section}.router_aux_loss_coef={coefficient:g}: {model.path} is {kind}; set it to 0, or train a model "
            "whose configuration has that key, such as Mixtral, Qwen3-MoE or OLMoE"
        )


def check_packing(section: str, ranks: RanksConfig, model: ModelConfig, facts: ModelFacts) -> None:
    if ranks.packing and facts.unpackable:
        raise ConfigError(
            f"{section}.packing=true lays sequences end to end, and they would see each other in a model that has "
            f"{facts.unpackable}, such as {facts.kind} ({model.path}): set {section}.packing=false"
        )


def check_rollout(rollout: ResolvedRollout, model: ModelConfig, facts: ModelFacts, machine: Machine) -> int:
    """Return the longest sequence that sampling can make, or refuse what the model or the engine cannot do."""
    longest = rollout.longest()
    if longest > facts.context:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens} "
            f"exceed the model's context of {facts.context} tokens: lower one of them"
        )
    row, sizes = ROLLOUT_ENGINES[rollout.engine], ROLLOUT_ENGINES[rollout.engine].cpu_head_sizes
    if sizes and not machine.gpus and facts.head_size not in sizes:
        raise ConfigError(
            f"model.path={model.path}: its attention heads have size {facts.head_size}; {rollout.engine} on a CPU runs "
            f"{', '.join(map(str, sizes))}: set {others('rollout', lambda row: not row.cpu_head_sizes)} or choose "
            "another model"
        )
    if facts.kind in row.cpu_differs and not machine.gpus:
        raise ConfigError(
            f"model.path={model.path}: {rollout.engine} on a CPU gives {facts.kind} other log-probs than Transformers: "
            f"set {others('rollout', lambda row: not row.cpu_differs)} or choose another model"
        )
    package = row.kinds.get(facts.kind, "")
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"model.path={model.path}: {rollout.engine} needs {package} to load {facts.kind}, and it is not installed "
            f"here; install it or set {others('rollout', lambda row: not row.kinds)}"
        )
    if rollout.tensor_parallel > 1 and not row.tensor_parallel:
        raise ConfigError(
            f"rollout.engine={rollout.engine} divides no model: set rollout.tensor_parallel=1 (got "
            f"{rollout.tensor_parallel}) or {others('rollout', lambda row: row.tensor_parallel)}"
        )
    if facts.heads % rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel={rollout.tensor_parallel} does not divide the model's {facts.heads} heads"
        )
    return longest


@dataclass(frozen=True, slots=True)
class Measured:
    """The prompts of a dataset, and how many tokens each has."""

    prompts: list[Prompt]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a plan has read of model and data, for checks that read nothing again."""

    facts: ModelFacts
    chat: ChatFormat
    rows: list[Any]  # prompts to answer, or the records of an offline task
    held_out: list[Any]
    trials: "dict[str, Trial]" = field(default_factory=dict)  # calls that reward functions were asked, by their names


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that fit, how many did not, and how many tokens the longest has."""

    prompts: list[Prompt]
    dropped: int
    longest: int


def load_prompts(data: PromptDataConfig, path: str, key: str) -> list[Prompt]:
    return read_prompts(open_source(path, key), data, path)


def measured(prompts: list[Prompt], chat: ChatFormat) -> Measured:
    return Measured(prompts, chat.prompt_lengths([prompt_text(prompt, chat) for prompt in prompts]))


def prompt_text(prompt: Prompt, chat: ChatFormat) -> str:
    with naming(prompt.place()):
        chat.check_tools(prompt.messages, prompt.tools, column="tools" in prompt.columns)
        chat.check_rounds(prompt.tools)
        return chat.prompt_text(prompt.messages, prompt.tools)


def fitting_prompts(source: Measured, limit: int, too_long: str) -> PromptSet:
    """Keep prompts within the limit; one above it is refused by its place, or left out and counted."""
    prompts = source.prompts
    kept: list[Prompt] = []
    longest = 0
    for prompt, length in zip(prompts, source.lengths, strict=True):
        if 0 < length <= limit:
            kept.append(prompt)
            longest = max(longest, length)
        elif too_long == "error" or length == 0:
            raise ConfigError(
                f"{prompt.place()} has {length} tokens; 1 to rollout.max_prompt_tokens={limit} "
                "are allowed: change the row or the limit, or set data.too_long=drop"
            )
    if not kept:
        raise ConfigError(
            f"all {len(prompts)} prompts of {prompts[0].source} have more than rollout.max_prompt_tokens={limit} "
            "tokens: raise the limit"
        )
    return PromptSet(kept, len(prompts) - len(kept), longest)


def node_rooms(
    machine: Machine,
    tenants: Sequence[tuple[Tenant, list[int]]],
    engines: Sequence[int] = (),
    engine: EngineRoom = NO_ENGINE,
) -> list[Room]:
    """Return the memory of each node that has work; of models and engines the nodes of their processes are given."""
    rooms = []
    for at, node in enumerate(machine.split()):
        here = [(tenant, nodes.count(at)) for tenant, nodes in tenants if at in nodes]
        place = f"on {node.address}" if node.address else "here"
        if here or at in engines:
            rooms.append(Room(node.memory_bytes, "cpu", here, list(engines).count(at), engine, place=place))
    return rooms
