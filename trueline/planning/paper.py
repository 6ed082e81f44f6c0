"""Plans of runs on devices that are not here, of models that need not be: by the planners of real runs."""

import itertools
from types import SimpleNamespace

from trueline.config.base import ConfigError, Tree
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import DistillRunConfig, SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Prompt
from trueline.models.loading import check_model
from trueline.models.shapes import PAPER
from trueline.monitoring.timing import duration
from trueline.offline import plan as offline
from trueline.planning.hardware import Devices
from trueline.planning.seconds import phase_seconds, sync_bytes, train_seconds
from trueline.rl.estimates import describe_roles, memory_bytes
from trueline.rl.plan import RLPlan, Surroundings, check_algorithm, decide
from trueline.runs.memory import GIB, Tenant
from trueline.runs.preflight import Measured
from trueline.runs.summary import engines_line, machine_line, model_line, ranks_line
from trueline.runtime.placement import Layout, check_devices

PROMPT_TOKENS, ROW_TOKENS = 512, 2048  # where no key says otherwise
NO_TOKENIZER = SimpleNamespace(chat_template=None, eos_token_id=0)


def plan_on_paper(config: RunConfig, devices: Devices) -> str:
    """Describe a run of these keys on these devices, or refuse it as it would be refused there."""
    if isinstance(config, RLConfig):
        return describe_rl(plan_rl_on_paper(config, devices), devices)
    if isinstance(config, SupervisedConfig):
        return describe_supervised(config.replaced(on_paper(config)), devices)
    raise ConfigError("only runs of reinforcement learning and of offline tasks are planned on paper")


def on_paper(config: RLConfig | SupervisedConfig) -> Tree:
    """Mark the models of a run, so that no more than their shapes is asked for."""
    if not config.model.path:
        raise ConfigError("no model: give --model-shape llama-8b or another of the table, or --model FOLDER")
    names = {"model": {"path": config.model.path}}
    if isinstance(config, RLConfig):
        names |= {"teacher": {"path": config.teacher.path}} if config.teacher.path else {}
        names |= {"critic": {"path": config.critic.path}} if config.critic.path else {}
    if isinstance(config, DistillRunConfig) and config.distill.teacher:
        names |= {"distill": {"teacher": config.distill.teacher}}
    return {
        section: {key: PAPER + path.removeprefix(PAPER) for key, path in part.items()}
        for section, part in names.items()
    }


def plan_rl_on_paper(config: RLConfig, devices: Devices) -> RLPlan:
    config = config.replaced(on_paper(config))
    check_algorithm(config)
    length = config.rollout.max_prompt_tokens or PROMPT_TOKENS
    prompts = Measured([Prompt(0, [])], [length])
    chat = ChatFormat(NO_TOKENIZER, use_template=False)
    plan = decide(config, Surroundings(check_model(config.model), devices.machine(), [prompts], {}, chat, []))
    spots(plan.layout, devices)  # refuses engines that no node holds
    return plan


def spots(layout: Layout, devices: Devices) -> dict[str, list[int]]:
    """Return the first GPU of every rank and engine, numbered through the nodes; an engine lies inside one node."""
    width, size = layout.tensor_parallel, devices.gpus_of_node
    if layout.engines and width > size:
        raise ConfigError(f"rollout.tensor_parallel={width} is more than the {size} GPUs of a node: set it to {size}")
    free = itertools.count(layout.policy_ranks)
    found = {"policy": list(range(layout.policy_ranks))}
    for one in layout.roles:
        found[one.name] = list(range(one.ranks)) if one.shared else list(itertools.islice(free, one.ranks))
    first = 0 if layout.colocated else next(free)
    found["engine"] = []
    for _ in range(layout.engines):
        first += size - first % size if first % size + width > size else 0
        found["engine"].append(first)
        first += width
    last = (layout.policy_ranks if layout.colocated else devices.nodes * size) if layout.engines else first
    if first > last:
        raise ConfigError(
            f"rollout.engines={layout.engines} of {width} GPUs do not fit into nodes of {size}: set "
            f"rollout.engines={sum(one + width <= last for one in found['engine'])}, or another rollout.tensor_parallel"
        )
    return found


def describe_places(layout: Layout, devices: Devices) -> list[str]:
    size, lines = devices.gpus_of_node, []
    for node in range(devices.nodes):
        held = {
            name: [number for number, gpu in enumerate(gpus) if gpu // size == node]
            for name, gpus in spots(layout, devices).items()
        }
        ranges = {name: dict.fromkeys((found[0], found[-1])) for name, found in held.items() if found}
        said = ", ".join(f"{name} {'-'.join(map(str, ends))}" for name, ends in ranges.items())
        lines.append(f"node {node:<5} {said or 'nothing'}")
    return lines


def describe_rl(plan: RLPlan, devices: Devices) -> str:
    config, layout, model = plan.config, plan.layout, plan.config.model
    each = {name: f", about {size / GIB:.1f} GiB each" for name, size in memory_bytes(plan).items()}
    seconds = phase_seconds(plan, devices)
    hidden = 0 if layout.in_turns else min(seconds["rollout"], seconds["score"] + seconds["train"])
    completions = config.prompts_per_step * config.algorithm.group_size
    return "\n".join(
        [
            machine_line(plan.machine) + f" ({devices.nodes} x {devices.gpus_of_node} x {devices.name})",
            model_line(model.path, plan.facts, model.dtype, model.lora.rank),
            ranks_line("policy", layout.policy_ranks, config.training, model) + each["policy"],
            *describe_roles(plan, each),
            engines_line(plan.rollout) + each["engine"],
            *plan.forecast.lines(),
            *describe_places(layout, devices),
            f"batch      {completions} answers of {plan.rollout.max_new_tokens} tokens to prompts of "
            f"{plan.longest_prompt}; optimizer steps: {config.minibatches * config.epochs}",
            f"sync       {sync_bytes(plan) / 1e9:.1f} GB to each engine by {plan.transport()}",
            f"expected   {', '.join(f'{name} {value:.2g} s' for name, value in seconds.items())}: "
            f"{duration(sum(seconds.values()) - hidden)} a step; an estimate (docs/cluster.md)",
        ]
    )


def describe_supervised(config: SupervisedConfig, devices: Devices) -> str:
    facts, machine = check_model(config.model), devices.machine()
    rows = min(config.max_tokens or ROW_TOKENS, facts.context)
    config, world, longest = offline.resolve(config.replaced({"max_tokens": rows}), facts, machine)
    forecast = offline.forecast_memory(config, facts, machine, world, longest)
    config, layout = config.replaced(forecast.keys()), Layout(world)
    check_devices(layout, machine)
    tokens = config.samples_per_step * longest * (2 if config.task in ("preference", "rm") else 1)
    one = Tenant("model", "training", facts, config.model, config.training, world, tokens / world)
    return "\n".join(
        [
            machine_line(machine) + f" ({devices.nodes} x {devices.gpus_of_node} x {devices.name})",
            model_line(config.model.path, facts, config.model.dtype, config.model.lora.rank),
            ranks_line("training", world, config.training, config.model),
            *forecast.lines(),
            *describe_places(layout, devices),
            f"batch      {config.samples_per_step} rows of {longest} tokens",
            f"expected   train {train_seconds(one, tokens, longest, 1, devices):.2g} s a step; an estimate "
            "(docs/cluster.md)",
        ]
    )
