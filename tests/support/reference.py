"""The pages of the reference that are made from the code: keys, verbs and the names of the package for Python."""

import argparse
import inspect
import json
import os
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any
from unittest import mock

import trueline
from tests.support.generated_docs import findings_table, table
from trueline.cli import TOOL_KEYS, make_parser
from trueline.config.algorithm import PRESETS
from trueline.config.base import Config
from trueline.monitoring.findings import CODES
from trueline.options import CommandParser, default_text
from trueline.verbs import GROUPS, TASK_VERBS, TOOLS, VERBS

SAMPLING = ("generate", "eval", "raft", "iterative_dpo")
KEYS = {  # page -> its title, and the verbs whose keys it has
    "keys_rl": ("Keys of RL", tuple(PRESETS)),
    "keys_data": ("Keys of training on data", tuple(TASK_VERBS)),
    "keys_sampling": ("Keys of sampling, evaluation and rounds", SAMPLING),
    "keys_serving": ("Keys of serve-reward", ("serve-reward",)),
    "keys_verify": ("Keys of verify", ("verify",)),
}
WIDTH = "88"  # columns of a help text
PAGE = re.compile(r"docs/(\w+)\.md")
MADE = "This page is made from the code. "


def pages() -> dict[str, str]:
    """Return every page that is made whole, by its path in the site."""
    keys = {f"reference/{page}.md": keys_page(*row) for page, row in KEYS.items()}
    others = {"verbs": verbs_page(), "python": python_page(), "findings": findings_page()}
    return keys | {f"reference/{name}.md": text for name, text in others.items()}


def configuration(verb: str) -> Config:
    return VERBS[verb].kind.parse(VERBS[verb].defaults) if verb in VERBS else TOOL_KEYS[verb]()


def keys_page(title: str, verbs: tuple[str, ...]) -> str:
    """Write a table for each section of the keys, in the order in which `trueline config` lists them."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}  # path, type and meaning of a key -> verb -> default
    for verb in verbs:
        for key in configuration(verb).leaves():
            rows.setdefault((key.path, key.kind, key.meaning), {})[verb] = default_text(key)
    sections: dict[str, list[tuple[str, str]]] = {}
    for (path, kind, meaning), defaults in rows.items():
        cells = (f"`{path}`", described(kind, meaning, defaults, verbs))
        sections.setdefault(path.rpartition(".")[0], []).append(cells)
    many = len(verbs) > 1
    about = (
        f"For {words(verbs)}. Where a default is not that of all, the verbs that have it follow in brackets. " * many
    )
    lines = [f"# {title}", f"{MADE}{about}`trueline config VERB` prints the same for one verb."]
    for section, cells in sections.items():
        lines += [f"## {section or 'The run'}", table(("key", "meaning, type, default"), *cells)]
    return "\n\n".join(lines)


def described(kind: str, meaning: str, defaults: dict[str, str], verbs: tuple[str, ...]) -> str:
    """Return the meaning, the type and the default of a key, and that of each verb where they differ."""
    by_default: dict[str, list[str]] = {}
    for verb, default in defaults.items():
        by_default.setdefault(default, []).append(verb)
    usual = max(by_default, key=lambda default: len(by_default[default]))
    others = [f"{code(default)} ({words(of)})" for default, of in by_default.items() if default != usual]
    only = f" Only {words(defaults)}." if len(defaults) < len(verbs) else ""
    text = PAGE.sub(r"[\1](../\1.md)", outside_code(" ".join(meaning.split())))
    return f"{text}{only}<br>{code(kind)}, default {'; '.join([code(usual), *others])}"


def code(text: str) -> str:
    return f"`{text if text.isprintable() else json.dumps(text)}`" if text else "empty"


def outside_code(text: str) -> str:
    """Escape what Markdown would read as marks, except between backticks."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([|<>*_\[\]])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def findings_page() -> str:
    """Write a table for each section of what runs report."""
    lines = ["# Findings", f"{MADE}[Troubleshooting](../troubleshooting.md#findings) says where they appear."]
    for section, rows in groupby(CODES.values(), key=lambda one: one.section):
        text = re.sub(r"\]\((?=\w+\.md)", "](../", findings_table(list(rows)))
        lines += [f"## {section}", text.replace("](#", "](../troubleshooting.md#")]
    return "\n\n".join(lines)


def verbs_page() -> str:
    """Write the help of every verb, as the command line prints it."""
    with mock.patch.dict(os.environ, {"COLUMNS": WIDTH}):
        verbs = choices(make_parser())
        lines = ["# Every verb", f"{MADE}`trueline VERB --help` prints the same."]
        for title, names in GROUPS.items():
            lines.append(f"## {title[0].upper()}{title[1:]}")
            for name in names:
                inside = {} if name in TOOLS and takes_a_run(verbs[name]) else choices(verbs[name])
                for parser in (verbs[name], *inside.values()):
                    lines += [f"### {parser.prog}", f"```text\n{parser.format_help().rstrip()}\n```"]
    return "\n\n".join(lines) + "\n"


def choices(parser: argparse.ArgumentParser) -> dict[str, CommandParser]:
    """Return the parsers of a parser's verbs."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def takes_a_run(parser: argparse.ArgumentParser) -> bool:
    """Return whether its verbs are those of runs, whose help is on the page already."""
    return VERBS.keys() <= choices(parser).keys()


def python_page() -> str:
    """Write the signature and the docstring of every public name."""
    lines = ["# Names in Python", f"{MADE}[Python](../python.md) shows them at work."]
    for name in trueline.__all__:
        found = getattr(trueline, name)
        lines += [f"## trueline.{name}", described_object(name, found)]
        if inspect.isclass(found) and not issubclass(found, BaseException):
            members = ((member, value) for member, value in vars(found).items() if not member.startswith("_"))
            rows = [member_row(member, value) for member, value in members if inspect.getdoc(value)]
            lines.append(table(("member", "what it is"), *(row for row in rows if row)))
    return "\n\n".join(lines) + "\n"


def described_object(name: str, found: Any) -> str:
    kind = "class" if inspect.isclass(found) else "def"
    return f"```python\n{kind} {name}{signature(found)}\n```\n\n{inspect.getdoc(found)}"


def member_row(name: str, found: Any) -> tuple[str, str] | None:
    if isinstance(found, property):
        return f"`{name}`", outside_code(inspect.getdoc(found) or "")
    if inspect.isfunction(found):
        return f"`{name}{signature(found)}`", outside_code(inspect.getdoc(found) or "")
    return None


def signature(found: Any) -> str:
    """Return a signature as it is written in the source, one parameter a line if it is long."""
    text = re.sub(r"\bself, |\(self\)", lambda match: "()" * (match[0] == "(self)"), str(inspect.signature(found)))
    text = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text)
    text = re.sub(r"(: |> )'(\w+)'", r"\1\2", text)
    if len(text) < 80:
        return text
    inside, _, returned = text.removeprefix("(").rpartition(")")
    return "(\n    " + ",\n    ".join(parts(inside)) + f",\n){returned}"


def parts(text: str) -> list[str]:
    return re.split(r", (?![^\[]*\])", text)
