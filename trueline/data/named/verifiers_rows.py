"""Rows of an environment of verifiers, which a program in an interpreter of its own writes."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.named import verifiers_program
from trueline.data.rows import Located, locate_row

Options = dict[str, Any]


def program(python: str, mode: str, name: str, arguments: Options) -> list[str]:
    """Return the command that writes an environment's rows or plays its episodes."""
    return [python, verifiers_program.__file__, mode, name, json.dumps(arguments)]


def read_rows(name: str, options: Options, named: str) -> list[Located]:
    """Read an environment's rows; options other than ours are arguments of `load_environment`."""
    arguments = dict(options)
    python, split, size = arguments.pop("python", ""), arguments.pop("split", "train"), arguments.pop("size", None)
    if not python or shutil.which(python := str(Path(python).expanduser())) is None:
        problem = f"there is no interpreter {python}" if python else "it names no interpreter"
        remedy = "add ?python=/path/to/venv/bin/python, of an environment that has verifiers"
        raise ConfigError(f"{named}: {problem}: {remedy}")
    if split not in ("train", "eval"):
        raise ConfigError(f"{named}: split={split}: verifiers has the splits train and eval")
    command = [*program(python, "rows", name, arguments), split]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    last = lines[-1] if lines else {}
    if done.returncode or "error" in last:
        why = last.get("error") or done.stderr.strip()[-400:]
        raise ConfigError(f"{named}: verifiers cannot load it: {why}; install it into the environment of {python}")
    return [locate_row(line["row"], f"{named}, row {number}", Path()) for number, line in enumerate(lines[:size], 1)]
