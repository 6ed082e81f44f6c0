"""A report as one file: an HTML page that needs nothing else, or curves as an SVG, read and smoothed as on the page."""

import base64
import difflib
import hashlib
import html
from collections.abc import Callable
from itertools import compress, product
from pathlib import Path
from string import Template

from trueline.config.base import ConfigError
from trueline.files import PRIVATE_FILE, write_atomically
from trueline.monitoring.metrics import CHARTS
from trueline.monitoring.run_folder import RunFolder
from trueline.report.curves import Point, smooth, svg_curve
from trueline.report.digest import as_json, describe, usual_mean
from trueline.report.runs import ReportedRun, is_number

HERE = Path(__file__).parent
SCRIPTS = ("values.js", "vendor/uPlot.iife.min.js", "timeline.js", "transcripts.js", "charts.js", "page.js")
STYLES = ("vendor/uPlot.min.css", "page.css")  # joined, as the scripts are; the last script draws


def write_report(folders: dict[str, RunFolder], out: Path | None, note: Callable[[str], object] = str) -> Path:
    """Write the page of these runs and return its path; `note` gets what the page lacks."""
    file = out or Path(f"report-{Path(next(iter(folders))).name}.html")
    check_ending(file, "a page", (".html", ".htm"))
    runs = [ReportedRun(name, folder).read() for name, folder in folders.items()]
    for run in runs:
        if not run.rows:
            note(f"warning: {run.name} has logged no step yet: the page shows only its plan and configuration")
    write_private(file, page(as_json(describe(runs)), title=", ".join(folders)))
    return file


def check_ending(file: Path, what: str, endings: tuple[str, ...]) -> None:
    if file.suffix and file.suffix.lower() not in endings:
        raise ConfigError(f"--out {file}: {what} is not a {file.suffix} file: let the name end in {endings[0]}")


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    try:
        write_atomically(file, content, mode=PRIVATE_FILE)
    except OSError as error:
        remedy = "name a file in a folder that exists and has room"
        raise ConfigError(f"--out {file}: cannot be written ({error.strerror}): {remedy}") from error


def page(content: bytes, *, title: str, connects: str = "'none'") -> bytes:
    script, style = (b"\n".join((HERE / name).read_bytes() for name in names) for names in (SCRIPTS, STYLES))
    policy = (
        f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; connect-src {connects}; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = Template((HERE / "page.html").read_text()).substitute(policy=policy, title=html.escape(title))
    data = b'<script type="application/json" id="data">' + content + b"</script>"
    parts = [head.encode(errors="replace"), b"<style>" + style + b"</style>", data, b"<script>" + script + b"</script>"]
    return b"\n".join(parts) + b"\n"


def source(text: bytes) -> str:
    """Return the hash by which a page's policy allows this text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def write_picture(folders: dict[str, RunFolder], words: str, out: Path | None, mean: int | None) -> Path:
    """Draw the metrics that the words name, with commas between them, and return the file."""
    runs = [ReportedRun(name, folder).read() for name, folder in folders.items()]
    if not (metrics := [metric.strip() for metric in words.split(",") if metric.strip()]):
        raise ConfigError(f"--svg names no metric; there are {', '.join(known_metrics(runs)) or 'none yet'}")
    series = series_of(runs, metrics, usual_mean(runs) if mean is None else mean)
    title = ", ".join(run.name for run in runs) if len(metrics) > 1 else CHARTS.get(metrics[0], metrics[0])
    file = out or Path(f"report-{Path(runs[0].name).name}.svg")
    check_ending(file, "a picture of curves", (".svg",))
    write_private(file, svg_curve(series, title).encode())
    return file


def series_of(runs: list[ReportedRun], metrics: list[str], mean: int) -> dict[str, list[Point]]:
    """Return a curve for each metric of each run that has it, by a unique name."""
    points = {(run.name, metric): curve(run, metric, mean) for run, metric in product(runs, metrics)}
    for metric in metrics:
        if not any(points[run.name, metric] for run in runs):
            names, known = ", ".join(run.name for run in runs), known_metrics(runs)
            near = difflib.get_close_matches(metric, known, n=1)
            guess = f" (did you mean {near[0]!r}?)" if near else ""
            unknown = f"no run has this metric{guess}; there are {', '.join(known)}"
            early = f"{names} has logged no step yet: wait for one"
            raise ConfigError(f"--svg {metric}: {unknown if any(run.rows for run in runs) else early}")
    named = [len(runs) > 1, len(metrics) > 1 or len(runs) == 1]
    return {", ".join(compress(key, named)): found for key, found in points.items() if found}


def curve(run: ReportedRun, metric: str, mean: int) -> list[Point]:
    """Return means over `mean` steps; of fewer values, if not every step has one."""
    points = [(row["step"], row[metric]) for row in run.rows if is_number(row.get(metric))]
    return smooth(points, max(round(mean * len(points) / max(len(run.rows), 1)), 1))


def known_metrics(runs: list[ReportedRun]) -> list[str]:
    names = {name for run in runs for row in run.rows for name, value in row.items() if is_number(value)}
    return sorted(names - {"step"})
