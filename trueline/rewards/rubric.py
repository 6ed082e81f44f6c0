"""Rubrics: an LLM judge says which items a reply meets, and the points of these items make the reward."""

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field, ValidationError, model_validator

from trueline.config.base import Config, ConfigError, Tree, read_tree
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.types import ROW_ITEM, RUBRIC
from trueline.rewards.base import (
    BatchedReward,
    Call,
    Graded,
    RewardFailure,
    RewardTimeout,
    RewardUnreachable,
    Score,
    short_cause,
)
from trueline.rewards.remote import Judge, check_judge_model, check_judge_server, check_prompt, fill_prompt

SUFFIXES = (".yaml", ".yml", ".json")
GRADING_SECONDS = 10.0  # for the grading before the start
ALIASES = {"title": "name", "description": "criterion", "weight": "points"}  # in published data sets
PROMPT = """\
Grade the reply at the end of a conversation by a list of criteria. Judge each criterion by itself and as it is written:
true if the reply meets it, else false. Some criteria describe a mistake; they are true of a reply that makes it.

[Conversation]
{messages}

[Reply]
{reply}

[Criteria]
{items}

End with a JSON object that has the number of every criterion, and true or false for each, such as
{"1": true, "2": false}
"""


class RubricItem(Config):
    name: str = ""
    """Its name in metrics and transcripts."""
    criterion: str = Field(min_length=1)
    """What a reply does that meets it."""
    points: float = Field(1.0, allow_inf_nan=False)
    """Points of a reply that meets it; negative for a pitfall."""
    required: bool = False
    """With aggregation=gate: a reply that fails it earns nothing."""

    @model_validator(mode="before")
    @classmethod
    def rename(cls, given: Any) -> Any:
        return {ALIASES.get(key, key): value for key, value in given.items()} if isinstance(given, dict) else given

    def passes(self, met: bool) -> bool:
        """Return whether a verdict is what the item asks for; a pitfall asks not to be met."""
        return met == (self.points > 0)


def weighted_sum(items: list[RubricItem], met: list[bool]) -> float:
    """Return the points that were earned over the most that there are, as RaR-Explicit (arXiv:2507.17746) does."""
    return sum(item.points for item, one in zip(items, met, strict=True) if one) / highest(items)


def gate(items: list[RubricItem], met: list[bool]) -> float:
    """Return the weighted sum, but nothing above 0 where a required item fails."""
    is_open = all(item.passes(one) for item, one in zip(items, met, strict=True) if item.required)
    return weighted_sum(items, met) if is_open else min(weighted_sum(items, met), 0.0)


def all_or_nothing(items: list[RubricItem], met: list[bool]) -> float:
    """Return 1 if every item passes, else 0."""
    return float(all(item.passes(one) for item, one in zip(items, met, strict=True)))


def highest(items: list[RubricItem]) -> float:
    return sum(item.points for item in items if item.points > 0)


Aggregate = Callable[[list[RubricItem], list[bool]], float]
AGGREGATIONS: dict[str, Aggregate] = {one.__name__: one for one in (weighted_sum, gate, all_or_nothing)}


