"""The folder of a run: made once, never overwritten, taken up again by --resume."""

import json
import shlex
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from trueline.config.base import ConfigError
from trueline.config.run import RunConfig

UNFINISHED = ".unfinished"
HEAD = "# trueline "  # first line of config.yaml, with the verb; a comment, so that the file can be given to --config
FOLDER = "run        "  # line of run.log that ends the plan, with the folder
RUNS = Path(RunConfig.model_fields["folder"].default)
PRIVATE = 0o700  # transcripts, rows and logs are for who made them


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.transcripts = path / "transcripts.jsonl"
        self.ledger = path / "ledger.jsonl"  # which prompts each step trained on, and what became of the others
        self.events = path / "events.jsonl"  # who did what from when to when, step by step
        self.logs = path / "logs"
        self.log = self.logs / "run.log"  # what was said of the run
        self.checkpoints = path / "checkpoints"

    def open(self, config: RunConfig, verb: str, *, resume: bool) -> Self:
        """Make the folder, or try the one to go on with by writing to it before anything starts."""
        try:
            if resume:
                self._touch()
            else:
                self._make(config, verb)
        except OSError as error:
            raise ConfigError(
                f"folder={config.folder}: {self.path} cannot be written ({error.strerror}): choose another place "
                "with folder=..., or see to its permissions and to room on the disk"
            ) from error
        return self

    def _make(self, config: RunConfig, verb: str) -> None:
        if self.path.exists():
            raise ConfigError(f"{self.path} exists: add --resume to go on with that run, or choose another --name")
        # Made aside: a folder with the run's name can always be resumed.
        aside = RunFolder(self.path.with_name(f"{self.path.name}{UNFINISHED}"))
        shutil.rmtree(aside.path, ignore_errors=True)
        aside.path.mkdir(PRIVATE, parents=True)
        aside.logs.mkdir()
        aside.config.write_text(f"{HEAD}{verb}\n{config.dump()}")
        aside.path.rename(self.path)

    def _touch(self) -> None:
        trial = self.path / f"trial{UNFINISHED}"
        trial.write_text("a full disk takes no byte\n")
        trial.unlink()

    @classmethod
    def find(cls, folder: str, name: str | None, verb: str) -> "RunFolder":
        """Find the run to resume: the named one, or that of this verb which was touched last."""
        base = Path(folder).resolve()
        if name is not None:
            return cls(base / name)._checked(verb)
        found = [cls(file.parent) for file in base.glob("*/config.yaml") if file.parent.suffix != UNFINISHED]
        runs = [run for run in found if run.verb() == verb]
        if not runs:
            raise ConfigError(f"no {verb} run to resume in {base}: name its place with folder=...")
        return max(runs, key=RunFolder.touched)

    def _checked(self, verb: str) -> "RunFolder":
        if not self.config.is_file():
            raise ConfigError(
                f"{self.path} is not a run that can be resumed (it has no config.yaml): see to --name and folder=..., "
                "or leave --resume out to start it"
            )
        if self.verb() != verb:
            raise ConfigError(
                f"{self.path} is a run of {self.verb() or 'no known verb'}: resume it with the verb that began it "
                f"(got {verb})"
            )
        return self

    def verb(self) -> str:
        """Return the verb that began this run, or nothing where its head is unknown."""
        with self.config.open() as lines:
            head = lines.readline()
        return head.removeprefix(HEAD).strip() if head.startswith(HEAD) else ""

    def touched(self) -> float:
        """Tell when the files of this run, or those of the stages inside it, last changed."""
        files = [self.path, *self.path.glob("*"), *self.path.glob("round_*/*/*")]
        return max(file.lstat().st_mtime for file in files)

    def rows(self) -> list[dict[str, Any]]:
        """Read what each step has reported."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []

    def rewrite(self, config: RunConfig, verb: str) -> None:
        """Let the run go on with other keys than it was begun with."""
        aside = self.config.with_suffix(UNFINISHED)
        aside.write_text(f"{HEAD}{verb}\n{config.dump()}")
        aside.rename(self.config)

    def resume_command(self) -> str:
        base = Path(RunConfig.model_fields["folder"].default).resolve()
        place = "" if self.path.parent == base else f" {shlex.quote(f'folder={self.path.parent}')}"
        return f"trueline {self.verb()} --resume --name {self.path.name}{place}"

    def has_checkpoint(self) -> bool:
        return any(path.suffix != UNFINISHED for path in self.checkpoints.glob("step_*"))


def default_name(verb: str) -> str:
    return f"{verb}-{datetime.now():%Y%m%d-%H%M%S}"
