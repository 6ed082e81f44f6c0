"""Where prompts and labels come from."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, model_validator

from trueline.config.base import Config


def resolve_template(value: str) -> str:
    """Resolve a template's file to its absolute path: a run that goes on may start in another folder."""
    if value in ("auto", "never"):
        return value
    file = Path(value).expanduser().resolve()
    if not file.is_file():
        raise ValueError(
            f"{value}: there is no such file (looked in {Path.cwd()}); name a Jinja file, or set auto or never"
        )
    return str(file)


ChatTemplate = Annotated[str, AfterValidator(resolve_template)]


class SourceConfig(Config):
    """Keys by which all kinds of runs describe their rows."""

    path: str = ""
    """JSON, JSONL, CSV, TSV, Parquet or Arrow file, a folder of them, or a hub name (`owner/name[:split]`)."""

    mixture: dict[str, float] = {}
    """Several datasets in place of `path`: each one's path and how likely a row is drawn from it (normalised)."""

    prompt_column: str | None = None
    """Column with the prompt (text or messages); null takes messages, prompt or question, or Alpaca's instruction."""

    system_prompt: str | None = None
    """Put in front of every conversation as a system message."""

    chat_template: ChatTemplate = "auto"
    """auto: the tokenizer's, where it has one; a Jinja file, saved with the model; never: texts, joined by lines."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking=false; the saved template has them as its defaults."""

    shuffle: bool = True
    """Draw rows in a seeded random order, anew in every epoch."""

    @model_validator(mode="after")
    def check_sources(self) -> Self:
        if self.path and self.mixture:
            raise ValueError(f"path={self.path} and mixture={self.mixture} exclude each other: keep one of them")
        for path, probability in self.mixture.items():
            if not 0 < probability < math.inf:
                raise ValueError(f"mixture gives {path} the probability {probability}: it must be above 0")
        return self

    def sources(self) -> dict[str, float]:
        """Return each dataset's path and weight."""
        return self.mixture or {self.path: 1.0}

    def source_key(self) -> str:
        return "data.mixture" if self.mixture else "data.path"


class PromptDataConfig(SourceConfig):
    """Keys for rows with prompts to complete."""

    label_column: str | None = None
    """Column that rewards see as `label`; null takes the first of label, answer, solution that exists."""

    too_long: Literal["error", "drop"] = "error"
    """A prompt above rollout.max_prompt_tokens is refused by its place, or left out and counted."""


class DataConfig(SourceConfig):
    """Keys for rows to learn."""

    format: Literal[
        "auto", "messages", "conversations", "alpaca", "completion", "text", "preference", "rated", "steps"
    ] = "auto"
    """What the rows are; auto tells it from the columns of the first row."""

    messages_column: str | None = None
    """Column with whole conversations; null takes messages or conversations."""

    completion_column: str | None = None
    """Column with the answer or its steps; null takes completion, answer or response, or output, or completions."""

    chosen_column: str | None = None
    """Column with the better answer; null takes chosen."""

    rejected_column: str | None = None
    """Column with the worse answer; null takes rejected."""

    rating_column: str | None = None
    """Column that says whether an answer is desirable, or how good its steps are; null takes label or labels."""

    text_column: str | None = None
    """Column with plain text to continue pre-training on; null takes text."""

    too_long: Literal["error", "truncate", "drop"] = "error"
    """A row with too many tokens is refused by its place, cut on the right, or left out; what was done is counted."""

    step_separator: str = "\n"
    """Text that ends each step of an answer whose steps are labelled; on the command line, \\n is a newline."""
