"""What the policy talks to besides prompts: an environment, tools or an agent, and how long an episode may become."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trueline.config.base import Config


class EnvironmentConfig(Config):
    """Several turns. At most one of `function`, `agent` and `tools`; none: one prompt, one reply, one reward."""

    function: str = ""
    """file.py:Class with `reset` and `step`, or file.py:function that plays an episode, `run(policy, prompt)`."""

    agent: str = ""
    """file.py:main(prompt, client), or a command that talks to OPENAI_BASE_URL: an agent that knows nothing of us."""

    tools: list[str] = []
    """calculator, python, search, file.py:function, mcp:ADDRESS or mcp:COMMAND: what the model may call, by name."""

    options: dict[str, Any] = {}
    """Values for the class of an environment, the function of one, an agent or tools, by name."""

    tool_format: str = "auto"
    """How the model writes calls: auto, hermes, llama, mistral, json, or the name of one of vLLM's parsers."""

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

    memory_gib: float = Field(4.0, gt=0)
    """Memory that one of these processes may take beyond its imports."""

    @field_validator("tools", mode="before")
    @classmethod
    def list_tools(cls, tools: Any) -> Any:
        return [tool.strip() for tool in tools.split(",")] if isinstance(tools, str) else tools

    @model_validator(mode="after")
    def check_one(self) -> Self:
        given = [name for name in ("function", "agent", "tools") if self.model_dump()[name]]
        if len(given) > 1:
            raise ValueError(f"environment.{given[0]} and environment.{given[1]} exclude each other: keep one of them")
        return self

    def kind(self) -> str:
        """Return which of the three is set, or nothing."""
        return next((name for name in ("function", "agent", "tools") if self.model_dump()[name]), "")
