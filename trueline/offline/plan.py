"""Plan an offline run before it starts: read, check and tokenize rows, fill in keys, put the plan into words."""

import math
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from trueline.config.base import ConfigError, Tree, parse_override
from trueline.config.model import RanksConfig
from trueline.config.supervised import DistillRunConfig, SupervisedConfig
from trueline.data.batching import Budget
from trueline.data.chat import ChatFormat
from trueline.data.loader import fingerprint
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.offline.dataset import Material, check_longest, load_material
from trueline.offline.tasks import TASKS, teacher_model
from trueline.runs.engines import check_engines
from trueline.runs.learning_rate import rate_keys, rate_line, rate_warnings
from trueline.runs.memory import HOST_SHARE, Forecast, Room, Tenant, place_tokens, settled
from trueline.runs.preflight import (
    Reading,
    check_packing,
    check_parallel,
    check_routers,
    node_rooms,
    rank_count,
    resolve_dtype,
    resolve_path,
)
from trueline.runs.roles import reads_alike
from trueline.runs.summary import machine_line, model_line, node_lines, ranks_line, warning_lines
from trueline.runtime.cluster import Machine, machine_at_hand
from trueline.runtime.placement import Layout, check_devices, placed


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
    forecast: Forecast | None  # of a machine that is this one

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
    config, world, max_tokens = resolve(config, facts, machine)
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    material = load_material(config, chat, max_tokens)
    parts = [part for part in (material.train, material.held_out) if part is not None]
    longest = max(check_longest(part, budget_of(config)) for part in parts)
    forecast = forecast_memory(config, facts, machine, world, longest) if here else None
    config = config.replaced(forecast.keys()) if forecast else config
    steps = config.steps or math.ceil(material.train.rows() * config.epochs / config.samples_per_step)
    layout = Layout(world, width=config.model.width())
    check_devices(layout, machine)
    config = config.replaced({"steps": steps})
    return SupervisedPlan(config, machine, facts, layout, material, steps, longest, chat, forecast)


def resolve(config: SupervisedConfig, facts: ModelFacts, machine: Machine) -> tuple[SupervisedConfig, int, int]:
    """Fill in every key that was left to the machine or the model; return ranks and the longest sequence besides."""
    ranks = rank_count(config.training, config.model, machine)
    limit = config.training.micro_batch_tokens
    max_tokens = config.max_tokens or min(facts.context, (limit or facts.context) * config.model.context_parallel)
    if max_tokens > facts.context:
        raise ConfigError(f"max_tokens={max_tokens} is more than the model's context of {facts.context}: lower it")
    resolved = config.replaced(
        {
            "model": {
                "dtype": resolve_dtype(config.model.dtype, config.training, machine),
                "path": resolve_path(config.model.path),
            },
            "training": {"ranks": ranks} | rate_keys(facts.parameters, config.task, config.model, config.training),
            "max_tokens": max_tokens,
        }
    )
    check_engines(resolved, "training")  # with what the machine has filled in
    check_parallel(resolved.model, facts)
    check_packing("training", resolved.training, resolved.model, facts)
    check_routers("training", resolved.training, resolved.model, facts)
    if isinstance(resolved, DistillRunConfig):
        resolved = resolved.replaced({"distill": {"teacher": resolve_path(resolved.distill.teacher)}})
        check_teacher(resolved, facts)
    return resolved, ranks, max_tokens


def budget_of(config: SupervisedConfig) -> Budget:
    """Return the budget of a pass that was asked for; passes that follow memory hold whatever the data has."""
    training = config.training
    limit = (
        sys.maxsize
        if training.micro_batch_tokens is None
        else training.micro_batch_tokens * config.model.context_parallel
    )
    return Budget(limit, training.micro_batch_samples, training.packing)


