"""One HTML file that needs nothing else: the runs as JSON, a script that draws them, and a style."""

import base64
import hashlib
import html
import os
from collections.abc import Callable
from pathlib import Path
from string import Template

from trueline.config.base import ConfigError
from trueline.monitoring.run_folder import UNFINISHED
from trueline.report.digest import as_json, describe
from trueline.report.runs import find_runs, read_run

HERE = Path(__file__).parent
SCRIPTS = ("transcripts.js", "timeline.js", "page.js")  # joined; the last one draws
PRIVATE_FILE = 0o600  # as the folders of runs are: transcripts are for who made them


def write_report(words: list[str], out: Path | None, note: Callable[[str], object] = str) -> Path:
    """Write the page of these runs and return its place; `note` is given what the page will lack."""
    found = find_runs(words)
    names = list(found)
    file = out or Path(f"report-{Path(names[0]).name}.html")
    check_ending(file, "a page", (".html", ".htm"))
    runs = [read_run(name, folder) for name, folder in found.items()]
    for run in runs:
        if not run.rows:
            note(f"warning: {run.name} has logged no step yet: the page shows its plan and configuration alone")
    content = as_json(describe(runs))
    write_private(file, page(content, title=", ".join(names)))
    return file


def check_ending(file: Path, what: str, endings: tuple[str, ...]) -> None:
    if file.suffix and file.suffix.lower() not in endings:
        raise ConfigError(f"--out {file}: {what} is no {file.suffix} file: let its name end in {endings[0]}")


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    aside = file.with_name(file.name + UNFINISHED)
    try:
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as stream:
            stream.write(content)
        aside.rename(file)
    except OSError as error:
        raise ConfigError(
            f"--out {file}: cannot be written ({error.strerror}): name a file in a folder that exists and has room"
        ) from error


def page(content: bytes, *, title: str, connects: str = "'none'") -> bytes:
    """Put the page together around what `as_json` has written."""
    script, style = b"".join((HERE / name).read_bytes() for name in SCRIPTS), (HERE / "page.css").read_bytes()
    policy = (
        f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; connect-src {connects}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = Template((HERE / "page.html").read_text()).substitute(policy=policy, title=html.escape(title))
    parts = [
        head.encode(errors="replace"),
        b"<style>" + style + b"</style>",
        b'<script type="application/json" id="data">' + content + b"</script>",
        b"<script>" + script + b"</script>",
    ]
    return b"\n".join(parts) + b"\n"


def source(text: bytes) -> str:
    """Return the name by which a page's policy allows this text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
