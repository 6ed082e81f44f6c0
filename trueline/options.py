"""Words of the command line: what they may be, and all that are not known reported at once."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trueline.config.base import Config, ConfigError, parse_override, suggestion

KEY = re.compile(r"[\w.][\w.+-]*=")  # how an override begins
NUMBER = re.compile(r"-\d*\.?\d+")  # and no flag
SWITCHES = ("--deep", "--dry-run", "--restart", "--resume")  # which take no value, or need none

Words = list[str]


class Once(argparse.Action):
    """Stores the value of a flag, prints which is replaced by a later one, and refuses two flags of one key."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        given: dict[str, str] = vars(namespace).setdefault("given", {})  # key -> the flag that has set it
        before, flag = vars(namespace).get(self.dest), given.get(self.dest)
        if flag and before != values and flag != option_string:
            parser.error(f"{option_string} {values}: {flag} has set {self.dest}={before} already; give one of the two")
        if flag and before != values:
            sys.stderr.write(f"{flag} {before} does not count, for {flag} {values} stands behind it\n")
        if option_string:
            given[self.dest] = option_string
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """Reports every word of a command that it does not know, with what to write in place of it."""

    respell: Callable[[Words], Words] = staticmethod(lambda words: words)  # before they are parsed

    stray = ""  # what to write in place of a word that is neither a flag nor a key

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", None, Once)

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

    def _mistakes(self, rest: Words, options: argparse.Namespace) -> Words:
        (flags, words), kind = split_words(rest), self.get_default("config_kind")
        if kind is None:
            return [self._without_keys(word) for word in (*flags, *words)]
        lines = [self._unknown_flag(word, kind) for word in flags]
        for word in words:
            try:
                parse_override(word)
            except ConfigError as error:
                about = "{0!r} is neither an option nor key=value: " + self.stray
                lines.append(about.format(word) if self.stray else str(error))
        return lines and [*lines, *unknown_keys(kind, options.config, [word for word in words if KEY.match(word)])]

    def _unknown_flag(self, word: str, kind: type[Config]) -> str:
        said = f"unknown option {word}; keys are written as key=value"
        if near := difflib.get_close_matches(word.partition("=")[0], self._flags(), n=1, cutoff=0.8):
            return f"{said}; did you mean {near[0]!r}?"
        return said + suggestion(kind, word.lstrip("-").partition("=")[0].replace("-", "_"))

    def _without_keys(self, word: str) -> str:
        name, _, value = word.lstrip("-").partition("=")
        what = f"unknown option {word}" if word.startswith("-") else f"unexpected word {word!r}"
        near = difflib.get_close_matches(f"--{name}", self._flags(), n=1, cutoff=0.8)
        guess = f"; did you mean '{near[0]}{f' {value}' * bool(value)}'?" if near else ""
        return f"{what}; {self.prog} takes {', '.join(self._flags()) or 'no options'}, and no keys{guess}"

    def _flags(self) -> Words:
        return re.findall(r"(?<![\w-])--[a-z][\w-]*", self.format_usage())


def split_words(rest: Sequence[str]) -> tuple[Words, Words]:
    """Return unknown flags, and words that belong to none of them; the values behind a flag belong to it."""
    flags: Words = []
    words: Words = []
    for word in rest:
        if word.startswith("-") and not NUMBER.fullmatch(word):
            flags.append(word)
            open_flag = "=" not in word
        elif not flags or not open_flag or KEY.match(word):
            words.append(word)
            open_flag = False
    return flags, words


def unknown_keys(kind: type[Config], files: list[Path], overrides: Words) -> Words:
    """List the keys that a configuration does not have, beside flags that were not known."""
    try:
        kind.parse(kind.asked(files, overrides))
    except ConfigError as error:
        return [line for line in str(error).split("\n") if line.startswith(("unknown key", "--config"))]
    return []


def keys_first(words: Words) -> Words:
    """Move --resume behind the keys that follow it, so that the word behind it is a run or a flag."""
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


def add_config_options(verb: CommandParser, flags: dict[str, str], kind: type[Config]) -> None:
    for flag, key in flags.items():
        about = f"same as {key}=..."
        verb.add_argument(flag, dest=key, metavar=key.rpartition(".")[2].upper(), help=about)
    verb.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="YAML; later files win")
    verb.epilog = "Any key of `trueline config` can be set as key=value, e.g. training.learning_rate=1e-5"
    verb.set_defaults(takes_overrides=True, config_kind=kind)


def given_flags(options: argparse.Namespace, flags: dict[str, str]) -> Words:
    values = vars(options)
    return [f"{key}={values[key]}" for key in dict.fromkeys(flags.values()) if values[key] is not None]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
