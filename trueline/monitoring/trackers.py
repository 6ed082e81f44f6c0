"""Where numbers go: JSON lines always, TensorBoard and Weights & Biases where they are wanted."""

import json
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.run import MonitoringConfig
from trueline.monitoring.run_folder import RunFolder


class Tracker:
    def __init__(self, folder: RunFolder, config: MonitoringConfig, resume_step: int = 0, run_id: str = "") -> None:
        self.last_step = keep_until(folder.metrics, resume_step)
        keep_until(folder.transcripts, resume_step)
        self.metrics = folder.metrics.open("a")
        self.transcripts = folder.transcripts.open("a")
        self.board = make_board(folder.path / "tensorboard", resume_step) if config.tensorboard else None
        self.remote = open_wandb(folder, config.wandb, run_id) if config.wandb else None
        self.run_id = str(self.remote.id) if self.remote is not None else ""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self.metrics.flush()
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        if self.remote is not None:
            self.remote.log(metrics, step=step)

    def show(self, step: int, transcripts: list[dict[str, Any]]) -> None:
        for transcript in transcripts:
            self.transcripts.write(json.dumps({"step": step, **transcript}, ensure_ascii=False, default=str) + "\n")
        self.transcripts.flush()

    def close(self) -> None:
        self.metrics.close()
        self.transcripts.close()
        if self.board is not None:
            self.board.close()
        if self.remote is not None:
            self.remote.finish()


def keep_until(file: Path, step: int) -> int:
    """Drop what was written after the checkpoint that a run resumes from: those steps come again. The last kept one."""
    if not file.exists():
        return -1
    whole = file.read_text().split("\n")[:-1]  # a kill may have left half a line at the end
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    aside = file.with_suffix(".unfinished")
    aside.write_text("".join(line + "\n" for line in kept))
    aside.rename(file)
    return int(json.loads(kept[-1])["step"]) if kept else -1


def make_board(folder: Path, resume_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (seconds to import)

    return SummaryWriter(folder, purge_step=resume_step + 1)  # type: ignore[no-untyped-call]


def open_wandb(folder: RunFolder, project: str, run_id: str) -> Any:
    """The run with this id goes on; an empty id starts one."""
    try:
        import wandb  # noqa: PLC0415  (an optional package)
    except ImportError:
        raise ConfigError("monitoring.wandb: wandb is not installed; pip install 'trueline[wandb]'") from None
    try:
        return wandb.init(project=project, name=folder.path.name, dir=folder.path, id=run_id or None, resume="allow")
    except wandb.errors.Error as error:
        raise ConfigError(
            f"monitoring.wandb={project}: {error}; run `wandb login`, or set WANDB_MODE=offline to keep it on this disk"
        ) from error
