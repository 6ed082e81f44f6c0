"""Plan an offline run: read, check and tokenize rows, fill in keys."""

import math
import sys
from dataclasses import dataclass, field, replace
from functools import partial

from trueline.config.base import ConfigError, Tree, merge
from trueline.config.model import RanksConfig, resolve_path
from trueline.config.supervised import DistillRunConfig, SupervisedConfig
from trueline.data.batching import Budget
from trueline.data.chat import ChatFormat
from trueline.data.loader import fingerprint
from trueline.data.pictures import TRAINED_BY
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.models.vision import VISION_FAMILIES
from trueline.monitoring.findings import Finding
from trueline.plan.findings import check_settled, find, reproducible
from trueline.plan.inputs import Reading, check_kept
from trueline.plan.memory import HOST_SHARE, Forecast, MemoryPool, ModelFootprint, node_rooms, settle
from trueline.plan.resolve import (
    check_engines,
    check_model_keys,
    compile_keys,
    first_fitting_keys,
    rank_count,
    rate_findings,
    rate_keys,
    reads_alike,
    resolve_dtype,
)
from trueline.plan.tasks import TASKS, Material, check_longest, load_material, teacher_model
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.runtime.placement import Layout, check_devices, place_processes
from trueline.training.engines.table import TRAIN_ENGINES


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    config: SupervisedConfig  # resolved
    machine: Machine
    facts: ModelFacts
    layout: Layout
    material: Material
    steps: int
    longest: int
    chat: ChatFormat
    forecast: Forecast | None  # of this machine; None where a plan is only shown
    findings: list[Finding] = field(default_factory=list)

    def reading(self) -> Reading:
        return Reading(self.facts, self.chat, self.material.records, self.material.held_out_records)

    def without_records(self) -> "SupervisedPlan":
        """Leave out what training does not need: rows as texts may take as much memory as all samples."""
        return replace(self, material=Material(self.material.train, self.material.held_out))

    def fingerprint(self) -> Tree:
        data, train = self.config.data, self.material.train
        return fingerprint(data.sources(), train.sizes, train.digests, self.config.seed, data.shuffle)


def plan_supervised(config: SupervisedConfig, *, here: bool = True) -> SupervisedPlan:
    """Read, check and tokenize before any model is loaded; with `here`, this machine must have the memory to train."""
    check_engines(config, "training")
    facts, machine = check_model(config.model, TASKS[config.task].head), machine_at_hand()
    config, world, max_tokens = resolve(reproducible(config), facts, machine)
    check_vision_run(config, facts)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    material = load_material(config, chat, max_tokens)
    parts = [part for part in (material.train, material.held_out) if part is not None]
    longest = max(check_longest(part, budget_of(config)) for part in parts)
    forecast = forecast_memory(config, facts, machine, world, longest) if here else None
    if forecast:
        check_settled(config, forecast)
        config = config.with_keys(forecast.keys())
    steps = config.steps or math.ceil(material.train.rows() * config.epochs / config.samples_per_step)
    layout = Layout(world, width=config.model.width(), deterministic=config.deterministic)
    check_devices(layout, machine)
    config = config.with_keys({"steps": steps})
    rates = rate_findings(facts.parameters, config.task, config.model, config.training)
    found = find(config, layout, machine, chat, [*rates, *teacher_findings(config)])
    return SupervisedPlan(config, machine, facts, layout, material, steps, longest, chat, forecast, found)


def resolve(config: SupervisedConfig, facts: ModelFacts, machine: Machine) -> tuple[SupervisedConfig, int, int]:
    """Fill in every key that was left to the machine or the model; return ranks and the longest sequence as well."""
    ranks = rank_count(config.training, config.model, machine)
    limit = config.training.micro_batch_tokens
    max_tokens = config.max_tokens or min(facts.context, (limit or facts.context) * config.model.context_parallel)
    if max_tokens > facts.context:
        raise ConfigError(f"max_tokens={max_tokens} is more than the model's context of {facts.context}: lower it")
    resolved = config.with_keys(
        {
            "model": {
                "dtype": resolve_dtype(config.model.dtype, config.training, machine),
                "path": resolve_path(config.model.path),
            },
            "training": {"ranks": ranks}
            | compile_keys(config, facts, machine)
            | rate_keys(facts.parameters, config.task, config.model, config.training),
            "max_tokens": max_tokens,
        }
    )
    check_engines(resolved, "training")  # with what the machine has filled in
    check_model_keys(resolved.training, resolved.model, facts)
    if isinstance(resolved, DistillRunConfig):
        resolved = resolved.with_keys({"distill": {"teacher": resolve_path(resolved.distill.teacher)}})
        check_teacher(resolved, facts)
    return resolved, ranks, max_tokens


