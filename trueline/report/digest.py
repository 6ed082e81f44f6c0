"""The content of a page: every metric, some transcripts, and sums of the rest, in a bounded size."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from trueline.files import Row
from trueline.monitoring.findings import HEALTH_LEVELS
from trueline.monitoring.metrics import CHARTS, better
from trueline.monitoring.timing import duration
from trueline.monitoring.transcripts import NUMBERS
from trueline.report.curves import COLOURS, bounds
from trueline.report.runs import ReportedRun, Transcript, is_number, pick_evenly, round_short

LAST = {"reward/mean": "reward", "evaluation/reward": "held-out", "loss": "loss"}  # shown in a run's header
LEVEL, SECONDS, TOKENS = "health/level", "axis/seconds", "axis/tokens"
LONG, MEAN = 150, 10  # steps from which on curves show means, and of so many
METRIC_BYTES, TRANSCRIPT_BYTES, EVENT_BYTES = 2_200_000, 2_000_000, 400_000  # of all runs together
PAGE_BYTES = 4_800_000  # of all that; tokens of transcripts get what is left
PICTURE_BYTES = 2_000_000  # of all runs together, besides
MOST_FINDINGS, MOST_PICTURES = 200, 200  # of one run
MOST_ROWS, MOST_TRANSCRIPTS = 4000, 300  # of all runs together; of one
HEAD, TAIL = 1400, 600  # characters that are shown of a longer text
MOST_TURNS, FEWEST_TURNS = 40, 8  # of a conversation that stands alone, and of one among many
BINS = 20
MOST_STEPS = 20  # in a row, that are shown at once
MOST_POINTS, MOST_PROCESSES = 200, 16  # of the memory


def describe(runs: list[ReportedRun]) -> Row:
    rewards = [one.reward for run in runs for one in run.transcripts if one.reward is not None]
    low, high = bounds(rewards or [0.0])
    shared: Row = {"charts": CHARTS, "colours": COLOURS, "levels": HEALTH_LEVELS}
    shown = [describe_run(run, len(runs), (low, high)) for run in runs]
    names = dict.fromkeys(name for run in shown for name in run["summary"])
    shared |= {"bins": [low, high], "mean": usual_mean(runs), "better": {name: better(name) for name in names}}
    return shared | {"runs": shown}


def usual_mean(runs: list[ReportedRun]) -> int:
    """Return the default number of steps over which curves are averaged."""
    return MEAN if any(len(run.rows) > LONG for run in runs) else 1


def describe_run(run: ReportedRun, runs: int, span: tuple[float, float]) -> Row:
    rows = with_axes(run.rows)
    numbers = summary(run.rows)
    room = METRIC_BYTES // runs - len(as_json(numbers))
    chosen = fit_bytes(
        lambda count: choose_transcripts(run.transcripts, count),
        MOST_TRANSCRIPTS,
        TRANSCRIPT_BYTES // runs,
        lambda chosen: without_tokens(run.texts(chosen)),
    )
    shown = {
        "name": run.name,
        "verb": run.verb,
        "facts": facts(run, rows),
        "health": health(rows),
        "rows": len(rows),
        "summary": numbers,
        "series": fit_bytes(lambda count: to_columns(thin_rows(rows, count)), MOST_ROWS // runs, room),
        "timeline": fit_bytes(lambda count: timeline(run.events, count), MOST_STEPS, EVENT_BYTES // runs),
        "memory": memory(run.events),
        "histograms": histograms(run.transcripts, *span),
        "transcripts": without_tokens(run.texts(chosen)),
        "starts": [one.start for one in chosen],
        "lengths": [written_length(row) for row in run.texts(chosen)],
        "transcript_count": len(run.transcripts),
        "failures": shorten(run.failures),
        "ledger": ledger(run.ledger),
        "plan": run.plan,
        "verified": run.verified,
        "findings": shorten(run.findings[-MOST_FINDINGS:], MOST_FINDINGS),
        "config": shorten(run.config),
    }
    tokens = choose_tokens(run.texts(chosen), PAGE_BYTES // runs - len(as_json(shown)))
    return shown | {"tokens": tokens, "pictures": choose_pictures(run, shown["transcripts"], PICTURE_BYTES // runs)}


def as_json(content: Any) -> bytes:
    """Write JSON for a page: no text ends the HTML element around it, and half a character becomes unknown."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def fit_bytes(
    make: Callable[[int], Any], count: int, most_bytes: int, written: Callable[[Any], Any] = lambda made: made
) -> Any:
    """Make something of `count` items, or of half as many and so on, until its JSON is small enough."""
    while len(as_json(written(made := make(count)))) > most_bytes and count:
        count //= 2
    return made


def number(row: Row, key: str) -> float:
    return row[key] if is_number(row.get(key)) else 0.0


