"""Sampled answers on disk: one line per prompt, safe from a kill at any moment, and what is selected from them."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self, TextIO

from trueline.config.base import ConfigError
from trueline.config.sampling import GenerateConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.rollout.failures import RolloutFailure
from trueline.rollout.groups import Group

SYNC_SECONDS = 5.0  # what a power cut may cost; a kill of the process costs nothing that was written
SHOWN_ERRORS = 3
COUNTS = ("prompts", "answers", "failed", "empty", "truncated", "tokens")

Row = dict[str, Any]  # a prompt and all its answers
Answer = dict[str, Any]


def row_of(number: int, group: Group, judged: bool) -> Row:
    prompt = group[0].prompt
    return {"number": number, **described(prompt), "answers": [answer_of(one, judged) for one in group]}


def described(prompt: Prompt) -> Row:
    said = {"id": prompt.id, "source": prompt.source, "prompt": prompt.messages, "label": prompt.label}
    return said | ({"tools": prompt.tools} if prompt.tools else {})


def prompt_columns(row: Row) -> Row:
    """What whoever trains on an answer must know of its prompt."""
    return {name: row[name] for name in ("prompt", "tools") if name in row}


def answer_of(trajectory: Trajectory, judged: bool) -> Answer:
    """`reward` is null where nothing judged the answer, or the judging failed."""
    parts = {name.removeprefix("reward/"): value for name, value in trajectory.metrics.items()}
    return {
        "reply": trajectory.reply,
        "reward": trajectory.reward if judged else None,
        "parts": parts,
        "outcome": str(trajectory.outcome),
        "truncated": trajectory.truncated,
        "tokens": sum(trajectory.mask),
        **({"error": trajectory.error} if trajectory.error else {}),
    }


class SampleFile:
    """Lines are only ever appended, each in one write. What a kill left of the last one is cut off and sampled anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places = find_rows(path) if path.exists() else {}  # where the line of each prompt's number begins
        self.stream = path.open("ab")
        self.synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # every row was flushed; what a full disk refused is told by the error under way
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
        """In this order, whichever they were sampled in."""
        with self.path.open("rb") as stream:
            for number in numbers:
                stream.seek(self.places[number])
                yield json.loads(stream.readline())


def find_rows(path: Path) -> dict[int, int]:
    places: dict[int, int] = {}
    end = 0
    with path.open("r+b") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                break
            try:
                places[json.loads(line)["number"]] = end
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}, line {len(places) + 1} is not a row that was written here: remove the line to sample "
                    "its prompt again"
                ) from None
            end += len(line)
        stream.truncate(end)
    return places


def line_of(row: Row) -> str:
    """In ASCII, for a reply may hold half a character, which UTF-8 cannot."""
    return json.dumps(row, default=str) + "\n"


@contextmanager
def written_aside(path: Path) -> Iterator[TextIO]:
    """A file that has its name once it is whole."""
    aside = path.with_name(path.name + ".unfinished")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            yield stream
        aside.rename(path)
    except OSError as error:  # which names no file where a disk is full
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    with written_aside(path) as stream:
        stream.write(json.dumps(value, indent=2) + "\n")


def usable(answer: Answer) -> bool:
    """Whether it could be trained on: it did not fail, and says something."""
    return not Outcome(answer["outcome"]).failed and bool(answer["reply"].strip())


def eligible(answer: Answer, config: GenerateConfig) -> bool:
    """Whether it could be learnt as a good answer."""
    return usable(answer) and (config.keep_truncated or not answer["truncated"])


def best_of(answers: list[Answer]) -> list[Answer]:
    """The first of those with the highest reward; nothing of nothing."""
    return [max(answers, key=reward_of)] if answers else []


def reward_of(answer: Answer) -> float:
    return float(answer["reward"])


def kept_of(row: Row, config: GenerateConfig) -> list[Answer]:
    answers = [answer for answer in row["answers"] if eligible(answer, config)]
    if config.keep == "best":
        return best_of(answers)
    return [answer for answer in answers if config.keep == "all" or reward_of(answer) >= config.threshold]


def pair_of(row: Row, config: GenerateConfig) -> tuple[Answer, Answer] | None:
    """Best against worst; None where they are equally good, or the same text."""
    best = best_of([answer for answer in row["answers"] if eligible(answer, config)])
    if not best:
        return None
    worst = min((answer for answer in row["answers"] if usable(answer)), key=reward_of)
    differ = reward_of(best[0]) > reward_of(worst) and best[0]["reply"] != worst["reply"]
    return (best[0], worst) if differ else None


def kept_row(row: Row, answer: Answer) -> Row:
    """As `sft` reads it."""
    return {**prompt_columns(row), "completion": answer["reply"], "reward": answer["reward"]}


def pair_row(row: Row, pair: tuple[Answer, Answer]) -> Row:
    """As `dpo` and `rm` read it."""
    better, worse = pair
    rewards = {"chosen_reward": better["reward"], "rejected_reward": worse["reward"]}
    return {**prompt_columns(row), "chosen": better["reply"], "rejected": worse["reply"], **rewards}


@dataclass(slots=True)
class Tally:
    """What summary.json tells, counted row by row."""

    counts: Counter[str] = field(default_factory=Counter)
    means: list[float] = field(default_factory=list)  # reward of each prompt's answers
    best: list[float] = field(default_factory=list)  # of each prompt's best answer
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        answers = row["answers"]
        failed = [answer for answer in answers if Outcome(answer["outcome"]).failed]
        rewards = [reward_of(answer) for answer in answers if answer["reward"] is not None]
        if rewards:
            self.means.append(fmean(rewards))
            self.best.append(max(rewards))
        self.errors.update(f"{answer['outcome']}: {answer.get('error', '').strip()}" for answer in failed)
        self.counts.update(
            prompts=1,
            answers=len(answers),
            failed=len(failed),
            empty=sum(not answer["reply"].strip() for answer in answers),
            truncated=sum(answer["truncated"] for answer in answers),
            tokens=sum(answer["tokens"] for answer in answers),
        )

    def summary(self) -> Row:
        rewards = {"reward_mean": fmean(self.means), "reward_best_mean": fmean(self.best)} if self.means else {}
        return {**self.counts, **rewards, "errors": dict(self.errors.most_common(SHOWN_ERRORS))}


def write_selection(rows: Iterable[Row], folder: Path, config: GenerateConfig) -> Row:
    """kept.jsonl, pairs.jsonl where they are wanted, and the counts."""
    tally = Tally()
    selected = ("kept", "pairs", "prompts_without_pair") if config.pairs else ("kept",)
    tally.counts.update(dict.fromkeys((*COUNTS, *selected), 0))
    wanted = written_aside(folder / "pairs.jsonl") if config.pairs else nullcontext()
    with written_aside(folder / "kept.jsonl") as kept, wanted as pairs:
        for row in rows:
            tally.add(row)
            answers = kept_of(row, config)
            tally.counts["kept"] += len(answers)
            kept.writelines(line_of(kept_row(row, answer)) for answer in answers)
            if pairs is not None:
                pair = pair_of(row, config)
                tally.counts["pairs" if pair else "prompts_without_pair"] += 1
                pairs.writelines([line_of(pair_row(row, pair))] if pair else [])
    return tally.summary()
