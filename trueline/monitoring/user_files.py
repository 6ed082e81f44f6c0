"""The user's own files in a configuration: kept by absolute path, found after a move, reported when they change."""

import ast
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trueline.monitoring.findings import WATCH, Finding

FUNCTIONS = re.compile(r"reward\.(parts\..+\.)?function|environment\.(function|agent)|algorithm\.(advantage|loss)")
TOOLS = re.compile(r"environment\.tools")
DATASETS = re.compile(r"data\.path|evaluation\.(data|sets\..+)")
HELD_OUT = re.compile(r"evaluation\..+")
TEMPLATES = re.compile(r"(.+\.)?chat_template")
MIXTURE = "data.mixture"  # whose keys are paths
PLACES = re.compile(r"(model|critic|teacher)\.path|distill\.teacher|environment\.options\.documents")
# What is not the same before and after a change, by the section of its key; of others, its plural.
DIFFERS = {"environment": "episodes", "algorithm": "updates", "data": "prompts"}
PICKLED = ".pickle"
MODULE = re.compile(r"([A-Za-z_][\w.]*):\w+")
Tree = dict[str, Any]  # not imported: it brings pydantic, and processes of user functions start without
Change = Callable[[str], str]
Digests = dict[str, dict[str, str]]  # of files, by key


def changed_places(tree: Tree, change: Change, path: str = "") -> Tree:
    """Return the tree with `change` applied to every path, hub name, address and built-in name."""
    changed: Tree = {}
    for name, value in tree.items():
        key = f"{path}{name}"
        if key == MIXTURE:
            changed[name] = {change(place): weight for place, weight in value.items()}
        elif isinstance(value, dict):
            changed[name] = changed_places(value, change, f"{key}.")
        elif isinstance(value, list):
            changed[name] = [changed_value(one, change, key) for one in value]
        else:
            changed[name] = changed_value(value, change, key)
    return changed


def changed_value(value: Any, change: Change, key: str) -> Any:
    if not isinstance(value, str) or not value:
        return value
    if not matches(key, FUNCTIONS, TOOLS):
        return change(value) if matches(key, DATASETS, TEMPLATES, PLACES) else value
    place, _, name = value.rpartition(":")
    if place.isidentifier() and Path(f"{place}.py").is_file():  # a module that is imported from this folder
        place = f"{place}.py"
    if place.endswith(".py") and " " not in place:
        return f"{change(place)}:{name}"
    if key == "environment.agent" and " " in value:
        return shlex.join(change(word) if "." in word or "/" in word else word for word in shlex.split(value))
    return change(value) if key.startswith("reward.") or value.endswith(PICKLED) else value


def matches(key: str, *kinds: re.Pattern[str]) -> bool:
    return any(kind.fullmatch(key) for kind in kinds)


def with_absolute_places(tree: Tree, built_in: Collection[str] = ()) -> Tree:
    """Return a tree that can be resumed from any folder; only files and folders change."""

    def absolute(place: str) -> str:
        found = Path(place).expanduser()
        return str(found.resolve()) if place not in built_in and found.exists() else place

    return changed_places(tree, absolute) | {"folder": str(Path(tree["folder"]).expanduser().resolve())}


def found_again(tree: Tree, base: Path) -> Tree:
    """Return the tree of a run that is in the folder `base` now, with files that have moved along with it; those below
    the working folder are named from there, as they usually were, for their names stand in rows and metrics."""
    before = str(tree.get("folder", ""))

    def locate(place: str) -> str:
        if not os.path.isabs(before) or not os.path.isabs(place):
            return place
        moved = os.path.normpath(base / os.path.relpath(place, before))
        now = moved if os.path.exists(moved) and not os.path.exists(place) else place
        near = os.path.relpath(now)
        return near if os.path.isfile(now) and not near.startswith("..") else now

    return changed_places(tree, locate)


def fingerprints(tree: Tree) -> Digests:
    """Return the SHA-256 of the user's code, templates and held-out data by key; places in the tree are absolute."""
    found: Digests = {}
    for key, value in code_values(tree):
        files = [file for place in places_in(value, key) for file in files_of(place)]
        found.setdefault(key, {}).update({str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    return found


def code_values(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, dict):
            yield from code_values(value, f"{key}.")
        elif matches(key, FUNCTIONS, TOOLS, TEMPLATES, HELD_OUT):
            yield from ((key, str(one)) for one in (value if isinstance(value, list) else [value]))


def places_in(value: str, key: str) -> list[str]:
    seen: dict[str, str] = {}
    changed_value(value, lambda place: seen.setdefault(place, place), key)
    return [*seen] or [value]


def files_of(place: str) -> list[Path]:
    """Return a file, or those of a module, and the neighbouring modules that it imports."""
    module = MODULE.fullmatch(place)
    bases = [Path.cwd(), *map(Path, sys.path)] if module else []
    named = next(filter(None, (list(module_files(base, module[1])) for base in bases if module)), [Path(place)])
    found = [file for file in named if file.is_file()]
    for file in found:
        found += [more for more in imported_beside(file) if more not in found]
    return found


def imported_beside(file: Path) -> Iterator[Path]:
    nodes: list[ast.AST] = []
    with suppress(SyntaxError, ValueError):
        nodes = list(ast.walk(ast.parse(file.read_bytes()))) if file.suffix == ".py" else []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [node.module] if node.module else [alias.name for alias in node.names]
    for name in names:
        yield from module_files(file.parent, name)


def module_files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files in `folder` that importing a module by this name runs."""
    for part in name.split("."):
        yield from (file for file in (folder / f"{part}.py", folder / part / "__init__.py") if file.is_file())
        folder /= part


def changed_files(record: Path, tree: Tree) -> list[Finding]:
    """Find the files that changed since the run was last started, and record their present state."""
    now, before = fingerprints(tree), {}
    with suppress(OSError, ValueError):
        before = json.loads(record.read_text())
    names = {key: {Path(file).name: digest for file, digest in files.items()} for key, files in now.items()}
    with suppress(OSError):
        record.write_text(json.dumps(names, indent=2) + "\n")
    found = []
    for key, file, digest in ((key, *item) for key, files in now.items() for item in files.items()):
        if before.get(key, {}).get(Path(file).name, digest) != digest:
            what, section = f"{file} changed since this run was last started", key.partition(".")[0]
            differs = DIFFERS.get(section, f"{section}s")
            why = f"{differs} before and after are not comparable: restore it, or start a new run"
            found.append(Finding(WATCH, "changed_file", what, why, key))
    return found
