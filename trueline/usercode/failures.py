"""What can go wrong with user code: raised in its process, sent over the line, and raised again in the run."""

import inspect
import traceback
from pathlib import Path

LONGEST_ERROR = 20_000  # characters
PACKAGE = Path(__file__).parents[1]
CALLERS = (  # where files begin that call user code
    *(str(PACKAGE / name) for name in ("usercode/", "rewards/scoring.py", "environments/tools/toolbox.py")),
    *(str(PACKAGE / f"environments/{name}.py") for name in ("hosted", "openenv", "verifiers")),
    *(str(Path(inspect.__file__).parent / name) for name in ("asyncio", "concurrent", "importlib")),
    "<frozen importlib",
)


class PolicyError(Exception):
    """User code raises it where the completion itself is at fault: a reward is then reward.policy_error, and counted.

    A tool's text goes to the policy.
    """


class NoSuchFunction(ValueError):
    """A specification names nothing that can be used. The message says why, so there is no traceback."""


class ToolRaised(Exception):
    """A user's tool raised an exception; the policy gets its text."""


class UserCodeFailure(RuntimeError):
    """An environment, tool, agent or reward function failed. It is never turned into a number."""

    def __init__(self, reason: str, subject: str = "", *, log: str = "") -> None:
        self.reason, self.subject = reason, subject  # the subject is a key and its value
        self.detail = f"{reason} (see {log})" if log else reason
        super().__init__(f"{subject}: {self.detail}" if subject else self.detail)


class WrongResult(UserCodeFailure):
    """User code returned a value that no environment or agent may return."""


class ProgramEnded(UserCodeFailure):
    """An agent's command, or the process of user code, ended by itself."""


class CallTimeout(UserCodeFailure):
    """A call took longer than its deadline, and its process was killed."""


class ProcessLost(UserCodeFailure):
    """The process was killed because of another episode; this one may start again.

    A suspect is one of several that were at work there, any of which may be at fault: it has to start alone.
    """

    def __init__(self, reason: str, subject: str = "", *, suspect: bool = False) -> None:
        super().__init__(reason, subject)
        self.suspect = suspect


def explain(error: BaseException) -> str:
    """Return the traceback from where the user's own lines begin."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith(CALLERS):
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place))[-LONGEST_ERROR:].rstrip()
