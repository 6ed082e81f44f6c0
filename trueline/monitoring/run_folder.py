"""The folder of a run: made once, never overwritten, taken up again by --resume."""

import shutil
from datetime import datetime
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.config.run import RunConfig


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.transcripts = path / "transcripts.jsonl"
        self.logs = path / "logs"

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        assert config.name is not None
        folder = cls(Path(config.folder).resolve() / config.name)
        if folder.path.exists():
            raise ConfigError(f"{folder.path} exists: add --resume to go on with that run, or choose another --name")
        # Made aside: a folder with the run's name can always be resumed.
        aside = cls(folder.path.with_name(f"{config.name}.unfinished"))
        shutil.rmtree(aside.path, ignore_errors=True)
        aside.logs.mkdir(parents=True)
        aside.config.write_text(config.dump())
        aside.path.rename(folder.path)
        return folder

    @classmethod
    def find(cls, folder: str, name: str | None, verb: str) -> "RunFolder":
        """The run to resume: the named one, or the newest of this verb."""
        base = Path(folder).resolve()
        if name is not None:
            if not (base / name / "config.yaml").is_file():
                raise ConfigError(f"{base / name} is not a run that can be resumed: it has no config.yaml")
            return cls(base / name)
        runs = sorted(base.glob(f"{verb}-*/config.yaml"), key=lambda file: file.stat().st_mtime)
        if not runs:
            raise ConfigError(f"no {verb} run to resume in {base}; name one with --name")
        return cls(runs[-1].parent)


def default_name(verb: str) -> str:
    return f"{verb}-{datetime.now():%Y%m%d-%H%M%S}"
