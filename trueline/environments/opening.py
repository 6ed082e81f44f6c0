"""The environment of a run: checked before the start, and opened with its processes."""

import asyncio
import importlib.util
import shlex
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Tool
from trueline.data.template import PROBE_TOOL, REMEDY
from trueline.data.types import Prompt
from trueline.environments.base import Environment
from trueline.environments.endpoint import PolicyEndpoint, Structures
from trueline.environments.hosted import AgentCommand, load_code
from trueline.environments.multi_turn import (
    AgentEnvironment,
    HostedEnvironment,
    StepEnvironment,
    ToolEnvironment,
    row_of,
)
from trueline.environments.single_turn import SingleTurn
from trueline.environments.tools.calls import SPELLINGS
from trueline.environments.tools.formats import ChosenFormat, Parse, check_format, choose_format, open_parser
from trueline.environments.tools.toolbox import MCP, Toolbox
from trueline.environments.trial import last_lines, try_episode
from trueline.monitoring.findings import Finding
from trueline.monitoring.user_files import PICKLED
from trueline.rewards.combined import CombinedReward
from trueline.usercode.failures import UserCodeFailure
from trueline.usercode.host import EpisodeCode, EpisodeHosts, Host, UserCode


def user_code_of(config: EnvironmentConfig) -> UserCode | None:
    """Return what the processes of a run's environment load, or None where it has one turn."""
    key = config.kind()
    if not key:
        return None
    load: Callable[[list[str], dict[str, Any]], EpisodeCode] = load_code
    specification = [config.function or config.agent]
    if key == "tools":
        load, specification = Toolbox, config.tools
    elif key == "agent" and not is_function(config.agent):
        load, specification = AgentCommand, split_command(config.agent)
    limits = config.timeout_seconds, config.memory_gib, config.episodes_per_process
    return UserCode(load, specification, config.options, "environment", key, *limits)


def is_function(named: str) -> bool:
    """Return whether it is a function, `file.py:name`, `package.module:name` or a pickle, or else a command."""
    if named.endswith(PICKLED):
        return True
    place, separator, name = named.rpartition(":")
    return bool(separator) and name.isidentifier() and " " not in place


def split_command(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"environment.agent={text}: {error}; close its quotation marks") from None


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """What a check has found of an environment."""

    tools: list[Tool] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)


def check_environment(config: EnvironmentConfig, *examples: Prompt, rewarded: bool = True) -> EnvironmentCheck:
    """Load the environment in a process, compare what it takes with what rows have, and try an episode.

    `rewarded` tells whether the run has a reward besides that of the environment.
    """
    code = user_code_of(config)
    if code is None:
        return EnvironmentCheck()
    check_format(config.tool_format)
    with ThreadPoolExecutor(1) as thread:  # a notebook runs an event loop in this one
        return thread.submit(asyncio.run, load_and_try(config, code, list(examples), rewarded)).result()


def check_parameters(host: Host, examples: list[Prompt]) -> None:
    """Refuse parameters without a value; options are for the class of an environment, not for its `reset`."""
    options = {} if host.about["plays"] == "steps" else host.code.options
    for example in examples:
        given = {*row_of(example), *options}
        missing = [name for name in host.about["required"] if name not in given]
        if missing:
            raise ConfigError(
                f"{host.code.name()}: no value for its parameter {missing[0]!r}; it is given "
                f"{', '.join(sorted(given))}: rename it, give it a default, or set environment.options"
            )


def describe_environment(config: EnvironmentConfig, chat: ChatFormat, context: int, engine: str) -> list[str]:
    """Return lines for the plan: what is played, and how tool calls are read."""
    code = user_code_of(config)
    if code is None:
        return []
    limits = f"{config.processes} processes, {config.timeout_seconds:g} s a step"
    turns = f"turns      up to {config.max_turns} in sequences of up to {context} tokens"
    lines = [f"{turns}: {code.name()} ({limits})"]
    if not config.function:
        lines.append(f"tool calls {format_of(config, chat, engine).words()}")
    return lines