def check_vision_run(config: SupervisedConfig, facts: ModelFacts) -> None:
    """Refuse what a run with a vision-language model cannot do."""
    named = f"model.path={config.model.path}"
    if facts.family not in VISION_FAMILIES:
        return
    if isinstance(config, DistillRunConfig):
        raise ConfigError(f"{named} is a vision-language model, which only {TRAINED_BY} train: name a language model")
    check_kept(config.checkpoint, config.model, facts)


def budget_of(config: SupervisedConfig) -> Budget:
    """Return the configured budget of a micro-batch; one that follows memory holds whatever the data has."""
    training, most = config.training, config.training.micro_batch_tokens
    tokens = sys.maxsize if most is None else most * config.model.context_parallel
    return Budget(tokens, training.micro_batch_samples, training.packing)


def forecast_memory(
    config: SupervisedConfig, facts: ModelFacts, machine: Machine, world: int, longest: int, *, propose: bool = True
) -> Forecast:
    """Choose what memory decides; a teacher shares the memory of its student."""
    tokens = config.model.place_tokens(config.samples_per_step, longest, world)
    tenants = [ModelFootprint("model", "training", facts, config.model, config.training, world, tokens)]
    if isinstance(config, DistillRunConfig):
        teacher, ranks = teacher_model(config), RanksConfig(micro_batch_tokens=config.training.micro_batch_tokens)
        tenants.append(ModelFootprint("teacher", "training", check_model(teacher), teacher, ranks, world, tokens))
    if machine.gpus:
        host = HOST_SHARE * machine.memory_bytes / machine.gpus
        rooms = [MemoryPool(machine.gpu_bytes, "cuda", [(one, 1) for one in tenants], host=host)]
    else:
        nodes = place_processes(Layout(world, width=config.model.width()), machine).policy
        rooms = node_rooms(machine, [(one, nodes) for one in tenants])
    divide = partial(sharding_keys, config, facts, machine, world, longest) if propose and machine.gpus else str
    return settle(rooms, longest, "max_tokens", divide)


def sharding_keys(config: SupervisedConfig, facts: ModelFacts, machine: Machine, world: int, longest: int) -> str:
    """Return the first keys that divide the model further and make it fit."""
    row = TRAIN_ENGINES[config.training.engine]
    sharded: Tree = {"training": row.sharded}
    on_host: Tree = {"training": row.on_host}
    adapters: Tree = {"model": {"lora": {"rank": 16}}}
    tried = [sharded, on_host, merge(sharded, on_host), adapters, merge(adapters, sharded)]
    undecided = config.with_keys({"training": {"compile": None}})
    return first_fitting_keys(
        undecided, tried, lambda changed: bool(forecast_memory(changed, facts, machine, world, longest, propose=False))
    )


def check_teacher(config: DistillRunConfig, student: ModelFacts) -> None:
    if not config.distill.teacher:
        raise ConfigError("distill.teacher is empty: name the model to learn from, e.g. distill.teacher=path/to/folder")
    named, wanted = f"distill.teacher={config.distill.teacher}", student.vocabulary
    found = check_model(teacher_model(config), key="distill.teacher").vocabulary
    if found != wanted:
        raise ConfigError(f"{named}: it knows {found} tokens and the student {wanted}: choose models of one vocabulary")
    if not reads_alike(config.distill.teacher, config.model):
        raise ConfigError(
            f"{named}: its tokenizer is not that of model.path={config.model.path}: choose another teacher"
        )
    if (config.distill.top_k or 0) > wanted:
        raise ConfigError(f"distill.top_k={config.distill.top_k} is more than the {wanted} tokens there are: lower it")


def teacher_findings(config: SupervisedConfig) -> list[Finding]:
    if not isinstance(config, DistillRunConfig) or config.distill.teacher != config.model.path:
        return []
    what = f"distill.teacher={config.distill.teacher} is the student itself, so there is nothing to learn"
    return [Finding("watch", "teacher_is_student", what, "name another model", "distill.teacher")]
