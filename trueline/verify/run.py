"""`trueline verify`: what holds for a model, and to which precision."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from trueline.config.base import ConfigError
from trueline.config.verify import VerifyConfig
from trueline.files import write_atomically
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.inputs import resolve_run_as_model
from trueline.runtime.cluster import machine_at_hand
from trueline.verify.comparison import Comparison, Result, summary, table
from trueline.verify.divisions import compare_passes, compare_ranks
from trueline.verify.engine import compare_engine
from trueline.verify.masks import compare_masks
from trueline.verify.subject import Subject, open_subject
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
    with TemporaryDirectory(prefix="trueline-verify-") as folder:
        subject = open_subject(config, machine_at_hand(), Path(folder))
        say(f"model      {config.model.path}, {subject.config.model.dtype}, up to {subject.config.tokens} tokens")
        found = list[Comparison]()
        for name in chosen or CHECKS:
            say(f"checking   {name} ({time.monotonic() - begun:.0f} s)")
            found += CHECKS[name](subject)
    rows = [one.as_row() for one in found]
    text = f"{table(found)}\n{summary(found)} ({time.monotonic() - begun:.0f} s)\n"
    sys.stdout.write(json.dumps(rows) + "\n" if as_json else text)
    if taken:
        write_into(RunFolder(Path(asked).expanduser()), text, rows)
    return int(any(one.result == Result.DIFFERS for one in found))


def write_into(run: RunFolder, text: str, rows: list[dict[str, object]]) -> None:
    """Leave the table with the run, whose report shows it."""
    if run.config.is_file():
        write_atomically(run.verified, json.dumps({"text": text, "rows": rows}).encode())
