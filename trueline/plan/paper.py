"""Plans for devices and models that are not here, made by the planners of real runs."""

from dataclasses import replace
from types import SimpleNamespace

from trueline.config.base import ConfigError, tree_with
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Prompt
from trueline.models.loading import PAPER, check_model
from trueline.plan.describe import describe_on_paper
from trueline.plan.findings import idle_keys
from trueline.plan.hardware import Devices
from trueline.plan.inputs import MODEL_KEYS, Kind, Measured, PlanInputs
from trueline.plan.offline import SupervisedPlan, forecast_memory, resolve
from trueline.plan.rewards import RewardCheck
from trueline.plan.rl import RLPlan, check_algorithm, decide
from trueline.plan.tasks import TASKS, Dataset, Material
from trueline.runtime.placement import Layout, check_devices

PROMPT_TOKENS, ROW_TOKENS = 512, 2048  # where no key says otherwise
NO_TOKENIZER = SimpleNamespace(chat_template=None, eos_token_id=0)


def plan_on_paper(config: RunConfig, devices: Devices) -> str:
    """Describe a run of these keys on these devices, or refuse it as it would be refused there."""
    config = on_paper(config)
    if isinstance(config, SupervisedConfig):
        return describe_on_paper(plan_supervised_on_paper(config, devices), devices)
    assert isinstance(config, RLConfig)  # no other verb is planned
    return describe_on_paper(plan_rl_on_paper(config, devices), devices)


def on_paper(config: Kind) -> Kind:
    """Mark the models of a run, so that only their shapes are read."""
    named = {key.path: str(key.default) for key in config.leaves() if key.path in MODEL_KEYS and key.default}
    if "model.path" not in named:
        raise ConfigError("no model: give --model-shape llama-8b or another of the table, or --model FOLDER")
    for key, path in named.items():
        config = config.with_keys(tree_with(key, PAPER + path.removeprefix(PAPER)))
    return config


def plan_rl_on_paper(config: RLConfig, devices: Devices) -> RLPlan:
    check_algorithm(config)
    length = config.rollout.max_prompt_tokens or PROMPT_TOKENS
    prompts = Measured([Prompt(0, [])], [length])
    chat = ChatFormat(NO_TOKENIZER, use_template=False)
    inputs = PlanInputs(check_model(config.model), devices.machine(), [prompts], {}, chat, RewardCheck())
    plan = decide(config, inputs)
    return replace(plan, findings=idle_keys(plan.config))


def plan_supervised_on_paper(config: SupervisedConfig, devices: Devices) -> SupervisedPlan:
    facts, machine = check_model(config.model), devices.machine()
    rows = min(config.max_tokens or ROW_TOKENS, facts.context)
    config, world, longest = resolve(config.with_keys({"max_tokens": rows}), facts, machine)
    forecast = forecast_memory(config, facts, machine, world, longest)
    config, layout = config.with_keys(forecast.keys()), Layout(world, width=config.model.width())
    check_devices(layout, machine)
    nothing = Material(Dataset(TASKS[config.task], [], [], [], [], {}, []), None)
    chat = ChatFormat(NO_TOKENIZER, use_template=False)
    found = idle_keys(config)
    return SupervisedPlan(config, machine, facts, layout, nothing, config.steps or 1, longest, chat, forecast, found)
