"""Where rewards come from, and what is done when one cannot be had."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trueline.config.base import Config
from trueline.config.data import ChatTemplate


def without_secrets(value: str) -> str:
    """Refuse an address that may hold a secret, because configurations are shown and saved."""
    if re.search(r"://([^/]*@|.*[?#])", value):
        raise ValueError(
            "the address holds a password or a query, which may be secret: put it into an environment variable, and "
            "name that in remote.token_variable (sent as Authorization: Bearer ...) or remote.query_variable"
        )
    return value


PublicAddress = Annotated[str, AfterValidator(without_secrets)]


class RemoteConfig(Config):
    """How remote scorers and LLM judges are asked over HTTP."""

    concurrency: int = Field(16, ge=1)
    """Requests under way at a time."""

    attempts: int = Field(5, ge=1)
    """Tries of one request; answers 429 and 5xx and broken connections are tried again."""

    backoff_seconds: float = Field(1.0, ge=0)
    """Wait before the second try; it doubles from try to try, unless the server says how long to wait."""

    token_variable: str | None = None
    """Environment variable with the token that is sent as `Authorization: Bearer ...`; null sends none."""

    query_variable: str | None = None
    """Environment variable with the query of the address, e.g. key=...&version=1; null sends none."""


class JudgeConfig(Config):
    """A language model that grades replies, for function=judge."""

    url: PublicAddress = ""
    """OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1."""

    model: str = ""
    """Name of the model there."""

    prompt: str = (
        "Grade the reply to the request below. Answer with a number from 0 (useless) to 10 (perfect) and nothing "
        "else.\n\n[Request]\n{prompt}\n\n[Reply]\n{reply}\n\n[Grade]\n"
    )
    """What it is asked; {prompt}, {reply}, {label} and columns are filled in."""

    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """The first group of its first match in the judge's answer is the reward; no match is a failure."""

    scale: float = Field(0.1, gt=0, allow_inf_nan=False)
    """The number found is multiplied by this."""

    temperature: float | None = Field(0.0, ge=0, allow_inf_nan=False)
    """What it samples at; null, or a server that refuses the parameter, leaves that to the server."""


class RewardPartConfig(Config):
    """One reward function, reward model, LLM judge or remote scorer."""

    function: PublicAddress = ""
    """A built-in, file.py:name, package.module:name, the folder of a reward model, judge, or a scorer's http:// URL."""

    weight: float = Field(1.0, allow_inf_nan=False)
    """Its weight in the sum of several."""

    normalize: bool = False
    """Reward models: subtract the mean and divide by the deviation that were stored with the model."""

    clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Bound of this reward's size, after normalising; null: none."""

    pattern: str | None = None
    """Regular expression for the built-in `regex` reward."""

    options: dict[str, Any] = {}
    """Further values that the function's parameters are filled with by name."""

    chat_template: ChatTemplate = "auto"
    """Reward models: auto (the template saved with the model), never or a Jinja file, as they were trained."""

    steps: Literal["min", "mean", "product", "last"] = "min"
    """Process reward models: how the probabilities that steps are good become one number."""

    step_separator: str = "\n"
    """Process reward models: text that ends each step; on the command line, \\n is a newline."""

    remote: RemoteConfig = RemoteConfig()
    judge: JudgeConfig = JudgeConfig()

    def constants(self) -> dict[str, Any]:
        """Return what a function's parameters are filled with in every call."""
        return {**({} if self.pattern is None else {"pattern": self.pattern}), **self.options}


class RewardConfig(RewardPartConfig):
    parts: dict[str, RewardPartConfig] = {}
    """Several rewards by name in place of `function`; their weighted sum is the task reward."""

    processes: int = Field(2, ge=1)
    """Processes that run each reward function, apart from the trainer."""

    batch: int = Field(64, ge=1)
    """Most replies in one call of a function that takes `replies`, and in one pass of a reward model."""

    timeout_seconds: float = Field(30.0, gt=0)
    """A call that takes longer is killed and counted as reward_timeout, never as a zero."""

    memory_gib: float = Field(4.0, gt=0)
    """Address space that one reward process may take beyond what it has at its start."""

    max_failure_share: float = Field(0.05, ge=0, le=1)
    """Share of failed rewards, among a step's answers or the last 100 if those are more, above which the run stops."""

    probe: bool = True
    """Call functions about a few rows, and knock at servers, before models load; refuse what fails at every call."""

    policy_error: float = Field(0.0, allow_inf_nan=False)
    """Reward of a completion whose own doing is the error, such as code that does not end."""

    @model_validator(mode="after")
    def check_parts(self) -> Self:
        if self.function and self.parts:
            raise ValueError(
                f"function={self.function} and parts={', '.join(self.parts)} exclude each other: keep one of them"
            )
        fields = RewardPartConfig.model_fields
        ignored = [name for name, field in fields.items() if self.parts and self.__dict__[name] != field.default]
        if ignored:
            raise ValueError(
                f"{ignored[0]} is set beside parts={', '.join(self.parts)}, where it does nothing: set it in the parts "
                f"(reward.parts.{next(iter(self.parts))}.{ignored[0]}=...)"
            )
        return self

    def named_parts(self) -> dict[str, RewardPartConfig]:
        """Return every reward by name; the only one of a run is called `reward`."""
        return self.parts or ({"reward": self} if self.function else {})
