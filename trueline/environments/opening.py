"""The environment of a run: checked before the start, opened with its processes, and closed."""

import asyncio
import importlib.util
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Tool
from trueline.data.template import PROBE_TOOL, REMEDY
from trueline.data.types import Prompt
from trueline.environments.base import Environment, EnvironmentFailure
from trueline.environments.endpoint import Endpoint
from trueline.environments.hosts import Host, Hosts, Program
from trueline.environments.played import Agent, Game, ToolUse, row_of
from trueline.environments.single_turn import SingleTurn
from trueline.environments.structures import Structures
from trueline.environments.tools.calls import SPELLINGS
from trueline.environments.tools.formats import Chosen, Parse, check_format, chosen_format, open_parser
from trueline.environments.tools.toolbox import MCP
from trueline.environments.trial import last_lines, try_episode
from trueline.monitoring.user_files import PICKLED
from trueline.rewards.combined import CombinedReward


def program_of(config: EnvironmentConfig) -> Program | None:
    """Return what the processes of a run's environment load, or None where it has one turn."""
    key = config.kind()
    if not key:
        return None
    if key == "tools":
        return Program("tools", config.tools, key, config)
    named = config.function or config.agent
    if key == "agent" and not is_function(named):
        return Program("program", split_command(named), key, config)
    return Program("function", [named], key, config)


def is_function(named: str) -> bool:
    """Tell a function, `file.py:name`, `package.module:name` or a pickle, from a command."""
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
class Found:
    """What is known of an environment before the start."""

    tools: list[Tool] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_environment(config: EnvironmentConfig, *examples: Prompt, rewarded: bool = True) -> Found:
    """Load the environment in a process, compare what it takes with what rows have, and try an episode.

    `rewarded` tells whether the run has a reward besides that of the environment.
    """
    program = program_of(config)
    if program is None:
        return Found()
    check_format(config.tool_format)
    with ThreadPoolExecutor(1) as thread:  # a notebook runs an event loop in this one
        return thread.submit(asyncio.run, look_at(program, list(examples), rewarded)).result()


def check_parameters(host: Host, examples: list[Prompt]) -> None:
    """Refuse parameters without a value; options are for the class of an environment, not for its `reset`."""
    options = {} if host.about["plays"] == "steps" else host.program.config.options
    for example in examples:
        given = {*row_of(example), *options}
        missing = [name for name in host.about["required"] if name not in given]
        if missing:
            raise ConfigError(
                f"{host.program.words()}: no value for its parameter {missing[0]!r}; it is given "
                f"{', '.join(sorted(given))}: rename it, give it a default, or set environment.options"
            )


def describe_environment(config: EnvironmentConfig, chat: ChatFormat, context: int, engine: str) -> list[str]:
    """Return lines for the plan: what is played, and what the chat template does to earlier turns."""
    program = program_of(config)
    if program is None:
        return []
    limits = f"{config.processes} processes, {config.timeout_seconds:g} s a step"
    turns = f"turns      up to {config.max_turns} in sequences of up to {context} tokens"
    lines = [f"{turns}: {program.words()} ({limits})"]
    if not config.function:
        lines.append(f"tool calls {format_of(config, chat, engine).words()}")
    if kind := chat.rewrites():
        lines.append(f"template   rewrites earlier turns ({kind}): each turn becomes a training sequence of its own")
    if lost := lost_parts(config, chat):
        lines.append(f"template   leaves out {lost} of a conversation: {REMEDY}")
    return lines


def lost_parts(config: EnvironmentConfig, chat: ChatFormat) -> str:
    """Say what the template leaves out of several turns; agents may bring tools, whose calls are tried too."""
    try:
        return ", ".join(chat.lost_parts([PROBE_TOOL] if config.kind() == "agent" else ()))
    except ConfigError as error:
        return f"parts ({error})"


async def look_at(program: Program, examples: list[Prompt], rewarded: bool) -> Found:
    config = program.config
    with tempfile.TemporaryDirectory() as folder:
        single = replace(program, config=config.replaced({"processes": 1}))
        hosts = Hosts(single, Path(folder, "environment.log"))
        host, warnings = hosts.hosts[0], []
        try:
            await host.start()
            check_parameters(host, examples)
            if config.trial and not config.tools:
                warnings = await try_episode(hosts, examples[0], rewarded=rewarded)
        except EnvironmentFailure as error:
            served = any(tool.startswith(MCP) for tool in config.tools)
            raise ConfigError(str(error) + (last_lines(hosts) if served else "")) from None
        finally:
            await hosts.stop()
        return Found(host.about.get("schemas", []), warnings)


def format_of(config: EnvironmentConfig, chat: ChatFormat, engine: str) -> Chosen:
    """Return how the model writes calls, and what reads them: vLLM's parsers take seconds to import."""
    vllm = engine == "vllm" and importlib.util.find_spec("vllm") is not None
    return chosen_format(config.tool_format, chat.tokenizer.chat_template, vllm=vllm)


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
        self.remark = ""  # why calls are read otherwise than the plan says
        program = program_of(config)
        self.hosts = Hosts(program, logs / "environment.log") if program else None
        self.endpoint: Endpoint | None = None

    async def start(self) -> None:
        """Start one process, which tells how it plays, and the endpoint that it may need."""
        if self.hosts is None:
            return
        first = self.hosts.hosts[0]
        await first.start()
        if self.config.tools or first.about["plays"] == "itself":
            parser = await asyncio.to_thread(open_parser, self.chosen, self.chat.tokenizer)
            self.parse, self.remark = parser, parser.remark
        if first.about["plays"] == "itself":
            structures = await asyncio.to_thread(structures_of, self.config, self.chat) if self.structures else None
            self.endpoint = Endpoint(model="policy", decode=self.chat.reply_text, structures=structures)
            await self.endpoint.start()

    def __call__(self) -> Environment:
        if self.hosts is None:
            return SingleTurn(self.rewards)
        if self.endpoint is not None:
            return Agent(self.hosts, self.rewards, self.endpoint, self.parse)
        if self.config.tools:
            return ToolUse(self.hosts, self.rewards, self.parse)
        return Game(self.hosts, self.rewards)

    async def stop(self) -> None:
        if self.hosts is not None:
            await self.hosts.stop()
        if self.endpoint is not None:
            await self.endpoint.stop()
