"""A failed reward call as a file: written by a run, and called again without any protection.

`python -m trueline.rewards.replay FILE` shows the traceback or the number, and can be run under a debugger.
"""

import json
import re
import sys
from pathlib import Path

from trueline.config.reward import RewardPartConfig
from trueline.rewards.base import Call
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS
from trueline.rewards.scoring import call_function, reward_of
from trueline.usercode.failures import NoSuchFunction
from trueline.usercode.loading import load_function


def write_failure(file: Path, part: RewardPartConfig | None, call: Call, error: str) -> None:
    """Write only what a repeated call needs. Without a part, the episode failed before any reward was called."""
    reward = part.model_dump(include={"function", "pattern", "options"}) if part is not None else {"episode": "failed"}
    without_password = re.sub(r"(https?://)[^/\s@]+@", r"\1", error)
    record = {**reward, "call": call, "error": without_password}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2, default=str) + "\n")


def replay(file: Path) -> float:
    """Call the function again, and return its reward or raise what it raises."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NoSuchFunction(f"not a file of a failed call ({error}): name one below runs/NAME/failures") from None
    if "episode" in record:
        raise NoSuchFunction(
            "the environment, tool or agent failed before any reward was called, and an episode cannot be replayed "
            "without a model. The file has its prompt and its error; to see it again, run `trueline eval` with that "
            "environment and model, runtime=local and evaluation.limit=1"
        )
    part = RewardPartConfig(**{key: record[key] for key in ("function", "pattern", "options")})
    if (kind := kind_of(part)) != "function":
        raise NoSuchFunction(f"{part.function} is a {kind}, and only functions can be replayed")
    try:
        (value,) = call_function(load_function(part.function, REWARDS), [record["call"]], part.constants())
    except SystemExit as leaving:
        raise RuntimeError(f"the function called sys.exit({leaving.code!r})") from leaving
    return reward_of(value)


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
