"""The strict base class of configurations, and how files and overrides become one validated tree."""

import difflib
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from trueline.config.foreign_names import FOREIGN_NAMES, RENAMED, Suggestion

Tree = dict[str, Any]
TEXT_KINDS = ("str", "str | null")
NEAR = 0.8  # one wrong letter in five
POLICY = ("training", "model", "rollout", "algorithm", "data")  # sections that a suggestion prefers
ROLES = ("reference", "critic", "reward_model", "teacher")  # sections that a suggestion takes last


class ConfigError(ValueError):
    """A mistake of the user; the message says what is wrong, where, and how to fix it."""

    def __init__(self, message: object = "", *, key: str = "") -> None:
        super().__init__(message)
        self.key = key  # of the configuration, to change


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a configuration tree, as `trueline config` shows it."""

    path: str
    kind: str
    default: Any
    meaning: str


class Config(BaseModel):
    """Unknown keys are errors, values are frozen, and every field has a one-line description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)

    @model_validator(mode="after")
    def run_checks(self) -> Self:
        self.check_keys()
        return self

    def check_keys(self) -> None:
        """Raise a ValueError if keys of this section contradict each other."""

    @classmethod
    def load(cls, files: list[Path], overrides: list[str], base: Tree | None = None) -> Self:
        """Load one tree: later files override earlier ones, `a.b=value` overrides files, and both override `base`."""
        return cls.parse(merge(base or {}, cls.merge_sources(files, overrides)))

    @classmethod
    def merge_sources(cls, files: list[Path], overrides: list[str]) -> Tree:
        """Merge what files and overrides set, unchecked."""
        texts = {key.path for key in cls().leaves() if key.kind in TEXT_KINDS}
        tree: Tree = {}
        for more in [*map(read_tree, files), *(parse_override(override, texts) for override in overrides)]:
            tree = merge(tree, more)
        return tree

    @classmethod
    def parse(cls, tree: Tree) -> Self:
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            cause = first.get("ctx", {}).get("error")
            key = cause.key if isinstance(cause, ConfigError) else ""  # a check may name it
            raise ConfigError(explain(cls, error.errors()), key=key or ".".join(map(str, first["loc"]))) from None

    def leaves(self, prefix: str = "") -> Iterator[Key]:
        """Yield every key with its current value."""
        for name, field in type(self).model_fields.items():
            value = self.__dict__[name]
            if isinstance(value, Config):
                yield from value.leaves(f"{prefix}{name}.")
            else:
                yield Key(prefix + name, kind_name(field.annotation), value, field.description or "")

    def with_keys(self, values: Tree) -> Self:
        """Return a validated copy with some values changed."""
        return self.parse(merge(self.model_dump(), values))

    def dump(self) -> str:
        """Return the whole tree as YAML; loading it again gives an equal configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def kind_name(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(kind_name(option) for option in get_args(annotation))
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is list:
        return f"list of {kind_name(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return " to ".join(kind_name(part) for part in get_args(annotation))
    if get_args(annotation):
        return " | ".join(str(option) for option in get_args(annotation))
    return str(annotation.__name__)


def merge(under: Tree, over: Tree) -> Tree:
    """Merge nested dictionaries key by key; anything else in `over` replaces what is in `under`."""
    merged = dict(under)
    for key, value in over.items():
        both_trees = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_trees else value
    return merged


def read_tree(file: Path, named: str = "") -> Tree:
    """Read a YAML file; errors begin with how it was `named`."""
    place = named or f"--config {file}"
    try:
        tree = load_yaml(file.read_text(encoding="utf-8-sig"), place)
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error.strerror}); give a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{place}: expected `key: value` lines, found {type(tree).__name__}")
    return tree


def load_yaml(text: str, place: str) -> Any:
    check_repeats(yaml.compose(text, Loader=yaml.SafeLoader), place)
    return yaml.safe_load(text)


def check_repeats(node: yaml.Node | None, place: str, path: str = "") -> None:
    """Refuse a key that a section contains twice: YAML silently takes the last one."""
    lines: dict[str, int] = {}
    for name, value in node.value if isinstance(node, yaml.MappingNode) else []:
        key, line = f"{path}{name.value}", name.start_mark.line + 1
        if key in lines:
            where = f"is in lines {lines[key]} and {line}" if lines[key] != line else f"is twice in line {line}"
            raise ConfigError(f"{place}: the key {key!r} {where}: delete one of them")
        lines[key] = line
        check_repeats(value, place, f"{key}.")
    for item in node.value if isinstance(node, yaml.SequenceNode) else []:
        check_repeats(item, place, path)


def parse_override(override: str, texts: Collection[str] = ()) -> Tree:
    """Parse `a.b=value`: values are YAML, except for text keys, which take the text unchanged."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"{override!r} is not an override: write section.key=value, e.g. training.ranks=2")
    value: Any = text
    if path not in texts or text == "null":
        with suppress(yaml.YAMLError):
            value = load_yaml(text, override)
    return tree_with(path, value)


