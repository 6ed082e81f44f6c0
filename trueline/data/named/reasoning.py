"""Rows of Reasoning Gym's tasks, made from a seed, which the reward `reasoning_gym` scores."""

import dataclasses
import difflib
import json
import random
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.rows import Lazy, Located, Row

SIZE, SEED = 500, 0  # unless the name says otherwise; the library's own seed is another one each time


class TaskRows(Lazy[Located]):
    """The rows of a task; each is made from the seed and its number when it is drawn."""

    def __init__(self, dataset: Any, seed: int, name: str) -> None:
        self.dataset, self.seed, self.name = dataset, seed, name

    def __len__(self) -> int:
        return len(self.dataset)

    def at(self, number: int) -> Located:
        before = random.getstate()
        random.seed(f"{self.seed} {number}")  # some tasks (list_functions) draw from it besides their own generator
        made = self.dataset[number]
        random.setstate(before)
        row: Row = {name: made[name] for name in ("question", "answer", "metadata")}
        return Located(json.loads(json.dumps(row, default=str)), f"{self.name}, row {number + 1}")


def make_tasks(task: str, options: dict[str, Any], named: str) -> TaskRows:
    """Make the rows of a task; options other than `size` and `seed` are those of its configuration."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # noqa: PLC0415  (an extra; seconds to import)
    except ImportError:
        raise ConfigError(f"{named} needs Reasoning Gym: pip install 'trueline[reasoning]'") from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4) or sorted(DATASETS)[:3]
        raise ConfigError(f"{named}: Reasoning Gym has no task {task!r}; near it are {', '.join(near)}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"{named}: {task} has no option {unknown[0]!r}; it has {', '.join(known)}")
    given = {"size": SIZE, "seed": SEED, **options}
    try:
        dataset = create_dataset(task, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{named}: {task} refuses these options: {error}") from None
    rows = TaskRows(dataset, given["seed"], named)
    first = rows.at(0).row
    if first["answer"] is not None and dataset.score_answer(first["answer"], first) < 1:  # arc_agi compares tuples
        raise ConfigError(f"{named}: the grader of {task} takes no rows of JSON, not even its own: choose another task")
    return rows