def facts(run: ReportedRun, rows: list[Row]) -> dict[str, str]:
    """Return the header of a run: its progress and its last numbers."""
    if not rows:
        return {"steps": f"none yet of {run.config.get('steps', 'an unknown number')}"}
    planned = f" of {run.config['steps']}" if "steps" in run.config else ""
    found = {"steps": f"{rows[-1]['step']}{planned}", "time": duration(rows[-1][SECONDS])}
    for key, name in LAST.items():
        values = [row[key] for row in rows if is_number(row.get(key))]
        found |= {name: f"{values[-1]:.4g}"} if values else {}
    return found


def health(rows: list[Row]) -> Row | None:
    """Return the last level with the rules behind it, and the count of each level; None for unchecked runs."""
    if not (checked := [row for row in rows if row.get(LEVEL) in range(len(HEALTH_LEVELS))]):
        return None
    last, counts = checked[-1], Counter(int(row[LEVEL]) for row in checked)
    rules = [key.partition("/")[2] for key in last if key.startswith("health/") and key != LEVEL and number(last, key)]
    return {"level": int(last[LEVEL]), "rules": rules, "counts": [counts[level] for level in range(len(HEALTH_LEVELS))]}


def with_axes(rows: list[Row]) -> list[Row]:
    """Add to each row the seconds and tokens up to it."""
    seconds = accumulate(number(row, "time/step") for row in rows)
    tokens = accumulate(tokens_of(row) for row in rows)
    return [{**row, SECONDS: second, TOKENS: token} for row, second, token in zip(rows, seconds, tokens, strict=True)]


def tokens_of(row: Row) -> float:
    return number(row, "speed/tokens") or number(row, "speed/tokens_per_second") * number(row, "time/step")


def to_columns(rows: list[Row]) -> dict[str, list[float | None]]:
    """Turn rows into one list per metric; None where a row has no such number."""
    ordered = [max(rows, key=len), *rows] if rows else []  # a whole step names the phases in their order
    names = dict.fromkeys(name for row in ordered for name, value in row.items() if is_number(value))
    return {name: [round_short(row.get(name)) for row in rows] for name in names}


