"""What a page shows of runs: every metric, some transcripts, and sums of the rest, in a size that does not grow."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from trueline.data.transcripts import NUMBERS
from trueline.monitoring.curves import COLOURS, bounds
from trueline.monitoring.timing import duration
from trueline.report.numbers import evenly, is_number, rounded
from trueline.report.runs import Row, Run, Transcript
from trueline.report.timeline import MOST_STEPS, listed, memory, timeline

CHARTS = {  # metrics with a chart of their own, where a run has them; any other can be chosen on the page
    "reward/mean": "Reward",
    "evaluation/reward": "Held-out reward",
    "loss": "Loss",
    "evaluation/loss": "Held-out loss",
    "preference/accuracy": "Accuracy of preferences",
    "preference/margin": "Margin of preferences",
    "reward_model/accuracy": "Accuracy of the reward model",
    "process_reward/accuracy": "Accuracy of the process reward model",
    "kto/accuracy": "Accuracy",
    "policy/kl": "KL to the reference, per token",
    "policy/sequence_kl": "KL to the reference, per response",
    "distill/kl_per_token": "KL to the teacher, per token",
    "policy/entropy": "Entropy",
    "grad_norm": "Gradient norm",
    "critic/explained_variance": "Variance explained by the critic",
    "response_length/mean": "Length of responses, tokens",
    "response_length/truncated_share": "Share of truncated responses",
    "mismatch/logprob_gap_mean": "Log-prob gap of engine and trainer",
    "mismatch/sampler_effect_run": "Effect by which draws differ from the policy, over the run",
    "speed/tokens_per_second": "Tokens per second",
    "memory/device_gib": "Memory of the device, GiB",
    "memory/peak_gib": "Peak memory, GiB",
}
LAST = {"reward/mean": "reward", "evaluation/reward": "held-out", "loss": "loss"}  # shown in a run's header
LEVELS = ("OK", "WATCH", "BAD")  # by `health/level`
LEVEL, SECONDS, TOKENS = "health/level", "axis/seconds", "axis/tokens"

LONG, MEAN = 150, 10  # steps from which on curves show means, and of so many

METRIC_BYTES, TRANSCRIPT_BYTES, EVENT_BYTES = 2_200_000, 2_000_000, 400_000  # of all runs together
PAGE_BYTES = 4_800_000  # of all that; tokens of transcripts get what is left
MOST_ROWS, MOST_TRANSCRIPTS = 4000, 300  # of all runs together; of one
HEAD, TAIL = 1400, 600  # characters that are shown of a longer text
MOST_TURNS, FEWEST_TURNS = 40, 8  # of a conversation that stands alone, and of one among many
BINS = 20


def describe(runs: list[Run]) -> Row:
    """Return all that the page shows, as JSON can say it."""
    rewards = [one.reward for run in runs for one in run.transcripts.entries if one.reward is not None]
    low, high = bounds(rewards or [0.0])
    return {
        "charts": CHARTS,
        "colours": COLOURS,
        "levels": LEVELS,
        "bins": [low, high],
        "mean": usual_mean(runs),
        "runs": [describe_run(run, len(runs), (low, high)) for run in runs],
    }


def usual_mean(runs: list[Run]) -> int:
    """Return of how many steps curves show the mean, unless another number is asked for."""
    return MEAN if any(len(run.rows) > LONG for run in runs) else 1


def describe_run(run: Run, runs: int, span: tuple[float, float]) -> Row:
    rows, told = with_axes(run.rows), run.transcripts
    chosen = within(
        lambda count: chosen_transcripts(told.entries, count),
        MOST_TRANSCRIPTS,
        TRANSCRIPT_BYTES // runs,
        lambda chosen: without_tokens(told.rows(chosen)),
    )
    shown = {
        "name": run.name,
        "verb": run.verb,
        "facts": facts(run, rows),
        "health": health(rows),
        "series": within(lambda count: columns(thinned(rows, count)), MOST_ROWS // runs, METRIC_BYTES // runs),
        "timeline": within(lambda count: timeline(run.events, count), MOST_STEPS, EVENT_BYTES // runs),
        "memory": memory(run.events),
        "histograms": histograms(told.entries, *span),
        "transcripts": without_tokens(told.rows(chosen)),
        "transcript_count": len(told.entries),
        "failures": cleaned(run.failures),
        "ledger": ledger(run.ledger),
        "plan": run.plan,
        "config": cleaned(run.config),
    }
    return shown | {"tokens": shown_tokens(told.rows(chosen), PAGE_BYTES // runs - len(as_json(shown)))}


def as_json(content: Any) -> bytes:
    """Write JSON for a page: no text in it ends the element it stands in, and half a character is shown as unknown."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def within(
    make: Callable[[int], Any], count: int, most_bytes: int, written: Callable[[Any], Any] = lambda made: made
) -> Any:
    """Make something of so many items, or of half as many and so on, until it is small enough as it is written."""
    while len(as_json(written(made := make(count)))) > most_bytes and count:
        count //= 2
    return made


def number(row: Row, key: str) -> float:
    return row[key] if is_number(row.get(key)) else 0.0


def facts(run: Run, rows: list[Row]) -> dict[str, str]:
    """Return the header of a run: how far it is, and its last numbers."""
    if not rows:
        return {"steps": f"none yet of {run.config.get('steps', 'an unknown number')}"}
    planned = f" of {run.config['steps']}" if "steps" in run.config else ""
    found = {"steps": f"{rows[-1]['step']}{planned}", "time": duration(rows[-1][SECONDS])}
    for key, name in LAST.items():
        values = [row[key] for row in rows if is_number(row.get(key))]
        found |= {name: f"{values[-1]:.4g}"} if values else {}
    return found


