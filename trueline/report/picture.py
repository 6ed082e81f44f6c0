"""Curves of runs as one SVG file, read and smoothed as on the page."""

import difflib
from itertools import product
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.monitoring.curves import Point, smooth, svg_curve
from trueline.monitoring.metrics import CHARTS
from trueline.report.digest import usual_mean
from trueline.report.page import check_ending, write_private
from trueline.report.runs import ReportedRun, find_runs, is_number, read_run


def write_picture(words: list[str], metrics: list[str], out: Path | None, mean: int | None) -> Path:
    """Draw these metrics of these runs and return the file."""
    runs = [read_run(name, folder) for name, folder in find_runs(words).items()]
    metrics = [metric.strip() for metric in metrics if metric.strip()]
    if not metrics:
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
            raise ConfigError(unknown_metric(metric, runs))
    several = len(runs) > 1, len(metrics) > 1 or len(runs) == 1
    kept = {key: found for key, found in points.items() if found}
    return {
        ", ".join(word for word, told in zip(key, several, strict=True) if told): found for key, found in kept.items()
    }


def curve(run: ReportedRun, metric: str, mean: int) -> list[Point]:
    """Return means over `mean` steps; of fewer values, if not every step has one."""
    points = [(row["step"], row[metric]) for row in run.rows if is_number(row.get(metric))]
    return smooth(points, max(round(mean * len(points) / max(len(run.rows), 1)), 1))


def unknown_metric(metric: str, runs: list[ReportedRun]) -> str:
    if not any(run.rows for run in runs):
        return f"--svg {metric}: {', '.join(run.name for run in runs)} has logged no step yet: wait for one"
    known = known_metrics(runs)
    near = difflib.get_close_matches(metric, known, n=1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return f"--svg {metric}: no run has this metric{guess}; there are {', '.join(known)}"


def known_metrics(runs: list[ReportedRun]) -> list[str]:
    names = {name for run in runs for row in run.rows for name, value in row.items() if is_number(value)}
    return sorted(names - {"step"})
