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


def write_failure(file: Path, part: RewardPartConfig | None, call: Call, error: str) -> None:
    """Write what it takes to make the call again, and no more: neither tokens nor environment.

    Without a part the episode failed before any reward was asked for.
    """
    asked = part.model_dump(include={"function", "pattern", "options"}) if part is not None else {"episode": "failed"}
    record = {**asked, "call": call, "error": without_password(error)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2, default=str) + "\n")


def without_password(text: str) -> str:
    return re.sub(r"(https?://)[^/\s@]+@", r"\1", text)


def replay(file: Path) -> float:
    """Make the call again and return its reward; whatever the function raises is raised."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NoSuchFunction(f"not a file of a failed call ({error}): name one below runs/NAME/failures") from None
    if "episode" in record:
        raise NoSuchFunction(
            "the environment, tool or agent failed before any reward was asked for, and an episode cannot be replayed "
            "alone, for a model has to reply in it. The file holds its prompt and its error; to see it again, run "
            "`trueline eval` with that environment and model, runtime=local and evaluation.limit=1"
        )
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
        sys.stderr.write(f"error: {arguments[0]}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
