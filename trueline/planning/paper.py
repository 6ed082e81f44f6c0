"""Plans of runs on devices that are not here, of models that need not be: by the planners of real runs."""

from collections.abc import Callable
from types import SimpleNamespace

from trueline.config.base import ConfigError, nested
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Prompt
from trueline.models.loading import check_model
from trueline.models.shapes import PAPER
from trueline.monitoring.timing import duration
from trueline.offline import plan as offline
from trueline.planning.hardware import DEVICES, Devices
from trueline.planning.seconds import phase_seconds, sync_bytes, train_seconds
from trueline.rl.estimates import describe_roles, memory_bytes
from trueline.rl.plan import RLPlan, check_algorithm, decide
from trueline.rl.surroundings import Surroundings
from trueline.runs.memory import GIB, Tenant, place_tokens
from trueline.runs.preflight import MODEL_KEYS, Kind, Measured
from trueline.runs.rewards import RewardCheck
from trueline.runs.summary import engines_line, machine_line, model_line, node_lines, ranks_line, warning_lines
from trueline.runtime.placement import Layout, check_devices

PROMPT_TOKENS, ROW_TOKENS = 512, 2048  # where no key says otherwise
NO_TOKENIZER = SimpleNamespace(chat_template=None, eos_token_id=0)


def plan_on_paper(config: RunConfig, devices: Devices) -> str:
    """Describe a run of these keys on these devices, or refuse it as it would be refused there."""
    config = on_paper(config)
    if isinstance(config, SupervisedConfig):
        return describe_supervised(config, devices)
    assert isinstance(config, RLConfig)  # no other verb is planned
    return describe_rl(plan_rl_on_paper(config, devices), devices)


def on_paper(config: Kind) -> Kind:
    """Mark the models of a run, so that no more than their shapes is asked for."""
    named = {key.path: str(key.default) for key in config.leaves() if key.path in MODEL_KEYS and key.default}
    if "model.path" not in named:
        raise ConfigError("no model: give --model-shape llama-8b or another of the table, or --model FOLDER")
    for key, path in named.items():
        config = config.replaced(nested(key, PAPER + path.removeprefix(PAPER)))
    return config


def plan_rl_on_paper(config: RLConfig, devices: Devices) -> RLPlan:
    check_algorithm(config)
    length = config.rollout.max_prompt_tokens or PROMPT_TOKENS
    prompts = Measured([Prompt(0, [])], [length])
    chat = ChatFormat(NO_TOKENIZER, use_template=False)
    return decide(
        config, Surroundings(check_model(config.model), devices.machine(), [prompts], {}, chat, RewardCheck())
    )


def describe_rl(plan: RLPlan, devices: Devices) -> str:
    config, layout, model = plan.config, plan.layout, plan.config.model
    each = {name: f", about {size / GIB:.1f} GiB each" for name, size in memory_bytes(plan).items()}
    completions = config.prompts_per_step * config.algorithm.group_size
    return "\n".join(
        [
            machine_line(plan.machine) + f" ({devices.nodes} x {devices.gpus_of_node} x {devices.name})",
            model_line(model.path, plan.facts, model.dtype, model.lora.rank),
            ranks_line("policy", layout.policy_ranks, config.training, model) + each["policy"],
            *describe_roles(plan, each),
            engines_line(plan.rollout) + each["engine"],
            *plan.forecast.lines(),
            *node_lines(layout, plan.machine),
            f"batch      {completions} answers of {plan.rollout.max_new_tokens} tokens to prompts of "
            f"{plan.longest_prompt}; optimizer steps: {config.minibatches * config.epochs}",
            f"sync       {sync_bytes(plan) / 1e9:.1f} GB to each engine by {plan.transport()}",
            expected_line(lambda: phase_seconds(plan, devices), devices, overlaps=not layout.in_turns),
            *warning_lines(config, layout, plan.machine),
        ]
    )


def expected_line(phases: Callable[[], dict[str, float]], devices: Devices, *, overlaps: bool = False) -> str:
    """Describe the seconds of each phase, or why there are none."""
    if devices.tflops is None and devices.name in DEVICES:
        return f"expected   no seconds: {devices.name} computes no bfloat16, which model.dtype=auto takes on GPUs"
    if devices.tflops is None:
        return "expected   no seconds: add the speed of the GPU to --devices, e.g. 1x80GiB@990TFLOPs"
    seconds = phases()
    hidden = min(seconds["rollout"], seconds["score"] + seconds["train"]) if overlaps else 0
    said = ", ".join(f"{name} {rounded(value)} s" for name, value in seconds.items())
    total = f": {duration(sum(seconds.values()) - hidden)}" * (len(seconds) > 1)
    return f"expected   {said}{total} a step; an estimate (docs/cluster.md)"


def rounded(seconds: float) -> str:
    return f"{float(f'{seconds:.2g}'):g}"


def describe_supervised(config: SupervisedConfig, devices: Devices) -> str:
    facts, machine = check_model(config.model), devices.machine()
    rows = min(config.max_tokens or ROW_TOKENS, facts.context)
    config, world, longest = offline.resolve(config.replaced({"max_tokens": rows}), facts, machine)
    forecast = offline.forecast_memory(config, facts, machine, world, longest)
    config, layout = config.replaced(forecast.keys()), Layout(world, width=config.model.width())
    check_devices(layout, machine)
    sequences = config.samples_per_step * (2 if config.task in ("preference", "rm") else 1)
    tokens, share = sequences * longest, place_tokens(sequences, longest, world, config.model)
    one = Tenant("model", "training", facts, config.model, config.training, world, share)
    return "\n".join(
        [
            machine_line(machine) + f" ({devices.nodes} x {devices.gpus_of_node} x {devices.name})",
            model_line(config.model.path, facts, config.model.dtype, config.model.lora.rank),
            ranks_line("training", world, config.training, config.model),
            *forecast.lines(),
            *node_lines(layout, machine),
            f"batch      {config.samples_per_step} rows of {longest} tokens",
            expected_line(lambda: {"train": train_seconds(one, tokens, longest, 1, devices)}, devices),
            *warning_lines(config, layout, machine),
        ]
    )
