"""Rewards: functions, reward models, LLM judges and remote scorers, and what happens when they fail."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from trueline.config.base import Config
from trueline.config.data import ChatTemplate


def without_secrets(value: str) -> str:
    """Refuse an address that may contain a secret: configurations are printed and saved."""
    if re.search(r"://([^/]*@|.*[?#])", value):
        raise ValueError(
            "the address contains a password or a query, which may be secret: put it into an environment variable and "
            "set remote.token_variable (sent as Authorization: Bearer ...) or remote.query_variable to its name"
        )
    return value


PublicAddress = Annotated[str, AfterValidator(without_secrets)]


class RemoteConfig(Config):
    """HTTP requests to remote scorers and LLM judges."""

    concurrency: int = Field(16, ge=1)
    """Most concurrent requests."""
    attempts: int = Field(5, ge=1)
    """Attempts per request; statuses 429 and 5xx and broken connections are retried."""
    backoff_seconds: float = Field(1.0, ge=0)
    """Wait before the first retry; it doubles each time unless the server sends a Retry-After."""
    token_variable: str | None = None
    """Environment variable with the token to send as `Authorization: Bearer ...`. null: none."""
    query_variable: str | None = None
    """Environment variable with the query string of the URL, e.g. key=...&version=1. null: none."""


class JudgeConfig(Config):
    url: PublicAddress = ""
    """OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1."""
    model: str = ""
    """Name of the model at that endpoint."""
    prompt: str = (
        "Grade the reply to the request below. Answer with a number from 0 (useless) to 10 (perfect) and nothing "
        "else.\n\n[Request]\n{prompt}\n\n[Reply]\n{reply}\n\n[Grade]\n"
    )
    """Prompt of the judge; {prompt}, {reply}, {label} and column names are filled in."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Regular expression; the first group of its first match is the reward. No match is a failure."""
    scale: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Multiply the matched number by this."""
    temperature: float | None = Field(0.0, ge=0, allow_inf_nan=False)
    """Sampling temperature of the judge. null: the server's default, also used if the server rejects the parameter."""


class RewardModelKeys(Config):
    normalize: bool = False
    """Reward models: subtract the mean and divide by the deviation saved with the model."""
    chat_template: ChatTemplate = "auto"
    """Reward models: auto (the template saved with the model), never, or a Jinja file, as in their training."""
    steps: Literal["min", "mean", "product", "last"] = "min"
    """Process reward models: how the step probabilities become one reward."""
    step_separator: str = "\n"
    """Process reward models: text that ends each step; on the command line, \\n is a newline."""


class RewardPartConfig(RewardModelKeys):
    function: PublicAddress = ""
    """A built-in, file.py:name, module:name, judge, a reward model's folder, a rubric's YAML, or a scorer's URL."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Weight in the sum of several rewards."""
    clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Clip this reward to [-clip, clip], after normalization. null: no clipping."""
    pattern: str | None = None
    """Regular expression for the built-in `regex` reward."""
    options: dict[str, Any] = {}
    """Extra arguments for the function, by name."""
    remote: RemoteConfig = RemoteConfig()
    judge: JudgeConfig = JudgeConfig()

    def constants(self) -> dict[str, Any]:
        """Return the arguments that every call gets."""
        return {**({} if self.pattern is None else {"pattern": self.pattern}), **self.options}


class RewardConfig(RewardPartConfig):
    parts: dict[str, RewardPartConfig] = {}
    """Several named rewards instead of `function`; the task reward is their weighted sum."""
    processes: int = Field(2, ge=1)
    """Processes per reward function, separate from the trainer."""
    batch: int = Field(64, ge=1)
    """Most completions per call of a function that takes `replies`, and per pass of a reward model."""
    timeout_seconds: float = Field(30.0, gt=0)
    """Calls that take longer are killed and counted as reward_timeout, never scored as zero."""
    memory_gib: float = Field(4.0, gt=0)
    """Memory limit of a reward process, beyond what it uses at its start."""
    max_failure_share: float = Field(0.05, ge=0, le=1)
    """Stop the run if more than this share of rewards fail, over a step's completions or the last 100 if more."""
    probe: bool = True
    """Before models load, call reward functions on a few rows and contact servers; refuse those that always fail."""
    policy_error: float = Field(0.0, allow_inf_nan=False)
    """Reward for completions that cause the error themselves, such as code that never ends."""

    def check_keys(self) -> None:
        if self.function and self.parts:
            raise ValueError(f"function={self.function} and parts={', '.join(self.parts)} exclude each other: keep one")
        fields = RewardPartConfig.model_fields
        if ignored := [name for name, field in fields.items() if self.parts and self.__dict__[name] != field.default]:
            raise ValueError(
                f"{ignored[0]} has no effect with parts={', '.join(self.parts)}: set it in the parts, "
                f"reward.parts.{next(iter(self.parts))}.{ignored[0]}=..."
            )

    def named_parts(self) -> dict[str, RewardPartConfig]:
        """Return every reward by name; a single one is called `reward`."""
        return self.parts or ({"reward": self} if self.function else {})
