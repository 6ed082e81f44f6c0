"""The script that completes verbs, flags and keys in bash, written from the parsers of the command line."""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NoReturn

from trueline.config.base import keys_of
from trueline.options import CommandParser, Words
from trueline.verbs import VERBS

# The words before the cursor lead from command to command. Behind `=`, and behind a flag that takes a value, there
# are no words, and bash offers files.
SCRIPT = r"""# Completes trueline in bash 4 and newer: source <(trueline --print-completion bash)
%(keys)s
_trueline_words() {
    case "$1" in
%(commands)s
        *) return 1 ;;
    esac
}
_trueline() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command=trueline words word
    COMPREPLY=()
    if [[ $current == = || $before == = ]]; then return; fi
    if [[ $before == --* && " %(switches)s " != *" $before "* ]]; then return; fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if _trueline_words "$command $word"; then command="$command $word"; fi
    done
    _trueline_words "$command"
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    if [[ ${COMPREPLY[*]} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _trueline trueline
"""


class PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any, **more: Any) -> NoReturn:
        assert isinstance(parser, CommandParser)
        sys.stdout.write(bash_script(parser))
        parser.exit()


def bash_script(parser: CommandParser) -> str:
    parsers = list(commands(parser))
    kinds = {one.kind.__name__: one.kind for one in parsers if one.kind is not None}
    keys = [f"_trueline_{name}='{' '.join(f'{key}=' for key in keys_of(kind))}'" for name, kind in kinds.items()]
    rows = sorted((" ".join(words_of(one)), one.prog) for one in parsers)
    cases = [
        (words, "|".join(f"'{prog}'" for _, prog in group)) for words, group in groupby(rows, key=lambda row: row[0])
    ]
    lines = [f'        {progs}) words="{words}" ;;' for words, progs in cases]
    switches = {flag for one in parsers for action in one._actions if action.nargs == 0 for flag in flags_of(action)}
    return SCRIPT % {"keys": "\n".join(keys), "commands": "\n".join(lines), "switches": " ".join(sorted(switches))}


def commands(parser: CommandParser) -> Iterator[CommandParser]:
    yield parser
    for inner in verbs_of(parser).values():
        yield from commands(inner)


def verbs_of(parser: CommandParser) -> dict[str, CommandParser]:
    tables = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: inner for table in tables for name, inner in table.items()}


def words_of(parser: CommandParser) -> Words:
    """Return what may follow a command: its verbs, its flags, and the variable with its keys."""
    named = [str(one.metavar) for one in parser._actions if not one.option_strings and not one.choices]
    takes_verb = any(name.startswith("VERB") for name in named)
    flags = [flag for action in parser._actions for flag in flags_of(action)]
    keys = [] if parser.kind is None else [f"$_trueline_{parser.kind.__name__}"]
    return [*verbs_of(parser), *(VERBS if takes_verb else ()), *flags, *keys]


def flags_of(action: argparse.Action) -> Words:
    return [flag for flag in action.option_strings if flag.startswith("--")]
