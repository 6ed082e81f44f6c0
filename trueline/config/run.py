"""What a run keeps, says and where it lives."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trueline.config.base import Config, merge


class CheckpointConfig(Config):
    save: bool = True
    """Write checkpoints; false for a run that must leave none, which cannot be resumed or exported."""

    every: int = Field(50, ge=0)
    """Save every this many steps; 0 saves at the end only."""

    model: Literal["every", "last"] = "every"
    """Which checkpoints hold the model itself: every, or the last, of the run's end, alone; adapters are in all."""

    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints stay on disk."""

    keep_best: int = Field(0, ge=0)
    """How many of the best checkpoints by `metric` stay besides."""

    metric: str = "evaluation/loss"
    """What keep_best looks at; a `-` in front means that more is better, e.g. -evaluation/accuracy."""

    def holds_model(self, step: int, steps: int) -> bool:
        """Tell whether the checkpoint of this step, of so many, is to hold the model."""
        return self.model == "every" or step >= steps

    def check_best(self, held_out: bool, evaluated_every: int) -> None:
        """Refuse to keep the best by an evaluation that no checkpoint will have."""
        if not self.keep_best or not self.metric.removeprefix("-").startswith("evaluation/"):
            return
        asked = f"checkpoint.keep_best={self.keep_best} looks at checkpoint.metric={self.metric}"
        if not self.save:
            raise ValueError(f"{asked}, but checkpoint.save=false writes none: set one of the two")
        if not held_out:
            raise ValueError(f"{asked}, but nothing is held out: set evaluation.data, or a metric of training")
        if not self.every or not evaluated_every:
            raise ValueError(
                f"{asked}, so checkpoints need evaluations of their steps: set checkpoint.every and evaluation.every "
                f"above 0 (got {self.every} and {evaluated_every})"
            )


class ClusterConfig(Config):
    address: str | None = None
    """Ray cluster to run on, HOST:PORT or auto; null takes RAY_ADDRESS, else this machine alone."""

    @field_validator("address")
    @classmethod
    def check_address(cls, address: str | None) -> str | None:
        if address and address.startswith("ray://"):
            raise ValueError(
                "ray:// puts the run outside of the cluster, where it cannot share memory with its processes: start it "
                "on a node (or with `ray job submit`) and name HOST:PORT or auto"
            )
        return address


class MonitoringConfig(Config):
    transcripts_per_step: int = Field(4, ge=0)
    """Completions of a step written to transcripts.jsonl: a mean, for groups stay whole; 0 writes none."""

    tokens: bool = True
    """Keep log-prob, log-ratio, advantage and entropy of each token of these transcripts."""

    doctor: bool = True
    """Look at rows, template, rewards, numbers and machine before a run starts (docs/doctor.md)."""

    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""

    wandb: str | None = None
    """Weights & Biases project to report to; null reports nothing. Needs the wandb package."""

    mlflow: str | None = None
    """MLflow experiment to report to, at MLFLOW_TRACKING_URI; null reports nothing. Needs the mlflow package."""

    trackio: str | None = None
    """Trackio project to report to; null reports nothing. Needs the trackio package."""


class HealthConfig(Config):
    action: Literal["log", "pause", "stop", "roll_back"] = "log"
    """When a step is judged BAD (docs/metrics.md): it is said; the run waits for you; it stops; it goes back, twice."""

    rate_factor: float = Field(0.1, gt=0, le=1)
    """What roll_back multiplies the learning rates by."""


class EnginesConfig(Config):
    """Sections that name engines, and the `runtime` that their processes live in."""

    def engines(self) -> dict[str, str]:
        """Return the engine of every section that has one."""
        return {key.path.removesuffix(".engine"): key.default for key in self.leaves() if key.path.endswith(".engine")}

    @model_validator(mode="before")
    @classmethod
    def fill_local(cls, values: Any) -> Any:
        """Fill in engines that can live in one process, where the runtime is local."""
        local = isinstance(values, dict) and values.get("runtime", cls.model_fields["runtime"].default) == "local"
        engines = {
            section: {"engine": "hf" if section == "rollout" else "torch"}
            for section in cls.model_construct().engines()
        }
        return merge(engines, values) if local else values


class RunConfig(EnginesConfig):
    """Keys that every kind of run shares."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Folder of the run below `folder`; null makes one from the verb and the time."""

    folder: str = "runs"
    """Where run folders are made."""

    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seeds data order, sampling and initialisation."""

    runtime: Literal["ray", "local"] = "ray"
    """ray: one process per rank and engine; local: everything in this process, for breakpoints."""

    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait for any one answer of a process (start, sampling, update) before the run stops and names it."""

    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    health: HealthConfig = HealthConfig()

    @model_validator(mode="after")
    def check_roll_back(self) -> Self:
        if self.health.action == "roll_back" and not self.checkpoint.save:
            raise ValueError("health.action=roll_back needs checkpoints to go back to, and checkpoint.save=false")
        return self
