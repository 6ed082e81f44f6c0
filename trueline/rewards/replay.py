"""A reward call that failed, as a file: written when a run stops, and run again without any protection.

`python -m trueline.rewards.replay FILE` shows the traceback or the number, and can be run under a debugger.
"""

import json
import re
import sys
from pathlib import Path

from trueline.algorithms.user_functions import NoSuchFunction, load_function
from trueline.config.reward import RewardPartConfig
from trueline.rewards.base import Call
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS
from trueline.rewards.process import ask, checked


def write_failure(file: Path, part: RewardPartConfig, call: Call, error: str) -> None:
    """Write what it takes to make the call again, and no more: neither tokens nor environment."""
    record = {
        "function": part.function,
        "pattern": part.pattern,
        "options": part.options,
        "call": call,
        "error": without_password(error),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2, default=str) + "\n")


def without_password(text: str) -> str:
    return re.sub(r"(https?://)[^/\s@]+@", r"\1", text)


def replay(file: Path) -> float:
    """Make the call again and return its reward; whatever the function raises is raised."""
    record = json.loads(file.read_text())
    part = RewardPartConfig(**{key: record[key] for key in ("function", "pattern", "options")})
    if (kind := kind_of(part)) != "function":
        raise NoSuchFunction(f"{part.function} is a {kind}, and only functions can be replayed")
    try:
        (value,) = ask(load_function(part.function, REWARDS), [record["call"]], part.constants())
    except SystemExit as leaving:
        raise RuntimeError(f"the function called sys.exit({leaving.code!r})") from leaving
    return checked(value)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        sys.exit("usage: python -m trueline.rewards.replay FILE")
    try:
        sys.stdout.write(f"{replay(Path(arguments[0]))}\n")
    except NoSuchFunction as error:
        sys.exit(f"{arguments[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
