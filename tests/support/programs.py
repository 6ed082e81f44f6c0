"""Programs that tests start and listen to."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], *, start_new_session: bool = False
) -> subprocess.Popen[str]:
    """Start a program whose output and errors come as one text."""
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=start_new_session,
    )
