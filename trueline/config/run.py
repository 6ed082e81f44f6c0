"""What a run keeps, says and where it lives."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trueline.config.base import Config, merge


class CheckpointConfig(Config):
    every: int = Field(50, ge=0)
    """Save every this many steps; 0 saves at the end only."""

    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints stay on disk."""

    keep_best: int = Field(0, ge=0)
    """How many of the best checkpoints by `metric` stay besides."""

    metric: str = "evaluation/loss"
    """What keep_best looks at; a `-` in front means that more is better, e.g. -evaluation/accuracy."""

    def check_best(self, held_out: bool, evaluated_every: int) -> None:
        """Refuse to keep the best by an evaluation that no checkpoint will have."""
        if not self.keep_best or not self.metric.removeprefix("-").startswith("evaluation/"):
            return
        asked = f"checkpoint.keep_best={self.keep_best} looks at checkpoint.metric={self.metric}"
        if not held_out:
            raise ValueError(f"{asked}, but nothing is held out: set evaluation.data, or a metric of training")
        if not self.every or not evaluated_every:
            raise ValueError(
                f"{asked}, so checkpoints need evaluations of their steps: set checkpoint.every and evaluation.every "
                f"above 0 (got {self.every} and {evaluated_every})"
            )


class MonitoringConfig(Config):
    transcripts_per_step: int = Field(4, ge=0)
    """Sampled conversations written to transcripts.jsonl at every step."""

    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""

    wandb: str | None = None
    """Weights & Biases project to report to; null reports nothing. Needs the wandb package."""


class RunConfig(Config):
    """Keys that every kind of run shares."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Folder of the run below `folder`; null makes one from the verb and the time."""

    folder: str = "runs"
    """Where run folders are made."""

    seed: int = Field(0, ge=0)
    """Seeds data order, sampling and initialisation."""

    runtime: Literal["ray", "local"] = "ray"
    """ray: one process per rank and engine; local: everything in this process, for breakpoints."""

    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait for any one answer of a process (start, sampling, update) before the run stops and names it."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    local_engines: ClassVar[dict[str, str]] = {}  # section -> the engine that runs in one process

    @model_validator(mode="before")
    @classmethod
    def fill_local(cls, values: Any) -> Any:
        local = isinstance(values, dict) and values.get("runtime") == "local"
        engines = {section: {"engine": engine} for section, engine in cls.local_engines.items()}
        return merge(engines, values) if local else values

    @model_validator(mode="after")
    def check_local(self) -> Self:
        for section, engine in self.local_engines.items() if self.runtime == "local" else ():
            value = self.model_dump(include={section})[section]["engine"]
            if value != engine:
                raise ValueError(
                    f"runtime=local keeps everything in one process: set {section}.engine={engine} (got {value}) or "
                    "runtime=ray"
                )
        return self