class Rubric(Config):
    items: list[RubricItem] = []
    """The items of every row."""
    column: str | None = None
    """Column of the data with a row's own items, which follow these. null: none."""
    aggregation: str = "weighted_sum"
    """How verdicts become the reward."""
    gradings: int = Field(1, ge=1, le=2)
    """2: every reply is graded twice, the second time with the items in reverse, and the reward is the mean."""
    prompt: str = PROMPT
    """Prompt of the judge; {items}, {reply}, {prompt}, {messages}, {label} and column names are filled in."""

    def check_keys(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={self.aggregation}: write one of {', '.join(AGGREGATIONS)}")
        if not self.items and self.column is None:
            raise ValueError("there are no items: write at least one, or name a column of the data that has them")
        names = [item.name for item in self.items]
        for number, item in enumerate(self.items, 1):
            place = f"item {number} ({item.name})"
            if not item.name:
                raise ValueError(f"item {number} ({item.criterion:.40}) has no name: give it one")
            if item.name in names[: number - 1]:
                raise ValueError(f"{place}: another item has this name: give each its own")
            if item.points == 0:
                raise ValueError(f"{place}: points=0 leaves it without effect: give it points, or delete it")
            if item.required and self.aggregation != "gate":
                raise ValueError(f"{place}: required=true needs aggregation=gate (got {self.aggregation}): set it")
        if self.items and highest(self.items) == 0 and self.aggregation != "all_or_nothing":
            raise ValueError(f"no item has points above 0, by which {self.aggregation} divides: add one")

    def for_row(self, call: Call, row: str) -> "Rubric":
        """Return the rubric with the items of a row, which are numbered, as their titles may be alike."""
        if self.column is None:
            return self
        place, given = f"{row}: column {self.column}", call.get(self.column)
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise ConfigError(f"{place}: expected a list of items with a criterion and points, got {given!r:.80}")
        items = [item.model_dump() for item in self.items]
        # What else published data sets say of an item, such as tags, is left out.
        for number, one in enumerate(given, 1):
            known = {ALIASES.get(key, key): value for key, value in one.items() if value is not None}
            own = {key: value for key, value in known.items() if key in RubricItem.model_fields}
            items.append(own | {"name": f"{number} {own.get('name', '')}".strip()})
        return parse_rubric(self.model_dump() | {"column": None, "items": items}, place)

    def describe(self) -> str:
        own = f" and those of column {self.column}" if self.column else f" of {highest(self.items):g} points"
        return f"{len(self.items)} items{own}, {self.aggregation}" + ", graded twice" * (self.gradings > 1)


def parse_rubric(tree: Tree, place: str) -> Rubric:
    try:
        return Rubric.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
    path = [f"item {part + 1}" if isinstance(part, int) else part for part in first["loc"][1:] or first["loc"]]
    message, known = first["msg"].removeprefix("Value error, "), RubricItem if len(path) > 1 else Rubric
    if first["type"] == "extra_forbidden":
        message = f"unknown key: there are {', '.join(known.model_fields)}"
    elif first["type"] != "value_error":
        message = f"{message[:1].lower()}{message[1:]} (got {first['input']!r:.80}): correct it"
    raise ConfigError(": ".join([place, *path, message]))


def read_rubric(function: str) -> Rubric:
    place = f"reward.function={function}"
    rubric = parse_rubric(read_tree(Path(function).expanduser(), place), place)
    if rubric.aggregation == "gate" and not rubric.column and not any(item.required for item in rubric.items):
        raise ConfigError(f"{place}: aggregation=gate without an item that has required=true: set it for one")
    return rubric


def check_rubric(
    part: RewardPartConfig, config: RewardConfig, examples: dict[str, Call], names: set[str], trial: object
) -> list[str]:
    """Refuse what cannot work, and describe the rubric; with a trial, the judge grades an empty reply to one row."""
    file, rubric = f"reward.function={part.function}", read_rubric(part.function)
    for key in part.judge.model_dump(include={"prompt", "pattern", "scale"}, exclude_defaults=True):
        raise ConfigError(f"judge.{key} has no effect with a rubric, whose file may have a prompt: delete judge.{key}")
    check_judge_server(part)
    check_prompt(f"{file}: prompt", rubric.prompt, names | {"items"}, ("reply", "items"))
    for source, call in examples.items():
        rubric.for_row(call, f"{file}: the first row of {source}")
    if config.probe:
        check_judge_model(part)
    reward = RubricReward(part, min(config.timeout_seconds, GRADING_SECONDS))
    with ThreadPoolExecutor(1) as thread:  # a notebook runs an event loop in this one
        tried = thread.submit(asyncio.run, try_once(reward, next(iter(examples.values())))).result() if trial else []
    return [f"rubric     {part.function}: {rubric.describe()}, by {part.judge.model}", *tried]


async def try_once(reward: "RubricReward", call: Call) -> list[str]:
    """Describe one grading; a judge that is slow or busy may still do later, but not one that cannot be read."""
    try:
        graded = await reward.grade(call)
    except (RewardTimeout, RewardUnreachable) as failure:
        return [f"trial      none: {short_cause(str(failure))}"]
    except RewardFailure as failure:
        what = f"reward.function={reward.file}: the judge cannot grade an empty reply: {short_cause(str(failure))}"
        raise ConfigError(
            f"{what}: name another judge or clearer items (reward.probe=false starts all the same)"
        ) from None
    finally:
        await reward.stop()
    items = ", ".join(f"{metric.split('/', 2)[-1]} {value:g}" for metric, value in graded.metrics.items())
    return [f"trial      an empty reply gets {graded.reward:g} ({items})"]


class RubricReward(BatchedReward):
    """One request grades all items of a reply; an answer that cannot be read is asked for again."""

    def __init__(self, part: RewardPartConfig, timeout_seconds: float) -> None:
        self.file, self.attempts, self.rubric = part.function, part.remote.attempts, read_rubric(part.function)
        self.judge = Judge(part, timeout_seconds)
        super().__init__(self._score_batch, 1, part.remote.concurrency, self.judge.address.client.aclose)

    async def _score_batch(self, calls: list[Call]) -> list[Score]:
        return [await self.grade(calls[0])]

    async def grade(self, call: Call) -> Graded:
        try:
            rubric = self.rubric.for_row(call, f"{self.file}: this row")
        except ConfigError as error:
            raise RewardFailure(str(error)) from None
        async with self.judge.address.deadline():
            first = await self._grade(rubric.items, call)
            others = [await self._grade(rubric.items[::-1], call) for _ in range(1, rubric.gradings)]
        return add_up(rubric, [first, *(one[::-1] for one in others)], len(self.rubric.items))

    async def _grade(self, items: list[RubricItem], call: Call) -> list[bool]:
        listed = "\n".join(f"{number}. {item.criterion}" for number, item in enumerate(items, 1))
        prompt = fill_prompt(self.rubric.prompt, {**call, "items": listed}, f"{self.file}: prompt")
        for _ in range(self.attempts):
            text = await self.judge.answer(prompt, call) or ""
            try:
                return read_verdicts(text, items)
            except ValueError as error:
                problem = f"{error} ({self.attempts} tries): {' '.join(text.split())}"  # one line, as causes are shown
        raise self.judge.address.failure(problem)


def read_verdicts(text: str, items: list[RubricItem]) -> list[bool]:
    """Read whether each item is met from the last JSON object; raise ValueError unless exactly these have a verdict."""
    try:
        verdicts = json.loads(re.findall(r"\{[^{}]*\}", text)[-1])
    except (IndexError, ValueError):
        raise ValueError("no JSON object came back") from None
    for number, item in enumerate(items, 1):
        if not isinstance(verdicts.get(str(number)), bool):
            raise ValueError(f"no verdict, true or false, on item {number} ({item.name})")
    if unknown := [key for key in verdicts if key.isdecimal() and not 1 <= int(key) <= len(items)]:
        raise ValueError(f"a verdict on item {unknown[0]} of {len(items)} items")
    return [verdicts[str(number)] for number in range(1, len(items) + 1)]


def add_up(rubric: Rubric, gradings: list[list[bool]], shared: int) -> Graded:
    """Return the mean reward of the gradings, how often each item is met, and the share of items on which they differ.

    The first `shared` items are those of every row; the others have no meaning across rows.
    """
    prefixes = [f"{RUBRIC}item/"] * shared + [ROW_ITEM] * (len(rubric.items) - shared)
    met = [fmean(one) for one in zip(*gradings, strict=True)]
    metrics = {f"{prefix}{item.name}": one for prefix, item, one in zip(prefixes, rubric.items, met, strict=True)}
    if len(gradings) > 1:
        metrics[f"{RUBRIC}disagreement"] = fmean(0 < one < 1 for one in met)
    return Graded(fmean(AGGREGATIONS[rubric.aggregation](rubric.items, one) for one in gradings), metrics)