def summary(rows: list[Row]) -> dict[str, list[float | None]]:
    """Return the last, lowest and highest value of each metric over all rows, each followed by its step."""
    found: dict[str, tuple[tuple[float, int], ...]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and is_number(value):
                now = (value, row["step"])
                _, low, high = found.get(name, (now, now, now))
                found[name] = (now, now if value < low[0] else low, now if value > high[0] else high)
    return {name: [part for value, step in ends for part in (round_short(value), step)] for name, ends in found.items()}


def thin_rows(rows: list[Row], count: int) -> list[Row]:
    """Drop rows evenly; keep those with an evaluation or a warning, as long as they are few."""
    if len(rows) <= count:
        return rows
    marked = [row for row in rows if number(row, LEVEL) or any(key.startswith("evaluation/") for key in row)]
    kept = pick_evenly(marked, count // 2)
    steps = {row["step"] for row in marked}
    kept += pick_evenly([row for row in rows if row["step"] not in steps], count - len(kept))
    return sorted(kept, key=lambda row: row["step"])


def choose_transcripts(entries: list[Transcript], count: int) -> list[Transcript]:
    """Choose whole groups evenly over the steps, with as many transcripts of each purpose if there are."""
    purposes: dict[str, list[Transcript]] = {}
    for one in entries:
        purposes.setdefault(one.purpose, []).append(one)
    kept: list[Transcript] = []
    for others, same in zip(range(len(purposes), 0, -1), sorted(purposes.values(), key=len), strict=True):
        kept += choose_groups(same, max((count - len(kept)) // others, 1))
    return sorted(kept, key=lambda one: one.step)


def choose_groups(entries: list[Transcript], count: int) -> list[Transcript]:
    """Choose groups evenly, of `count` transcripts in all; a part of one that is larger than that."""
    groups: dict[Any, list[Transcript]] = {}
    for one in entries:
        groups.setdefault(one.start if one.group is None else (one.step, one.group), []).append(one)
    number = max(count * len(groups) // len(entries), 1)
    while number > 1 and sum(map(len, pick_evenly(list(groups.values()), number))) > count:
        number -= 1
    return [one for group in pick_evenly(list(groups.values()), number) for one in group][:count]


def without_tokens(rows: Iterable[Row]) -> list[Row]:
    return [shorten({key: value for key, value in row.items() if key != "tokens"}) for row in rows]


def written_length(row: Row) -> int:
    """Return how many characters the model wrote: in all its turns, or in the reply."""
    turns = [one for one in as_list(row.get("turns")) if isinstance(one, dict) and one.get("role") == "assistant"]
    return sum(len(str(text)) for text in ([one.get("content") or "" for one in turns] or [row.get("reply") or ""]))


def choose_tokens(rows: Iterable[Row], most_bytes: int) -> dict[int, list[Row]]:
    """Return the tokens of as many transcripts as fit, chosen evenly, by their places."""
    # As they are written: lists of short texts take many times as much memory.
    found = {place: as_json(tokens) for place, row in enumerate(rows) if (tokens := token_sequences(row))}
    places = list(found)
    while sum(len(f'"{place}":,') + len(found[place]) for place in places) > most_bytes and places:
        places = pick_evenly(list(found), len(places) // 2)
    return {place: json.loads(found[place]) for place in places}


def choose_pictures(run: ReportedRun, transcripts: list[Row], most_bytes: int) -> dict[str, str]:
    """Return the pictures that transcripts name as data URLs: as many as fit, chosen evenly."""
    names = dict.fromkeys(str(name) for one in transcripts for name in as_list(one.get("images")))
    urls = [(name, url) for name in pick_evenly(list(names), MOST_PICTURES) if (url := run.picture(name))]
    return dict(fit_bytes(lambda count: pick_evenly(urls, count), len(urls), most_bytes))


def token_sequences(row: Row) -> list[Row]:
    sequences = []
    for one in as_list(row.get("tokens")):
        if isinstance(one, dict) and isinstance(one.get("text"), list):
            found = {name: one.get(name) for name in NUMBERS}
            numbers = {name: value for name, value in found.items() if isinstance(value, str) or is_number(value)}
            counts = [int(count) for count in as_list(one.get("sampled")) if is_number(count)]
            shown = {"text": list(map(str, one["text"])), "sampled": counts, **numbers}
            sequences.append(shown | {"left_out": int(number(one, "left_out"))})
    return sequences


def shorten(value: Any, most: int = MOST_TURNS) -> Any:
    """Shorten texts and lists, and write numbers that JSON lacks as text; lists in a list share its room."""
    if isinstance(value, str):
        left_out = len(value) - HEAD - TAIL
        return f"{value[:HEAD]}\n[{left_out} characters left out]\n{value[-TAIL:]}" if left_out > 0 else value
    if isinstance(value, dict):
        return {key: shorten(inner, most) for key, inner in value.items()}
    if isinstance(value, list):
        more = [f"[{len(value) - most} left out]"] if len(value) > most else []
        room = max(MOST_TURNS // max(len(value), 1), FEWEST_TURNS)
        return [shorten(inner, room) for inner in value[:most]] + more
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def histograms(entries: list[Transcript], low: float, high: float) -> dict[str, list[int]]:
    """Count the rewards of all transcripts, by purpose and source."""
    counts: dict[str, list[int]] = {}
    for one in entries:
        if one.reward is not None:
            bins = counts.setdefault(f"{one.purpose} {Path(one.source).stem}".strip(), [0] * BINS)
            bins[min(int((one.reward - low) / (high - low) * BINS), BINS - 1)] += 1
    return counts


def ledger(rows: list[Row]) -> Row | None:
    """Return the prompts of the last row by their fate, and how many had each fate so far."""
    if not rows:
        return None
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({fate: len(numbers) for fate, numbers in row.items() if isinstance(numbers, list)})
    last = {fate: shorten(" ".join(map(str, rows[-1].get(fate, [])))) for fate in sums}
    return {"step": rows[-1]["step"], "fates": {fate: [sums[fate], last[fate]] for fate in sums}}


def timeline(events: list[Row], count: int) -> Row | None:
    """Return `count` of the first, middle and last steps, and the longest; None if nothing is recorded."""
    rows = [row for row in events if is_number(row.get("start")) and is_number(row.get("seconds"))]
    if not rows or not count:
        return None
    middle, worst = max((len(rows) - count) // 2, 0), max(range(len(rows)), key=lambda place: rows[place]["seconds"])
    every = range(len(rows))
    windows = {"last": every[-count:], "first": every[:count], "middle": every[middle : middle + count]}
    windows["worst"] = every[worst : worst + 1]
    kept = sorted({place for window in windows.values() for place in window})
    names: dict[str, int] = {}  # which spans name by their numbers
    steps = []
    for row in (rows[place] for place in kept):
        spans = [span for span in as_list(row.get("spans")) if is_span(span)]
        numbered = [[names.setdefault(name, len(names)) for name in span[:2]] + span[2:] for span in spans]
        steps.append({"step": row["step"], "start": row["start"], "seconds": row["seconds"], "spans": numbered})
    places = {name: [kept.index(window[0]), len(window)] for name, window in windows.items()}
    return {"steps": steps, "names": list(names), "windows": places}


def is_span(value: Any) -> bool:
    whole = isinstance(value, list) and len(value) == 4
    return whole and all(isinstance(name, str) for name in value[:2]) and all(map(is_number, value[2:]))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def memory(events: list[Row]) -> Row | None:
    """Return the GiB of the largest processes over the steps; None if nothing is recorded."""
    rows = pick_evenly([row for row in events if isinstance(row.get("memory"), dict)], MOST_POINTS)
    most: dict[str, float] = {}
    for name, gib in (pair for row in rows for pair in row["memory"].items() if is_number(pair[1])):
        most[name] = max(gib, most.get(name, 0.0))
    largest = sorted(most, key=lambda name: -most[name])[:MOST_PROCESSES]
    found = {name: [round_short(row["memory"].get(name)) for row in rows] for name in largest}
    return {"step": [row["step"] for row in rows], "gib": found} if found else None
