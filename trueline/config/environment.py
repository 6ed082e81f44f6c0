"""What the policy talks to besides prompts: an environment, tools or an agent, and how long an episode may become."""

import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trueline.config.base import Config

BUILT_IN_TOOLS = ("calculator", "python", "search")
TOOL = re.compile(rf"mcp:|({'|'.join(BUILT_IN_TOOLS)})\s*$|[^\s,]+:\w+\s*$")  # the beginning of one in a list
VARIABLE = re.compile(r"\$\{\w+\}")


class EnvironmentConfig(Config):
    """Several turns. At most one of `function`, `agent` and `tools`; none: one prompt, one reply, one reward."""

    function: str = ""
    """file.py:Class with `reset` and `step`, or file.py:function that plays an episode, `run(policy, prompt)`."""

    agent: str = ""
    """file.py:main(prompt, client), or a command that talks to OPENAI_BASE_URL: an agent that knows nothing of us."""

    tools: list[str] = []
    """calculator, python, search, file.py:function, mcp:URL or mcp:COMMAND (secrets as ${NAME} of the environment)."""

    options: dict[str, Any] = {}
    """Values for the class of an environment, the function of one, an agent or tools, by name."""

    tool_format: str = "auto"
    """How the model writes calls: auto (by its chat template), one of docs/agents.md, or the name of a vLLM parser."""

    max_turns: int = Field(8, ge=1)
    """Replies of the policy in one episode; the next one ends it as truncated."""

    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest reply of one turn; null: as rollout.max_new_tokens leaves, which is for all replies in a sequence."""

    truncated: Literal["judge", "drop"] = "judge"
    """An episode that runs out of turns or tokens: the reward judges what was said so far, or it is left out."""

    timeout_seconds: float = Field(60.0, gt=0)
    """For one step, one tool's answer, or an agent's silence; then its process is ended."""

    processes: int = Field(4, ge=1)
    """Processes that environments, tools and agents run in, each with many episodes at a time."""

    episodes_per_process: int = Field(128, ge=1)
    """Episodes, and calls of theirs, at a time in one process; others wait for a place, and no deadline runs."""

    trial: bool = True
    """Play one episode with a made-up reply, for up to 10 seconds, before models load; what fails in it is reported."""

    memory_gib: float = Field(4.0, gt=0)
    """Memory that one of these processes may take beyond its imports."""

    @field_validator("tools", mode="before")
    @classmethod
    def list_tools(cls, tools: Any) -> Any:
        if tools is None:
            raise ValueError("is empty: name tools, e.g. --tools calculator, or leave it out")
        if isinstance(tools, dict):  # which `mcp: COMMAND` is to YAML
            return [f"{name}:{rest or ''}" for name, rest in tools.items()]
        return split_tools(tools) if isinstance(tools, str) else tools

    @field_validator("tools")
    @classmethod
    def check_addresses(cls, tools: list[str]) -> list[str]:
        for tool in tools:
            check_address(tool)
        return tools

    @model_validator(mode="after")
    def check_headers(self) -> Self:
        headers = self.options.get("mcp_headers", {}) if self.tools else {}
        if not isinstance(headers, dict) or not all(VARIABLE.search(str(value)) for value in headers.values()):
            raise ValueError(
                "environment.options.mcp_headers: give names and values, each value with a variable of the "
                "environment, such as 'Bearer ${MY_TOKEN}': configurations are shown and saved, the value is not"
            )
        addresses = [tool.removeprefix("mcp:").strip() for tool in self.tools if tool.startswith("mcp:http")]
        places = {urlsplit(address).netloc for address in addresses}
        if headers and len(places) > 1:
            raise ValueError(
                f"environment.options.mcp_headers would be sent to all of {', '.join(sorted(places))}: give the "
                "headers of one server, and put what others need into their addresses, as ${NAME}"
            )
        return self

    @model_validator(mode="after")
    def check_one(self) -> Self:
        given = [name for name in ("function", "agent", "tools") if self.model_dump()[name]]
        if len(given) > 1:
            raise ValueError(f"environment.{given[0]} and environment.{given[1]} exclude each other: keep one of them")
        return self

    def plays(self) -> bool:
        """Tell whether user code plays the episode, and has rewards of its own; tools have none."""
        return bool(self.function or self.agent)

    def kind(self) -> str:
        """Return which of the three is set, or nothing."""
        return next((name for name in ("function", "agent", "tools") if self.model_dump()[name]), "")


def split_tools(text: str) -> list[str]:
    """Split a list at its commas, save those within the command of an MCP server, which no other tool follows."""
    tools: list[str] = []
    for piece in text.split(","):
        if tools and tools[-1].startswith("mcp:") and not TOOL.match(piece.strip()):
            tools[-1] += f",{piece}"
        else:
            tools.append(piece.strip())
    return tools


def check_address(tool: str) -> None:
    """Refuse an address of an MCP server that may hold a secret, because configurations are shown and saved."""
    if not tool.startswith("mcp:http"):
        return
    address = urlsplit(VARIABLE.sub("", tool.removeprefix("mcp:").strip()))
    user = address.netloc.rpartition("@")[0].strip(":")
    values = [part.rpartition("=")[2] for part in address.query.split("&")]
    if user or any(values) or address.fragment:
        raise ValueError(
            "the address of an MCP server holds a password or a query, which may be secret: put it into a variable of "
            "the environment, and write ${NAME} in its place, or set environment.options.mcp_headers"
        )
