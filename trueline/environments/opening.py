"""The environment of a run: checked and tried before the start, and opened with its processes."""

import asyncio
import gc
import importlib.util
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message, Talk, Tool
from trueline.data.template import PROBE_TOOL, REMEDY
from trueline.data.types import Completion, Prompt
from trueline.environments import multi_turn
from trueline.environments.base import Environment, OutOfBudget, Policy, Reply, Structure, Wording, as_said
from trueline.environments.endpoint import PolicyEndpoint, Structures
from trueline.environments.hosted import AgentCommand, load_code
from trueline.environments.multi_turn import AgentEnvironment, StepEnvironment
from trueline.environments.openenv import OpenEnvCode
from trueline.environments.single_turn import SingleTurn
from trueline.environments.tools import formats
from trueline.environments.tools.calls import SPELLINGS
from trueline.environments.tools.formats import ChosenFormat
from trueline.environments.tools.toolbox import MCP, Toolbox
from trueline.environments.verifiers import VerifiersCode
from trueline.monitoring.findings import Finding
from trueline.monitoring.user_files import PICKLED
from trueline.rewards.combined import CombinedReward
from trueline.usercode.failures import PolicyError, UserCodeFailure, WrongResult
from trueline.usercode.host import EpisodeCode, EpisodeHosts, Host, UserCode

TRIAL_SECONDS, CLOSE_SECONDS = 10.0, 2.0
MADE_UP = "I do not know."  # the reply in a trial
LAST_LINES = 400  # characters of a log
# Thousands of episodes hold many objects and few cycles: at Python's 700, their turns spend a third in the collector.
OBJECTS_BETWEEN_COLLECTIONS = 50_000
LIBRARIES: dict[str, Callable[[list[str], dict[str, Any]], EpisodeCode]] = {  # by how environment.function begins
    "openenv": OpenEnvCode,
    "verifiers": VerifiersCode,
}


def user_code_of(config: EnvironmentConfig) -> UserCode | None:
    """Return what the processes of a run's environment load, or None where it has one turn."""
    if not (key := config.kind()):
        return None
    load: Callable[[list[str], dict[str, Any]], EpisodeCode] = load_code
    specification = [config.function or config.agent]
    place, separator, name = config.agent.rpartition(":")  # of a function, unless the agent is a command
    is_function = config.agent.endswith(PICKLED) or (separator and name.isidentifier() and " " not in place)
    if library := LIBRARIES.get(config.function.partition(":")[0]):
        load, specification = library, [config.function, *([config.python] if config.python else [])]
    elif key == "tools":
        load, specification = Toolbox, config.tools
    elif key == "agent" and not is_function:
        try:
            load, specification = AgentCommand, shlex.split(config.agent)
        except ValueError as error:
            raise ConfigError(f"environment.agent={config.agent}: {error}; close its quotation marks") from None
    limits = config.timeout_seconds, config.memory_gib, config.episodes_per_process
    return UserCode(load, specification, config.options, "environment", key, *limits)


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    tools: list[Tool] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)  # of self-play


def check_environment(config: EnvironmentConfig, *examples: Prompt, rewarded: bool = True) -> EnvironmentCheck:
    """Load the environment in a process, compare what it takes with what rows have, and try an episode.

    `rewarded` tells whether the run has a reward besides that of the environment.
    """
    if (code := user_code_of(config)) is None:
        return EnvironmentCheck()
    formats.check_format(config.tool_format)

    async def load_and_try(log: Path) -> EnvironmentCheck:
        hosts, warnings = EpisodeHosts(code, 1, log), []
        try:
            await hosts.hosts[0].start()
            about = hosts.hosts[0].about
            check_parameters(hosts.hosts[0], examples)
            if config.trial and not config.tools:
                warnings = await try_episode(hosts, examples[0], rewarded=rewarded)
        except UserCodeFailure as error:
            served = any(tool.startswith(MCP) for tool in config.tools)
            raise ConfigError(f"{error}{last_lines(hosts) if served else ''}") from None
        finally:
            await hosts.stop()
        found = [Finding("watch", "environment_trial", text, key=f"environment.{code.key}") for text in warnings]
        return EnvironmentCheck(about.get("schemas", []), found, about.get("roles", []))

    # In a thread, because a notebook runs an event loop in this one.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, load_and_try(Path(folder, "environment.log"))).result()