def forecast_memory(
    config: SupervisedConfig, facts: ModelFacts, machine: Machine, world: int, longest: int, *, propose: bool = True
) -> Forecast:
    """Choose what memory decides; a teacher lives beside its student."""
    tokens = place_tokens(config.samples_per_step, longest, world, config.model)
    tenants = [Tenant("model", "training", facts, config.model, config.training, world, tokens)]
    if isinstance(config, DistillRunConfig):
        teacher, ranks = teacher_model(config), RanksConfig(micro_batch_tokens=config.training.micro_batch_tokens)
        tenants.append(Tenant("teacher", "training", check_model(teacher), teacher, ranks, world, tokens))
    if machine.gpus:
        host = HOST_SHARE * machine.memory_bytes / machine.gpus
        rooms = [Room(machine.gpu_bytes, "cuda", [(one, 1) for one in tenants], host=host)]
    else:
        nodes = placed(Layout(world, width=config.model.width()), machine).policy
        rooms = node_rooms(machine, [(one, nodes) for one in tenants])
    divide = partial(sharding_keys, config, facts, machine, world, longest) if propose and machine.gpus else str
    return settled(rooms, longest, "max_tokens", divide)


def sharding_keys(config: SupervisedConfig, facts: ModelFacts, machine: Machine, world: int, longest: int) -> str:
    """Return the first keys that share the model out further and make it fit, in a configuration's words."""
    adapters, sharded, on_host = "model.lora.rank=16", "training.zero_stage=3", "training.offload=optimizer"
    for keys in ([sharded], [on_host], [sharded, on_host], [adapters], [adapters, sharded]):
        with suppress(ConfigError):
            tried = config
            for key in keys:
                tried = tried.replaced(parse_override(key))
            forecast_memory(tried, facts, machine, world, longest, propose=False)
            return " and ".join(keys)
    return ""


def check_teacher(config: DistillRunConfig, student: ModelFacts) -> None:
    if not config.distill.teacher:
        raise ConfigError("distill.teacher is empty: name the model to learn from, e.g. distill.teacher=path/to/folder")
    named, wanted = f"distill.teacher={config.distill.teacher}", student.vocabulary
    try:
        found = check_model(teacher_model(config), head="language").vocabulary
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", "distill.teacher=", 1)) from error
    if found != wanted:
        raise ConfigError(f"{named}: it knows {found} tokens and the student {wanted}: choose models of one vocabulary")
    if not reads_alike(config.distill.teacher, config.model):
        raise ConfigError(
            f"{named}: its tokenizer is not that of model.path={config.model.path}: choose another teacher"
        )
    if (config.distill.top_k or 0) > wanted:
        raise ConfigError(f"distill.top_k={config.distill.top_k} is more than the {wanted} tokens there are: lower it")


def teacher_warnings(config: SupervisedConfig) -> list[str]:
    if not isinstance(config, DistillRunConfig) or config.distill.teacher != config.model.path:
        return []
    return [
        f"distill.teacher={config.distill.teacher} is the student itself, so there is nothing to learn: name another"
    ]


def describe_plan(plan: SupervisedPlan) -> str:
    config, train, held_out = plan.config, plan.material.train, plan.material.held_out
    model, parameters = config.model, plan.facts.parameters
    counts = ", ".join(f"{count} {what}" for what, count in train.counts.items() if count and what != "rows")
    rate = (parameters, config.task, model, config.training)
    warnings = [*rate_warnings(*rate), *teacher_warnings(config)]
    return "\n".join(
        [
            machine_line(plan.machine),
            model_line(model.path, plan.facts, model.dtype, model.lora.rank),
            ranks_line("training", plan.layout.policy_ranks, config.training, model),
            rate_line(*rate),
            *node_lines(plan.layout, plan.machine),
            *(plan.forecast.lines() if plan.forecast else []),
            f"data       {train.rows()} rows, longest {plan.longest} tokens" + (f" ({counts})" if counts else ""),
            *(f"format     {described}" for described in train.formats),
            *([f"held out   {held_out.rows()} rows"] if held_out else []),
            *plan.chat.remarks(),
            f"length     {plan.steps} steps of {config.samples_per_step} rows",
            *warning_lines(config, plan.layout, plan.machine, warnings),
        ]
    )
