"""How the command line is read: flags, keys, help texts, and every unknown word reported at once."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trueline.config.base import Config, ConfigError, Key, Tree, explain, parse_override, suggestion

KEY = re.compile(r"[\w.][\w.+-]*=")  # how an override begins
NUMBER = re.compile(r"-\d*\.?\d+")  # not a flag
SWITCHES = ("--deep", "--dry-run", "--restart", "--resume")  # which take no value, or need none

Words = list[str]


class StoreOnce(argparse.Action):
    """Stores the value of a flag, reports a value that a later one replaces, and refuses two flags for one key."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        flags: dict[str, str] = vars(namespace).setdefault("flags", {})  # key -> the flag that has set it
        before, flag = vars(namespace).get(self.dest), flags.get(self.dest)
        if flag and before != values and flag != option_string:
            parser.error(f"{option_string} {values}: {flag} already sets {self.dest}={before}; give only one of them")
        if flag and before != values:
            sys.stderr.write(f"{flag} {before} is ignored: {flag} {values} follows it\n")
        if option_string:
            flags[self.dest] = option_string
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """Reports every unknown word of a command, each with a suggestion."""

    respell: Callable[[Words], Words] = staticmethod(lambda words: words)  # before they are parsed
    stray = ""  # what to write instead of a word that is neither a flag nor a key
    kind: type[Config] | None = None  # of the keys that it takes
    defaults: Tree = {}  # of these keys, where a verb has its own
    common_keys: Sequence[str] = ()  # listed in the help
    example = ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.register("action", None, StoreOnce)

    def add_config_options(self, flags: dict[str, str], kind: type[Config]) -> None:
        for flag, key in flags.items():
            self.add_argument(flag, dest=key, metavar=key.rpartition(".")[2].upper())
        files = "YAML file with keys; may be repeated, later files win"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help=files)
        self.kind = kind
        self.set_defaults(takes_overrides=True)

    def parse_known_args(  # type: ignore[override]  # which has an overload for namespaces of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, Words]:
        words = list(sys.argv[1:] if args is None else args)
        options, rest = super().parse_known_args(self.respell(words), namespace)
        if self.get_default("run") is not None and (lines := self._mistakes(rest, options)):
            self.error("\n".join(lines))
        return options, rest

    def error(self, message: str) -> Any:
        """Leave out the usage of a verb, which is longer than the error."""
        usage = f"usage: {self.prog} ... (-h lists its options)" if self.get_default("run") else self.format_usage()
        self.exit(2, f"{usage.rstrip()}\n{self.prog}: error: {message}\n")

    def format_help(self) -> str:
        """Add what the keys mean, and an example. Only help needs this, and it takes longer than parsing."""
        keys = {key.path: key for key in self.kind.parse(self.defaults).leaves()} if self.kind else {}
        for action in self._actions:
            if action.help is None and action.dest in keys:
                action.help = f"{keys[action.dest].meaning.rstrip('.').replace('%', '%%')} (key {action.dest})"
        common = [f"  {key}={default_text(keys[key])}\n      {keys[key].meaning}\n" for key in self.common_keys]
        title = f"keys, written as key=value (`trueline config {self.prog.split()[-1]}` lists all):\n"
        listing = [title, *common, "\n"] if common else []
        self.epilog = "".join([*listing, f"example:\n  {self.example}"]) if self.example else self.epilog
        return super().format_help()

    def _mistakes(self, rest: Words, options: argparse.Namespace) -> Words:
        flags, words = split_words(rest)
        if self.kind is None:
            return [self._without_keys(word) for word in (*flags, *words)]
        lines = [self._unknown_flag(word, self.kind) for word in flags]
        for word in words:
            try:
                parse_override(word)
            except ConfigError as error:
                about = "{0!r} is neither an option nor key=value: " + self.stray
                lines.append(about.format(word) if self.stray else str(error))
        return lines and [*lines, *unknown_keys(self.kind, options.config, [word for word in words if KEY.match(word)])]

    def _unknown_flag(self, word: str, kind: type[Config]) -> str:
        unknown = f"unknown option {word}; keys are written as key=value"
        if near := difflib.get_close_matches(word.partition("=")[0], self._flags(), n=1, cutoff=0.8):
            return f"{unknown}; did you mean {near[0]!r}?"
        return unknown + suggestion(kind, word.lstrip("-").partition("=")[0].replace("-", "_"))

    def _without_keys(self, word: str) -> str:
        name, _, value = word.lstrip("-").partition("=")
        what = f"unknown option {word}" if word.startswith("-") else f"unexpected word {word!r}"
        near = difflib.get_close_matches(f"--{name}", self._flags(), n=1, cutoff=0.8)
        guess = f"; did you mean '{near[0]}{f' {value}' * bool(value)}'?" if near else ""
        return f"{what}; {self.prog} takes {', '.join(self._flags()) or 'no options'}, and no keys{guess}"

    def _flags(self) -> Words:
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        return [flag for flag in flags if flag != "--help"]


def default_text(key: Key) -> str:
    """Return a default as an override writes it."""
    return key.default if isinstance(key.default, str) else json.dumps(key.default)


def split_words(rest: Sequence[str]) -> tuple[Words, Words]:
    """Return unknown flags, and words that belong to none of them; the values behind a flag belong to it."""
    flags, words = Words(), Words()
    for word in rest:
        if word.startswith("-") and not NUMBER.fullmatch(word):
            flags.append(word)
            open_flag = "=" not in word
        elif not flags or not open_flag or KEY.match(word):
            words.append(word)
            open_flag = False
    return flags, words


def unknown_keys(kind: type[Config], files: list[Path], overrides: Words) -> Words:
    """List files that cannot be read and keys that do not exist, to report them together with unknown flags."""
    try:
        kind.model_validate(kind.merge_sources(files, overrides))
    except ValidationError as error:
        unknown = [detail for detail in error.errors() if detail["type"] == "extra_forbidden"]
        return [explain(kind, unknown)] if unknown else []
    except ConfigError as error:
        return [str(error)]
    return []


def keys_first(words: Words) -> Words:
    """Move --resume behind the keys that follow it, so that the next word is a run or a flag."""
    words = list(words)
    for at in range(len(words) - 1):
        if words[at] == "--resume" and KEY.match(words[at + 1]):
            words[at : at + 2] = words[at + 1], words[at]
    return words


def verb_first(words: Words, verbs: Collection[str], flag: str = "", default: str = "") -> Words:
    """Put the verb of a run in front: a verb that is no flag's value, the value of `flag`, or the default."""
    words = list(words)
    if flag in words[:-1]:
        at = words.index(flag)
        return [words[at + 1], *words[:at], *words[at + 2 :]]
    if named := [word for word in words if flag and word.startswith(f"{flag}=")]:
        words.remove(named[0])
        return [named[0].removeprefix(f"{flag}="), *words]
    befores = zip(["", *words], words, strict=False)
    free = [not before.startswith("-") or "=" in before or before in SWITCHES for before, _ in befores]
    bare = [at for at, word in enumerate(words) if free[at] and not word.startswith("-") and not KEY.match(word)]
    if found := [at for at in bare if words[at] in verbs] or bare:
        return [words.pop(found[0]), *words]
    return [default, *words] if default and not {"-h", "--help"} & set(words) else words


def given_keys(options: argparse.Namespace, flags: dict[str, str]) -> Words:
    """Return the keys that flags set, and those that are given as such."""
    values = vars(options)
    keys = [f"{key}={values[key]}" for key in dict.fromkeys(flags.values()) if values[key] is not None]
    return [*keys, *options.overrides]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
