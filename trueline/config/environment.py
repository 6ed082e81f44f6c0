"""Multi-turn episodes: environments, tools, agents and their limits."""

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from trueline.config.base import Config

TOOL = re.compile(r"mcp:|python\s*$|[^\s,]+:\w+\s*$")  # how a tool in a list begins
VARIABLE = re.compile(r"\$\{\w+\}")


class EnvironmentConfig(Config):
    """Multi-turn episodes. Set one of `function`, `agent` and `tools`; with none, a prompt gets one completion."""

    function: str = ""
    """file.py:Class with `reset` and `step`, file.py:run(policy, prompt), openenv:URL or NAME, or verifiers:NAME."""
    python: str = ""
    """The Python of the virtual environment that has what verifiers:NAME or openenv:NAME names."""
    agent: str = ""
    """file.py:main(prompt, client), or a command that calls OPENAI_BASE_URL: an agent that needs no changes."""
    tools: list[str] = []
    """python, file.py:function, mcp:URL or mcp:COMMAND; write secrets as ${NAME}."""
    options: dict[str, Any] = {}
    """Arguments for the environment class or function, the agent or the tools, by name."""
    tool_format: str = "auto"
    """How the model writes tool calls. auto: from its chat template; else a name of docs/agents.md or a vLLM parser."""
    max_turns: int = Field(8, ge=1)
    """Most policy turns per episode; then the episode is truncated."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest reply of one turn. null: what rollout.max_new_tokens leaves for the sequence."""
    max_images: int = Field(8, ge=0)
    """Most pictures that are added to a sequence. 0 where a critic, teacher or reward model reads none."""
    truncated: Literal["judge", "drop"] = "judge"
    """For episodes that run out of turns or tokens. judge: score what there is. drop: exclude them."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Time limit for a step, a tool call, or an agent's silence; then its process is killed."""
    processes: int = Field(4, ge=1)
    """Processes that run environments, tools and agents; each runs many episodes at a time."""
    episodes_per_process: int = Field(128, ge=1)
    """Most concurrent episodes, and tool calls, per process; others wait without a deadline."""
    trial: bool = True
    """Before models load, play one episode with a made-up reply (up to 10 seconds) and report what fails."""
    memory_gib: float = Field(4.0, gt=0)
    """Memory limit of each of these processes, beyond its imports."""

    @field_validator("tools", mode="before")
    @classmethod
    def list_tools(cls, tools: Any) -> Any:
        if tools is None:
            raise ValueError("is empty: name tools, e.g. --tools python")
        if isinstance(tools, dict):  # YAML reads `mcp: COMMAND` as a mapping
            return [f"{name}:{rest or ''}" for name, rest in tools.items()]
        return split_tools(tools) if isinstance(tools, str) else tools

    @field_validator("tools")
    @classmethod
    def check_addresses(cls, tools: list[str]) -> list[str]:
        """Refuse MCP addresses that may contain a secret: configurations are printed and saved."""
        for tool in (tool for tool in tools if tool.startswith("mcp:http")):
            address = urlsplit(VARIABLE.sub("", tool.removeprefix("mcp:").strip()))
            user = address.netloc.rpartition("@")[0].strip(":")
            values = [part.rpartition("=")[2] for part in address.query.split("&")]
            if user or any(values) or address.fragment:
                raise ValueError(
                    "the address of an MCP server contains a password or a query, which may be secret: put it into an "
                    "environment variable and write ${NAME}, or set environment.options.mcp_headers"
                )
        return tools

    def check_keys(self) -> None:
        headers = self.options.get("mcp_headers", {}) if self.tools else {}
        if not isinstance(headers, dict) or not all(VARIABLE.search(str(value)) for value in headers.values()):
            raise ValueError(
                "environment.options.mcp_headers: write each value with an environment variable, such as "
                "'Bearer ${MY_TOKEN}', because configurations are printed and saved"
            )
        addresses = [tool.removeprefix("mcp:").strip() for tool in self.tools if tool.startswith("mcp:http")]
        places = {urlsplit(address).netloc for address in addresses}
        if headers and len(places) > 1:
            raise ValueError(
                f"environment.options.mcp_headers would be sent to {', '.join(sorted(places))}: use them for one "
                "server, and put secrets of the others into their addresses, as ${NAME}"
            )
        if len(given := self.kinds()) > 1:
            raise ValueError(f"environment.{given[0]} and environment.{given[1]} exclude each other: keep one of them")

        if self.python and not self.function.startswith(("openenv:", "verifiers:")):
            raise ValueError(
                f"environment.python={self.python} is the Python of verifiers:NAME and openenv:NAME: "
                "remove it, or name such an environment as environment.function"
            )

    def plays(self) -> bool:
        """Tell whether user code plays the episode and returns rewards; tools do not."""
        return bool(self.function or self.agent)

    def kind(self) -> str:
        """Return which of function, agent and tools is set, or empty text."""
        return next(iter(self.kinds()), "")

    def kinds(self) -> list[str]:
        return [name for name in ("function", "agent", "tools") if self.model_dump()[name]]


def split_tools(text: str) -> list[str]:
    """Split a list at its commas, except those inside the command of an MCP server."""
    tools: list[str] = []
    for piece in text.split(","):
        if tools and tools[-1].startswith("mcp:") and not TOOL.match(piece.strip()):
            tools[-1] += f",{piece}"
        else:
            tools.append(piece.strip())
    return tools
