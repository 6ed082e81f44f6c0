"""Where prompts, labels and rewards come from."""

from typing import Literal

from pydantic import Field

from trueline.config.base import Config


class DataConfig(Config):
    path: str = ""
    """JSON, JSONL, CSV, Parquet or Arrow file, a folder of them, or a hub name (`name` or `name:split`)."""

    prompt_column: str | None = None
    """Column with the prompt (text or messages); null takes the first of messages, prompt, question."""

    label_column: str | None = None
    """Column that rewards see as `label`; null takes the first of label, answer, solution that exists."""

    system_prompt: str | None = None
    """Put in front of every conversation as a system message."""

    chat_template: Literal["auto", "never"] = "auto"
    """auto: prompts go through the tokenizer's chat template where it has one; never: text as it is."""

    shuffle: bool = True
    """Draw rows in a seeded random order, anew in every epoch."""


class RewardConfig(Config):
    function: str = ""
    """A built-in name (math, exact, regex), `file.py:function` or `package.module:function`."""

    pattern: str | None = None
    """Regular expression for the built-in `regex` reward."""

    processes: int = Field(2, ge=1)
    """Processes that run the reward function, apart from the trainer."""

    timeout_seconds: float = Field(30.0, gt=0)
    """A call that takes longer is killed and counted as reward_timeout, never as a zero."""

    memory_gib: float = Field(4.0, gt=0)
    """Address space that one reward process may take beyond what it has at its start."""

    max_failure_share: float = Field(0.05, ge=0, le=1)
    """Share of failed rewards in one step above which the run stops."""