def turn_findings(config: EnvironmentConfig, chat: ChatFormat) -> list[Finding]:
    """Return what the chat template does to a conversation of several turns, where a run has some."""
    if user_code_of(config) is None:
        return []
    key, found = "data.chat_template", []
    if kind := chat.rewrites():
        what = f"the chat template rewrites earlier turns ({kind}): each turn becomes a training sequence of its own"
        found.append(Finding("watch", "template_rewrites_turns", what, key=key))
    if lost := lost_parts(config, chat):
        what = f"the chat template leaves out {lost} of a conversation"
        found.append(Finding("watch", "template_drops_turn_parts", what, REMEDY, key))
    return found


def lost_parts(config: EnvironmentConfig, chat: ChatFormat) -> str:
    """Say what the template leaves out of several turns; agents may bring tools, whose calls are tried too."""
    try:
        return ", ".join(chat.lost_parts([PROBE_TOOL] if config.kind() == "agent" else ()))
    except ConfigError as error:
        return f"parts ({error})"


async def load_and_try(
    config: EnvironmentConfig, code: UserCode, examples: list[Prompt], rewarded: bool
) -> EnvironmentCheck:
    with tempfile.TemporaryDirectory() as folder:
        hosts = EpisodeHosts(code, 1, Path(folder, "environment.log"))
        host, warnings = hosts.hosts[0], []
        try:
            await host.start()
            about = host.about
            check_parameters(host, examples)
            if config.trial and not config.tools:
                warnings = await try_episode(hosts, examples[0], rewarded=rewarded)
        except UserCodeFailure as error:
            served = any(tool.startswith(MCP) for tool in config.tools)
            raise ConfigError(str(error) + (last_lines(hosts) if served else "")) from None
        finally:
            await hosts.stop()
        found = [Finding("watch", "environment_trial", text, key=f"environment.{code.key}") for text in warnings]
        return EnvironmentCheck(about.get("schemas", []), found)


def format_of(config: EnvironmentConfig, chat: ChatFormat, engine: str) -> ChosenFormat:
    """Return how the model writes calls, and what reads them: vLLM's parsers take seconds to import."""
    vllm = engine == "vllm" and importlib.util.find_spec("vllm") is not None
    return choose_format(config.tool_format, chat.tokenizer.chat_template, vllm=vllm)


def structures_of(config: EnvironmentConfig, chat: ChatFormat) -> Structures:
    """Return what vLLM can hold replies to; calls as the model's template writes them, else as plain JSON."""
    from trueline.environments.tools.vllm_structures import check_structure  # noqa: PLC0415  (vLLM takes seconds)

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
        self.parse: Parse
        self.remark = ""  # why another reader of calls is used than the plan says
        code = user_code_of(config)
        self.hosts = EpisodeHosts(code, config.processes, logs / "environment.log") if code else None
        self.endpoint: PolicyEndpoint | None = None

    async def start(self) -> None:
        """Start one process, which reports how it plays, and the endpoint that it may need."""
        if self.hosts is None:
            return
        first = self.hosts.hosts[0]
        await first.start()
        if self.config.tools or first.about["plays"] == "itself":
            parser = await asyncio.to_thread(open_parser, self.chosen, self.chat.tokenizer)
            self.parse, self.remark = parser, parser.remark
        if first.about["plays"] == "itself":
            structures = await asyncio.to_thread(structures_of, self.config, self.chat) if self.structures else None
            self.endpoint = PolicyEndpoint(model="policy", decode=self.chat.reply_text, structures=structures)
            await self.endpoint.start()

    def __call__(self) -> Environment:
        if self.hosts is None:
            return SingleTurn(self.rewards)
        if self.endpoint is not None:
            environment: HostedEnvironment = AgentEnvironment(self.hosts, self.rewards, self.endpoint, self.parse)
        elif self.config.tools:
            environment = ToolEnvironment(self.hosts, self.rewards, self.parse)
        else:
            environment = StepEnvironment(self.hosts, self.rewards)
        environment.drop_truncated = self.config.truncated == "drop"
        return environment

    async def stop(self) -> None:
        if self.hosts is not None:
            await self.hosts.stop()
        if self.endpoint is not None:
            await self.endpoint.stop()
