"""Sampled completions on disk, one line per prompt and safe from a kill, and the selection from them."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TextIO

from trueline.config.base import ConfigError
from trueline.config.sampling import GenerateConfig
from trueline.data.messages import Message, content_of
from trueline.data.pictures import image_parts, payloads_of, picture_file
from trueline.data.types import RUBRIC, Outcome, Prompt, Trajectory
from trueline.files import Row, atomic_path, rows_at, whole_lines, write_once
from trueline.rollout.evaluation import PART
from trueline.rollout.failures import RolloutFailure
from trueline.rollout.groups import Group
from trueline.rollout.summary import role_of

SYNC_SECONDS = 5.0  # what a power cut may cost; a kill of the process costs nothing that was written
SHOWN_ERRORS = 3
COUNTS = ("prompts", "completions", "failed", "empty", "truncated", "tokens")

ASKED = ("prompt", "images", "tools")  # fields of a row that completions answer

Sampled = dict[str, Any]


def row_of(number: int, group: Group, *, scored: bool, played: bool = False) -> Row:
    """Describe a prompt and its completions, which are whole conversations where an environment was played."""
    completions = [completion_of(one, scored) | (conversations_of(one) if played else {}) for one in group]
    return {"number": number, **prompt_row(group[0].prompt), "completions": completions}


def prompt_row(prompt: Prompt) -> Row:
    row = {"id": prompt.id, "source": prompt.source, "prompt": prompt.messages, "label": prompt.label}
    row |= {"images": [picture_file(picture) for picture in prompt.pictures]} if prompt.pictures else {}
    return row | ({"tools": prompt.tools} if prompt.tools else {})


def keep_pictures(prompt: Prompt, folder: Path) -> None:
    """Write the pictures of a prompt, unless they are there: rows of sampled completions name them."""
    for picture in prompt.pictures:
        write_once(folder / picture_file(picture), picture.data)


def learned_rows(row: Row, completion: Sampled) -> list[Row]:
    """Return prompt, completion and tools as trainers read them: of a reply, or of every conversation of an episode."""
    if "conversations" in completion:
        return [one | shown_in([*one["prompt"], *one["completion"]], row) for one in completion["conversations"]]
    return [{name: row[name] for name in ASKED if name in row} | {"completion": completion["reply"]}]


def shown_in(messages: list[Message], row: Row) -> Row:
    """Return the pictures of a row that a conversation shows; it has others in its parts."""
    count = payloads_of(messages).count(None)
    return {"images": row["images"][:count]} if count else {}


def completion_of(trajectory: Trajectory, scored: bool) -> Sampled:
    """Describe a completion; `reward` is null where nothing scored it, or the scoring failed."""
    parts = {name: value for name, value in trajectory.metrics.items() if name.startswith(PART)}
    rubric = {name.removeprefix(RUBRIC): value for name, value in trajectory.metrics.items() if name.startswith(RUBRIC)}
    return {
        "reply": trajectory.reply,
        "reward": trajectory.reward if scored else None,
        "parts": {name.removeprefix(PART): value for name, value in parts.items()},
        **({"rubric": rubric} if rubric else {}),
        "outcome": str(trajectory.outcome),
        "truncated": trajectory.truncated,
        **({"limit": trajectory.limit} if trajectory.limit else {}),
        "tokens": trajectory.sampled_tokens(),
        **({"error": trajectory.error} if trajectory.error else {}),
    }


def conversations_of(trajectory: Trajectory) -> Sampled:
    """Return the conversations of an episode, and what the environment reports of it."""
    dialogues = [(one, role_of(one) | ({"tools": one.tools} if one.tools else {})) for one in trajectory.dialogues]
    conversations = [{"prompt": one.prompt, "completion": one.completion, **named} for one, named in dialogues]
    metrics = {name: value for name, value in trajectory.metrics.items() if not name.startswith((PART, RUBRIC))}
    return {"conversations": conversations, "metrics": metrics}


class SampleFile:
    """Lines are only ever appended, each in one write. What a kill left of the last one is cut off and sampled anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places = find_rows(path) if path.exists() else {}  # where the line of each prompt's number begins
        self.stream, self.synced = path.open("ab"), time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # every row was flushed; a full disk has raised its error already
            self.stream.close()

    def add(self, row: Row) -> None:
        place = self.stream.tell()
        try:
            self.stream.write(line_of(row).encode())
            self.stream.flush()
            if time.monotonic() - self.synced > SYNC_SECONDS:
                os.fsync(self.stream.fileno())
                self.synced = time.monotonic()
        except OSError as error:
            raise RolloutFailure(f"{self.path} cannot be written: {error}") from error
        self.places[row["number"]] = place

    def rows(self, numbers: Iterable[int]) -> Iterator[Row]:
        """Read the rows of these numbers in this order, whichever they were sampled in."""
        return rows_at(self.path, (self.places[number] for number in numbers))


def find_rows(path: Path) -> dict[int, int]:
    places, end = dict[int, int](), 0
    with path.open("r+b") as stream:
        for place, line in whole_lines(stream):
            try:
                places[json.loads(line)["number"]] = place
            except (ValueError, KeyError, TypeError):
                where, remedy = f"{path}, line {len(places) + 1}", "remove the line to sample its prompt again"
                raise ConfigError(f"{where} is not a row that was written here: {remedy}") from None
            end = place + len(line)
        stream.truncate(end)
    return places