def tree_with(path: str, value: Any) -> Tree:
    """Return the tree in which `path`, written with dots, has the value."""
    return reduce(lambda tree, name: {name: tree}, reversed(path.split(".")), value)


def explain(config: type[Config], details: Iterable[Any]) -> str:
    """Name mistakes of a tree, as pydantic lists them, a line each."""
    lines: list[str] = []
    for detail in details:
        path = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            lines += [f"unknown key {key!r}{suggestion(config, key)}" for key in paths_below(path, detail["input"])]
        elif detail["type"] == "missing":
            lines.append(f"{path} is required: set {path}=...")
        elif detail["type"] == "value_error":
            lines.append(f"{path}: {message}" if path else message)
        else:
            lines.append(f"{path}: {message[:1].lower()}{message[1:]} (got {detail['input']!r})")
    return "\n".join(lines)


def paths_below(path: str, value: Any) -> list[str]:
    """List the keys of an unknown section; pydantic names only the section."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [below for name, inner in value.items() for below in paths_below(f"{path}.{name}", inner)]


@cache
def keys_of(config: type[Config]) -> list[str]:
    return [key.path for key in config().leaves()]


def suggestion(config: type[Config], path: str) -> str:
    """Return the end of a message about an unknown key: what it was renamed to, or which key was probably meant."""
    keys = keys_of(config)
    if RENAMED.get(path) in keys:
        return f": it was renamed to {RENAMED[path]!r}"
    found, is_foreign = known_suggestion(path, keys)
    if found is None and not is_foreign and (near := nearest(path, keys)):
        found = Suggestion((near,))
    return f"; {found.text()}" if found else "; `trueline config` lists every key"


def known_suggestion(path: str, keys: list[str]) -> tuple[Suggestion | None, bool]:
    """Return the suggestion for the longest ending that is a key or a foreign name, and whether it is the latter."""
    section, *_ = words = path.split(".")
    for ending in (".".join(words[start:]) for start in range(len(words))):
        for found in FOREIGN_NAMES.get(ending, [Suggestion((ending,))]):
            own = f"{section}.{found.keys[0].rpartition('.')[2]}" if found.keys and not found.sentence else ""
            if own in keys:  # critic.lr means the critic's, not the policy's
                return Suggestion((own,)), True
            if set(found.keys) <= set(keys):
                return found, True
        if ending in FOREIGN_NAMES:
            return None, True
    return None, False


def nearest(path: str, keys: list[str]) -> str | None:
    """Find a key or section with a similar last word: first in the same section, last in another model's."""
    section, _, word = path.rpartition(".")
    near: list[tuple[bool, float, int, str]] = []
    for key in [*keys, *dict.fromkeys(key.rpartition(".")[0] for key in keys if "." in key)]:
        own_section, _, own_word = key.rpartition(".")
        if (score := likeness(word, own_word)) >= NEAR:
            preference = (own_section in POLICY) - (own_section in ROLES)
            near.append((likeness(section, own_section) >= NEAR, score, preference, key))
    return max(near, key=lambda found: found[:3])[3] if near else None


def likeness(one: str, other: str) -> float:
    """Return a similarity from 0 to 1; swapped letters, the most frequent typo, count as similar."""
    swapped = 0.9 if sorted(one) == sorted(other) else 0.0
    return max(swapped, difflib.SequenceMatcher(None, one, other).ratio())
