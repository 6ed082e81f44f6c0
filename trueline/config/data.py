"""Datasets: paths, columns, chat templates."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from trueline.config.base import Config


def resolve_template(value: str) -> str:
    """Make a template's path absolute: a resumed run may start in another folder."""
    if value in ("auto", "never"):
        return value
    file = Path(value).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"no file {value} in {Path.cwd()}: name a Jinja file, or set auto or never")
    return str(file)


ChatTemplate = Annotated[str, AfterValidator(resolve_template)]


class TemplateConfig(Config):
    """How messages become text."""

    chat_template: ChatTemplate = "auto"
    """auto: the tokenizer's, if any. FILE: a Jinja file, saved with the model. never: join texts by line breaks."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments for the chat template, such as enable_thinking=false; the saved template keeps them as defaults."""


class SourceConfig(TemplateConfig):
    path: str = ""
    """JSON, JSONL, CSV, TSV, Parquet or Arrow file, a folder of them, or a hub name (owner/name[:split])."""
    mixture: dict[str, float] = {}
    """Several datasets instead of `path`: each path and its sampling weight (normalized)."""
    prompt_column: str | None = None
    """Column with the prompt, text or messages. null: messages, prompt, question or Alpaca's instruction."""
    system_prompt: str | None = None
    """Prepend this system message to every conversation."""
    shuffle: bool = True
    """Shuffle rows with the run's seed, differently in every epoch."""
    max_pixels: int = Field(1_048_576, ge=1)
    """Most pixels of a picture; a larger one is made smaller when it is read, in proportion."""

    def check_keys(self) -> None:
        if self.path and self.mixture:
            raise ValueError(f"path={self.path} and mixture={self.mixture} exclude each other: keep one of them")
        for path, probability in self.mixture.items():
            if not 0 < probability < math.inf:
                raise ValueError(f"mixture.{path}={probability}: set a weight above 0")

    def sources(self) -> dict[str, float]:
        """Return the weight of each dataset's path."""
        return self.mixture or {self.path: 1.0}

    def source_key(self) -> str:
        return "data.mixture" if self.mixture else "data.path"


class DifficultyConfig(Config):
    """Let prompts rest that are too easy or too hard at present: their groups carry no signal."""

    enabled: bool = False
    """Skip and count prompts whose completions all passed, or all failed, when they were last sampled."""
    low: float = Field(0.0, ge=0, le=1)
    """A prompt is too hard if at most this share of its completions pass."""
    high: float = Field(1.0, ge=0, le=1)
    """A prompt is too easy if at least this share of its completions pass."""
    pass_reward: float = 1.0
    """Completions with at least this task reward pass."""
    rest: int = Field(1, ge=1)
    """How often a prompt is skipped, once in every epoch, before it comes back."""
    longest_rest: int = Field(8, ge=1)
    """Each further rest for the same reason is twice as long, up to this."""
    column: str | None = None
    """Column with pass rates that are known before the start (0 to 1, or empty). null: none are."""

    def check_keys(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"difficulty.low={self.low:g} must be below high={self.high:g}: lower it")
        if self.rest > self.longest_rest:
            raise ValueError(f"difficulty.rest={self.rest} is above longest_rest={self.longest_rest}: raise the latter")


class PromptDataConfig(SourceConfig):
    label_column: str | None = None
    """Column passed to rewards as `label`. null: the first of label, answer, solution that exists."""
    too_long: Literal["error", "drop"] = "error"
    """For prompts above rollout.max_prompt_tokens. error: stop and name the row. drop: skip and count them."""
    difficulty: DifficultyConfig = DifficultyConfig()


class DataConfig(SourceConfig):
    format: Literal[
        "auto", "messages", "conversations", "alpaca", "completion", "text", "preference", "rated", "steps"
    ] = "auto"
    """Format of the rows. auto: detect it from the columns of the first row."""
    messages_column: str | None = None
    """Column with whole conversations. null: messages or conversations."""
    completion_column: str | None = None
    """Column with the completion or its steps. null: completion, answer, response, output or completions."""
    chosen_column: str | None = None
    """Column with the preferred completion. null: chosen."""
    rejected_column: str | None = None
    """Column with the rejected completion. null: rejected."""
    rating_column: str | None = None
    """Column with the label of a completion, or with labels of its steps. null: label or labels."""
    text_column: str | None = None
    """Column with plain text for continued pre-training. null: text."""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """For rows above max_tokens. error: stop and name the row. truncate (on the right) and drop: rows are counted."""
    step_separator: str = "\n"
    """Text that ends each labelled step; on the command line, \\n is a newline."""
