"""One HTML file that needs nothing else: the runs as JSON, a script that draws them, and a style."""

import base64
import hashlib
import html
from collections.abc import Callable
from pathlib import Path
from string import Template

from trueline.config.base import ConfigError
from trueline.files import PRIVATE_FILE, write_atomically
from trueline.report.digest import as_json, describe
from trueline.report.runs import find_runs, read_run

HERE = Path(__file__).parent
SCRIPTS = ("transcripts.js", "timeline.js", "page.js")  # joined; the last one draws


def write_report(words: list[str], out: Path | None, note: Callable[[str], object] = str) -> Path:
    """Write the page of these runs and return its path; `note` gets what the page lacks."""
    found = find_runs(words)
    names = list(found)
    file = out or Path(f"report-{Path(names[0]).name}.html")
    check_ending(file, "a page", (".html", ".htm"))
    runs = [read_run(name, folder) for name, folder in found.items()]
    for run in runs:
        if not run.rows:
            note(f"warning: {run.name} has logged no step yet: the page shows only its plan and configuration")
    content = as_json(describe(runs))
    write_private(file, page(content, title=", ".join(names)))
    return file


def check_ending(file: Path, what: str, endings: tuple[str, ...]) -> None:
    if file.suffix and file.suffix.lower() not in endings:
        raise ConfigError(f"--out {file}: {what} is not a {file.suffix} file: let the name end in {endings[0]}")


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    try:
        write_atomically(file, content, mode=PRIVATE_FILE)
    except OSError as error:
        raise ConfigError(
            f"--out {file}: cannot be written ({error.strerror}): name a file in a folder that exists and has room"
        ) from error


def page(content: bytes, *, title: str, connects: str = "'none'") -> bytes:
    """Assemble the page around the JSON of `as_json`."""
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
    """Return the hash by which a page's policy allows this text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
