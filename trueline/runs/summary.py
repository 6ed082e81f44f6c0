"""Lines of a plan, read before anything starts: every kind of run says the same fact in the same words."""

from collections.abc import Collection, Iterable

from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.config.rl import ResolvedRollout
from trueline.config.run import RunConfig
from trueline.data.readers import renamed_roles
from trueline.models.loading import ModelFacts
from trueline.runs.idle_keys import idle_keys
from trueline.runs.memory import GIB
from trueline.runs.preflight import PromptSet
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import Layout, crowding, placed


def machine_line(machine: Machine) -> str:
    devices = f"{machine.gpus} GPUs" if machine.gpus else f"{machine.cpus} CPU cores"
    name = f"cluster    {len(machine.nodes)} nodes, free on them" if machine.nodes else "machine   "
    return f"{name} {devices}, {machine.memory_bytes / GIB:.1f} GiB of memory free"


def node_lines(layout: Layout, machine: Machine) -> list[str]:
    """Say who goes where, for a cluster."""
    if not machine.nodes:
        return []
    places = placed(layout, machine)
    kinds = {"policy": places.policy, **places.roles, "engine": places.engines}
    lines = []
    for at in places.used():
        here = {kind: [number for number, node in enumerate(nodes) if node == at] for kind, nodes in kinds.items()}
        ends = {kind: dict.fromkeys((numbers[0], numbers[-1])) for kind, numbers in here.items() if numbers}
        said = "; ".join(f"{kind} {'-'.join(map(str, both))}" for kind, both in ends.items())
        lines.append(f"node       {machine.nodes[at].address}: {said}")
    return lines


def model_line(path: str, facts: ModelFacts, dtype: str, adapters: int = 0) -> str:
    said = f"model      {path}: {facts.parameters / 1e6:.1f} M parameters, {dtype}"
    return said + (f", LoRA of rank {adapters}" if adapters else "")


def ranks_line(name: str, world: int, ranks: RanksConfig, model: ModelConfig) -> str:
    """Describe how a model is spread over processes; what is about training is said of trained ones only."""
    trained, limit = isinstance(ranks, TrainingConfig), ranks.micro_batch_tokens
    parts = {
        f"{name:<10} {world} x {ranks.engine} rank": True,
        f"ZeRO {ranks.zero_stage}": trained,
        f"tensor {model.tensor_parallel} x context {model.context_parallel}": model.width() > 1,
        f"passes of up to {limit} tokens" if limit else "passes as memory allows": True,
        "activations computed again": trained and bool(model.gradient_checkpointing),
    }
    return ", ".join(part for part, applies in parts.items() if applies)


def engines_line(rollout: ResolvedRollout) -> str:
    drawn = "" if rollout.seeded else ", answers without seeds of their own (rollout.seeded)"
    return f"engines    {rollout.engines} x {rollout.engine}, tensor parallel {rollout.tensor_parallel}{drawn}"


def prompts_line(sets: Collection[PromptSet], rollout: ResolvedRollout, held_out: int | None = None) -> str:
    dropped = sum(one.dropped for one in sets)
    renamed = renamed_roles(prompt.columns for one in sets for prompt in one.prompts)
    return (
        f"data       {sum(len(one.prompts) for one in sets)} prompts"
        + (f", {held_out} held out" if held_out is not None else "")
        + (f", {dropped} too long and left out" if dropped else "")
        + f"; longest prompt {max(one.longest for one in sets)} tokens, answers up to {rollout.max_new_tokens}"
        + (f"; roles: {renamed}" if renamed else "")
    )


def warning_lines(config: RunConfig, layout: Layout, machine: Machine, found: Iterable[str] = ()) -> list[str]:
    """Warn of what will run, but hardly as it was meant."""
    return [f"warning: {text}" for text in (*crowding(layout, machine), *found, *idle_keys(config))]