def health(rows: list[Row]) -> Row | None:
    """Return the last verdict with the rules behind it, and how often there was each; None where nothing judged."""
    judged = [row for row in rows if row.get(LEVEL) in range(len(LEVELS))]
    if not judged:
        return None
    last, counts = judged[-1], Counter(int(row[LEVEL]) for row in judged)
    rules = [key.partition("/")[2] for key in last if key.startswith("health/") and key != LEVEL and number(last, key)]
    return {"level": int(last[LEVEL]), "rules": rules, "counts": [counts[level] for level in range(len(LEVELS))]}


def with_axes(rows: list[Row]) -> list[Row]:
    """Add to each row the seconds and tokens up to it."""
    seconds = accumulate(number(row, "time/step") for row in rows)
    tokens = accumulate(tokens_of(row) for row in rows)
    return [{**row, SECONDS: second, TOKENS: token} for row, second, token in zip(rows, seconds, tokens, strict=True)]


def tokens_of(row: Row) -> float:
    return number(row, "speed/tokens") or number(row, "speed/tokens_per_second") * number(row, "time/step")


def columns(rows: list[Row]) -> dict[str, list[float | None]]:
    """Turn rows into a list for each metric; None where a row has no such number."""
    ordered = [max(rows, key=len), *rows] if rows else []  # a whole step names the phases in their order
    names = dict.fromkeys(name for row in ordered for name, value in row.items() if is_number(value))
    return {name: [rounded(row.get(name)) for row in rows] for name in names}


def thinned(rows: list[Row], count: int) -> list[Row]:
    """Leave rows out evenly; those with an evaluation or a warning stay, as long as they are few."""
    if len(rows) <= count:
        return rows
    marked = [row for row in rows if number(row, LEVEL) or any(key.startswith("evaluation/") for key in row)]
    kept = evenly(marked, count // 2)
    steps = {row["step"] for row in marked}
    kept += evenly([row for row in rows if row["step"] not in steps], count - len(kept))
    return sorted(kept, key=lambda row: row["step"])


def chosen_transcripts(entries: list[Transcript], count: int) -> list[Transcript]:
    """Choose whole groups evenly over the steps, as many transcripts of each purpose as long as there are."""
    purposes: dict[str, list[Transcript]] = {}
    for one in entries:
        purposes.setdefault(one.purpose, []).append(one)
    kept: list[Transcript] = []
    for others, same in zip(range(len(purposes), 0, -1), sorted(purposes.values(), key=len), strict=True):
        kept += chosen_groups(same, max((count - len(kept)) // others, 1))
    return sorted(kept, key=lambda one: one.step)


def chosen_groups(entries: list[Transcript], count: int) -> list[Transcript]:
    """Choose groups evenly, of so many transcripts in all; a part of one where it is larger than that."""
    groups: dict[Any, list[Transcript]] = {}
    for one in entries:
        groups.setdefault(one.start if one.group is None else (one.step, one.group), []).append(one)
    number = max(count * len(groups) // len(entries), 1)
    while number > 1 and sum(map(len, evenly(list(groups.values()), number))) > count:
        number -= 1
    return [one for group in evenly(list(groups.values()), number) for one in group][:count]


def without_tokens(rows: Iterable[Row]) -> list[Row]:
    return [cleaned({key: value for key, value in row.items() if key != "tokens"}) for row in rows]


def shown_tokens(rows: Iterable[Row], most_bytes: int) -> dict[int, list[Row]]:
    """Return the tokens of as many transcripts as there is room for, evenly, by the places of these."""
    # As they are written: lists of short texts take many times as much memory.
    found = {place: as_json(tokens) for place, row in enumerate(rows) if (tokens := sequences(row))}
    count = len(found)
    while sum(len(f'"{place}":,') + len(found[place]) for place in evenly(list(found), count)) > most_bytes and count:
        count //= 2
    return {place: json.loads(found[place]) for place in evenly(list(found), count)}


def sequences(row: Row) -> list[Row]:
    """Return the tokens of a transcript, sequence by sequence, as far as they can be shown."""
    told = [one for one in listed(row.get("tokens")) if isinstance(one, dict)]
    return [sequence(one, one["text"]) for one in told if isinstance(one.get("text"), list)]


def sequence(told: Row, texts: list[Any]) -> Row:
    numbers = {name: told[name] for name in NUMBERS if isinstance(told.get(name), str) or is_number(told.get(name))}
    counts = [int(count) for count in listed(told.get("sampled")) if is_number(count)]
    return {"text": list(map(str, texts)), "sampled": counts, **numbers, "left_out": int(number(told, "left_out"))}


def cleaned(value: Any, most: int = MOST_TURNS) -> Any:
    """Shorten the texts and lists of a value, and word numbers that JSON cannot say; lists in a list share its room."""
    if isinstance(value, str):
        left_out = len(value) - HEAD - TAIL
        return f"{value[:HEAD]}\n[{left_out} characters left out]\n{value[-TAIL:]}" if left_out > 0 else value
    if isinstance(value, dict):
        return {key: cleaned(inner, most) for key, inner in value.items()}
    if isinstance(value, list):
        more = [f"[{len(value) - most} left out]"] if len(value) > most else []
        room = max(MOST_TURNS // max(len(value), 1), FEWEST_TURNS)
        return [cleaned(inner, room) for inner in value[:most]] + more
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
    """Return the prompts of the last row by their fate, and how many met each so far."""
    if not rows:
        return None
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({fate: len(numbers) for fate, numbers in row.items() if isinstance(numbers, list)})
    last = {fate: cleaned(" ".join(map(str, rows[-1].get(fate, [])))) for fate in sums}
    return {"step": rows[-1]["step"], "fates": {fate: [sums[fate], last[fate]] for fate in sums}}
