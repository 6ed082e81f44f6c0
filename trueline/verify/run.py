"""`trueline verify`: what holds for a model, and to which precision."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

from trueline.config.base import ConfigError
from trueline.config.verify import VerifyConfig
from trueline.files import write_atomically
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.inputs import resolve_run_as_model
from trueline.runtime.cluster import machine_at_hand
from trueline.verify.comparison import Comparison, Result, summary, table
from trueline.verify.divisions import FAILURES, compare_passes, compare_ranks, failed_check
from trueline.verify.engine import compare_engine
from trueline.verify.masks import compare_masks
from trueline.verify.subject import LOGS, Subject, open_subject
from trueline.verify.weights import compare_saved

CHECKS: dict[str, Callable[[Subject], Iterator[Comparison]]] = {
    "template": compare_masks,
    "passes": compare_passes,
    "saved": compare_saved,
    "ranks": compare_ranks,
    "engine": compare_engine,
}


def verify(config: VerifyConfig, chosen: list[str], as_json: bool, say: Callable[[str], None]) -> int:
    """Return 0 if everything that could be compared holds, 1 if something differs."""
    if unknown := [name for name in chosen if name not in CHECKS]:
        raise ConfigError(f"--checks {unknown[0]}: not known; choose from {', '.join(CHECKS)}")
    if not config.model.path:
        raise ConfigError("verify needs a model: name it with --model")
    asked, begun = config.model.path, time.monotonic()
    config, taken = resolve_run_as_model(config)
    for line in taken:
        say(line)
    folder, found = Path(mkdtemp(prefix="trueline-verify-")), list[Comparison]()
    try:
        subject = open_subject(config, machine_at_hand(), folder)
        say(f"model      {config.model.path}, {subject.config.model.dtype}, up to {subject.config.tokens} tokens")
        for name in chosen or CHECKS:
            say(f"checking   {name} ({time.monotonic() - begun:.0f} s)")
            found += make_check(name, subject)
    finally:
        tidy(folder, found, say)
    rows = [one.as_row() for one in found]
    text = f"{table(found)}\n{summary(found)} ({time.monotonic() - begun:.0f} s)\n"
    sys.stdout.write(json.dumps(rows) + "\n" if as_json else text)
    if taken:
        write_into(RunFolder(Path(asked).expanduser()), text, rows)
    return int(any(one.result == Result.DIFFERS for one in found))


def make_check(name: str, subject: Subject) -> Iterator[Comparison]:
    """Yield what a check finds, also before it fails as a whole."""
    try:
        yield from CHECKS[name](subject)
    except FAILURES as error:
        yield failed_check(name, error)


def tidy(folder: Path, found: list[Comparison], say: Callable[[str], None]) -> None:
    """Remove what was written, but keep the logs of processes where something differs."""
    logs = folder / LOGS
    if not logs.is_dir() or not any(one.result == Result.DIFFERS for one in found):
        shutil.rmtree(folder)
        return
    for part in folder.iterdir():
        if part != logs:
            shutil.rmtree(part)
    say(f"logs       {logs}")


def write_into(run: RunFolder, text: str, rows: list[dict[str, object]]) -> None:
    """Leave the table with the run, whose report shows it."""
    if run.config.is_file():
        write_atomically(run.verified, json.dumps({"text": text, "rows": rows}).encode())