def check_parameters(host: Host, examples: Sequence[Prompt]) -> None:
    """Refuse parameters without a value; options are for the class of an environment, not for its `reset`."""
    options = {} if host.about["plays"] == "steps" else host.code.options
    for example in examples:
        given = {*multi_turn.row_of(example), *options}
        if missing := [name for name in host.about["required"] if name not in given]:
            names = f"{', '.join(sorted(given))}: rename it, give it a default, or set environment.options"
            raise ConfigError(f"{host.code.name()}: no value for its parameter {missing[0]!r}; it is given {names}")


class MadeUpPolicy(Policy):
    """Replies once, and not where a format is required."""

    def __init__(self) -> None:
        self.was_asked = False

    async def replies(
        self,
        count: int,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Wording = as_said,
        stop: Sequence[str] = (),
        structure: Structure | None = None,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[Reply]:
        before, self.was_asked = self.was_asked, True
        if before or structure is not None:
            raise OutOfBudget("a trial has one reply, in no format")
        return [Reply(MADE_UP, worded(MADE_UP), Completion.of([0], [0.0], 0, "stop"), 1)] * count

    def take_role(self, role: str) -> None: ...
    def add_reward(self, reward: float, role: str = "") -> None: ...
    def hear(self, messages: list[Message]) -> None: ...

    def talk(self) -> Talk:
        return Talk()


async def try_episode(hosts: EpisodeHosts, prompt: Prompt, *, rewarded: bool) -> list[str]:
    """Refuse an environment that fails before its first reply or returns what none may; return other failures."""
    name, policy = hosts.code.name(), MadeUpPolicy()
    async with open_environment(hosts) as environment:
        try:
            async with asyncio.timeout(min(TRIAL_SECONDS, hosts.code.timeout_seconds)):
                place = await environment.place()
                earned = await environment.take_turns(place, policy, prompt)
            multi_turn.check_earned(earned, place, rewarded or not policy.was_asked)
        except (TimeoutError, OutOfBudget, PolicyError):  # it needs longer, continues, or blames the reply
            return []
        except WrongResult as failure:
            raise ConfigError(str(failure)) from None
        except UserCodeFailure as failure:
            if not policy.was_asked:
                raise ConfigError(f"{name}: {failure.reason}{last_lines(hosts)}") from None
            why = failure.reason.strip().rpartition("\n")[2]
            return [f"{name} failed on the made-up reply {MADE_UP!r}: {why}; such episodes have no reward"]
    if not policy.was_asked:
        raise ConfigError(f"{name}: a trial episode ended before it asked the model for a reply{last_lines(hosts)}")
    return []


@asynccontextmanager
async def open_environment(hosts: EpisodeHosts) -> AsyncIterator[StepEnvironment | AgentEnvironment]:
    """Open the environment of one episode as a run does, and give its place back."""
    rewards, endpoint = CombinedReward({}, 0.0), None
    environment: StepEnvironment | AgentEnvironment = StepEnvironment(hosts, rewards)
    if hosts.hosts[0].about["plays"] == "itself":
        every = Structures(SPELLINGS["json"], lambda structure: "")  # which of them an engine can follow is the run's
        endpoint = PolicyEndpoint(model="policy", decode=str, structures=every)
        await endpoint.start()
        environment = AgentEnvironment(hosts, rewards, endpoint, formats.Parser(formats.UNKNOWN))
    try:
        yield environment
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await environment.close()
        if endpoint is not None:
            await endpoint.stop()


def last_lines(hosts: EpisodeHosts) -> str:
    """Return what the user's code printed last; the log of a trial is removed."""
    printed = hosts.log.read_text(errors="replace").strip()[-LAST_LINES:]
    return f"; it printed: {printed}" if printed else ""


def describe_environment(config: EnvironmentConfig, chat: ChatFormat, context: int, engine: str) -> list[str]:
    """Return lines for the plan: what is played, and how tool calls are read."""
    if (code := user_code_of(config)) is None:
        return []
    limits = f"{config.processes} processes, {config.timeout_seconds:g} s a step"
    turns = f"turns      up to {config.max_turns} in sequences of up to {context} tokens"
    calls = [] if config.function else [f"tool calls {format_of(config, chat, engine).words()}"]
    return [f"{turns}: {code.name()} ({limits})", *calls]


def turn_findings(config: EnvironmentConfig, chat: ChatFormat) -> list[Finding]:
    """Return what the chat template does to a conversation of several turns, where a run has some."""
    if user_code_of(config) is None:
        return []
    key, found = "data.chat_template", []
    if kind := chat.rewrites():
        what = f"the chat template rewrites earlier turns ({kind}): each turn becomes a training sequence of its own"
        found.append(Finding("watch", "template_rewrites_turns", what, key=key))
    try:  # agents may bring tools, whose calls are tried too
        lost = ", ".join(chat.lost_parts([PROBE_TOOL] if config.kind() == "agent" else ()))
    except ConfigError as error:
        lost = f"parts ({error})"
    if lost:
        what = f"the chat template leaves out {lost} of a conversation"
        found.append(Finding("watch", "template_drops_turn_parts", what, REMEDY, key))
    return found


def format_of(config: EnvironmentConfig, chat: ChatFormat, engine: str) -> ChosenFormat:
    """Return how the model writes calls, and what reads them: vLLM's parsers take seconds to import."""
    vllm = engine == "vllm" and importlib.util.find_spec("vllm") is not None
    return formats.choose_format(config.tool_format, chat.tokenizer.chat_template, vllm=vllm)


def structures_of(config: EnvironmentConfig, chat: ChatFormat) -> Structures:
    """Return what vLLM can hold replies to; calls as the model's template writes them, else as plain JSON."""
    from trueline.environments.tools.vllm_calls import check_structure  # noqa: PLC0415  (vLLM takes seconds)

    return Structures(SPELLINGS.get(format_of(config, chat, "vllm").form.name), check_structure)


class OpenEnvironment:
    """Makes the environment of each episode, and holds the processes behind them."""

    def __init__(
        self,
        config: EnvironmentConfig,
        rewards: CombinedReward,
        chat: ChatFormat,
        logs: Path,
        *,
        engine: str = "hf",
        structures: bool = False,
    ) -> None:
        self.config, self.rewards, self.chat = config, rewards, chat
        self.structures = structures  # whether engines can hold replies to some
        self.chosen = format_of(config, chat, engine)
        self.parse: formats.Parse
        self.remark = ""  # why another reader of calls is used than the plan says
        code = user_code_of(config)
        self.hosts = EpisodeHosts(code, config.processes, logs / "environment.log") if code else None
        self.endpoint: PolicyEndpoint | None = None

    async def start(self) -> None:
        """Start one process, which reports how it plays, and the endpoint that it may need."""
        if self.hosts is None:
            return
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
        first = self.hosts.hosts[0]
        await first.start()
        if self.config.tools or first.about["plays"] == "itself":
            parser = await asyncio.to_thread(formats.open_parser, self.chosen, self.chat.tokenizer)
            self.parse, self.remark = parser, parser.remark
        if first.about["plays"] == "itself":
            structures = await asyncio.to_thread(structures_of, self.config, self.chat) if self.structures else None
            self.endpoint = PolicyEndpoint(model="policy", decode=self.chat.reply_text, structures=structures)
            await self.endpoint.start()

    def __call__(self) -> Environment:
        if self.hosts is None:
            return SingleTurn(self.rewards)
        environment: multi_turn.HostedEnvironment = StepEnvironment(self.hosts, self.rewards)
        if self.endpoint is not None:
            environment = AgentEnvironment(self.hosts, self.rewards, self.endpoint, self.parse)
        elif self.config.tools:
            environment = multi_turn.ToolEnvironment(self.hosts, self.rewards, self.parse)
        environment.drop_truncated = self.config.truncated == "drop"
        environment.sees = self.chat.vision is not None
        return environment

    async def stop(self) -> None:
        for part in (self.hosts, self.endpoint):
            if part is not None:
                await part.stop()
