"""The strict base of every configuration, and how files and overrides become one validated tree."""

import difflib
import re
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from trueline.config.foreign_names import FOREIGN_NAMES, RENAMED

Tree = dict[str, Any]
TEXT_KINDS = ("str", "str | null")
NEAR = 0.8  # one wrong letter in five
POLICY = ("training", "model", "rollout", "algorithm", "data")  # sections that are meant most often
ROLES = ("reference", "critic", "reward_model", "teacher")  # models beside the policy, which are meant least often


class ConfigError(ValueError):
    """A mistake in what the user asked for; the message alone says what, where and how to mend it."""


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a configuration tree, as `trueline config` shows it."""

    path: str
    kind: str
    default: Any
    meaning: str


class Config(BaseModel):
    """Unknown keys are errors, values are fixed after loading, every field has a line of meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)

    @classmethod
    def load(cls, files: list[Path], overrides: list[str], base: Tree | None = None) -> Self:
        """Load one tree: later files win over earlier ones, `a.b=value` overrides over files, all over `base`."""
        return cls.parse(merge(base or {}, cls.asked(files, overrides)))

    @classmethod
    def asked(cls, files: list[Path], overrides: list[str]) -> Tree:
        """Return what files and overrides set, unchecked."""
        texts = {key.path for key in cls().leaves() if key.kind in TEXT_KINDS}
        tree: Tree = {}
        for more in (*map(read_tree, files), *(parse_override(override, texts) for override in overrides)):
            tree = merge(tree, more)
        return tree

    @classmethod
    def parse(cls, tree: Tree) -> Self:
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(explain(cls, error)) from None

    def leaves(self, prefix: str = "") -> Iterator[Key]:
        """Yield every key with its present value."""
        for name, field in type(self).model_fields.items():
            value = self.__dict__[name]
            if isinstance(value, Config):
                yield from value.leaves(f"{prefix}{name}.")
            else:
                yield Key(prefix + name, kind_name(field.annotation), value, field.description or "")

    def replaced(self, values: Tree) -> Self:
        """Return a copy with some values changed, checked as if it had been loaded so."""
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


def read_tree(file: Path) -> Tree:
    try:
        text = file.read_text(encoding="utf-8-sig")
        check_repeats(yaml.compose(text, Loader=yaml.SafeLoader), f"--config {file}")
        tree = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {file}: cannot be read ({error.strerror}); give a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {file}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {file}: expected `key: value` lines, found {type(tree).__name__}")
    return tree


def check_repeats(node: yaml.Node | None, place: str, path: str = "") -> None:
    """Refuse a key that a section holds twice: YAML would take the last one in silence."""
    lines: dict[str, int] = {}
    for name, value in node.value if isinstance(node, yaml.MappingNode) else []:
        key, line = f"{path}{name.value}", name.start_mark.line + 1
        if key in lines:
            where = f"stands in lines {lines[key]} and {line}" if lines[key] != line else f"stands twice in line {line}"
            raise ConfigError(f"{place}: the key {key!r} {where}: keep one of them")
        lines[key] = line
        check_repeats(value, place, f"{key}.")
    for item in node.value if isinstance(node, yaml.SequenceNode) else []:
        check_repeats(item, place, path)


def parse_override(override: str, texts: Collection[str] = ()) -> Tree:
    """Parse `a.b=value`: values are YAML, but for keys that hold text, which is taken as it stands."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"{override!r} is not an override: write it as section.key=value, e.g. training.ranks=2")
    try:
        value = text if path in texts and text != "null" else read_value(text, path)
    except yaml.YAMLError:
        value = text
    return nested(path, value)


def read_value(text: str, path: str) -> Any:
    check_repeats(yaml.compose(text, Loader=yaml.SafeLoader), f"{path}={text}")
    return yaml.safe_load(text)


def nested(path: str, value: Any) -> Tree:
    """Return the tree in which `path`, written with dots, has the value."""
    *parents, leaf = path.split(".")
    tree: Tree = {leaf: value}
    for name in reversed(parents):
        tree = {name: tree}
    return tree


def explain(config: type[Config], error: ValidationError) -> str:
    return "\n".join(line for detail in error.errors() for line in explain_one(config, detail))


def explain_one(config: type[Config], detail: Any) -> list[str]:
    path = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    if detail["type"] == "extra_forbidden":
        return [f"unknown key {key!r}{suggestion(config, key)}" for key in paths_below(path, detail["input"])]
    return [explain_value(path, detail)]


def paths_below(path: str, value: Any) -> list[str]:
    """List the keys that an unknown section holds; pydantic names the section alone."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [below for name, inner in value.items() for below in paths_below(f"{path}.{name}", inner)]


def explain_value(path: str, detail: Any) -> str:
    if detail["type"] == "missing":
        return f"{path} is required: set {path}=..."
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return message if not path else f"{path}: {message}"
    return f"{path}: {message[:1].lower()}{message[1:]} (got {detail['input']!r})"


@cache
def keys_of(config: type[Config]) -> list[str]:
    return [key.path for key in config().leaves()]


def suggestion(config: type[Config], path: str) -> str:
    keys = keys_of(config)
    if RENAMED.get(path) in keys:
        return f": it was renamed to {RENAMED[path]!r}"
    answer = known_answer(path, keys)
    if answer is None:
        answer = nearest(path, keys)
    if not answer:
        return "; `trueline config` lists every key"
    return f"; {answer}" if " " in answer else f"; did you mean {answer!r}?"


def known_answer(path: str, keys: list[str]) -> str | None:
    """Return what to say of the longest ending that is a key or a foreign name; empty where no key here is meant."""
    section, *_ = words = path.split(".")
    for ending in (".".join(words[start:]) for start in range(len(words))):
        for answer in FOREIGN_NAMES.get(ending, (ending,)):
            own = f"{section}.{answer.rpartition('.')[2]}"  # critic.lr asks for the critic's, not the policy's
            if own in keys or set(keys_named(answer)) <= set(keys):
                return own if own in keys else answer
        if ending in FOREIGN_NAMES:
            return ""
    return None


def keys_named(answer: str) -> list[str]:
    return re.findall(r"`([\w.]+)", answer) if " " in answer else [answer]


def nearest(path: str, keys: list[str]) -> str | None:
    """Find a key or section with almost the same last word: best in the same section, last in another model's."""
    section, _, word = path.rpartition(".")
    near: list[tuple[bool, float, int, str]] = []
    for key in [*keys, *dict.fromkeys(key.rpartition(".")[0] for key in keys if "." in key)]:
        own_section, _, own_word = key.rpartition(".")
        if (score := likeness(word, own_word)) >= NEAR:
            preference = (own_section in POLICY) - (own_section in ROLES)
            near.append((likeness(section, own_section) >= NEAR, score, preference, key))
    return max(near, key=lambda found: found[:3])[3] if near else None


def likeness(one: str, other: str) -> float:
    """Compare from 0 to 1; the same letters in another order, the commonest slip, are much alike."""
    swapped = 0.9 if sorted(one) == sorted(other) else 0.0
    return max(swapped, difflib.SequenceMatcher(None, one, other).ratio())
