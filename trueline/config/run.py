"""Keys of every run: checkpoints, cluster, monitoring, health."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trueline.config.base import Config, merge


class CheckpointConfig(Config):
    save: bool = True
    """Write checkpoints. A run without them cannot be resumed or exported."""
    every: int = Field(50, ge=0)
    """Save every this many steps. 0: only at the end."""
    model: Literal["every", "last"] = "every"
    """Which checkpoints contain the model: every one, or only the last of the run. Adapters are always saved."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(0, ge=0)
    """Number of best checkpoints by `metric` to keep as well."""
    metric: str = "evaluation/loss"
    """Metric for keep_best; a leading `-` means higher is better, e.g. -evaluation/accuracy."""

    def holds_model(self, step: int, steps: int) -> bool:
        """Tell whether the checkpoint of this step contains the model."""
        return self.model == "every" or step >= steps

    def check_best(self, held_out: bool, evaluated_every: int) -> None:
        """Refuse keep_best with a metric that checkpoints will not have."""
        if not self.keep_best or not self.metric.removeprefix("-").startswith("evaluation/"):
            return
        use = f"checkpoint.keep_best={self.keep_best} needs checkpoint.metric={self.metric}"
        if not self.save:
            raise ValueError(f"{use}, but checkpoint.save=false writes no checkpoints: change one of the two")
        if not held_out:
            raise ValueError(f"{use}, but there is no held-out data: set evaluation.data, or a training metric")
        if not self.every or not evaluated_every:
            raise ValueError(
                f"{use}, which needs evaluations at checkpoints: set checkpoint.every and evaluation.every above 0 "
                f"(got {self.every} and {evaluated_every})"
            )


class ClusterConfig(Config):
    address: str | None = None
    """Ray cluster: HOST:PORT or auto. null: RAY_ADDRESS if set, else this machine."""

    @field_validator("address")
    @classmethod
    def check_address(cls, address: str | None) -> str | None:
        if address and address.startswith("ray://"):
            raise ValueError(
                "ray:// runs outside the cluster and cannot share memory with it: start on a node (or with "
                "`ray job submit`) and set HOST:PORT or auto"
            )
        return address


class MonitoringConfig(Config):
    transcripts_per_step: int = Field(4, ge=0)
    """Completions per step in transcripts.jsonl, on average, as groups stay whole. 0: none."""
    tokens: bool = True
    """Include log-prob, log-ratio, advantage and entropy of every token in transcripts."""
    keep_samples_mib: float = Field(256.0, ge=0)
    """Keep the samples of the last steps for `trueline replay`, in up to this many MiB. 0: none."""
    doctor: bool = True
    """Check data, template, rewards, numbers and machine before the run starts (docs/doctor.md)."""
    tensorboard: bool = True
    """Write TensorBoard event files in addition to metrics.jsonl."""
    wandb: str | None = None
    """Weights & Biases project. null: off. Needs the wandb package."""
    mlflow: str | None = None
    """MLflow experiment, at MLFLOW_TRACKING_URI. null: off. Needs the mlflow package."""
    trackio: str | None = None
    """Trackio project. null: off. Needs the trackio package."""


class HealthConfig(Config):
    action: Literal["log", "pause", "stop", "roll_back"] = "log"
    """On a BAD step (docs/metrics.md): log, pause, stop, or roll back (at most twice)."""
    rate_factor: float = Field(0.1, gt=0, le=1)
    """roll_back multiplies learning rates by this."""


class EnginesConfig(Config):
    """Sections that name an engine, and the `runtime` of their processes."""

    def engines(self) -> dict[str, str]:
        """Return the engine of each section that has one; that of `training`, whose default others follow, first."""
        found = (key for key in self.leaves() if key.path.endswith(".engine"))
        named = {key.path.removesuffix(".engine"): key.default for key in found}
        return {name: named[name] for name in sorted(named, key=lambda name: name != "training")}

    @model_validator(mode="before")
    @classmethod
    def fill_engines(cls, values: Any) -> Any:
        """Default to the policy's engine for other models and, with runtime=local, to engines of one process."""
        if not isinstance(values, dict):
            return values
        local = values.get("runtime", cls.model_fields["runtime"].default) == "local"
        training = values.get("training")
        chosen = training.get("engine") if isinstance(training, dict) else None
        filled = {"rollout": "hf" if local else None}
        sections = {
            name: filled.get(name, chosen or ("torch" if local else None)) for name in cls.model_construct().engines()
        }
        return merge({name: {"engine": engine} for name, engine in sections.items() if engine}, values)


class RunConfig(EnginesConfig):
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Folder of the run below `folder`. null: made from verb and time."""
    folder: str = "runs"
    """Folder that contains run folders."""
    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seed of data order, sampling and initialization."""
    runtime: Literal["ray", "local"] = "ray"
    """ray: one process per rank and engine. local: everything in this process, for debugging."""
    deterministic: bool = False
    """Compute the same bits as another run of the same command on this machine; slower (docs/configuration.md)."""
    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest wait for one call of a process (start, sampling, update); then the run stops and names it."""
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    health: HealthConfig = HealthConfig()

    def check_keys(self) -> None:
        if self.health.action == "roll_back" and not self.checkpoint.save:
            raise ValueError("health.action=roll_back needs checkpoints: set checkpoint.save=true")