def line_of(row: Row) -> str:
    """Write a row in ASCII, for a completion may hold half a character, which UTF-8 cannot."""
    return json.dumps(row, default=str) + "\n"


@contextmanager
def write_aside(path: Path) -> Iterator[TextIO]:
    """Open a file that gets its name once it is whole."""
    try:
        with atomic_path(path) as aside, aside.open("w", encoding="utf-8") as stream:
            yield stream
    except OSError as error:  # which names no file where a disk is full
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    with write_aside(path) as stream:
        stream.write(json.dumps(value, indent=2) + "\n")


def is_usable(completion: Sampled) -> bool:
    """Tell whether a completion could be trained on: it has its reward, and all messages have text or a tool."""
    scored, talks = Outcome(completion["outcome"]).is_scored, completion.get("conversations", [])
    messages = [message for one in talks for message in (*one["prompt"], *one["completion"])]
    plain = [one for one in messages if not any(True for _ in image_parts([one]))]
    bare = [one for one in plain if not one.get("tool_calls") and one["role"] != "tool"]
    return scored and bool(completion["reply"].strip()) and all(content_of(one).strip() for one in bare)


def is_eligible(completion: Sampled, config: GenerateConfig) -> bool:
    """Tell whether a completion could be learned as a good one."""
    return is_usable(completion) and (config.keep_truncated or not completion["truncated"])


def best_of(completions: list[Sampled]) -> list[Sampled]:
    """Return the first of the completions with the highest reward; nothing of nothing."""
    return [max(completions, key=reward_of)] if completions else []


def reward_of(completion: Sampled) -> float:
    return float(completion["reward"])


def select_kept(row: Row, config: GenerateConfig) -> list[Sampled]:
    completions = [one for one in row["completions"] if is_eligible(one, config)]
    if config.keep == "best":
        return best_of(completions)
    return [one for one in completions if config.keep == "all" or reward_of(one) >= config.threshold]


def pair_of(row: Row, config: GenerateConfig) -> Row | None:
    """Return the best and the worst completion as `dpo` and `rm` read them; None if they are as good, or the same."""
    usable = [one for one in row["completions"] if is_usable(one)]
    # In a pair, each is one training sequence.
    completions = [one for one in usable if one.get("metrics", {}).get("episode/sequences", 1) == 1]
    if not (best := best_of([one for one in completions if is_eligible(one, config)])):
        return None
    (better,) = learned_rows(row, best[0])
    prompt: Row = {name: better[name] for name in ASKED if name in better}
    others = [(one, *learned_rows(row, one)) for one in completions]
    alike = [one for one in others if all(one[1].get(name) == better.get(name) for name in ASKED)]
    worst, worse = min(alike, key=lambda one: reward_of(one[0]))  # of episodes that began with the same prompt
    rewards = {"chosen_reward": best[0]["reward"], "rejected_reward": worst["reward"]}
    differ = reward_of(best[0]) > reward_of(worst) and better["completion"] != worse["completion"]
    return {**prompt, "chosen": better["completion"], "rejected": worse["completion"], **rewards} if differ else None


@dataclass(slots=True)
class Tally:
    """Counts and mean rewards for summary.json, taken row by row."""

    counts: Counter[str] = field(default_factory=Counter)
    means: list[float] = field(default_factory=list)  # reward of each prompt's completions
    best: list[float] = field(default_factory=list)  # of each prompt's best completion
    errors: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)  # that cut completions off

    def add(self, row: Row) -> None:
        completions = row["completions"]
        failed = [completion for completion in completions if Outcome(completion["outcome"]).is_failure]
        if rewards := [reward_of(completion) for completion in completions if completion["reward"] is not None]:
            self.means.append(fmean(rewards))
            self.best.append(max(rewards))
        self.errors.update(f"{completion['outcome']}: {completion.get('error', '').strip()}" for completion in failed)
        self.limits.update(completion["limit"] for completion in completions if "limit" in completion)
        self.counts.update(
            prompts=1,
            completions=len(completions),
            failed=len(failed),
            empty=sum(not completion["reply"].strip() for completion in completions),
            truncated=sum(completion["truncated"] for completion in completions),
            tokens=sum(completion["tokens"] for completion in completions),
        )

    def summary(self) -> Row:
        rewards = {"reward_mean": fmean(self.means), "reward_best_mean": fmean(self.best)} if self.means else {}
        errors = dict(self.errors.most_common(SHOWN_ERRORS))
        return {**self.counts, "truncated_by": dict(self.limits), **rewards, "errors": errors}


def write_selection(rows: Iterable[Row], folder: Path, config: GenerateConfig) -> Row:
    """Write kept.jsonl, and pairs.jsonl where pairs are wanted; return the summary."""
    tally = Tally()
    selected = ("kept", "pairs", "prompts_without_pair") if config.pairs else ("kept",)
    tally.counts.update(dict.fromkeys((*COUNTS, *selected), 0))
    wanted = write_aside(folder / "pairs.jsonl") if config.pairs else nullcontext()
    with write_aside(folder / "kept.jsonl") as kept, wanted as pairs:
        for row in rows:
            tally.add(row)
            for completion in select_kept(row, config):
                tally.counts["kept"] += 1
                rows_kept = learned_rows(row, completion)
                kept.writelines(line_of({**learned, "reward": completion["reward"]}) for learned in rows_kept)
            if pairs is not None:
                pair = pair_of(row, config)
                tally.counts["pairs" if pair else "prompts_without_pair"] += 1
                pairs.writelines([line_of(pair)] if pair else [])
    return tally.summary()
